"""LoRA adapters in SGLang: each tree is verified with the adapter of its request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapters_on_cpu
import pytest
import torch
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_tiny_adapter

GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}

NAMES = ["first", "second", None]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of an engine with two adapters of different ranks."""
    paths = {
        name: str(make_tiny_adapter(tmp_path_factory.mktemp(name), rank, seed))
        for name, rank, seed in (("first", 8, 5), ("second", 4, 6))
    }
    return {
        "enable_lora": True,
        "lora_paths": paths,
        "max_loras_per_batch": len(NAMES),
        "lora_backend": "torch_native",
        "variables": {adapters_on_cpu.VARIABLE: "1"},
    }


def cases() -> list[Case]:
    """Each prompt with each adapter and with none, twice: prefixes are cached for each of them."""
    prompts = some_prompts(4, longest=60, shortest=40)
    asked = [prompt for prompt in prompts for _ in NAMES]
    adapters = NAMES * len(prompts)
    return [Case(asked, GREEDY, adapters=adapters) for _ in range(2)]


def test_requests_with_two_adapters_and_with_none(
    engine: dict[str, Any], tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    plain, _ = run_sglang(tiny_llama, cases(), drafted=False, **engine)
    drafted, _ = run_sglang(tiny_llama, cases(), **engine)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
    proves_drafting(drafted[0])
    assert drafted[1].counters["accepted_tokens"] > 0
    answers = (drafted[0].tokens[row::3] for row in range(3))
    for first, second, unadapted in zip(*answers, strict=True):
        assert first != unadapted != second != first
    assert min(drafted[1].cached) > 0


@pytest.mark.parametrize("tree", [False, True])
def test_forwards_that_are_of_no_request_have_no_adapter(
    tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch had one, which is in the place that SGLang's layers take for the model's."""
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from drafttree.sglang.forward import _batch

    adapters_on_cpu.enable(monkeypatch.setattr)
    manager = LoRAManager.__new__(LoRAManager)
    manager.max_loras_per_batch, manager.attn_dp_enabled = 1, False
    manager.lora_backend = TorchNativeLoRABackend(1, torch.device("cpu"))
    manager.loras = {"adapter": SimpleNamespace(config=SimpleNamespace(r=4), scaling=2.0)}
    manager.memory_pool = SimpleNamespace(
        uid_to_buffer_id={"adapter": 0}, get_buffer_id={"adapter": 0}.get
    )

    def ranks() -> list[int]:
        """The rank of the adapter of each row."""
        batch = manager.lora_backend.batch_info
        of_segments = batch.lora_ranks_cpu[batch.weight_indices_cpu.long()]
        return of_segments.repeat_interleave(batch.seg_lens_cpu.long()).tolist()

    decode = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, batch_size=3, lora_ids=["adapter"] * 3
    )
    manager.prepare_lora_batch(decode)
    assert ranks() == [4] * 3
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 32, dtype=torch.int32))
    runner = SimpleNamespace(page_size=1, req_to_token_pool=pool, lora_manager=manager)
    _batch(runner, 2, 5, 3, tree)
    assert ranks() == [0] * 10
