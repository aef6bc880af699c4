"""The joint distribution of the first tokens that a small model samples after a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

Joint = dict[tuple[int, ...], float]


def exact_joint(
    model: Path, prompt: list[int], vocab: int, temperature: float, top_k: int
) -> Joint:
    """The probability of each sequence of three tokens, after temperature and top-k."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prefixes = [prompt + list(pair) for pair in product(range(vocab), repeat=2)]
    with torch.no_grad():
        logits = network(torch.tensor(prefixes)).logits / temperature
    kept = logits.topk(top_k).values[..., -1:]
    probabilities = logits.masked_fill(logits < kept, -torch.inf).softmax(-1).double()
    start = len(prompt) - 1
    return {
        (a, b, c): float(
            probabilities[a * vocab + b, start, a]
            * probabilities[a * vocab + b, start + 1, b]
            * probabilities[a * vocab + b, start + 2, c]
        )
        for a, b, c in product(range(vocab), repeat=3)
    }


def bound_joint(model: Path, prompt: list[int], answers: Iterable[Sequence[int]]) -> Joint:
    """The probability of each of the answers at temperature 1, if there are no others.

    At each position the probabilities of the tokens that may follow add up to 1. No answer may be
    the beginning of another one, so they have their end with them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    following: dict[tuple[int, ...], set[int]] = {}
    for answer in answers:
        for size, token in enumerate(answer):
            following.setdefault(tuple(answer[:size]), set()).add(token)
    joint: Joint = {}
    begun: Joint = {(): 1.0}
    while begun:
        beginning, share = begun.popitem()
        if beginning not in following:
            joint[beginning] = share
            continue
        with torch.no_grad():
            logits = network(torch.tensor([[*prompt, *beginning]])).logits[0, -1].double()
        tokens = sorted(following[beginning])
        for token, each in zip(tokens, logits[tokens].softmax(0).tolist(), strict=True):
            begun[*beginning, token] = share * each
    return joint


def p_value(answers: list[list[int]], joint: Joint) -> float:
    """P-value of a chi-square test, in which cells expected fewer than 5 times are merged.

    It is 0 if there are answers that cannot be.
    """
    import numpy as np
    from scipy.stats import chisquare

    requests = len(answers)
    length = max(map(len, joint))
    counts = Counter(tuple(tokens[:length]) for tokens in answers)
    if not counts.keys() <= joint.keys():
        return 0.0
    large = [cell for cell, probability in joint.items() if probability * requests >= 5]
    observed = np.array([counts[cell] for cell in large], float)
    expected = np.array([joint[cell] for cell in large]) * requests
    rest = requests - expected.sum()
    if rest > 0:
        observed = np.append(observed, requests - observed.sum())
        expected = np.append(expected, rest)
    return float(chisquare(observed, expected * requests / expected.sum()).pvalue)
