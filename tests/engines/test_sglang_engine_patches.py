"""In the real SGLang exactly what `PATCHES` lists is replaced, once, without effect elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from sglang_runs import environment

from drafttree.sglang.patches import PATCHES

# Prints one JSON object. Functions of SGLang are compared by identity, before and after.
PROGRAM = """
import inspect, json, sys
from types import SimpleNamespace
import torch
from sglang.srt.arg_groups import lora_hook
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.managers import tokenizer_control_mixin
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache import kv_cache_builder, kv_cache_configurator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.model_executor import pool_configurator
from sglang.srt.plugins import load_plugins
from sglang.srt import runtime_context
from sglang.srt.runtime_context import get_parallel
from sglang.srt.session.streaming_session import StreamingSession
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
import sglang.srt.layers.attention.torch_native_backend, sglang.srt.speculative.ngram_info
import sglang.srt.speculative.draft_worker_common

def functions():
    found = {}
    for module in [name for name in sys.modules if name.startswith("sglang.")]:
        for name, value in list(vars(sys.modules[module]).items()):
            if inspect.isclass(value) and value.__module__ == module:
                for inner, member in vars(value).items():
                    if callable(member):
                        found[f"{module}:{name}.{inner}"] = member
            elif inspect.isfunction(value):
                found[f"{module}:{name}"] = value
    for name, value in attention_registry.ATTENTION_BACKENDS.items():
        found[f"{attention_registry.__name__}:ATTENTION_BACKENDS[{name}]"] = value
    return found

def changed(before):
    return sorted(k for k, v in functions().items() if k in before and before[k] is not v)

# The host's own functions are stubs where calling them would need an engine.
seen = []
def stub(name, parameters, result=None):
    namespace = {"seen": seen, "result": result}
    exec(f"def {name}({parameters}):\\n    seen.append(({name!r}, locals()))\\n    return result()",
         namespace)
    return namespace[name]

answer = lambda: SimpleNamespace(internal_state={})
Sampler.__init__ = torch.nn.Module.__init__  # the stock one needs the groups of a running engine
real = {
    "Scheduler.get_internal_state": Scheduler.get_internal_state,
    "_compute_cell_size": pool_configurator.DefaultPoolConfigurator._compute_cell_size,
    "create_tree_cache": kv_cache_builder.create_tree_cache,
}
start = functions()
load_plugins()
report = {"registered": changed(start)}

from drafttree.metrics import Counters
from drafttree.sglang import patches
from drafttree.sglang.acceptance_sampler import AcceptanceSampler

runners = [SimpleNamespace(sample=lambda logits_output, forward_batch: "sampled",
                           sampler=Sampler.__new__(Sampler)) for _ in range(2)]
observed = []
def apply(runner, who):
    patches.route_attention()
    patches.take_corpora()
    patches.accept_adapters()
    patches.report_counters()
    patches.use_idle_rounds()
    patches.refuse_recaptures()
    patches.report_new_weights()
    patches.check_stops_in_order()
    patches.widen_request_rows()
    patches.count_layer_memory()
    patches.match_prefixes_by_bigrams()
    patches.keep_computed_kv_of_sessions()
    patches.observe_prefill(runner, lambda batch, logits: observed.append(who))
    patches.install_acceptance_sampler(runner)

stock_sample, stock_sampler = runners[0].sample, runners[0].sampler
apply(runners[0], "first")
report["applied"] = changed(start)
report["runner"] = [runners[0].sample is not stock_sample,
                    isinstance(runners[0].sampler, AcceptanceSampler)]
exchanged = SimpleNamespace(attn_backend="stock", decode_cuda_graph_runner="graphs")
report["graphs"] = [dict(vars(exchanged))]
with patches.exchange_graphs(exchanged, "another", "others"):
    report["graphs"].append(dict(vars(exchanged)))
report["graphs"].append(dict(vars(exchanged)))
def draft_model(head_kind, get_logits):
    model = torch.nn.Module()
    model.processor = torch.nn.Module.__new__(LogitsProcessor)
    model.head = torch.nn.Module.__new__(head_kind)
    for part in (model.processor, model.head):
        torch.nn.Module.__init__(part)
    model.head.number, model.processor._get_logits = 5, get_logits
    return model
def stock_logits(
    hidden_states, lm_head, logits_metadata, embedding_bias=None, use_logits_buffer=True
):
    return hidden_states + lm_head.number
