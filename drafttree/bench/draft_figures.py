"""Figures of drafting: its share of the time, and those of a draft model."""

from __future__ import annotations

from pathlib import Path

from drafttree.bench.methods import BenchMethod
from drafttree.bench.report import Repetition, totals
from drafttree.model_files import local_folder, weights_size


def draft_figures(
    repetition: Repetition, method: BenchMethod, target: Path, draft_seconds: float | None
) -> dict[str, float]:
    """Figures of one repetition; empty for a method without a model.

    Args:
        repetition: Answers of both sides.
        method: The method measured.
        target: Folder of the target.
        draft_seconds: Time spent drafting in this repetition; None if it was not measured.

    Returns:
        `block_efficiency`, tokens per step with the bonus token; `mbsu`, the memory-bound speedup,
        which is the block efficiency over the time of a step in which every forward takes time in
        proportion to the size of the weights (RSD, arXiv 2402.14160, appendix D.2);
        `draft_size_ratio`, the size of the draft model's weights over the target's; and
        `draft_time_share`, the share of the method's time spent drafting. A drafter that continues
        the target's hidden states has only the last one. There is no `mbsu` where the number of
        forwards differs from step to step, and neither size figure where a model has no
        safetensors files on this machine.
    """
    if not method.timed:
        return {}
    sums = totals(repetition.method)
    timed = {} if draft_seconds is None else {"draft_time_share": draft_seconds / sums.seconds}
    if method.draft_model is None:
        return timed
    efficiency = sums.step_tokens / max(sums.steps, 1)
    figures = {"block_efficiency": efficiency}
    sizes = [_weights_size(model) for model in (method.draft_model, str(target))]
    if all(sizes):
        ratio = sizes[0] / sizes[1]
        if method.draft_forwards is not None:
            figures["mbsu"] = efficiency / (method.draft_forwards * ratio + 1)
        figures["draft_size_ratio"] = ratio
    return figures | timed


def _weights_size(model: str) -> int:
    """Size of a model's weights in bytes; 0 if it is unknown."""
    folder = local_folder(model)
    return 0 if folder is None else weights_size(folder)
