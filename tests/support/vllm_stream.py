"""A run of vLLM's `AsyncLLM` in a separate process: requests are streamed, and some aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_host.jobs import run_job
from v2_on_cpu import check_runner, for_runner
from vllm_runs import ENVIRONMENT, engine_arguments

if TYPE_CHECKING:
    from vllm.engine.protocol import StreamingInput

TURNS = 3
"""Prompts of a session."""


@dataclass
class Streamed:
    """The answers to the requests.

    Attributes:
        tokens: The new token ids of each request, up to the abort if it was aborted.
        last: The new token ids of a request that was sent after all others had ended.
        session: The new token ids of a session, in which prompts come one after another.
        counters: The tree worker's counts, of the first replica; empty without a method.
    """

    tokens: list[list[int]]
    last: list[int]
    session: list[int]
    counters: dict[str, int]


def stream_vllm(
    model: Path,
    prompts: list[list[int]],
    sampling: list[dict[str, Any]],
    abort_after: dict[int, int],
    speculative: dict[str, Any] | None = None,
    runner: str = "v1",
    **engine: Any,
) -> tuple[Streamed, str]:
    """Send all prompts at once, then the first one again.

    Args:
        model: Folder of the target.
        prompts: Token ids of each prompt.
        sampling: Keyword arguments of `SamplingParams`, for each prompt.
        abort_after: Number of tokens after which to abort a request, by row.
        speculative: The engine's `speculative_config`; None for plain decoding.
        runner: vLLM's model runner, "v1" or "v2".
        engine: Further arguments of the engine.

    Returns:
        The answers, and the engine's log.

    Raises:
        RunFailed: The engine did not start, or stopped.
    """
    given = {"max_num_seqs": 4, "speculative_config": speculative, **engine}
    arguments = engine_arguments(model, **given)
    answer: Streamed
    environment = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | for_runner(runner)
    answer, log = run_job(
        "vllm", _stream, (arguments, prompts, sampling, abort_after), environment, timeout=400
    )
    return answer, check_runner(runner, log)


def _stream(*arguments: Any) -> Streamed:
    return asyncio.run(_serve(*arguments))


async def _serve(
    arguments: dict[str, Any],
    prompts: list[list[int]],
    sampling: list[dict[str, Any]],
    aborted: dict[int, int],
) -> Streamed:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def one(name: str, row: int) -> list[int]:
        prompt = {"prompt_token_ids": prompts[row]}
        parameters = SamplingParams(
            detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling[row]
        )
        tokens: list[int] = []
        async for output in engine.generate(prompt, parameters, name):
            tokens += output.outputs[0].token_ids
            if len(tokens) >= aborted.get(row, 1 << 30) and name != "last":
                await engine.abort(name)
                break
        return tokens

    async def converse() -> list[int]:
        """Send the first prompts to one session, each when the answer to the last has ended."""
        parameters = SamplingParams(
            detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling[0]
        )
        ended = asyncio.Event()

        async def turns() -> AsyncGenerator[StreamingInput, None]:
            for prompt in prompts[:TURNS]:
                ended.clear()
                yield StreamingInput({"prompt_token_ids": prompt})
                await ended.wait()

        tokens: list[int] = []
        async for output in engine.generate(turns(), parameters, "session"):
            tokens += output.outputs[0].token_ids
            if len(tokens) % parameters.max_tokens == 0:
                ended.set()
        return tokens

    try:
        tokens = await asyncio.gather(*(one(str(row), row) for row in range(len(prompts))))
        last = await one("last", 0)
        session = await converse()
        ours = arguments["speculative_config"] is not None
        counters = (await engine.collective_rpc("drafttree_counters"))[0] if ours else {}
        return Streamed(tokens, last, session, counters)
    finally:
        engine.shutdown()
