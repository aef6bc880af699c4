"""SGLang's own tests of speculative decoding, against a server with Token Recycling.

The test methods are the kits of `sglang.test.kits`, as they are in the installed release; so is the
fixture that starts the server. What is set here is what SGLang lets a configuration set: the model,
the arguments, sizes and thresholds. Run by `make test-hosts`; docs/hosts.md says what is left out.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from typing import Any, ClassVar

import openai
import pytest
import requests
from sglang.test.kits import radix_cache_server_kit, spec_server_kits
from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_decoding_kit import SpecDecodingMixin
from sglang.test.kits.spec_server_kits import (
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecLogprobKit,
    SpecParityKit,
    SpecPenaltyKit,
)
from sglang.test.kits.streaming_session_kit import StreamingSessionKitMixin
from sglang.test.server_fixtures.spec_eagle_fixture import PROMPTS, SpecEagleServerBase
from sglang.test.test_utils import popen_launch_server
from sglang_server import counters_of

from drafttree.bench.models import ensure

PLAIN = bool(os.environ.get("HOSTS_PLAIN"))
NODES = 15
BOUNDS = (
    *("--context-length", "4096", "--max-total-tokens", "16384", "--max-running-requests", "16"),
)
ANSWER = 64
"""Tokens of the answers that the fixture, not a kit, asks for; SGLang's own fixture takes 1024."""


class Server(SpecEagleServerBase):  # type: ignore[misc]
    """A server with Token Recycling on a CPU, in SGLang's own fixture.

    Attributes:
        undrafted: Tests in which no draft need be accepted: what they generate is too short.
    """

    model = str(ensure("smollm2-135m"))
    spec_algo = "token-recycling"
    attention_backend = "torch_native"
    dtype = "float32"
    trust_remote_code = False
    variables: ClassVar[dict[str, str]] = {}
    undrafted: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def _launch_args(cls) -> list[str]:
        method = () if PLAIN else ("--speculative-algorithm", cls.spec_algo)
        return [
            *(*method, "--dtype", cls.dtype),
            *("--attention-backend", cls.attention_backend, "--page-size", str(cls.page_size)),
            *("--random-seed", "0", *BOUNDS, *map(str, cls.extra_args)),
        ]

    @classmethod
    def setUpClass(cls) -> None:
        settings = {"DRAFTTREE_OPTIONS": json.dumps({"nodes": NODES})} | cls.variables
        os.environ.update(settings)
        try:
            super().setUpClass()
        finally:
            for name in settings:
                del os.environ[name]
        cls.client = openai.Client(api_key="none", base_url=f"{cls.base_url}/v1")

    def setUp(self) -> None:
        super().setUp()
        self.counts: Counter[str] = Counter()
        self.before = {} if PLAIN else counters_of(self.base_url)
        self.start = time.monotonic()

    def tearDown(self) -> None:
        """Drafts were accepted in the very test."""
        super().tearDown()
        self.count()
        if PLAIN:
            return
        seconds = time.monotonic() - self.start
        name, accepted = self._testMethodName, self.counts["accepted_tokens"]
        steps = self.counts["drafted_steps"]
        print(f"{name}: {accepted} drafts accepted in {steps} drafted steps, {seconds:.0f} s")
        if name not in self.undrafted:
            assert accepted > 0, "no draft was accepted"

    def count(self) -> None:
        """Add what the server counted since `before`; a flush of its cache sets that to zero."""
        if PLAIN:
            return
        after = counters_of(self.base_url)
        flushed = after["steps"] < self.before["steps"]
        for name in ("drafted_steps", "accepted_tokens"):
            self.counts[name] += after[name] - (0 if flushed else self.before[name])
        self.before = after

    def send_request(self) -> None:
        time.sleep(random.uniform(0, 2))
        for prompt in PROMPTS:
            assert self._ask(prompt).status_code == 200

    def send_requests_abort(self) -> None:
        """Requests whose client goes away after a second."""
        for prompt in PROMPTS:
            time.sleep(random.uniform(0, 2))
            try:
                self._ask(prompt, timeout=1)
            except requests.Timeout as error:
                print(error)

    def _ask(self, prompt: str, timeout: float | None = None) -> requests.Response:
        sampling = {"temperature": 0, "max_new_tokens": ANSWER}
        body = {"text": prompt, "sampling_params": sampling}
        return requests.post(f"{self.base_url}/generate", json=body, timeout=timeout)


