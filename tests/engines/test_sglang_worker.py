"""What a worker in SGLang keeps of requests, and what it tells its drafter of their prompts."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttree.deferred_rows import DeferredRows
from drafttree.target import Target
from recycle_plugin import METHOD


def request(name: str, tokens: int) -> Any:
    return SimpleNamespace(
        rid=name,
        finished=lambda: False,
        origin_input_ids=list(range(tokens)),
        output_ids=[],
        grammar=None,
        custom_logit_processor=None,
        kv=SimpleNamespace(req_pool_idx=None),
        sampling_params=SimpleNamespace(
            max_new_tokens=8,
            custom_params=None,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            min_new_tokens=0,
        ),
    )


def prefill(*read: tuple[Any, int, int]) -> Any:
    """A batch of `(request, slot, length read so far)`."""
    for each, slot, _ in read:
        each.kv.req_pool_idx = slot
    return SimpleNamespace(
        reqs=[each for each, _, _ in read],
        input_ids=torch.zeros(len(read), dtype=torch.int64),
        req_pool_indices=torch.tensor([slot for _, slot, _ in read]),
        req_pool_indices_cpu=torch.tensor([slot for _, slot, _ in read]),
        seq_lens=torch.tensor([length for _, _, length in read]),
        seq_lens_cpu=torch.tensor([length for _, _, length in read]),
        sampling_info=SimpleNamespace(acc_additive_penalties=None, acc_scaling_penalties=None),
    )


class Drafter:
    """Records what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def release(self, slots: list[int]) -> None:
        if slots:
            self.calls.append(("release", slots))

    def start(self, slot: int, text: list[int]) -> None:
        self.calls.append(("start", (slot, len(text))))

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        self.calls.append(("extend", (slots.tolist(), tokens.flatten().tolist())))

    def reset(self) -> None:
        """Not recorded: the tests are about other calls."""

    def on_new_weights(self) -> None:
        self.calls.append(("new weights", None))


@pytest.fixture
def worker() -> Any:
    """A worker without an engine, whose target samples token 7 after each prompt."""
    from drafttree.sglang.drafters.model_free import ModelFreeWorker
    from drafttree.sglang.penalties import Penalties
    from drafttree.sglang.running import RunningRequests
    from drafttree.sglang.state import RequestStates

    made = ModelFreeWorker.__new__(ModelFreeWorker)
    made.drafter = Drafter()
    made._device = torch.device("cpu")
    made._runner = SimpleNamespace(
        model_config=SimpleNamespace(is_multimodal=False), forward_stream=torch.cpu.Stream()
    )
    made._requests = RunningRequests()
    made._states = RequestStates(4, torch.device("cpu"))
    made._penalties = Penalties(4, 512, torch.device("cpu"))
    made._target_worker = SimpleNamespace(
        forward_batch_generation=lambda batch: SimpleNamespace(
            next_token_ids=torch.full((len(batch.reqs),), 7)
        )
    )
    return made


@pytest.mark.parametrize("slot", [1, 2])
def test_a_request_that_lost_its_slot_is_forgotten(worker: Any, slot: int) -> None:
    """It was retracted, and aborted while it waited: SGLang never marks it as finished."""
    first = request("first", 5)
    worker._prefill(prefill((first, 1, 5)), None)
    first.kv.req_pool_idx = None
    worker.drafter.calls.clear()
    worker._prefill(prefill((request("second", 5), slot, 5)), None)
    assert worker._requests._slots == {"second": slot}
    assert worker.drafter.calls[:2] == [("release", [1]), ("start", (slot, 5))]


def test_a_prompt_that_is_read_in_parts_starts_once(worker: Any) -> None:
    """What SGLang samples after a part is dropped, so it is no part of the request's text."""
    long, short = request("long", 9), request("short", 3)
    for batch in (
        prefill((long, 2, 4)),
        prefill((long, 2, 8), (short, 0, 3)),
        prefill((long, 2, 9)),
    ):
        worker._prefill(batch, None)
    assert worker.drafter.calls == [
        ("start", (2, 9)),
        ("extend", ([2], [-1])),
        ("start", (0, 3)),
        ("extend", ([2, 0], [-1, 7])),
        ("extend", ([2], [7])),
    ]


