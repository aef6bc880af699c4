"""SGLang in a soak: requests arrive, are streamed and aborted through the offline engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import soak_run
from awaited import wait_until
from hosts import SGLANG_NAMES
from sglang_runs import counters_of
from soak_requests import MAX_MODEL_LEN, RUNNING, Asked, Given, Served
from structured_answers import GRAMMARS

PLAIN_SLOTS, CRAMPED_SLOTS = 8192, 1400
"""KV slots. A cramped cache has fewer than the running requests need."""


def answer_plainly(model: Path, pool: list[Asked]) -> tuple[list[Given], set[str]]:
    """As `soak_run.answer_plainly`."""
    return soak_run.answer_plainly(SglangEngine, pool, model=model, drafted={}, options={})


def soak(
    model: Path,
    drafted: dict[str, Any],
    options: dict[str, Any],
    pool: list[Asked],
    expected: list[Given],
    record: Path,
    seed: int,
    seconds: float,
) -> soak_run.Report:
    """Serve mixtures of the pool with draft trees."""
    return soak_run.soak(
        SglangEngine,
        pool,
        expected,
        record,
        engine="sglang",
        seed=seed,
        seconds=seconds,
        model=model,
        drafted=drafted,
        options=options,
    )


class SglangEngine:
    """An engine with its scheduler in another process."""

    def __init__(
        self,
        engine: str | None,
        *,
        model: Path,
        drafted: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        import sglang

        from drafttree.sglang.options import set_options

        set_options(**options)
        cramped = {"max_total_tokens": CRAMPED_SLOTS, "schedule_conservativeness": 0.01}
        self._model = model
        self._names = 0
        self._engine = sglang.Engine(
            model_path=str(model),
            dtype="float32",
            context_length=MAX_MODEL_LEN,
            max_running_requests=RUNNING,
            skip_server_warmup=True,
            random_seed=0,
            grammar_backend="xgrammar",
            constrained_json_disable_any_whitespace=True,
            # With overlapping scheduling plain SGLang applies penalties one token late.
            disable_overlap_schedule=True,
            log_level="info",
            **(cramped if drafted else {"max_total_tokens": PLAIN_SLOTS}),
            **drafted,
        )

    def serve(self, requests: list[Served], pool: list[Asked]) -> list[Given]:
        async def all_of_them() -> list[Given]:
            return list(await asyncio.gather(*(self._one(each, pool) for each in requests)))

        given: list[Given] = self._engine.loop.run_until_complete(all_of_them())
        return given

    async def _one(self, served: Served, pool: list[Asked]) -> Given:
        asked = pool[served.number]
        setting = {SGLANG_NAMES.get(name, name): value for name, value in asked.sampling.items()}
        logprobs = setting.pop("logprobs", None)
        if bias := setting.get("logit_bias"):
            setting["logit_bias"] = {str(token): value for token, value in bias.items()}
        if not served.drafted:
            setting["custom_params"] = {"drafttree": False}
        if asked.grammar is not None:
            setting |= GRAMMARS["sglang"][asked.grammar]
        wanted = {} if logprobs is None else {"return_logprob": True, "top_logprobs_num": logprobs}
        await asyncio.sleep(served.arrives / 100)
        self._names += 1
        # An abort ends all requests whose names begin with the given one.
        name = f"request {self._names:08}"
        # Pieces have the logprobs of their own tokens alone; samples have names of their own.
        streamed = logprobs is None and "n" not in setting
        if not streamed or not (served.streamed or served.abort_after):
            found = await self._engine.async_generate(
                input_ids=asked.prompt, sampling_params=setting, **wanted
            )
            return _given(found if isinstance(found, list) else [found])
        stream = await self._engine.async_generate(
            input_ids=asked.prompt, sampling_params=setting, stream=True, rid=name
        )
        output: dict[str, Any] = {"output_ids": [], "text": ""}
        async for piece in stream:
            # The last piece of an aborted request may lack its tokens.
            ids = piece.get("output_ids") or output["output_ids"]
            output = {**output, **piece, "output_ids": ids}
            if len(ids) >= (served.abort_after or len(ids) + 1):
                self._engine.tokenizer_manager.abort_request(name)
        return _given([output])

    def operate(self, operation: str) -> None:
        if operation == "reset the cache":
            # The scheduler may still be ending an aborted request, and is then asked again.
            wait_until(lambda: self._engine.flush_cache().success, "the cache was not reset")
        else:
            updated, message, *_ = self._engine.update_weights_from_disk(str(self._model))
            if not updated:
                raise RuntimeError(f"the weights were not reloaded: {message}")

    def _reported(self) -> dict[str, int]:
        return counters_of(self._engine)

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self._reported().items() if " " not in name}

    def held(self) -> dict[str, int]:
        return {name: count for name, count in self._reported().items() if " " in name}

    def close(self) -> None:
        self._engine.shutdown()


def _given(outputs: list[dict[str, Any]]) -> Given:
    given = Given()
    for each in outputs:
        info = each["meta_info"]
        given.tokens.append(list(each["output_ids"]))
        given.texts.append(each["text"])
        given.reasons.append((info["finish_reason"] or {}).get("type"))
        if "output_token_logprobs" in info:
            given.logprobs.append([chosen[0] for chosen in info["output_token_logprobs"]])
    return given
