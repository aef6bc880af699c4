"""What draft trees cannot serve in SGLang is refused at start, with the fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lyanna_parts import drafter_for
from sglang_on_gpu import BACKENDS, engine_settings
from sglang_runs import LIMITS, environment
from tiny_models import make_tiny_llama

import recycle_plugin
import rsd_plugin
from lyanna_plugin.checkpoint import save

PROGRAM = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
if sys.argv[2] == "hopper":
    from sglang.srt.runtime_context import override_platform
    override_platform(
        is_cuda=True, is_sm90=True, is_hopper_with_cuda_12_3=True, device_sm=90,
        device_capability=(9, 0), has_flashinfer=True,
    ).install()
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import ServerArgs
for arguments in json.loads(sys.argv[1]):
    try:
        server = ServerArgs(**arguments)
        server.resolve_once()
        view = resolved_view(server)
        names = ("speculative_num_draft_tokens", "attention_backend", "max_running_requests",
                 "disable_overlap_schedule", "enable_mixed_chunk")
        graphs = view.cuda_graph_config
        print(json.dumps({name: getattr(view, name) for name in names} |
                         {"graphs": [graphs.decode.backend, graphs.prefill.backend]}))
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def resolve(cases: list[dict[str, Any]], options: str = "", machine: str = "") -> list[Any]:
    """Resolve server arguments as the engine does before it starts: values, or an error message.

    On a `machine` called "hopper" the engine finds a GPU.
    """
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(cases), machine],
        env=os.environ | environment() | {"DRAFTTREE_OPTIONS": options},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith(("{", '"'))]
    assert len(lines) == len(cases), process.stderr[-3000:]
    return [json.loads(line) for line in lines]


SPLIT = "prefill_attention_backend", "decode_attention_backend"

HYBRID = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
}

WINDOWED = {
    "architectures": ["LlamaForCausalLM"],
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": [0, 1],
    "sliding_window": 64,
}
"""A model whose KV of sliding windows SGLang keeps in a pool of its own."""

SEEING = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_config": {"hidden_size": 64},
}

SEEING_HYBRID = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "vision_config": {"hidden_size": 64},
}

REFUSED: dict[str, dict[str, Any]] = {
    "pp-size=2": {"pp_size": 2},
    "dcp-size=2: set it to 1": {"dcp_size": 2, "tp_size": 2},
    "attn-cp-size=2: set it to 1": {"attn_cp_size": 2, "tp_size": 2},
    "enable-prefill-cp=True: leave it out": {
        "enable_prefill_cp": True,
        "cp_strategy": "zigzag",
        "tp_size": 2,
    },
    "max-total-tokens=128": {"max_total_tokens": 128},
    "max-total-tokens=163": {"max_total_tokens": 163, "page_size": 16},
    "enable-flexkv=True": {"enable_flexkv": True, "speculative_algorithm": "rsd"},
    "MLA": {
        "model": {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
        "speculative_algorithm": "rsd",
    },
    "disaggregation-mode=prefill": {"disaggregation_mode": "prefill"},
    "speculative-num-draft-tokens=1": {"speculative_num_draft_tokens": 1},
    "nodes=999": {"speculative_num_draft_tokens": 1000},
    "attention-backend=triton": {"attention_backend": "triton"},
    "moe-runner-backend=experimental_sgl_trtllm and LoRA adapters": {
        "enable_lora": True,
        "moe_runner_backend": "experimental_sgl_trtllm",
        "speculative_algorithm": "rsd",
    },
    "tokenizer-worker-num=2: set it to 1": {"tokenizer_worker_num": 2},
    "enable-return-hidden-states=True: leave it out, and --return-hidden-states-mode": {
        "return_hidden_states_mode": "last"
    },
    "enable-return-routed-experts=True": {"enable_return_routed_experts": True},
    "enable-torch-compile=True": {"enable_torch_compile": True},
    "add --disable-hybrid-swa-memory": {"model": WINDOWED},
    "in chunks of 64 tokens: set --context-length to 64 at most": {
        "model": {"architectures": ["LlamaForCausalLM"], "attention_chunk_size": 64}
    },
    "recurrent layers instead of attention": {
        "model": {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16}
    },
    "cannot drop drafts from the layers' states": {"model": HYBRID},
    "is multimodal: use a decoder with full attention": {
        "model": SEEING,
        "speculative_algorithm": "rsd",
    },
    "is multimodal, and --enable-lora=True: leave --enable-lora=True out": {
        "model": SEEING,
        "enable_lora": True,
    },
    "a hybrid with recurrent layers: leave --enable-streaming-session out": {
        "model": HYBRID,
        "enable_streaming_session": True,
    },
    "in transformers' code, where it reads media again": {
        "model": SEEING,
        "model_impl": "transformers",
    },
    "which reads media again wherever drafts are verified": {
        "model": {"architectures": ["LlavaVidForCausalLM"]}
    },
    "is multimodal where chains are drafted in place of trees": {
        "model": SEEING_HYBRID,
        # SGLang's own choices need a GPU.
        "mamba_radix_cache_strategy": "no_buffer",
        "disable_overlap_schedule": True,
    },
    "add --language-model-only to serve its text alone, or leave": {
        "model": SEEING | {"architectures": ["MuseGlimmerForConditionalGeneration"]},
        "speculative_algorithm": "rsd",
    },
    "is a hybrid with recurrent layers": {
        "model": HYBRID,
        "speculative_algorithm": "rsd",
    },
}

SERVED: dict[str, dict[str, Any]] = {
    "attention in chunks as long as the context": {
        "model": {"architectures": ["LlamaForCausalLM"], "attention_chunk_size": 64},
        "context_length": 64,
    },
    "a window": {"model": {"architectures": ["MistralForCausalLM"], "sliding_window": 64}},
    "a window without a KV pool of its own": {"model": WINDOWED, "disable_hybrid_swa_memory": True},
    "soft caps": {"model": {"architectures": ["LlamaForCausalLM"], "attn_logit_softcapping": 30.0}},
    "quantised weights": {"quantization": "w8a8_fp8", "dtype": "bfloat16"},
    "an FP8 KV cache": {"kv_cache_dtype": "fp8_e4m3"},
    "a BF16 KV cache": {"kv_cache_dtype": "bfloat16"},
    "replicas": {"dp_size": 2},
    "tensor parallelism": {"tp_size": 2},
    "LoRA adapters": {"lora_paths": ["adapter"]},
    "images": {"model": SEEING},
    "streaming sessions": {"enable_streaming_session": True},
    "a hierarchical cache": {"enable_hierarchical_cache": True},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plain = make_tiny_llama(tmp_path_factory.mktemp("plain"))
    common = {"model_path": str(plain), "skip_tokenizer_init": True}
    cases = {"plain": common, "ours": common | {"speculative_algorithm": "token-recycling"}}
    for name, arguments in (REFUSED | SERVED).items():
        arguments = dict(arguments)
        changed = arguments.pop("model", None)
        if changed is not None:
            folder = make_tiny_llama(tmp_path_factory.mktemp("changed"))
            config = json.loads((folder / "config.json").read_text())
            model_type = {"MistralForCausalLM": "mistral"}.get(changed["architectures"][0], "llama")
            (folder / "config.json").write_text(
                json.dumps(config | {"model_type": model_type} | changed)
            )
            arguments["model_path"] = str(folder)
        cases[name] = cases["ours"] | arguments
    return dict(zip(cases, resolve(list(cases.values())), strict=True))


def test_arguments_that_are_not_given_are_set(outcomes: dict[str, Any]) -> None:
    assert outcomes["ours"] == {
        "speculative_num_draft_tokens": 81,
        "attention_backend": "torch_native",
        "max_running_requests": 48,
        "disable_overlap_schedule": True,
        "enable_mixed_chunk": False,
        # SGLang's own, which a CPU does not read.
        "graphs": ["full", "disabled"],
    }


def test_a_server_without_a_drafttree_method_is_left_alone(outcomes: dict[str, Any]) -> None:
    assert outcomes["plain"]["speculative_num_draft_tokens"] is None
    assert outcomes["plain"]["max_running_requests"] is None
    assert outcomes["plain"]["disable_overlap_schedule"] is False


@pytest.mark.parametrize("name", REFUSED)
def test_the_refusal_names_what_is_wrong(outcomes: dict[str, Any], name: str) -> None:
    said = outcomes[name]
    assert isinstance(said, str), said
    assert name in said


@pytest.mark.parametrize("name", SERVED)
def test_what_needs_no_refusal_is_served(outcomes: dict[str, Any], name: str) -> None:
    assert outcomes[name] == outcomes["ours"]


def test_options_that_do_not_fit_are_named(tiny_llama: Path) -> None:
    arguments = {
        "model_path": str(tiny_llama),
        "skip_tokenizer_init": True,
        "speculative_algorithm": "token-recycling",
    }
    cases = [arguments | {"speculative_num_draft_tokens": 16}, arguments]
    conflict, default = resolve(cases, '{"tree": "branch:2-2"}')
    assert "--speculative-num-draft-tokens=16" in conflict
    assert default["speculative_num_draft_tokens"] == 7


def test_types_of_the_kv_cache_whose_rows_have_scales_are_refused() -> None:
    from drafttree.sglang.checks import _check_kv_cache

    with pytest.raises(ValueError, match="--kv-cache-dtype=mxfp8: use auto or bf16 or"):
        _check_kv_cache(recycle_plugin.METHOD, SimpleNamespace(kv_cache_dtype="mxfp8"))
    with pytest.raises(ValueError, match="--kv-cache-dtype=fp8_e4m3: use auto or bf16 or"):
        _check_kv_cache(rsd_plugin.METHOD, SimpleNamespace(kv_cache_dtype="fp8_e4m3"))


@pytest.mark.parametrize("name", ["use_ngram_embedding", "use_engram"])
def test_embeddings_that_depend_on_preceding_tokens_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttree.sglang import checks

    model = SimpleNamespace(model_path="longcat")
    monkeypatch.setattr(checks, "target_config", lambda server_args: model)
    checks._check_embeddings(recycle_plugin.METHOD, None)
    setattr(model, name, True)
    with pytest.raises(ValueError, match="longcat, whose embeddings depend on preceding"):
        checks._check_embeddings(recycle_plugin.METHOD, None)


@pytest.mark.parametrize("quantised", [None, {}, {"quantization": {}}])
def test_the_kv_cache_that_a_checkpoint_asks_for(
    quantised: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttree.sglang import checks, kv_types

    config = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=quantised))
    monkeypatch.setattr(kv_types, "target_config", lambda server_args: config)
    auto = SimpleNamespace(kv_cache_dtype="auto")
    assert kv_types.kv_cache_dtype(auto) == "auto"
    checks._check_kv_cache(rsd_plugin.METHOD, auto)
    if quantised is None:
        return
    quantised.get("quantization", quantised)["kv_cache_quant_algo"] = "FP8"
    assert kv_types.kv_cache_dtype(SimpleNamespace(kv_cache_dtype="bfloat16")) == "bfloat16"
    with pytest.raises(ValueError, match="--kv-cache-dtype=fp8_e4m3: use auto or bf16 or"):
        checks._check_kv_cache(rsd_plugin.METHOD, auto)


def chosen_on_cuda(trees: bool = True, windows: bool = False, **given: Any) -> Any:
    """Server arguments after the attention backends were chosen."""
    from drafttree.sglang.algorithm import _choose_cuda_backend

    common = dict.fromkeys(("attention_backend", *SPLIT, "page_size"))
    kv_dtype = given.pop("kv_cache_dtype", "auto")
    arguments = SimpleNamespace(**{**common, **given})
    _choose_cuda_backend(arguments, kv_dtype, trees=trees, windows=windows)
    return arguments


@pytest.mark.parametrize(
    ("given", "pages", "trees", "windows", "chosen"),
    [
        ("fa3", 1, True, False, "fa3"),
        ("fa3", None, True, False, "fa3"),
        ("fa3", 64, True, False, "triton"),
        ("fa3", 64, False, False, "fa3"),
        ("fa3", 1, True, True, "triton"),
        ("flashinfer", 16, True, False, "flashinfer"),
        ("flashinfer", 1, True, True, "triton"),
        ("flashinfer", 1, False, True, "triton"),
        ("fa3", 1, False, True, "fa3"),
        ("triton", 1, True, True, "triton"),
        ("trtllm_mha", 1, True, False, "triton"),
    ],
)
def test_attention_backends_on_cuda(
    given: str, pages: int | None, trees: bool, windows: bool, chosen: str
) -> None:
    arguments = chosen_on_cuda(trees, windows, attention_backend=given, page_size=pages)
    assert arguments.attention_backend == chosen


@pytest.mark.parametrize(
    ("given", "dtype", "trees", "chosen"),
    [
        ("fa3", "fp8_e4m3", True, "triton"),
        ("fa3", "fp8_e4m3", False, "fa3"),
        ("fa3", "bfloat16", True, "fa3"),
        ("flashinfer", "fp8_e4m3", True, "flashinfer"),
    ],
)
def test_attention_backends_with_an_fp8_kv_cache(
    given: str, dtype: str, trees: bool, chosen: str
) -> None:
    arguments = chosen_on_cuda(trees, attention_backend=given, kv_cache_dtype=dtype)
    assert arguments.attention_backend == chosen


@pytest.mark.parametrize("option", SPLIT)
@pytest.mark.parametrize(
    ("given", "others", "reason"),
    [
        ("flashinfer", {"windows": True}, "in sliding windows"),
        ("fa3", {"windows": True}, "in sliding windows"),
        ("fa3", {"page_size": 16}, "--page-size=16"),
        ("fa3", {"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype=fp8_e5m2"),
    ],
)
def test_backends_of_prompts_and_of_decoding_are_refused_by_name(
    option: str, given: str, others: dict[str, Any], reason: str
) -> None:
    flag = option.replace("_", "-")
    message = f"--{flag}={given}: drafts are not verified with it .*{reason}: leave it out, or name"
    with pytest.raises(ValueError, match=message):
        chosen_on_cuda(attention_backend="triton", **{option: given}, **others)


def test_a_backend_that_is_not_used_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    split = dict.fromkeys(SPLIT, "triton")
    arguments = chosen_on_cuda(windows=True, attention_backend="fa3", **split)
    assert arguments.attention_backend == "fa3"
    assert "is used instead" not in caplog.text
    arguments = chosen_on_cuda(windows=True, attention_backend="fa3", **{SPLIT[1]: "triton"})
    assert arguments.attention_backend == "triton"


def test_graphs_that_keep_masks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from drafttree.sglang.checks import _check_variables

    name = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    on_cuda = SimpleNamespace(device="cuda")
    _check_variables(recycle_plugin.METHOD, on_cuda)
    monkeypatch.setenv(name, "1")
    _check_variables(recycle_plugin.METHOD, SimpleNamespace(device="cpu"))
    with pytest.raises(ValueError, match=f"environment variable {name}=1: unset it"):
        _check_variables(recycle_plugin.METHOD, on_cuda)


@pytest.mark.full
def test_the_arguments_of_the_tests_on_a_gpu(tiny_llama: Path) -> None:
    cases: dict[str, dict[str, Any]] = {}
    for backend in BACKENDS:
        settings = LIMITS | engine_settings(backend, disable_cuda_graph=False)
        settings = {name: value for name, value in settings.items() if name != "variables"}
        settings |= {"model_path": str(tiny_llama), "skip_tokenizer_init": True}
        cases[f"{backend}, plain"] = settings
        cases[backend] = settings | {"speculative_algorithm": "token-recycling"}
    found = dict(
        zip(cases, resolve([*cases.values()], '{"nodes": 80}', machine="hopper"), strict=True)
    )
    for backend in BACKENDS:
        for name in (backend, f"{backend}, plain"):
            assert isinstance(found[name], dict), found[name]
            assert found[name]["attention_backend"] == backend
            assert found[name]["graphs"][0] == "full"
        assert found[backend]["speculative_num_draft_tokens"] == 81


@pytest.mark.full
def test_settings_on_a_gpu(tiny_llama: Path, tmp_path: Path) -> None:
    save(drafter_for(tiny_llama), tmp_path)
    common = {
        "model_path": str(tiny_llama),
        "skip_tokenizer_init": True,
        "device": "cuda",
        "speculative_algorithm": "token-recycling",
    }
    path = "speculative_draft_model_path"
    plain, sized, flashinfer, pages, rsd, lyanna, three_ranks = resolve(
        [
            common,
            common | {"speculative_num_draft_tokens": 81},
            common | {"attention_backend": "flashinfer", "page_size": 16},
            common | {"attention_backend": "fa3", "page_size": 16},
            common | {"speculative_algorithm": "rsd", path: str(tiny_llama)},
            common | {"speculative_algorithm": "lyanna", path: str(tmp_path)},
            common | {"speculative_algorithm": "rsd", path: str(tiny_llama), "tp_size": 3},
        ],
        machine="hopper",
    )
    assert "has 4 attention heads, which --tp-size=3 ranks cannot share equally" in three_ranks
    assert plain["graphs"] == rsd["graphs"] == lyanna["graphs"] == ["full", "disabled"]
    assert (rsd["disable_overlap_schedule"], lyanna["disable_overlap_schedule"]) == (True, False)
    assert (rsd["attention_backend"], lyanna["attention_backend"]) == ("fa3", "fa3")
    # SGLang captures graphs for trees of one size and up to as many requests as may run at once.
    assert plain["speculative_num_draft_tokens"] == 16
    assert plain["max_running_requests"] == 48
    assert plain["attention_backend"] == "fa3"
    assert plain["disable_overlap_schedule"] is False
    assert sized["speculative_num_draft_tokens"] == 81
    assert flashinfer["attention_backend"] == "flashinfer"
    assert pages["attention_backend"] == "triton"
    (limited,) = resolve([common], '{"max_nodes": 40}', machine="hopper")
    assert limited["speculative_num_draft_tokens"] == 41


def test_errors_about_draft_models(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = make_tiny_llama(tmp_path_factory.mktemp("other"), vocab_size=256)
    short = tmp_path_factory.mktemp("short")
    config = json.loads((tiny_llama / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    common = {"model_path": str(tiny_llama), "skip_tokenizer_init": True}
    rsd = common | {"speculative_algorithm": "rsd"}
    path = "speculative_draft_model_path"
    fits = rsd | {path: str(tiny_llama)}
    without, without_own, differs, shorter, as_short, missing, unneeded, resolved = resolve(
        [
            rsd,
            common | {"speculative_algorithm": "lyanna"},
            rsd | {path: str(other)},
            rsd | {path: str(short)},
            rsd | {path: str(short), "context_length": 100},
            rsd | {path: str(other / "nowhere")},
            common | {"speculative_algorithm": "token-recycling", path: str(tiny_llama)},
            fits,
        ]
    )
    assert "needs a draft model: name its folder with --speculative-draft-model-path" in without
    assert "needs a model of its own: name its folder" in without_own
    assert "has 256 tokens" in differs
    assert "reads up to 100 tokens, and the target 2048: set --context-length=100" in shorter
    assert "speculative_num_draft_tokens" in as_short
    assert "nowhere" in missing, missing
    assert "needs no model of its own" in unneeded
    assert resolved["speculative_num_draft_tokens"] == 16
    assert resolved["disable_overlap_schedule"] is True
    (unknown,) = resolve([fits], '{"tree": "beam:3"}')
    assert "tree='beam:3'" in unknown
    (sized,) = resolve([fits | {"speculative_num_draft_tokens": 9}], '{"tree": "beam:2x4"}')
    assert sized["speculative_num_draft_tokens"] == 9


def test_the_algorithms_have_all_methods_that_sglang_calls() -> None:
    """SGLang checks some of them itself; its next version may call more."""
    program = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
public = {name for name, value in vars(SpeculativeAlgorithm).items()
          if callable(value) and not name.startswith("_")}
constructors = {"from_string", "register"}
members = {member.name for member in SpeculativeAlgorithm}
for name in ("token-recycling", "rsd", "lyanna"):
    ours = set(dir(type(SpeculativeAlgorithm.from_string(name))))
    print("missing:", sorted(public - constructors - members - ours))
"""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert process.stdout.count("missing: []") == 3
