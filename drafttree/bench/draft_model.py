"""The figures of a method with a draft model, as the field gives them."""

from __future__ import annotations

from pathlib import Path

from drafttree.bench.methods import Method
from drafttree.bench.report import Repetition, totals
from drafttree.draft_model import weights_size


def draft_model_figures(
    repetition: Repetition, method: Method, target: Path, draft_seconds: float
) -> dict[str, float]:
    """The figures of one repetition; none where no model drafts.

    Returns:
        block_efficiency: tokens a step, the bonus token included.
        mbsu: memory-bound speed-up, the block efficiency over the time of a step in which every
            model takes as long as its weights are large (RSD, arXiv 2402.14160, appendix D.2).
        draft_size_ratio: the draft model's weights over the target's.
        draft_time_share: the part of the method's time that went into drafting.

        Of a drafter that continues the target's hidden states, the last one alone.
    """
    if not method.timed:
        return {}
    sums = totals(repetition.method)
    timed = {"draft_time_share": draft_seconds / sums.seconds}
    if method.draft_model is None or method.tree_depth is None:
        return timed
    ratio = weights_size(Path(method.draft_model)) / max(weights_size(target), 1)
    efficiency = sums.step_tokens / max(sums.steps, 1)
    return {
        "block_efficiency": efficiency,
        "mbsu": efficiency / (method.tree_depth * ratio + 1),
        "draft_size_ratio": ratio,
        **timed,
    }
