"""A run of vLLM's `AsyncLLM` in a process of its own: requests stream, some are aborted."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_runs import ENVIRONMENT, RunFailed


@dataclass
class Streamed:
    """What came of the requests.

    Attributes:
        tokens: of each request; those of an aborted one up to the abort.
        last: of a request that was sent after all others had ended.
        counters: our worker's counts; empty without one.
    """

    tokens: list[list[int]]
    last: list[int]
    counters: dict[str, int]


def stream_vllm(
    model: Path,
    prompts: list[list[int]],
    sampling: list[dict[str, Any]],
    abort_after: dict[int, int],
    speculative: dict[str, Any] | None = None,
) -> Streamed:
    """Send all prompts at once, then the first one again.

    Args:
        sampling: keyword arguments of `SamplingParams`, for each prompt.
        abort_after: requests to abort, and the number of tokens after which to do so.

    Raises:
        RunFailed: the engine did not start or stopped.
    """
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        "speculative_config": speculative,
    }
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        aborted = {str(row): count for row, count in abort_after.items()}
        job.write_text(json.dumps([arguments, prompts, sampling, aborted]))
        process = subprocess.run(
            [sys.executable, __file__, str(job), str(result)],
            env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            check=False,
        )
        if process.returncode != 0:
            raise RunFailed(process.stdout[-3000:])
        return Streamed(**json.loads(result.read_text()))


async def _serve(
    arguments: dict[str, Any],
    prompts: list[list[int]],
    sampling: list[dict[str, Any]],
    aborted: dict[str, int],
) -> dict[str, Any]:
    from vllm import AsyncEngineArgs, SamplingParams
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
            if len(tokens) >= aborted.get(name, len(tokens) + 1):
                await engine.abort(name)
                break
        return tokens

    try:
        tokens = await asyncio.gather(*(one(str(row), row) for row in range(len(prompts))))
        last = await one("last", 0)
        ours = arguments["speculative_config"] is not None
        counters = (await engine.collective_rpc("drafttree_counters"))[0] if ours else {}
        return {"tokens": tokens, "last": last, "counters": counters}
    finally:
        engine.shutdown()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(_serve(*given))))