@pytest.mark.parametrize("is_marked", [True, False])
def test_another_request_of_the_same_name_starts(worker: Any, is_marked: bool) -> None:
    """The first one was aborted while its prompt was read, and its slot was given to the other."""
    aborted, another = request("name", 9), request("name", 6)
    another.sampling_params.repetition_penalty = 1.5
    worker._prefill(prefill((aborted, 2, 4)), None)
    aborted.finished = lambda: is_marked
    worker._prefill(prefill((another, 2, 6)), None)
    assert worker.drafter.calls == [
        ("start", (2, 9)),
        ("extend", ([2], [-1])),
        ("release", [2]),
        ("start", (2, 6)),
        ("extend", ([2], [7])),
    ]
    logits = torch.ones(1, 512)
    worker._penalties.apply(logits, torch.tensor([2]), torch.full((1, 1), -1))
    assert logits[0, 7] < 1


def test_finished_requests_are_released_once_while_none_is_running(worker: Any) -> None:
    first, second = request("first", 5), request("second", 5)
    worker._prefill(prefill((first, 1, 5), (second, 2, 5)), None)
    del worker.drafter.calls[:]
    worker.drafttree_release()
    assert worker.drafter.calls == []
    first.finished = lambda: True
    worker.drafttree_release()
    worker.drafttree_release()
    assert worker.drafter.calls == [("release", [1])]
    worker._prefill(prefill((request("third", 4), 1, 4)), None)
    assert worker.drafter.calls[1:] == [("start", (1, 4)), ("extend", ([1], [7]))]
    assert worker._requests._slots == {"second": 2, "third": 1}


def test_what_a_layer_has_not_read_is_forgotten_with_its_request(worker: Any) -> None:
    from drafttree.sglang.drafters.hidden_state import HiddenStateWorker

    first, second = request("first", 5), request("second", 5)
    worker._prefill(prefill((first, 1, 5), (second, 2, 5)), None)
    of_layer = HiddenStateWorker.__new__(HiddenStateWorker)
    of_layer.drafter, of_layer._requests = worker.drafter, worker._requests
    of_layer._deferred = DeferredRows()
    tokens = torch.tensor([7, 7])
    of_layer._deferred.add([1, 2], torch.zeros(2, 4), tokens, torch.tensor([5, 5]))
    first.finished = lambda: True
    of_layer.drafttree_release()
    left = of_layer._deferred.take([1, 2])
    assert left is not None
    assert left.places.tolist() == [1]


def test_a_request_that_was_retracted_starts_again(worker: Any) -> None:
    again = request("again", 4)
    worker._prefill(prefill((again, 3, 4)), None)
    again.output_ids = [7, 7]
    worker._prefill(prefill((again, 3, 6)), None)
    assert worker.drafter.calls == [
        ("start", (3, 4)),
        ("extend", ([3], [7])),
        ("release", [3]),
        ("start", (3, 6)),
        ("extend", ([3], [7])),
    ]


@pytest.mark.parametrize(
    ("load_format", "overrides", "expected"),
    [
        ("auto", "{}", None),
        ("safetensors", " {} ", None),
        ("dummy", "{}", "--load-format dummy"),
        ("remote_instance", "{}", "--load-format remote_instance"),
        ("auto", '{"num_hidden_layers": 2}', "--json-model-override-args"),
    ],
)
def test_options_with_which_the_model_need_not_be_that_of_its_files(
    load_format: str, overrides: str, expected: str | None
) -> None:
    from drafttree.sglang.worker import _changed_by

    server = SimpleNamespace(load_format=load_format, json_model_override_args=overrides)
    assert _changed_by(server) == expected


