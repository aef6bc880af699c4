"""What cannot be served is refused at start, with the option, its value and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quantised_models import quantise
from tiny_families import make_tiny_family
from tiny_models import make_tiny_llama
from vllm_configured import configure, find_triton

vllm = pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_tree(folder: Path, paths: object) -> str:
    file = folder / "tree.json"
    file.write_text(json.dumps({"paths": paths}))
    return str(file)


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"node": 8}, "no option 'node'.*nodes"),
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": 5000}, "nodes=5000"),
        ({"nodes": "many"}, "nodes='many'"),
        ({"k": 0}, "k=0"),
        ({"k": 9}, "k=9"),
        ({"tree": "missing.json"}, "missing.json"),
        ({"tree": "branch:4-x"}, "branch:4-x"),
        ({"tree": "branch:4-4-4-4"}, "255"),
        ({"tree": "branch:2-2", "nodes": 9}, "nodes=9"),
        ({"nodes": 8, "num_speculative_tokens": 9}, "num_speculative_tokens=9"),
        ({"k": 2, "tree": "branch:4-2"}, "rank 3 but k=2"),
    ],
)
def test_bad_options(tiny_llama: Path, speculative: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(tiny_llama, speculative)


def test_attention_in_chunks(tmp_path: Path) -> None:
    """As in Llama 4: the engine attends to parts of a request as to requests of their own."""
    model = make_tiny_llama(tmp_path)
    file = model / "config.json"
    config = json.loads(file.read_text()) | {"attention_chunk_size": 24}
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="in chunks of 24 tokens: set max_model_len to 24 at most"):
        configure(model)
    configure(model, max_model_len=24)


def test_a_window_beside_a_second_model(tmp_path: Path) -> None:
    """Its layers would share the target's cache groups; a context within the window is fine."""
    model = make_tiny_family("mistral", tmp_path)
    rsd = {"method": "rsd", "model": str(model)}
    with pytest.raises(ValueError, match=r"RSD does not .* sliding window is 24: set max_model_l"):
        configure(model, rsd)
    configure(model, rsd, max_model_len=24)
    configure(model)


