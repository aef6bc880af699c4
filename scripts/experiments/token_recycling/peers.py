"""Replays the peers on the same texts: vLLM's n-gram speculation and its suffix decoding.

Both draft one chain for a step and read nothing but tokens. They run their own code: vLLM's
matching of n-grams, and the `SuffixDecodingCache` of arctic-inference with vLLM's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from scripts.experiments.common import Replayed
from scripts.experiments.token_recycling.replay import Text
from scripts.experiments.token_recycling.workloads import Wave

NGRAM_TOKENS = 5
NGRAM_SIZES = (2, 5)
SUFFIX_DEPTH = 24
"""vLLM's `suffix_decoding_max_tree_depth`, also the greatest number of draft tokens."""

Draft = Callable[[int], list[int]]
"""The draft tokens after so many tokens of a request's answer."""


def replay_ngram(waves: Sequence[Wave], context: int) -> list[dict[int, list[Replayed]]]:
    """The counts of each request of n-gram speculation, by wave and chat."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    def draft(text: Text) -> Draft:
        tokens = np.array([*text.prompt, *text.answer], np.int32)

        def at(done: int) -> list[int]:
            known = tokens[: len(text.prompt) + done]
            found = _find_longest_matched_ngram_and_propose_tokens(
                known, *NGRAM_SIZES, context, NGRAM_TOKENS
            )
            return [int(token) for token in found]

        return at

    return [_replayed(wave, draft) for wave in waves]


def replay_suffix(waves: Sequence[Wave]) -> list[dict[int, list[Replayed]]]:
    """The counts of each request of suffix decoding, whose cache is kept from wave to wave."""
    library: Any = import_module("arctic_inference.suffix_decoding")
    cache = library.SuffixDecodingCache(max_tree_depth=SUFFIX_DEPTH, max_cached_requests=10000)
    count = iter(range(1 << 30))

    def draft(text: Text) -> Draft:
        for active in list(cache.active_requests):
            cache.stop_request(active)
        request = next(count)
        tokens = np.array([*text.prompt, *text.answer], np.int32)
        start, seen = len(text.prompt), 0
        cache.start_request(request, tokens[:start])

        def at(done: int) -> list[int]:
            nonlocal seen
            cache.add_active_response(request, tokens[start + seen : start + done])
            seen = done
            end = start + done
            found = cache.speculate(
                request,
                tokens[max(0, end - SUFFIX_DEPTH) : end],
                max_spec_tokens=SUFFIX_DEPTH,
                max_spec_factor=1.0,
                min_token_prob=0.1,
            )
            return [int(token) for token in found.token_ids]

        return at

    return [_replayed(wave, draft) for wave in waves]


def _replayed(wave: Wave, draft: Callable[[Text], Draft]) -> dict[int, list[Replayed]]:
    found: dict[int, list[Replayed]] = {}
    for chat in wave:
        for text in chat.texts:
            at, done, steps, drafts = draft(text), 1, 0, 0
            while done < len(text.answer):
                chain = at(done)
                accepted = _common_length(chain, text.answer[done:])
                done = min(done + accepted + 1, len(text.answer))
                steps += 1
                drafts += len(chain)
            at(done)  # An engine reads an answer's last tokens before it notices the end.
            found.setdefault(text.chat, []).append(Replayed(steps, done - 1, drafts))
    return found


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
