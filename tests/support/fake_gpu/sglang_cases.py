"""A target and requests of SGLang's host, and the comparison of its two devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drafttree.testing.session import random_weights
from fake_gpu.comparison import assert_same
from fake_gpu.sglang_hosts import TOKEN_RECYCLING, Host
from fake_gpu.sglang_steps import Asked, Decoded, decode
from fake_gpu.sglang_target import Weights
from fake_gpu.tensors import Gpu

VOCAB = 64
GREEDY = {"temperature": 0.0}


def random_target(vocab_size: int) -> Weights:
    """A target whose next token depends a little on all tokens before."""
    generator = torch.Generator().manual_seed(1)
    after = random_weights(vocab_size, generator).log()
    return Weights(after, 0.3 * torch.randn(vocab_size, vocab_size, generator=generator))


WEIGHTS = random_target(VOCAB)


def prompt(seed: int, length: int) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def asked(*parameters: Mapping[str, Any]) -> dict[str, Asked]:
    """Requests of which one arrives while others decode, with a cached prefix; two have parts."""
    first = prompt(0, 9)
    prompts = (first, 16, 0), (prompt(1, 6), 14, 0), ([*first, *prompt(2, 12)], 6, 6)
    return {
        f"request {number}": Asked(text, tokens, given, starts)
        for number, ((text, tokens, starts), given) in enumerate(
            zip(prompts, parameters, strict=True)
        )
    }


def both(
    options: dict[str, Any],
    requests: dict[str, Asked],
    gpu: Gpu,
    /,
    *,
    host: Host = TOKEN_RECYCLING,
    waits: bool = False,
    **given: Any,
) -> Decoded:
    """Decode on the CPU and on the fake GPU, and compare."""
    torch.manual_seed(0)
    expected = decode(options, requests, WEIGHTS, None, host=host, **given)
    torch.manual_seed(0)
    found = decode(options, requests, WEIGHTS, gpu, host=host, waits=waits, **given)
    assert_same(expected, found, requests)
    assert found.parts > 0
    assert found.cached > 0
    return found