report["logits"] = []
for kind in (ParallelLMHead, VocabParallelEmbedding):
    model = draft_model(kind, stock_logits)
    head = patches.replace_logits(model, lambda states, head: [states, head(2 * states)])
    replaced = model.processor._get_logits
    patches.replace_logits(model, None)
    report["logits"].append([model.processor._get_logits is replaced, head(1),
                             replaced(1, SimpleNamespace(number=6), None)])
try:
    patches.replace_logits(torch.nn.Linear(2, 2), None)(1)
except ValueError as error:
    report["logits"].append(str(error))
once, sampler = functions(), runners[0].sampler
apply(runners[0], "again")
apply(runners[1], "second")
report["twice"] = changed(once) + ([] if runners[0].sampler is sampler else ["sampler"])
prefill = SimpleNamespace(
    forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True))
results = [runner.sample(SimpleNamespace(next_token_logits=None), prefill) for runner in runners]
report["observed"] = [observed, results]

# What the replacements do for servers with and without a drafttree method.
algorithms = {"none": SpeculativeAlgorithm.NONE}
for name in ("token-recycling", "lyanna"):
    algorithms[name] = SpeculativeAlgorithm.from_string(name)

Stub = pool_configurator.DefaultPoolConfigurator
Stub._compute_cell_size = stub("_compute_cell_size", "self, kvc, num_layers", lambda: 7)
kv_cache_builder.create_tree_cache = stub("create_tree_cache", "ctx", lambda: "cache")
Scheduler.get_internal_state = stub("get_internal_state", "self, recv_req", answer)
patches.count_layer_memory(), patches.match_prefixes_by_bigrams(), patches.report_counters()
report["layers"], report["bigrams"] = {}, {}
heads = SimpleNamespace(get_total_num_kv_heads=lambda: 8,
                        get_num_kv_heads=lambda ranks: max(1, 8 // ranks))
for name, algorithm in algorithms.items():
    report["layers"][name] = []
    for ranks in (1, 4, 16):
        kvc = SimpleNamespace(spec_algorithm=algorithm, model_config=heads)
        with get_parallel().override(attn_tp_size=ranks):
            Stub._compute_cell_size(None, kvc, 10)
        report["layers"][name].append(seen[-1][1]["num_layers"])
    context = SimpleNamespace(
        params=SimpleNamespace(is_eagle=False),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(spec_algorithm=algorithm)))
    kv_cache_builder.create_tree_cache(context)
    report["bigrams"][name] = seen[-1][1]["ctx"].params.is_eagle
counters = [Counters(torch.device("cpu")) for _ in range(2)]
counters[1]._sums += 3
workers = [None, *(SimpleNamespace(counters=each) for each in counters)]
report["counters"] = [
    Scheduler.get_internal_state(SimpleNamespace(draft_worker=worker), None).internal_state
    for worker in workers]
tokenizer_control_mixin.get_spec = lambda: SimpleNamespace(
    speculative_algorithm=seen[-1], speculative_ngram_external_corpus_max_tokens=5)
patches.take_corpora()
report["corpora"] = {}
for name in ("EAGLE", "token-recycling"):
    seen.append(name)
    spec = tokenizer_control_mixin.get_spec()
    report["corpora"][name] = [
        spec.speculative_algorithm, spec.speculative_ngram_external_corpus_max_tokens]
lora_hook.check_lora_speculative_compatibility = stub(
    "check_lora_speculative_compatibility", "server_args", lambda: None)
lora_hook.resolving_view = lambda server_args: server_args
patches.accept_adapters()
report["adapters"] = {}
for name in ("EAGLE", "token-recycling"):
    seen.clear()
    lora_hook.check_lora_speculative_compatibility(SimpleNamespace(speculative_algorithm=name))
    report["adapters"][name] = len(seen)
report["idle"] = {}
Scheduler.maybe_sleep_on_idle = stub("maybe_sleep_on_idle", "self", lambda: None)
patches.use_idle_rounds()
for name, worker in {
    "plain": None,
    "unfinished": SimpleNamespace(drafttree_prime=lambda cache: (1, 2)),
    "finished": SimpleNamespace(drafttree_prime=lambda cache: (2, 2)),
    "without room": SimpleNamespace(drafttree_prime=lambda cache: None),
}.items():
    seen.clear()
    Scheduler.maybe_sleep_on_idle(SimpleNamespace(draft_worker=worker, tree_cache=None))
    report["idle"][name] = len(seen)
released = []
worker = SimpleNamespace(drafttree_release=lambda: released.append("finished"))
Scheduler.maybe_sleep_on_idle(SimpleNamespace(draft_worker=worker, tree_cache=None))
report["released"] = released
StreamingSession.try_cache_finished_req = stub(
    "try_cache_finished_req", "self, req", lambda: True)
runtime_context.get_spec = lambda: SimpleNamespace(speculative_algorithm=served)
patches.keep_computed_kv_of_sessions()
report["sessions"] = {}
for served in ("EAGLE", "token-recycling"):
    report["sessions"][served] = []
    for committed, emitted in ((30, 4), (20, 4), (26, 0)):
        session = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=committed))
        turn = SimpleNamespace(origin_input_ids=[0] * 26, output_ids=[0] * emitted)
        owner = SimpleNamespace(borrowed_slot=lambda req: session)
        assert StreamingSession.try_cache_finished_req(owner, turn)
        report["sessions"][served].append(session.kv.kv_committed_len)
