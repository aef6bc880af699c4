"""How many tokens of a step each running request may have."""


def share_of_step(budget: int, requests: int, max_requests: int) -> int:
    """Tokens of a step for each running request, so that none waits because others draft.

    While more requests may join, a quarter of the step is left for their prompts.

    Args:
        budget: Greatest number of tokens of a step.
        requests: Number of running requests, at least 1.
        max_requests: Greatest number of them.
    """
    if requests < max_requests:
        budget -= budget // 4
    return budget // requests
