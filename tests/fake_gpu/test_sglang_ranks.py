"""Steps of SGLang's scheduler on two tensor-parallel ranks with fake GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpu.tensors import Gpu

pytest.importorskip("sglang", reason="SGLang is not installed here")

from fake_gpu.sglang_cases import GREEDY, WEIGHTS, asked
from fake_gpu.sglang_hosts import CHAINS, TOKEN_RECYCLING, Host
from fake_gpu.sglang_steps import decode
from fake_gpu.two_ranks import Rank


@pytest.mark.parametrize(
    ("host", "options"),
    [
        pytest.param(TOKEN_RECYCLING, {"tree": "branch:3-2-1"}, id="trees"),
        # Deeper than the longest chain that the target verifies.
        pytest.param(CHAINS, {"tree": "branch:2-1-1-1-1"}, id="chains"),
    ],
)
def test_ranks_send_each_other_tensors_of_one_size(
    gpu: Gpu, host: Host, options: dict[str, Any]
) -> None:
    requests = asked(GREEDY, GREEDY, GREEDY)
    first = Rank()
    leading = decode(options, requests, WEIGHTS, gpu, host=host, group=first)
    following = decode(options, requests, WEIGHTS, gpu, host=host, group=Rank(first))
    assert not first.sent
    assert following.texts == leading.texts
    assert following.trees == leading.trees
    assert following.counts == leading.counts
    assert leading.counts["accepted_tokens"] > 0
    for name, each in requests.items():
        assert leading.texts[name] == WEIGHTS.plain_text(each.prompt, each.length)
