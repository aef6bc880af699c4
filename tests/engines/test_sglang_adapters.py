"""LoRA adapters in SGLang: each tree is verified with the adapter of its request."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import adapters_on_cpu
import pytest
import torch
from overfitted_drafter import LENGTH, PROMPTS
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_tiny_adapter, make_tiny_llama
from top_tokens import check_primed

from recycle_plugin.storage.primed_files import primed_file

GREEDY = {"temperature": 0.0, "max_new_tokens": LENGTH, "ignore_eos": True}

NAMES = ["first", "second", None]

ENGINE: dict[str, Any] = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "variables": {adapters_on_cpu.VARIABLE: "1"},
}


class Loading(NamedTuple):
    """Cases in which adapters are loaded, the arguments of their engine, and its own answers."""

    cases: list[Case]
    engine: dict[str, Any]
    plain: list[Answer]


AT_ONCE = pytest.mark.parametrize(
    "most", [pytest.param(3, id="three_at_once"), pytest.param(2, marks=pytest.mark.full)]
)
"""With room for fewer adapters they take turns, and SGLang loads them again."""


@pytest.fixture(scope="module")
def adapters(first_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of different ranks."""
    second = make_tiny_adapter(tmp_path_factory.mktemp("second"), 4, 6)
    return {"first": str(first_adapter), "second": str(second)}


def arguments(adapters: dict[str, str], most: int = len(NAMES)) -> dict[str, Any]:
    return ENGINE | {"lora_paths": adapters, "max_loras_per_batch": most}


def asked() -> Case:
    """Each prompt with each adapter and with none."""
    prompts = some_prompts(4, longest=60, shortest=40)
    rows = [prompt for prompt in prompts for _ in NAMES]
    return Case(rows, GREEDY, adapters=NAMES * len(prompts))


def cases() -> list[Case]:
    """All adapters twice, as prefixes are cached for each of them, and the first alone."""
    return [asked(), asked(), Case(PROMPTS, GREEDY, adapters=["first"] * len(PROMPTS))]


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, adapters: dict[str, str]) -> Callable[[int], list[Answer]]:
    """The engine's own answers to the cases, by the number of adapters at a time."""

    @cache
    def answers(most: int) -> list[Answer]:
        return run_sglang(tiny_llama, cases(), drafted=False, **arguments(adapters, most))[0]

    return answers


def check(plain: list[Answer], drafted: list[Answer]) -> None:
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        assert with_trees.counters["accepted_tokens"] > 0
    answers = (drafted[0].tokens[row::3] for row in range(3))
    for first, second, unadapted in zip(*answers, strict=True):
        assert first != unadapted != second != first
    assert min(drafted[1].cached) > 0


@AT_ONCE
def test_requests_with_two_adapters_and_with_none(
    most: int,
    adapters: dict[str, str],
    plain: Callable[[int], list[Answer]],
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
) -> None:
    drafted, _ = run_sglang(tiny_llama, cases(), **arguments(adapters, most))
    check(plain(most), drafted)
    proves_drafting(drafted[0])


@pytest.mark.full
@AT_ONCE
def test_rsd(
    most: int,
    adapters: dict[str, str],
    merged: Path,
    plain: Callable[[int], list[Answer]],
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
) -> None:
    """The draft model runs without adapters, and has the first one merged into it."""
    drafted, _ = run_sglang(
        tiny_llama,
        cases(),
        {"tree": "beam:3x4"},
        method="rsd",
        draft_model=merged,
        **arguments(adapters, most),
    )
    check(plain(most), drafted)
    proves_drafting(drafted[0])
    counters = drafted[2].counters
    assert counters["emitted"] / counters["steps"] > 4


@pytest.mark.full
@AT_ONCE
def test_lyanna(
    most: int,
    adapters: dict[str, str],
    memorised: Path,
    plain: Callable[[int], list[Answer]],
    tiny_llama: Path,
) -> None:
    """Drafts continue the adapted hidden states, else those would not be accepted."""
    drafted, _ = run_sglang(
        tiny_llama,
        cases(),
        {"nodes": 12, "resample": False},
        method="lyanna",
        draft_model=memorised,
        **arguments(adapters, most),
    )
    check(plain(most), drafted)
    counters = drafted[2].counters
    # SGLang runs one more step for a request that has ended.
    assert counters["emitted"] / counters["steps"] > 2.2


