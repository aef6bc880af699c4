"""What vLLM's worker and its model runner do besides serving requests."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.config import VllmConfig
from vllm.config.load import LoadConfig

from drafttree.vllm.drafting import DraftingRunner
from drafttree.vllm.drafting_worker import DraftingWorker


class Runner:
    """Notes what it is told."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def load_drafter(self) -> None:
        self._calls.append("drafter")

    def weights_changed(self) -> None:
        self._calls.append("weights changed")

    def prime(self, blocks: list[int], *, idle: bool) -> tuple[int, int]:
        return len(blocks), 9


class StockWorker:
    """The calls of vLLM's worker that change the weights."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.device = torch.device("meta")
        self.model_runner = Runner(self.calls)
        self.vllm_config = VllmConfig()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.calls += ["pool opens", "target", "pool closes"]

    def reload_weights(self) -> None:
        self.calls.append("new weights")

    def reset_weights(self) -> None:
        self.calls.append("zeros")

    def start_weight_update(self) -> None:
        self.calls.append("transfer")

    def finish_weight_update(self) -> None:
        self.calls.append("new weights")

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")


class Worker(DraftingWorker, StockWorker):
    """As the workers are made."""

    def _attention_of_drafts(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_the_drafter_is_not_in_the_memory_that_sleep_drops() -> None:
    worker = Worker()
    worker.load_model()
    assert worker.calls == ["pool opens", "target", "pool closes", "drafter"]


@pytest.mark.parametrize("name", ["reload_weights", "finish_weight_update"])
def test_the_runner_is_told_of_new_weights(name: str) -> None:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    assert hasattr(VllmWorker, name)
    worker = Worker()
    getattr(worker, name)()
    assert worker.calls == ["new weights", "weights changed"]


def test_a_drafter_forgets_and_reads_new_weights() -> None:
    calls: list[str] = []
    runner: Any = DraftingRunner()
    runner._drafter = SimpleNamespace(
        reset=lambda: calls.append("reset"), on_new_weights=lambda: calls.append("new weights")
    )
    runner.weights_changed()
    assert calls == ["reset", "new weights"]


def test_nothing_is_primed_without_the_weights() -> None:
    """An engine that has no request primes, also in the middle of a transfer of weights."""
    worker = Worker()
    assert worker.drafttree_prime([1, 2]) == (2, 9)
    for loses, restores in (
        (worker.start_weight_update, worker.finish_weight_update),
        (worker.reset_weights, worker.reload_weights),
        (lambda: worker.sleep(2), worker.reload_weights),
    ):
        loses()
        assert worker.drafttree_prime([1, 2]) is None
        restores()
        assert worker.drafttree_prime([1, 2]) == (2, 9)
    worker.sleep(1)
    assert worker.drafttree_prime([1, 2]) == (2, 9)
    # A CPU's worker does not sleep.
    worker.device = torch.device("cpu")
    worker.sleep(2)
    assert worker.drafttree_prime([1, 2]) == (2, 9)


def test_vllm_can_set_the_weights_to_zero() -> None:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    assert hasattr(VllmWorker, "reset_weights")


@pytest.mark.parametrize(
    ("load_format", "options", "expected"),
    [
        ("auto", {}, None),
        ("safetensors", {}, None),
        ("dummy", {}, "load_format=dummy"),
        ("of_a_plugin", {"hf_overrides": {"num_hidden_layers": 2}}, "load_format=of_a_plugin"),
        ("auto", {"hf_overrides": {"num_hidden_layers": 2}}, "hf_overrides"),
        ("auto", {"hf_overrides": lambda config: config}, "hf_overrides"),
        ("auto", {"hf_config_path": "another"}, "hf_config_path"),
    ],
)
def test_options_with_which_the_model_need_not_be_that_of_its_files(
    load_format: str, options: dict[str, Any], expected: str | None
) -> None:
    runner: Any = DraftingRunner()
    runner.load_config = LoadConfig(load_format=load_format)
    runner.model_config = SimpleNamespace(**{"hf_overrides": {}, "hf_config_path": None, **options})
    assert runner._changed_by() == expected


def test_a_transfer_that_does_not_begin_leaves_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(worker: StockWorker) -> None:
        raise RuntimeError("no transfer is configured")

    worker = Worker()
    monkeypatch.setattr(StockWorker, "start_weight_update", fail)
    with pytest.raises(RuntimeError, match="configured"):
        worker.start_weight_update()
    assert worker.drafttree_prime([1, 2]) == (2, 9)


class Cache:
    """Stands for a KV cache."""


class StockRunner:
    """Builds KV caches, as vLLM's model runners do: once more to measure graphs."""

    cache: Cache | None = None

    def initialize_kv_cache(self, config: object, is_profiling: bool = False) -> None:
        assert self.cache is None, "the cache of the measurement is still there"
        self.cache = Cache()


class Adopted(DraftingRunner, StockRunner):
    """As the runners are made."""

    def _make_movers(self) -> Any:
        return [[self.cache]]


def test_a_layer_with_an_attention_backend_of_its_own_is_refused() -> None:
    class Backend:
        @staticmethod
        def get_name() -> str:
            return "OTHER"

    runner: Any = DraftingRunner()
    layer = SimpleNamespace(get_attn_backend=lambda: Backend)
    runner.compilation_config = SimpleNamespace(static_forward_context={"layers.3": layer})
    group = SimpleNamespace(layer_names=["layers.3"])
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
    with pytest.raises(ValueError, match=r"layers\.3 chooses the attention backend OTHER"):
        runner._make_movers()


def test_nothing_keeps_the_kv_cache_with_which_graphs_are_measured() -> None:
    runner = Adopted()
    runner.initialize_kv_cache(None, is_profiling=True)
    assert runner.cache is not None
    measured = weakref.ref(runner.cache)
    runner.cache = None
    assert measured() is None
    runner.initialize_kv_cache(None)
    assert runner._movers == [[runner.cache]]


def test_dummy_requests_at_the_start_draw_no_seeds() -> None:
    """vLLM draws one for each request without, from numbers that later requests get."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from drafttree.vllm.v2.warm_up import serve_dummy_requests

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    outputs: list[Any] = []
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(
            kv_cache_config=SimpleNamespace(num_blocks=400, kv_cache_groups=groups),
            kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
            max_num_reqs=4,
            max_model_len=1024,
            vocab_size=64,
        ),
        execute_model=outputs.append,
        sample_tokens=lambda grammar: None,
    )
    assert serve_dummy_requests(worker, [7])
    started = [each.sampling_params for output in outputs for each in output.scheduled_new_reqs]
    assert {each.temperature for each in started} == {0.0, 0.8}
    assert all(each.seed is not None for each in started)
