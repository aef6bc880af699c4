"""CUDA graphs of a draft model's forwards over whole trees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from drafttree.patches import check_parameters
from drafttree.sglang.graphs.requests import whole_steps_are_captured
from drafttree.sglang.patches import exchange_graphs, verify_in_graphs
from drafttree.sglang.versions import unknown


class _Graphs(DecodeCudaGraphRunner):
    """SGLang's graphs of verifications, which it does not capture of draft models itself."""

    def get_spec_info(self, num_tokens: int) -> NgramVerifyInput:
        """What the forwards that are captured are given of trees."""
        info = NgramVerifyInput(
            draft_token=None,
            custom_mask=self.buffers.custom_mask,
            positions=None,
            draft_token_num=self.captured_req_width,
        )
        info.capture_hidden_mode = CaptureHiddenMode.NULL
        return info


class DraftModelGraphs:
    """The graphs of a draft model.

    Args:
        runner: The draft model's runner, with its attention backend.

    Raises:
        RuntimeError: This SGLang's graph runners are not known.
    """

    def __init__(self, runner: Any) -> None:
        name, stock = "DecodeCudaGraphRunner.get_spec_info", DecodeCudaGraphRunner.get_spec_info
        check_parameters(name, stock, ["self", "num_tokens"], unknown)
        verify_in_graphs(runner)
        self._runner = runner
        self._graphs = _Graphs(runner)

    @classmethod
    def of(cls, runner: Any) -> DraftModelGraphs | None:
        """Capture them where SGLang captures whole graphs of the target; None elsewhere."""
        return cls(runner) if whole_steps_are_captured(torch.device(runner.device)) else None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run forwards over whole trees with graphs; in batches too large for them, without."""
        with exchange_graphs(self._runner, self._runner.attn_backend, self._graphs):
            yield
