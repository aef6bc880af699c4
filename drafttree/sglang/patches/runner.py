"""Patches of the target's model runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drafttree.patches import Patch, check_parameters, replace_function
from drafttree.sglang.patches.when import WITH_A_WORKER
from drafttree.sglang.versions import unknown

if TYPE_CHECKING:
    import torch

    from drafttree.model_drafters import Head

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="sglang.srt.model_executor.model_runner:ModelRunner.sample",
        when=f"{WITH_A_WORKER}, on the target's runner alone, for methods that learn from logits",
        reason="Sampling overwrites a prompt's logits, so the drafter must read them first.",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner:ModelRunner.sampler",
        when=f"{WITH_A_WORKER}, on the target's runner alone, for methods with a draft model",
        reason="An acceptance rule chooses tokens where SGLang would draw them.",
    ),
    *(
        Patch(
            target=f"sglang.srt.model_executor.model_runner:ModelRunner.{name}",
            when="on a GPU, on the target's runner, during each verification of trees whose number "
            "of draft tokens is chosen in each step, and on a draft model's runner while it "
            "drafts; restored afterwards",
            reason="SGLang's CUDA graphs and its attention backends are made for one number of "
            "draft tokens. Those for other numbers take their place, as in its adaptive methods. "
            "Of a draft model's forwards over whole trees it captures none.",
        )
        for name in ("attn_backend", "decode_cuda_graph_runner")
    ),
    Patch(
        target="sglang.srt.layers.attention.triton_backend:TritonAttnBackend.is_draft_runner",
        when="on a GPU, on the attention backend of a draft model, before its CUDA graphs are "
        "captured",
        reason="SGLang's graphs read masks in a buffer, which its Triton backend does not allocate "
        "for draft models: those of its own methods verify nothing.",
    ),
    Patch(
        target="sglang.srt.layers.logits_processor:LogitsProcessor._get_logits",
        when=f"{WITH_A_WORKER}, on a draft model's logits processor alone",
        reason="Models compute their logits within a forward. A drafter may need those of some "
        "tokens alone, or none.",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner:ModelRunner.shared_read_done_event",
        when="on a GPU, after each verification with methods that read hidden states",
        reason="Where steps overlap, SGLang's scheduler writes to its slot table as soon as the "
        "target has read it. The drafter's layer reads it after the target.",
    ),
)


def observe_prefill(runner: Any, observe: Callable[[Any, torch.Tensor], None]) -> None:
    """Pass a prefill's logits to a drafter before SGLang samples from them.

    Args:
        runner: The target's model runner; other runners are left alone.
        observe: Called with the forward batch and the raw logits `[B, V]` after each prefill. It
            replaces the function of an earlier call.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """

    def wrap(stock: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        def sample(logits_output: Any, forward_batch: Any) -> torch.Tensor:
            if forward_batch.forward_mode.is_extend_without_speculative():
                runner.sample.observe(forward_batch, logits_output.next_token_logits)
            return stock(logits_output, forward_batch)

        return sample

    expected = ["logits_output", "forward_batch"]
    replace_function(runner, "sample", wrap, expected=expected, unknown=unknown)
    runner.sample.observe = observe


def install_acceptance_sampler(runner: Any) -> None:
    """Give the target's model runner a sampler that can use an acceptance rule.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.layers.sampler import Sampler

    from drafttree.sglang.acceptance_sampler import AcceptanceSampler

    if isinstance(runner.sampler, AcceptanceSampler):
        return
    if type(runner.sampler) is not Sampler:
        raise unknown(f"the model runner's sampler is a {type(runner.sampler).__name__}")
    parameters = ["self", "probs", "sampling_info", "positions", "simple_sampling_case"]
    name = "Sampler._sample_from_probs"
    check_parameters(name, Sampler._sample_from_probs, parameters, unknown)
    runner.sampler = AcceptanceSampler()


@contextmanager
def exchange_graphs(runner: Any, attn_backend: Any, graph_runner: Any) -> Iterator[None]:
    """Let a model runner verify with another attention backend and other CUDA graphs for a while.

    Args:
        runner: The model runner.
        attn_backend: The attention backend.
        graph_runner: A `DecodeCudaGraphRunner` that was made with this backend.
    """
    stock = runner.attn_backend, runner.decode_cuda_graph_runner
    runner.attn_backend, runner.decode_cuda_graph_runner = attn_backend, graph_runner
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = stock


def verify_in_graphs(runner: Any) -> None:
    """Let a draft model's attention backend read the masks of trees in CUDA graphs.

    Args:
        runner: The draft model's runner, whose graphs have not been captured.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = runner.attn_backend
    if not isinstance(backend, TritonAttnBackend):
        return  # the others have such a buffer for draft models, or need none
    if not hasattr(backend, "is_draft_runner"):
        raise unknown("TritonAttnBackend has no is_draft_runner")
    backend.is_draft_runner = False


def replace_logits(
    model: torch.nn.Module, logits: Callable[[torch.Tensor, Head], torch.Tensor]
) -> Head:
    """Let another function compute a draft model's logits.

    Args:
        model: The draft model.
        logits: `(states [N, d], head) -> [N, V]`, called in each forward with the states of which
            logits are needed and the model's own head.

    Returns:
        The model's own head, which raises a ValueError if it is not of SGLang's kind.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    def modules(kind: type) -> list[Any]:
        return [each for each in model.modules() if isinstance(each, kind)]

    processors = modules(LogitsProcessor)
    own = [each._get_logits for each in processors]

    def wrap(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def get_logits(states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            return logits(states, lambda rows: stock(rows, *arguments, **named))

        return get_logits

    expected = [
        *("hidden_states", "lm_head", "logits_metadata"),
        *("embedding_bias", "use_logits_buffer"),
    ]
    for each in processors:
        replace_function(each, "_get_logits", wrap, expected=expected, unknown=unknown)

    def head(states: torch.Tensor) -> torch.Tensor:
        # Models with tied weights may have embeddings alone, which are of the head's base class.
        heads = modules(ParallelLMHead) or modules(VocabParallelEmbedding)
        if len(own) != 1 or len(heads) != 1:
            raise ValueError("the parts of it that compute logits are not known")
        return own[0](states, heads[0], LogitsMetadata(ForwardMode.DECODE))

    return head


def publish_reads(runner: Any) -> None:
    """Let SGLang's scheduler wait for all that was launched so far before it writes to its tables.

    Args:
        runner: The target's model runner, on a GPU.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    import torch

    if not hasattr(runner, "shared_read_done_event"):
        raise unknown("ModelRunner has no shared_read_done_event")
    event = torch.get_device_module(runner.device).Event()
    event.record()
    runner.shared_read_done_event = event