def test_errors_about_draft_models(
    tiny_llama: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = make_tiny_llama(tmp_path_factory.mktemp("other"), vocab_size=256)
    fits = {"method": "rsd", "model": str(tiny_llama)}
    for wrong, complaint in (
        ({"method": "rsd"}, "RSD needs a draft model"),
        ({"method": "lyanna"}, "Lyanna needs a model of its own"),
        (fits | {"model": str(other)}, "has 256 tokens"),
        (fits | {"model": str(tmp_path)}, "the draft model .* cannot be read"),
        (fits | {"tree": "beam:3"}, "tree='beam:3' is not known"),
        (fits | {"tree": "beam:64x4"}, "tree='beam:64x4' is out of range"),
        (fits | {"width": 3}, "RSD has no option 'width'"),
        (fits | {"num_speculative_tokens": 3}, "num_speculative_tokens=3"),
        ({"method": "token_recycling", "model": str(tiny_llama)}, "takes no model"),
    ):
        with pytest.raises(ValueError, match=complaint):
            configure(tiny_llama, wrong)
    assert configure(tiny_llama, fits).speculative_config.num_speculative_tokens == 15
    with pytest.raises(ValueError, match="takes no model"):
        configure(tiny_llama, spec_model=str(other))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], "not prefix-closed"),
        ([[0] * depth for depth in range(1, 71)], "deeper than 64"),
        ([], "no nodes"),
        ([[0], [0]], "twice"),
        ([[0], ["1"]], "ranks"),
    ],
)
def test_bad_tree_files(tiny_llama: Path, tmp_path: Path, paths: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(tiny_llama, {"tree": write_tree(tmp_path, paths)})


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype='bfloat16'"),
        ({"enable_dbo": True}, "enable_dbo=True"),
        ({"ubatch_size": 2}, "ubatch_size=2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"watermark_config": {"key": 1}}, "watermark_config="),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts=True: leave it"),
        ({"return_sampling_mask": True}, "return_sampling_mask=True: leave it out"),
        ({"enable_trace_replay": True}, "enable_trace_replay=True: leave it out"),
        ({"async_scheduling": True}, "V1 model runner here.*async_scheduling=True: leave it out"),
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens=1"),
        ({"worker_cls": "some.Worker"}, "worker_cls='some.Worker'"),
    ],
)
def test_engine_settings(tiny_llama: Path, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(tiny_llama, **engine)


def test_data_parallelism(tiny_llama: Path, tmp_path: Path) -> None:
    """Replicas of a dense model keep the schedule without which the engine pads drafts."""
    for method in (None, {"method": "rsd", "model": str(tiny_llama)}):
        config = configure(tiny_llama, method, data_parallel_size=2).speculative_config
        sizes = config.num_speculative_tokens_per_batch_size
        assert sizes == [(1, 1, config.num_speculative_tokens)]
    mixture = make_tiny_family("qwen3_moe", tmp_path)
    message = "data_parallel_size=2 and a mixture of experts: set it to 1"
    with pytest.raises(ValueError, match=message):
        configure(mixture, data_parallel_size=2)


def test_replicas_of_an_external_launcher(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for each other in each forward."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    launched = {"distributed_executor_backend": "external_launcher"}
    with pytest.raises(ValueError, match=r"data_parallel_size=2 and .*'external_launcher'"):
        configure(tiny_llama, data_parallel_size=2, **launched)


def test_a_mixture_of_experts_beside_lyanna(tmp_path: Path) -> None:
    model = make_tiny_family("qwen3_moe", tmp_path)
    with pytest.raises(ValueError, match=r"Lyanna .* is a mixture of experts: use a dense model"):
        configure(model, {"method": "lyanna", "model": str(model)})


def test_the_models_own_kv_cache_dtype(tiny_llama: Path) -> None:
    config = configure(tiny_llama, dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert "drafttree" in config.parallel_config.worker_cls


def test_a_draft_model_whose_heads_the_ranks_cannot_share(tiny_llama: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    method = {"method": "rsd", "model": str(tmp_path)}
    configure(tiny_llama, method)
    with pytest.raises(ValueError, match="1 attention heads, which tensor_parallel_size=2 ranks"):
        configure(tiny_llama, method, tensor_parallel_size=2)


def test_a_draft_model_with_a_shorter_context(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    config["max_position_embeddings"] = 100
    (tmp_path / "config.json").write_text(json.dumps(config))
    method = {"method": "rsd", "model": str(tmp_path)}
    configure(tiny_llama, method, max_model_len=100)
    with pytest.raises(ValueError, match=r"reads up to 100 tokens, and max_model_len=\d+: set max"):
        configure(tiny_llama, method)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    configure(tiny_llama, method)


CHAIN_WORKER = "drafttree.vllm.chains.cpu_worker.ChainCPUWorker"


def test_kv_connectors_and_offloading(tiny_llama: Path) -> None:
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    rsd = {"method": "rsd", "model": str(tiny_llama)}
    for engine in ({"kv_transfer_config": connector}, {"kv_offloading_size": 1.0}):
        config = configure(tiny_llama, {"num_speculative_tokens": 12}, **engine)
        assert config.parallel_config.worker_cls == CHAIN_WORKER
        assert config.speculative_config.num_speculative_tokens == 12
        assert configure(tiny_llama, **engine).speculative_config.num_speculative_tokens == 31
        with pytest.raises(ValueError, match=f"RSD does not work with {next(iter(engine))}"):
            configure(tiny_llama, rsd, **engine)
    producer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_producer")
    with pytest.raises(ValueError, match="kv_role='kv_producer': use one engine with kv_both"):
        configure(tiny_llama, kv_transfer_config=producer)


def test_latent_attention(tmp_path: Path) -> None:
    model = make_tiny_family("deepseek_v2", tmp_path)
    assert configure(model).parallel_config.worker_cls == CHAIN_WORKER
    with pytest.raises(ValueError, match=r"RSD does not work with .* latent attention \(MLA\)"):
        configure(model, {"method": "rsd", "model": str(model)})


def test_recurrent_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_family("qwen3_next", tmp_path)
    config = configure(model, dtype="bfloat16", enable_prefix_caching=False)
    assert config.parallel_config.worker_cls == CHAIN_WORKER
    assert config.speculative_config.num_speculative_tokens == 7
    with pytest.raises(ValueError, match="enable_prefix_caching=True: set it to False"):
        configure(model, dtype="bfloat16")
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(ValueError, match=r"layers, and vLLM 0\.31\.0: install 0\.32\.0"):
        configure(model, dtype="bfloat16", enable_prefix_caching=False)


def test_models_without_attention(tmp_path: Path) -> None:
    from transformers import MambaConfig

    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1}
    MambaConfig(architectures=["MambaForCausalLM"], **sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Token Recycling does not work .* has no attention"):
        configure(tmp_path)


def test_a_forced_v2_runner(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"VLLM_USE_V2_MODEL_RUNNER=1: .* needs Triton.*unset it"):
        configure(tiny_llama)


@pytest.fixture
def v2_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of vLLM that has Triton, whose user asks for the V2 model runner."""
    find_triton(monkeypatch)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def test_the_v2_runner_is_configured(tiny_llama: Path, v2_runner: None) -> None:
    config = configure(tiny_llama, {"nodes": 15}, max_num_seqs=8, max_num_batched_tokens=64)
    assert config.parallel_config.worker_cls == "drafttree.vllm.v2.cpu_worker.TreeCPUWorkerV2"
    speculative = config.speculative_config
    assert speculative.method == "ngram_gpu"
    assert [*map(list, speculative.num_speculative_tokens_per_batch_size)] == [
        *([1, 3, 15], [4, 6, 7], [7, 7, 3], [8, 8, 7]),
    ]
    assert configure(tiny_llama).speculative_config.num_speculative_tokens == 63


@pytest.mark.parametrize(
    ("speculative", "engine", "message"),
    [
        ({}, {"kv_offloading_size": 1.0}, "chains where kv_offloading_size is set.*: unset it"),
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size=2 on the V2 model runner"),
        (
            {"method": "lyanna", "model": "any", "tables": True},
            {},
            r"RUNNER=1: Lyanna is served with tables by the V1 model runner only: unset it",
        ),
        (
            {"method": "rsd", "model": "any", "tables": True},
            {},
            r"RUNNER=1: RSD is served with tables by the V1 model runner only: unset it",
        ),
    ],
)
def test_what_the_v2_runner_does_not_serve(
    tiny_llama: Path,
    v2_runner: None,
    speculative: dict[str, Any],
    engine: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        configure(tiny_llama, speculative, **engine)


def test_the_v2_runner_of_an_older_version(
    tiny_llama: Path, v2_runner: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.29.0")
    with pytest.raises(ValueError, match=r"of vLLM 0\.32 to 0\.33, not with that of 0\.29\.0"):
        configure(tiny_llama)


def test_another_runner_than_the_configuration_asks_for() -> None:
    from drafttree.vllm import patches

    class Runner:
        pass

    with pytest.raises(RuntimeError, match=r"for vLLM's .*\.Path, but .*Runner: leave"):
        patches.adopt(Runner(), Path, Runner.__class__)


def test_batch_invariance_is_refused_on_a_gpu(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttree.vllm import checks

    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setattr(checks, "_check_platform", lambda method, engine: "cuda")
    configure(tiny_llama)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r"Token Rec.*VLLM_BATCH_INVARIANT=1.*Unset it"):
        configure(tiny_llama)
    chains = configure(tiny_llama, attention_backend="FLASH_ATTN")
    assert chains.parallel_config.worker_cls.endswith("ChainGPUWorker")


def test_tree_attention_is_not_batch_invariant() -> None:
    from drafttree.vllm.attention.triton import TritonTreeBackend

    assert not TritonTreeBackend.supports_batch_invariance()


@pytest.mark.parametrize(
    "brought",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_checkpoints_that_bring_a_quantised_kv_cache(brought: dict[str, Any]) -> None:
    from drafttree.vllm.checks import brings_quantised_kv

    assert brings_quantised_kv(SimpleNamespace(quantization_config=brought))
    assert not brings_quantised_kv(SimpleNamespace(quantization_config={"kv_cache_scheme": None}))
    assert not brings_quantised_kv(SimpleNamespace())


def test_a_quantised_kv_cache_is_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    quantise(tiny_llama, tmp_path, "int8")
    assert configure(tmp_path).model_config.quantization == "compressed-tensors"
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"kv_cache_dtype='auto .quantised by the checkpoint"):
        configure(tmp_path)


def test_unsupported_head_sizes(tiny_llama: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text()) | {"head_dim": 24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="head size 24 is not a multiple of 16: use another"):
        configure(tmp_path)


def test_unknown_engine_versions(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(ValueError, match=r"0\.99\.0 is not supported.*0\.26"):
        configure(tiny_llama)


def test_host_options_are_understood(tiny_llama: Path) -> None:
    assert configure(tiny_llama).speculative_config.num_speculative_tokens == 80
    config = configure(tiny_llama, {"num_speculative_tokens": 15})
    assert config.speculative_config.num_speculative_tokens == 15
    config = configure(tiny_llama, {"tree": "branch:3-2-1"})
    assert config.speculative_config.num_speculative_tokens == 3 + 6 + 6


@pytest.mark.parametrize(
    ("engine", "warns"),
    [
        ({"enable_chunked_prefill": False}, False),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 2047}, True),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}, False),
        ({"max_num_batched_tokens": 1024}, False),
    ],
)
def test_prompts_that_have_to_fit_in_a_step(
    tiny_llama: Path, engine: dict[str, Any], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttree.vllm import checks

    said: list[str] = []
    monkeypatch.setattr(checks.logger, "warning", lambda text, *values: said.append(text % values))
    configure(tiny_llama, **engine)
    about = [text for text in said if "enable_chunked_prefill=False" in text]
    assert len(about) == warns
    assert all("max_num_batched_tokens to at least 2048" in text for text in about)


def test_other_methods_pass_through(tiny_llama: Path) -> None:
    """vLLM still refuses the same for its own methods after a drafttree method was requested."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    ours = configure(tiny_llama)
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    stock = configure(tiny_llama, ngram)
    assert stock.speculative_config.method == "ngram"
    assert "drafttree" not in stock.parallel_config.worker_cls
    assert "drafttree" in ours.parallel_config.worker_cls
    biased = SamplingParams(logit_bias={3: 1.0})
    biased._validate_spec_decode(ours.speculative_config)
    with pytest.raises(VLLMValidationError, match="not yet supported"):
        biased._validate_spec_decode(stock.speculative_config)