@pytest.fixture(scope="module")
def loading(tiny_llama: Path, adapters: dict[str, str]) -> Loading:
    """Cases in which one adapter takes another's name, and the engine's own answers."""
    first, second = ({"late": adapters[name]} for name in ("first", "second"))
    prompts = some_prompts(8, longest=60, shortest=40)
    late = {"adapters": ["late", None] * 4, "rounds": 2}
    served = [
        Case(prompts, GREEDY),
        *(Case(prompts, GREEDY, loads=each, **late) for each in (first, second, first)),
    ]
    engine = ENGINE | {"max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]}
    plain, _ = run_sglang(tiny_llama, served, drafted=False, **engine)
    none, one, other, again = (answer.tokens[::2] for answer in plain)
    for each in zip(none, one, other, strict=True):
        assert len({tuple(tokens) for tokens in each}) == 3
    assert again == one
    return Loading(served, engine, plain)


@pytest.mark.full
@pytest.mark.parametrize("method", ["token-recycling", "rsd", "lyanna"])
def test_adapters_that_are_loaded_while_serving(
    method: str,
    loading: Loading,
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
    request: pytest.FixtureRequest,
) -> None:
    """What a drafter knows of the answers of one adapter is of no use for those of another."""
    models = {"rsd": "merged", "lyanna": "memorised"}
    options = {"rsd": {"tree": "beam:3x4"}, "lyanna": {"nodes": 12}}
    with_trees, _ = run_sglang(
        tiny_llama,
        loading.cases,
        options.get(method),
        method=method,
        draft_model=request.getfixturevalue(models[method]) if method in models else None,
        **loading.engine,
    )
    for expected, drafted in zip(loading.plain, with_trees, strict=True):
        assert drafted.tokens == expected.tokens
    for drafted in with_trees[:3]:
        proves_drafting(drafted)
    if method == "token-recycling":
        # What was remembered of the first one's answers is right again.
        assert with_trees[3].counters["accepted_tokens"] > with_trees[1].counters["accepted_tokens"]


@pytest.mark.full
def test_what_an_idle_engine_computes_is_without_adapters(
    adapters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of the last batch before are with adapters."""
    (tmp_path / "model").mkdir()
    model = make_tiny_llama(tmp_path / "model", sharpness=2.0)
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path))
    file = primed_file(model, 8)
    adapted = Case(some_prompts(2), GREEDY, adapters=["first", "second"])
    waiting = Case(adapted.prompts[:1], GREEDY, adapters=["first"], after=file)
    options = {"nodes": 15, "prime": True, "prime_seconds": 0}
    run_sglang(model, [adapted, waiting], options, **arguments(adapters))
    check_primed(model)


def test_drafts_are_of_the_head_without_adapters() -> None:
    """With them SGLang would take the drafter's rows for those of the last batch."""
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    from drafttree.sglang.drafters.hidden_state import HiddenStateWorker
    from drafttree.tree import DraftTree

    head = torch.nn.Linear(4, 6)
    adapted = BaseLayerWithLoRA(head, TorchNativeLoRABackend(1, torch.device("cpu")))
    used: list[Any] = []

    def product(rows: torch.Tensor, given: Any) -> torch.Tensor:
        used.append(given)
        return rows @ given.weight.T

    slots = torch.tensor([1])
    worker = HiddenStateWorker.__new__(HiddenStateWorker)
    worker.draft_seconds = 0.0
    worker._vocab_size = 6
    worker._group = SimpleNamespace(world_size=1)
    worker._deferred = None
    worker._runner = SimpleNamespace(
        model=SimpleNamespace(
            lm_head=adapted, logits_processor=SimpleNamespace(_compute_lm_head=product)
        )
    )
    worker._states = SimpleNamespace(drafting=torch.ones(2), roots=torch.zeros(2))
    worker._drafts = lambda slots, lengths: (torch.ones(1, 3, 4),)
    worker.drafter = SimpleNamespace(
        logits=lambda states, head: head(states),
        propose=lambda slots, roots, *given: DraftTree.of_roots(roots),
        proposes_in_graphs=False,
        drafted=lambda *args, **kwargs: None,
    )
    worker._propose(SimpleNamespace(req_pool_indices=slots, seq_lens=torch.tensor([5])))
    assert used == [head]


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
    runner = SimpleNamespace(
        page_size=1, req_to_token_pool=pool, lora_manager=manager, model_config=SimpleNamespace()
    )
    _batch(runner, 2, 5, 3, tree)
    assert ranks() == [0] * 10
