"""A plot of a training run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_POINTS = 100
"""Maximum number of points of a curve; each is a mean over adjacent steps."""


def plot(metrics: Path, file: Path) -> None:
    """Plot the loss and the accuracy of each unrolled step.

    Args:
        metrics: The file `metrics.jsonl` of the run.
        file: The image to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    parts = np.array_split(np.arange(len(lines)), min(_POINTS, len(lines)))
    at = [lines[part[-1]]["step"] for part in parts]
    loss = np.array([line["loss"] for line in lines])
    accuracy = np.array([line["accuracy"] for line in lines])
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    axes[0].plot(at, [loss[part].mean() for part in parts])
    axes[0].set(xlabel="step", ylabel="loss")
    for step in range(accuracy.shape[1]):
        axes[1].plot(at, [accuracy[part, step].mean() for part in parts], label=f"step {step + 1}")
    axes[1].set(xlabel="step", ylabel="top token is the target's")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
