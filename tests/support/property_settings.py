"""Settings of property-based tests: how many cases they try, the same in every run."""

from hypothesis import HealthCheck, settings

CASES = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    # The fixtures select a kernel for a whole test; they have no state of a single case.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
