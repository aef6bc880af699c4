"""vLLM in a soak: steps are run one by one in the process that counts, on the V1 model runner."""

from __future__ import annotations

from itertools import chain, repeat
from math import nan
from pathlib import Path
from typing import Any

import soak_held
import soak_run
from soak_requests import MAX_MODEL_LEN, RUNNING, Asked, Given, Served
from structured_answers import GRAMMARS
from vllm_runs import sampling_parameters

PLAIN_BLOCKS, CRAMPED_BLOCKS = 40, 9
"""Blocks of 128 KV slots. A cramped cache has fewer than the running requests need."""


def answer_plainly(model: Path, pool: list[Asked]) -> tuple[list[Given], set[str]]:
    """As `soak_run.answer_plainly`."""
    return soak_run.answer_plainly(VllmEngine, pool, model=model, speculative=None)


def soak(
    model: Path,
    speculative: dict[str, Any],
    pool: list[Asked],
    expected: list[Given],
    record: Path,
    seed: int,
    seconds: float,
) -> soak_run.Report:
    """Serve mixtures of the pool with draft trees."""
    return soak_run.soak(
        VllmEngine,
        pool,
        expected,
        record,
        engine="vllm",
        seed=seed,
        seconds=seconds,
        model=model,
        speculative=speculative,
    )


class VllmEngine:
    """An engine whose core is in this process."""

    def __init__(
        self,
        engine: str | None,
        *,
        model: Path,
        speculative: dict[str, Any] | None,
    ) -> None:
        from vllm import LLM

        drafted = {"speculative_config": speculative} if speculative else {}
        self._llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=1024,
            seed=0,
            num_gpu_blocks_override=CRAMPED_BLOCKS if speculative else PLAIN_BLOCKS,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            disable_log_stats=False,
            **drafted,
        )
        self._drafted = bool(speculative)
        self._names = 0

    def serve(self, requests: list[Served], pool: list[Asked]) -> list[Given]:
        engine = self._llm.llm_engine
        waiting = sorted(enumerate(requests), key=lambda each: -each[1].arrives)
        rows: dict[str, int] = {}
        samples: list[dict[int, Any]] = [{} for _ in requests]
        step = 0
        while waiting or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                step = max(step, waiting[-1][1].arrives)
            while waiting and waiting[-1][1].arrives <= step:
                row, served = waiting.pop()
                self._names += 1
                rows[f"request {self._names}"] = row
                self._add(f"request {self._names}", served, pool[served.number])
            for output in engine.step():
                row = rows[output.request_id]
                samples[row] |= {each.index: each for each in output.outputs}
                length = max(len(each.token_ids) for each in samples[row].values())
                if not output.finished and length >= (requests[row].abort_after or length + 1):
                    engine.abort_request([output.request_id])
            step += 1
        return [_given(each) for each in samples]

    def _add(self, name: str, served: Served, asked: Asked) -> None:
        setting = {"detokenize": True} | asked.sampling
        if not served.drafted:
            setting["extra_args"] = {"drafttree": False}
        if asked.grammar is not None:
            setting["structured"] = GRAMMARS["vllm"][asked.grammar]
        self._llm.llm_engine.add_request(
            name,
            {"prompt_token_ids": asked.prompt},
            sampling_parameters(setting),
        )

    def operate(self, operation: str) -> None:
        if operation == "reset the cache":
            assert self._llm.reset_prefix_cache()
        elif operation == "forget":
            self._llm.collective_rpc("drafttree_reset")
        elif operation == "reload the weights":
            self._llm.collective_rpc("reload_weights")
        else:
            self._llm.sleep(1)
            self._llm.wake_up()

    def counts(self) -> dict[str, int]:
        counted: dict[str, int] = self._llm.collective_rpc("drafttree_counters")[0]
        metrics = {each.name: each for each in self._llm.get_metrics()}
        return counted | {"preemptions": metrics["vllm:num_preemptions"].value}

    def held(self) -> dict[str, int]:
        engine = self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            # One block is never given out.
            "used KV blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests of the scheduler": len(scheduler.requests),
            "requests of the output processor": len(engine.output_processor.request_states),
            **{f"ours: {name}": count for name, count in soak_held.held().items()},
        }

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _given(samples: dict[int, Any]) -> Given:
    given = Given()
    for _, each in sorted(samples.items()):
        given.tokens.append(list(each.token_ids))
        given.texts.append(each.text)
        given.reasons.append(each.finish_reason)
        if each.logprobs is not None:
            # There may be more of them than tokens, which is for the soak to report.
            chosen = zip(each.logprobs, chain(each.token_ids, repeat(None)), strict=False)
            given.logprobs.append(
                [best[token].logprob if token in best else nan for best, token in chosen]
            )
    return given
