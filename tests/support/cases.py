"""How many cases property-based tests try, the same on every run."""

from hypothesis import HealthCheck, settings

CASES = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    # The fixtures swap kernels for a whole test; they hold no state of one case.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