def launch_within_bounds(*arguments: Any, other_args: list[str], **settings: Any) -> Any:
    """Launch the plain server of SpecParityKit, whose KV cache would fill most of the memory."""
    return popen_launch_server(*arguments, other_args=[*other_args, *BOUNDS], **settings)


spec_server_kits.popen_launch_server = launch_within_bounds


class TestSpeculation(
    SpecParityKit,
    SpecCorrectnessKit,
    SpecLogprobKit,
    SpecPenaltyKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecDecodingMixin,
    Server,
):  # type: ignore[misc]
    """The kits for servers with speculative decoding."""

    # A model of 135M that was not trained for drafting accepts less than an 8B with a drafter.
    acc_length_thres = 1.2
    batch_accept_len_thres = 1.1
    accept_length_thres = 1.2
    bs_1_speed_thres = 0.0
    logprob_match_delta = 1e-3  # of SGLang's 0.5 for bfloat16: this is float32
    undrafted = frozenset({"test_first_token_finish", "test_logprob_start_len"})

    def flush_cache_for_spec_benchmark(self) -> None:
        """Flush the cache, which `test_bs_1_speed` does at its end too, and keep the counts."""
        self.count()
        super().flush_cache_for_spec_benchmark()
        self.before = {} if PLAIN else counters_of(self.base_url)

    @pytest.fixture(autouse=True)
    def small_radix_tree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tree of 24 prompts, not of 400, with pieces of 32 tokens, not of 256."""
        monkeypatch.setattr(radix_cache_server_kit.gen_radix_tree, "__defaults__", (24, 32))


class TestServing(
    BasicAPIContractMixin,
    BasicDecodeCorrectnessMixin,
    BasicSchedulerStressMixin,
    JSONConstrainedMixin,
    JSONModeMixin,
    RegexConstrainedMixin,
    EBNFConstrainedMixin,
    MatchedStopMixin,
    AbortAllMixin,
    PauseResumeInPlaceMixin,
    Server,
):  # type: ignore[misc]
    """The kits for any server."""

    extra_args = ("--context-length", "8192")  # a prompt of `test_long_prompt` has 8023 tokens
    abort_all_num_requests = 8
    abort_all_max_new_tokens = 2000
    pause_num_requests = 8
    pause_max_new_tokens = 128
    pause_duration = 2
    pause_ignore_eos = True  # the model ends some of these answers with its first token
    undrafted = frozenset(
        {
            *("test_health", "test_get_server_info", "test_get_model_info", "test_max_token_one"),
            *("test_health_generate", "test_determinism_temp_zero", "test_json_invalid"),
            *("test_ebnf_generate_greeting", "test_regex_generate_greeting"),
            "test_no_repetition_blowup",  # the model ends the answer with its first token
        }
    )


class TestSessions(StreamingSessionKitMixin, Server):  # type: ignore[misc]
    """Streaming sessions."""

    extra_args = (
        *("--enable-streaming-session", "--chunked-prefill-size", "256"),
        # Requests that are aborted ask for 100000 tokens, more than the model's context has.
        "--allow-auto-truncate",
        # The model ends its answers to the prompts of these requests with their first token.
        *("--preferred-sampling-params", json.dumps({"ignore_eos": True})),
    )


class TestTimeouts(RunningTimeoutTwoWaveMixin, Server):  # type: ignore[misc]
    """Requests that run for too long."""

    running_timeout_num_wave1 = 4
    running_timeout_num_wave2 = 4
    variables: ClassVar[dict[str, str]] = {"SGLANG_REQ_RUNNING_TIMEOUT": "5"}
