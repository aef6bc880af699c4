"""Fills the adjacency matrix before anything is served: row t with the target's k most likely
tokens after `[BOS, t]`, or after `[t]` alone where the model has no BOS.

The paper (arXiv 2408.08696) begins with zeros and learns a token's row when it is first verified.

`python -m recycle_plugin.priming FOLDER OUT` does it for the model in a folder. Interrupted and
started again it goes on from its last partial file.
"""

from __future__ import annotations

import copy
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tree_kernels.adjacency import top_candidates

from recycle_plugin.files import TablesError
from recycle_plugin.primed_files import (
    load_primed,
    partial_file,
    primed_file,
    primed_identity,
    rows_made,
    save_primed,
)

CHUNK = 256
_SAVES = 10
_SAVE_AFTER = 60.0
# What a model needs of memory, in sizes of its weights' files.
_ROOM = 1.3

Report = Callable[[int, int], None]


def prime(
    folder: Path,
    file: Path,
    k: int,
    device: str = "cpu",
    report: Report = lambda done, rows: None,
    vocab_size: int | None = None,
) -> None:
    """Make the primed matrix of the model in `folder`, unless `file` holds it already.

    Of several processes that make the same file one works, the others wait for it. Rows are made
    from id 0 up, and kept in a partial file beside at every tenth, or minute.

    Args:
        report: called with the rows made so far and with all.
        vocab_size: the width of the served logits, where it is known.

    Raises:
        ValueError: the model cannot be loaded, does not fit in memory, or has another vocabulary.
        OSError: the file cannot be written.
    """
    identity = primed_identity(folder, k)
    config = _read_config(folder)
    rows = config.get_text_config().vocab_size
    if vocab_size not in (None, rows):
        raise ValueError(
            f"the model in {folder} has a vocabulary of {rows}, and {vocab_size} logits are served"
        )
    if not 1 <= k <= rows:
        raise ValueError(f"k={k} is not between 1 and the vocabulary of {folder}, {rows}")
    file.parent.mkdir(parents=True, exist_ok=True)
    report(0, rows)
    with _alone(file):
        finished = _load(file, identity, rows)
        if finished is not None and rows_made(finished) == rows:
            report(rows, rows)
            return
        partial = partial_file(file)
        matrix = _load(partial, identity, rows)
        if matrix is None:
            matrix = torch.full((rows, k), -1, dtype=torch.int32)
        made = rows_made(matrix)
        report(made, rows)
        saved, when = made, time.monotonic()
        for first, candidates in _candidates(folder, device, made, rows, k):
            made = first + len(candidates)
            matrix[first:made] = candidates
            if (made - saved) * _SAVES >= rows or time.monotonic() - when > _SAVE_AFTER:
                save_primed(partial, matrix, identity)
                saved, when = made, time.monotonic()
            report(made, rows)
        save_primed(file, matrix, identity)
        partial.unlink(missing_ok=True)


def _load(file: Path, identity: dict[str, str], rows: int) -> torch.Tensor | None:
    """What a file holds; a damaged one counts as none and is made anew."""
    try:
        return load_primed(file, identity, rows)
    except TablesError:
        return None


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Wait until no other process makes the file, and keep others waiting."""
    with file.with_name(f"{file.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed or the process ends
        yield


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # Each model's code fails in its own way.
        raise ValueError(f"transformers cannot read {folder}/config.json: {error}") from error


def _load_model(folder: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    room = _ROOM * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.startswith("cuda")
        else psutil.virtual_memory().available
    )
    if room > free:
        raise ValueError(
            f"the model in {folder} needs {room / 2**30:.1f} GiB of memory on {device}, and "
            f"{free / 2**30:.1f} GiB are free"
        )
    widened = device == "cpu" and 2 * room <= free and _is_faster_wide(_read_config(folder))
    dtype = torch.float32 if widened else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.to(device).eval()
    except Exception as error:
        # Each model's code fails in its own way.
        raise ValueError(f"transformers cannot load the model in {folder}: {error}") from error


def _is_faster_wide(config: Any) -> bool:
    """Whether a CPU runs a model in float32 faster than as it is stored: without instructions for
    bfloat16, seven times (SmolLM2-135M on an AVX2 machine)."""
    if getattr(config, "quantization_config", None) is not None:
        return False
    halves = config.get_text_config().dtype in (torch.bfloat16, torch.float16)
    known = hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")  # not in every build of torch
    return halves and not (known and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.inference_mode()
def _candidates(
    folder: Path, device: str, first: int, rows: int, k: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows from `first` on, in chunks of equal ids whoever makes them: first row, candidates
    `int32 [n, k]`."""
    if first == rows:
        return
    model = _load_model(folder, device)
    bos = model.config.get_text_config().bos_token_id
    start = None
    if bos is not None:
        tokens = torch.tensor([[bos]], device=device)
        start = model(input_ids=tokens, use_cache=True).past_key_values
    while first < rows:
        end = min(rows, (first // CHUNK + 1) * CHUNK)
        tokens = torch.arange(first, end, device=device)[:, None]
        cache = None
        if start is not None:
            cache = copy.deepcopy(start)
            cache.batch_repeat_interleave(len(tokens))
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=bos is not None).logits
        if logits.shape[-1] != rows:
            raise ValueError(
                f"the model in {folder} gives {logits.shape[-1]} logits for a vocabulary of {rows}"
            )
        yield first, top_candidates(logits[:, -1], k).cpu()
        first = end


@contextmanager
def shown(console: Console) -> Iterator[Report]:
    """Shows progress: a bar on a terminal, elsewhere a line at every tenth."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would cut through ours
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("Priming Token Recycling", total=None)
        told = -1

        def report(made: int, rows: int) -> None:
            nonlocal told
            progress.update(task, completed=made, total=rows)
            if not console.is_terminal and made * 10 // rows > told:
                told = made * 10 // rows
                console.print(f"Priming Token Recycling: {made} of {rows} tokens")

        yield report


def prepare(folder: Path, k: int) -> None:
    """Make what priming would make for the model in `folder`, here and now.

    Raises:
        ValueError: the model cannot be primed; the message says why.
        OSError: the cache cannot be written.
    """
    file = primed_file(folder, k)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with shown(console) as report:
        prime(folder, file, k, "cuda" if torch.cuda.is_available() else "cpu", report)
    torch.cuda.empty_cache()  # for an engine that comes after; nothing without a GPU
    console.print(f"Primed: {file}", markup=False)


def _end_with(parent: int) -> None:
    """End this process soon after its parent; prctl would do so after the parent's *thread*."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(
    folder: Annotated[Path, typer.Argument(help="The model's folder.")],
    out: Annotated[Path, typer.Argument(help="The file to make.")],
    k: Annotated[int, typer.Option(min=1, help="Candidates kept for each token.")] = 8,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, or cuda.")] = "cpu",
    vocab_size: Annotated[
        int | None, typer.Option(help="Refuse a model of another vocabulary.")
    ] = None,
    parent: Annotated[int | None, typer.Option(help="End when this parent process ends.")] = None,
) -> None:
    """Prime Token Recycling for a model. Interrupted and started again, it goes on."""
    if parent is not None:
        _end_with(parent)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with shown(console) as report:
            prime(folder, out, k, device, report, vocab_size)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from the last tenth")
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