SchedulerWeightUpdaterManager.update_weights_from_disk = stub(
    "update_weights_from_disk", "self, recv_req", lambda: SimpleNamespace(message="updated"))
patches.refuse_recaptures()
report["updates"] = [
    SchedulerWeightUpdaterManager.update_weights_from_disk(
        SimpleNamespace(draft_worker=worker), SimpleNamespace(recapture_cuda_graph=recaptured)
    ).message
    for worker in (None, SimpleNamespace(has_own_graphs=True))
    for recaptured in (False, True)]
backend_for = attention_registry.ATTENTION_BACKENDS["torch_native"]
report["backends"] = {}
for name, algorithm in algorithms.items():
    try:
        backend = type(backend_for(SimpleNamespace(spec_algorithm=algorithm))).__name__
    except AttributeError as error:  # the runner is no more than its algorithm
        frame = error.__traceback__
        while frame.tb_next:
            if frame.tb_frame.f_code.co_name == "__init__":
                break
            frame = frame.tb_next
        backend = type(frame.tb_frame.f_locals["self"]).__name__
    report["backends"][name] = backend

# An engine that a patch does not fit is refused.
report["unknown"] = {}
def refused(name, apply):
    try:
        apply()
        report["unknown"][name] = "applied"
    except RuntimeError as error:
        report["unknown"][name] = str(error)

Stub._compute_cell_size = stub("_compute_cell_size", "self, kvc")
refused("_compute_cell_size", patches.count_layer_memory)
kv_cache_builder.create_tree_cache = stub("create_tree_cache", "context, more")
refused("create_tree_cache", patches.match_prefixes_by_bigrams)
tokenizer_control_mixin.get_spec = stub("get_spec", "context")
refused("get_spec", patches.take_corpora)
lora_hook.check_lora_speculative_compatibility = stub(
    "check_lora_speculative_compatibility", "view")
refused("check_lora_speculative_compatibility", patches.accept_adapters)
Scheduler.get_internal_state = stub("get_internal_state", "self")
refused("get_internal_state", patches.report_counters)
Scheduler.maybe_sleep_on_idle = stub("maybe_sleep_on_idle", "self, more")
refused("maybe_sleep_on_idle", patches.use_idle_rounds)
SchedulerWeightUpdaterManager.update_weights_from_disk = stub(
    "update_weights_from_disk", "self, recv_req, more")
