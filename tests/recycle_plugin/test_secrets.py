"""What one user's text tells another, in steps; no times are compared."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.experiments.token_recycling.shared_secrets import (
    KNOWN,
    LENGTH,
    SETTINGS,
    Users,
    make,
    second_users_steps,
    steps_of,
)

SHARED = {name: options for name, options in SETTINGS.items() if name != "request"}


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN.keys())
@pytest.mark.parametrize("seed", range(3))
def test_sharing_by_request_shows_nothing(seed: int, known: int) -> None:
    users, options = Users.of(seed, known), SETTINGS["request"]
    alone = second_users_steps(users, options, first_is_there=False)
    assert second_users_steps(users, options) == alone


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED.keys())
def test_shared_tables_show_what_another_user_had(options: dict[str, Any]) -> None:
    """So the test above would find it."""
    steps = {name: second_users_steps(Users.of(0, known), options) for name, known in KNOWN.items()}
    if options.get("hot_start") is False:  # all is forgotten while nothing runs
        assert len({*steps.values()}) == 1
    else:
        assert steps["yes"] < steps["its first half"] < steps["no"] <= LENGTH


def test_a_users_own_text_helps_only_that_request() -> None:
    """With sharing by request, the same user's next request starts from nothing too."""
    users, drafter = Users.of(0, LENGTH), make(sharing="request")
    repeated = users.first * 2
    first = steps_of(drafter, 0, users.text, repeated)
    assert first < 2 * LENGTH
    assert steps_of(drafter, 0, users.text, repeated) == first
