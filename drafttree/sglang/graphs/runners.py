"""Captures CUDA graphs of the target for trees of several sizes, and chooses among them.

SGLang captures its graphs for one number of rows of each request. For its own adaptive methods it
makes further graph runners, each with an attention backend of its own, and exchanges both between
steps. The same is done here. The graphs share SGLang's memory pool and its buffer of logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context, get_exec, get_spec
from sglang.srt.utils import get_available_gpu_memory

from drafttree.patches import check_parameters
from drafttree.sglang.graphs.sizes import GraphSizes
from drafttree.sglang.patches import exchange_graphs
from drafttree.sglang.versions import unknown

# A child of SGLang's logger: other loggers are not printed.
logger = logging.getLogger(f"sglang.{__name__}")

_PARAMETERS = [
    *("self", "model_runner", "attn_backend", "speculative_num_steps"),
    *("speculative_num_draft_tokens", "record_nolora_graph"),
]


class TreeGraphs:
    """The target's graphs for trees of several sizes.

    Call `plan` before SGLang captures graphs of the largest trees, and `capture` after it.

    Attributes:
        sizes: The numbers of draft tokens, and of requests.
    """

    def __init__(self, runner: Any, sizes: GraphSizes) -> None:
        self.sizes = sizes
        self._runner = runner
        self._stock = get_exec().graph.cuda_graph_config
        self._captured: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def plan(cls, runner: Any, draft_tokens: Sequence[int]) -> TreeGraphs:
        """Let SGLang capture graphs of the largest trees for as many requests as they may have.

        Args:
            runner: The target's model runner, whose graphs have not been captured.
            draft_tokens: Numbers of draft tokens, ascending from 0 to that of the largest trees.

        Raises:
            RuntimeError: This SGLang's graph runners are not known.
        """
        name = DecodeCudaGraphRunner.__name__
        check_parameters(name, DecodeCudaGraphRunner.__init__, _PARAMETERS, unknown)
        requests, _ = get_batch_sizes_to_capture(runner)
        graphs = cls(runner, GraphSizes.within_rows(draft_tokens, requests))
        get_context().override(__name__, cuda_graph_config=graphs._config(draft_tokens[-1]))
        return graphs

    def capture(self) -> None:
        """Capture the graphs of smaller trees.

        Raises:
            RuntimeError: SGLang has not captured graphs of the largest trees as was planned.
        """
        runner, sizes = self._runner, self.sizes
        get_context().override(__name__, cuda_graph_config=self._stock)
        self._add(sizes.num_draft_tokens, runner.attn_backend, runner.decode_cuda_graph_runner)
        free, started = _free_memory(runner), perf_counter()
        for num_draft_tokens in sorted(sizes.requests, reverse=True)[1:]:
            rows = num_draft_tokens + 1
            with (
                # Backends lay out their buffers by it.
                get_spec().override(speculative_num_draft_tokens=rows),
                get_exec().graph.override(cuda_graph_config=self._config(num_draft_tokens)),
            ):
                backend = runner._get_attention_backend()
                graph_runner = type(runner.decode_cuda_graph_runner)(
                    runner, attn_backend=backend, speculative_num_draft_tokens=rows
                )
            self._add(num_draft_tokens, backend, graph_runner)
        logger.info(
            "%d CUDA graphs verify trees of %s draft tokens; those of the smaller trees took "
            "%.2f GB and %.1f s",
            sizes.graphs,
            ", ".join(f"{each} (up to {of[-1]} requests)" for each, of in sizes.requests.items()),
            free - _free_memory(runner),
            perf_counter() - started,
        )

    @contextmanager
    def used(self, rows: int) -> Iterator[None]:
        """Verify with the graphs of trees of `rows` rows, the root's included.

        Raises:
            KeyError: There are none.
        """
        with exchange_graphs(self._runner, *self._captured[rows]):
            yield

    def _config(self, num_draft_tokens: int) -> Any:
        requests = [*self.sizes.requests[num_draft_tokens]]
        return with_phase(self._stock, Phase.DECODE, bs=requests)

    def _add(self, num_draft_tokens: int, backend: Any, graph_runner: Any) -> None:
        expected = num_draft_tokens + 1, self.sizes.requests[num_draft_tokens]
        if not isinstance(graph_runner, DecodeCudaGraphRunner):
            raise unknown(f"it verifies with {type(graph_runner).__name__} in place of CUDA graphs")
        found = graph_runner.captured_req_width, tuple(graph_runner.capture_bs)
        if found != expected or graph_runner.attn_backend is not backend:
            raise unknown(f"its graphs have {found} rows and requests, expected {expected}")
        self._captured[expected[0]] = backend, graph_runner


def why_one_size(runner: Any) -> str | None:
    """Why SGLang's graphs are captured for trees of one size; None if there may be several.

    Args:
        runner: The target's model runner.
    """
    graph = get_exec().graph
    if graph.cuda_graph_config.decode.backend != Backend.FULL:
        return f"the backend of CUDA graphs is {graph.cuda_graph_config.decode.backend}"
    if graph.disable_cuda_graph_padding:
        return "batches are not padded"
    # Its metadata are laid out for the graphs that were captured last.
    if runner.lora_manager is not None:
        return "LoRA adapters are served"
    return None


def _free_memory(runner: Any) -> float:
    """Free memory of the device in GB."""
    return float(get_available_gpu_memory(runner.device, runner.gpu_id))