refused("update_weights_from_disk", patches.refuse_recaptures)
Req.update_finish_state = stub("update_finish_state", "self, tokens")
refused("update_finish_state", patches.check_stops_in_order)
del SchedulerWeightUpdaterManager.flush_cache_after_weight_update
refused("flush_cache_after_weight_update", patches.report_new_weights)
refused("shared_read_done_event", lambda: patches.publish_reads(SimpleNamespace(device="cpu")))
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
bare = SimpleNamespace(attn_backend=TritonAttnBackend.__new__(TritonAttnBackend))
refused("is_draft_runner", lambda: patches.verify_in_graphs(bare))
StreamingSession.try_cache_finished_req = stub("try_cache_finished_req", "self, req, more")
refused("try_cache_finished_req", patches.keep_computed_kv_of_sessions)
del kv_cache_configurator.get_req_to_token_extra_context_len
refused("get_req_to_token_extra_context_len", patches.widen_request_rows)
del attention_registry.ATTENTION_BACKENDS["torch_native"]
refused("torch_native", patches.route_attention)
other = type("ModelRunner", (SimpleNamespace,), {})(sample=lambda logits: None, sampler=object())
refused("ModelRunner.sample", lambda: patches.observe_prefill(other, None))
refused("sampler", lambda: patches.install_acceptance_sampler(other))
unlike = draft_model(ParallelLMHead, lambda hidden_states, lm_head: hidden_states)
refused("_get_logits", lambda: patches.replace_logits(unlike, None))
print("REPORT", json.dumps(report))
"""

OF_RUNNERS = {
    f"sglang.srt.model_executor.model_runner:ModelRunner.{name}"
    for name in (
        *("sample", "sampler", "attn_backend", "decode_cuda_graph_runner"),
        "shared_read_done_event",
    )
}
OF_RUNNERS |= {
    "sglang.srt.layers.attention.triton_backend:TritonAttnBackend.is_draft_runner",
    "sglang.srt.layers.logits_processor:LogitsProcessor._get_logits",
}
REGISTRY = "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, process.stderr[-3000:]
    made: dict[str, Any] = json.loads(lines[0].removeprefix("REPORT "))
    return made


def test_registration_replaces_one_backend(report: dict[str, Any]) -> None:
    assert report["registered"] == [f"{REGISTRY}[torch_native]"]


def test_the_list_is_complete(report: dict[str, Any]) -> None:
    assert {name.partition("[")[0] for name in report["applied"]} == {
        patch.target for patch in PATCHES
    } - OF_RUNNERS
    assert report["runner"] == [True, True]


def test_graphs_are_exchanged_for_a_while(report: dict[str, Any]) -> None:
    before, meanwhile, after = report["graphs"]
    assert before == after == {"attn_backend": "stock", "decode_cuda_graph_runner": "graphs"}
    assert meanwhile == {"attn_backend": "another", "decode_cuda_graph_runner": "others"}


def test_a_drafter_computes_the_logits_of_a_draft_model(report: dict[str, Any]) -> None:
    *known, unknown = report["logits"]
    assert known == [[True, 6, [1, 8]]] * 2
    assert unknown == "the parts of it that compute logits are not known"


def test_nothing_is_replaced_twice(report: dict[str, Any]) -> None:
    assert report["twice"] == []


def test_corpora_are_taken_for_our_methods_alone(report: dict[str, Any]) -> None:
    assert report["corpora"] == {"EAGLE": ["EAGLE", 5], "token-recycling": ["NGRAM", 5]}


def test_the_check_of_adapters_is_passed_by_our_methods_alone(report: dict[str, Any]) -> None:
    assert report["adapters"] == {"EAGLE": 1, "token-recycling": 0}


def test_the_last_worker_of_a_runner_observes_it(report: dict[str, Any]) -> None:
    observed, results = report["observed"]
    assert observed == ["again", "second"]
    assert results == ["sampled", "sampled"]


def test_other_servers_are_served_as_before(report: dict[str, Any]) -> None:
    # With 1, 4 and 16 ranks, each of which has all 8 KV heads of the drafter's layer.
    unchanged = [10, 10, 10]
    assert report["layers"] == {
        "none": unchanged,
        "token-recycling": unchanged,
        "lyanna": [11, 14, 18],
    }
    assert report["bigrams"] == {"none": False, "token-recycling": False, "lyanna": True}
    assert report["backends"] == {
        "none": "TorchNativeAttnBackend",
        "token-recycling": "TreeAttentionBackend",
        "lyanna": "TreeAttentionBackend",
    }


def test_turns_of_sessions_keep_what_was_computed(report: dict[str, Any]) -> None:
    assert report["sessions"] == {"EAGLE": [30, 20, 26], "token-recycling": [29, 20, 26]}


def test_a_scheduler_sleeps_when_nothing_can_be_primed(report: dict[str, Any]) -> None:
    assert report["idle"] == {"plain": 1, "unfinished": 0, "finished": 1, "without room": 1}


def test_a_scheduler_without_requests_releases_those_that_finished(report: dict[str, Any]) -> None:
    assert report["released"] == ["finished"]


def test_graphs_are_not_captured_again_beside_our_own(report: dict[str, Any]) -> None:
    *others, ours = report["updates"]
    assert others == ["updated"] * 3
    assert "recapture_cuda_graph=True does not work" in ours


def test_each_worker_reports_its_own_counters(report: dict[str, Any]) -> None:
    plain, first, second = report["counters"]
    assert plain == {}
    assert first["drafttree"]["steps"] == 0
    assert second["drafttree"]["steps"] == 3


def test_an_unknown_host_is_refused(report: dict[str, Any]) -> None:
    assert len(report["unknown"]) == 17
    for name, said in report["unknown"].items():
        assert name in said
        assert "does not support this SGLang" in said
