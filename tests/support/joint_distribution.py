"""The joint distribution of the first three tokens that a small model samples after a prompt."""

from __future__ import annotations

from collections import Counter
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


def p_value(answers: list[list[int]], joint: Joint) -> float:
    """P-value of a chi-square test, in which cells expected fewer than 5 times are merged."""
    import numpy as np
    from scipy.stats import chisquare

    requests = len(answers)
    counts = Counter(tuple(tokens[:3]) for tokens in answers)
    large = [cell for cell, probability in joint.items() if probability * requests >= 5]
    observed = np.array([counts[cell] for cell in large], float)
    expected = np.array([joint[cell] for cell in large]) * requests
    rest = requests - expected.sum()
    if rest > 0:
        observed = np.append(observed, requests - observed.sum())
        expected = np.append(expected, rest)
    return float(chisquare(observed, expected * requests / expected.sum()).pvalue)