@pytest.mark.parametrize(
    ("given", "drafted"),
    [
        (None, True),
        ({}, True),
        ({"drafttree": True}, True),
        ({"drafttree": False}, False),
        (["drafttree"], True),
        ("drafttree", True),
        (3, True),
    ],
    ids=str,
)
def test_a_request_opts_out_with_an_object(given: Any, drafted: bool) -> None:
    """SGLang serves requests with custom parameters of any JSON type."""
    from drafttree.sglang.state import may_draft

    made = request("name", 3)
    made.sampling_params.custom_params = given
    assert may_draft(made) == drafted


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({}, None),
        ({"memory": 0}, "leave them out"),
        ({"sharing": "request"}, "leave them out"),
        ({"hot_start": False}, "leave hot_start=false out"),
        ({"tree": "static"}, "leave tree out"),
    ],
)
def test_a_corpus_that_would_not_be_kept_is_refused(
    worker: Any, options: dict[str, Any], fix: str | None
) -> None:
    from sglang.srt.managers.io_struct import AddExternalCorpusReqInput
    from sglang.srt.speculative.external_corpus_manager import ExternalCorpusManager

    target = Target("target", 200, torch.device("cpu"), torch.float32, logging.getLogger("test"))
    worker.drafter = METHOD.drafter(METHOD.parse({"prime": False, **options}), target)
    worker._corpora = {}
    answers: list[Any] = []
    manager = ExternalCorpusManager(worker, lambda answer, _: answers.append(answer))
    manager.add(AddExternalCorpusReqInput(corpus_id="texts", token_chunks=[[5, 6, 7, 8]]))
    manager._pending_load[1].join(60)
    manager.check_pending_load()
    (answer,) = answers
    assert answer.success is (fix is None)
    assert (fix or "Loaded") in answer.message
    assert worker.list_external_corpora() == ({} if fix else {"texts": 4})


class Pool:
    """An allocator of KV slots."""

    page_size, size = 16, 64

    def __init__(self, free: int) -> None:
        self.free_slots = torch.arange(free)

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots.split([count, len(self.free_slots) - count])
        return taken

    def free(self, slots: torch.Tensor) -> None:
        self.free_slots = torch.cat([slots, self.free_slots])


def test_priming_waits_while_open_sessions_hold_the_kv_pool(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttree.sglang.drafters import observing

    primed: list[int] = []

    def prime_ranks(drafter: Any, forward: Any, max_tokens: int, *given: Any, idle: bool) -> Any:
        primed.append(max_tokens)
        return 30, 90

    monkeypatch.setattr(observing, "prime_ranks", prime_ranks)
    worker._primed, worker._num_draft_tokens, worker._group = (20, 90), 7, None
    worker._device = torch.device("cpu")
    worker.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(2, 40))
    worker.token_to_kv_pool_allocator = Pool(free=32)
    assert worker.drafttree_prime(None) is None
    assert not primed
    worker.token_to_kv_pool_allocator = Pool(free=48)
    assert worker.drafttree_prime(None) == (30, 90)
    assert primed == [39]
    assert worker.token_to_kv_pool_allocator.available_size() == 48
    worker._primed, worker._corpora = (90, 90), {}
    assert worker.drafttree_prime(None) == (90, 90)
    # Rows of the old weights may have been dropped.
    worker.weights_changed()
    assert worker.drafttree_prime(None) == (30, 90)
    assert primed == [39, 39]


@pytest.mark.parametrize("change", ["corpus", "weights"])
def test_what_a_drafter_knows_changes_after_the_steps_under_way(
    worker: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """With overlapping scheduling they run on another stream of the GPU."""
    happened: list[Any] = []
    monkeypatch.setattr(
        torch.cpu, "current_stream", lambda: SimpleNamespace(wait_stream=happened.append)
    )
    monkeypatch.setattr(
        worker,
        "drafter",
        SimpleNamespace(remember=happened.append, reset=lambda: happened.append(0)),
    )
    worker._corpora, worker._loading = {}, torch.ones(3, dtype=torch.int32)
    if change == "corpus":
        worker.commit_corpus_load("texts", 3)
    else:
        worker.weights_changed()
    assert len(happened) == 2
    assert happened[0] is worker._runner.forward_stream


def test_the_drafter_reads_new_weights_before_the_next_batch(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asks for the runners whose weights it updates, once or more in an update."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    def decode(batch: Any, on_publish: Any) -> None:
        worker.drafter.calls.append(("decode", None))

    monkeypatch.setattr(worker, "_decode", decode)
    worker._corpora, worker._device = {}, torch.device("cpu")
    batch: Any = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: False))
    updates: Any = SimpleNamespace(
        tp_worker=SimpleNamespace(weight_update_runners=lambda: [("target", None)]),
        draft_worker=worker,
    )
    worker.forward_batch_generation(batch)
    for _ in range(2):
        selected = SchedulerWeightUpdaterManager._select_runners(updates)
        assert selected == [("target", None)]
    worker.forward_batch_generation(batch)
    worker.forward_batch_generation(batch)
    # An update of the target's weights alone asks the drafter for nothing, but flushes the cache.
    worker.clear_cache_pool()
    worker.forward_batch_generation(batch)
    told = [name for name, _ in worker.drafter.calls]
    again = ["new weights", "decode"]
    assert told == ["decode", *again, "decode", *again]


@pytest.mark.parametrize("flush_cache", [True, False])
def test_each_update_of_weights_is_told_to_the_drafter(
    worker: Any, monkeypatch: pytest.MonkeyPatch, flush_cache: bool
) -> None:
    """Also one of the target alone, and one that does not flush the cache."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    from drafttree.sglang.patches import report_new_weights

    name = "flush_cache_after_weight_update"
    monkeypatch.setattr(
        SchedulerWeightUpdaterManager, name, getattr(SchedulerWeightUpdaterManager, name)
    )
    report_new_weights()
    worker._corpora, worker._device = {"texts": 4}, torch.device("cpu")
    worker.drafter.reset = lambda: worker.drafter.calls.append(("reset", None))
    updated = SimpleNamespace(
        weight_updater=SimpleNamespace(update_weights_from_disk=lambda *_, **__: (True, ""))
    )
    flushed: list[Any] = []

    def flush(**given: Any) -> bool:
        flushed.append(given)
        return True

    updates: Any = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    updates.metrics_collector = None
    updates.scheduler = SimpleNamespace(record_weight_version_change=lambda **_: None)
    updates.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", updated)])
    updates.draft_worker = worker
    updates.flush_cache = flush
    given = SimpleNamespace(
        model_path="model",
        load_format=None,
        recapture_cuda_graph=False,
        weight_version=None,
        torch_empty_cache=False,
        flush_cache=flush_cache,
    )
    # As with a selector of the target alone, which other updates have.
    monkeypatch.setattr(
        SchedulerWeightUpdaterManager, "_select_runners", lambda self: [("target", updated)]
    )
    assert updates.update_weights_from_disk(given).success
    assert bool(flushed) == flush_cache
    assert worker.drafter.calls == [("reset", None)]
    assert worker.list_external_corpora() == {}
    assert worker._may_have_new_weights
    updates.draft_worker = None
    assert updates.update_weights_from_disk(given).success


def test_steps_overlap_as_the_scheduler_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the plugin turns it off, which the arguments that were given do not show."""
    from sglang.srt import runtime_context

    from drafttree.sglang.worker import _overlaps_steps

    given = SimpleNamespace(disable_overlap_schedule=False)
    for is_off in (True, False):
        schedule = SimpleNamespace(disable_overlap_schedule=is_off)
        monkeypatch.setattr(runtime_context, "get_schedule", lambda schedule=schedule: schedule)
        assert _overlaps_steps(given) is not is_off
