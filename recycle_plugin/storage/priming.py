"""Priming: compute the adjacency matrix of a model before anything is served.

Row t gets the target's k most likely tokens after `[BOS, t]`, or after `[t]` if the model has no
BOS. The paper (arXiv 2408.08696) starts from zeros instead and learns the row of a token when it is
first verified.

`python -m recycle_plugin.storage.priming FOLDER OUT` primes the model in a folder. If it is
interrupted, the same command continues from the last partial file.
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

from drafttree.model_files import weights_size
from recycle_plugin.storage.primed_files import (
    load_primed,
    num_primed_rows,
    partial_file,
    primed_file,
    primed_identity,
    save_primed,
)
from recycle_plugin.storage.table_files import TablesError

CHUNK = 256
"""Tokens in one forward."""
_SAVES = 10
_SAVE_AFTER = 60.0  # seconds
# Memory that a model needs to run, as a multiple of the size of its weights.
_MEMORY_FACTOR = 1.3

Report = Callable[[int, int], None]
"""`(rows computed so far, total rows)`."""


def prime(
    folder: Path,
    file: Path,
    k: int,
    device: str = "cpu",
    report: Report = lambda done, rows: None,
    vocab_size: int | None = None,
) -> None:
    """Compute the primed matrix of the model in `folder`, unless `file` already has it.

    If several processes prime the same file, one computes and the others wait for it. Rows are
    computed in order of token id and saved to a partial file beside `file`, after every tenth of
    them and at least once a minute.

    Args:
        folder: Folder of the model.
        file: File to write.
        k: Candidates per token.
        device: Torch device to run the model on.
        report: Called with the number of rows computed so far and their total.
        vocab_size: Width of the served logits, if known; a model of another width is refused.

    Raises:
        ValueError: The model cannot be loaded, does not fit in memory, or has another vocabulary.
        OSError: The file cannot be written.
    """
    identity = primed_identity(folder, k)
    config = _read_config(folder)
    rows = config.get_text_config().vocab_size
    if vocab_size not in (None, rows):
        raise ValueError(
            f"the model in {folder} has a vocabulary of {rows}, but {vocab_size} logits are served"
        )
    if not 1 <= k <= rows:
        raise ValueError(f"k={k} is not between 1 and the vocabulary of {folder}, {rows}")
    file.parent.mkdir(parents=True, exist_ok=True)
    report(0, rows)
    with _lock(file):
        finished = _load(file, identity, rows)
        if finished is not None and num_primed_rows(finished) == rows:
            report(rows, rows)
            return
        partial = partial_file(file)
        matrix = _load(partial, identity, rows)
        if matrix is None:
            matrix = torch.full((rows, k), -1, dtype=torch.int32)
        made = num_primed_rows(matrix)
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
    """Load a primed matrix; None if the file is missing or damaged and must be computed again."""
    try:
        return load_primed(file, identity, rows)
    except TablesError:
        return None


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Hold the lock of the file, so that only one process computes it at a time."""
    with file.with_name(f"{file.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or the process ends
        yield


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # This may run third-party model code, which can raise anything.
        raise ValueError(f"transformers cannot read {folder}/config.json: {error}") from error


def _load_model(folder: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    needed = _MEMORY_FACTOR * weights_size(folder)
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.startswith("cuda")
        else psutil.virtual_memory().available
    )
    if needed > free:
        raise ValueError(
            f"the model in {folder} needs {needed / 2**30:.1f} GiB of memory on {device}, but only "
            f"{free / 2**30:.1f} GiB are free"
        )
    in_float32 = (
        device == "cpu" and 2 * needed <= free and _is_faster_in_float32(_read_config(folder))
    )
    dtype = torch.float32 if in_float32 else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.to(device).eval()
    except Exception as error:
        # This may run third-party model code, which can raise anything.
        raise ValueError(f"transformers cannot load the model in {folder}: {error}") from error


def _is_faster_in_float32(config: Any) -> bool:
    """Whether a CPU runs the model faster in float32 than in its stored 16-bit type.

    Without bfloat16 instructions float32 is seven times as fast (SmolLM2-135M, AVX2).
    """
    if getattr(config, "quantization_config", None) is not None:
        return False
    is_16_bit = config.get_text_config().dtype in (torch.bfloat16, torch.float16)
    can_query = hasattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported"
    )  # not in every build of torch
    return is_16_bit and not (can_query and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.inference_mode()
def _candidates(
    folder: Path, device: str, first: int, rows: int, k: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row and the candidates, `int32 [n, k]`, of each chunk from row `first` on.

    Chunk boundaries do not depend on `first`, so a continued run gives the same matrix.
    """
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
def progress_shown(console: Console) -> Iterator[Report]:
    """Show progress: a bar on a terminal, elsewhere a line for every tenth."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would break up this one
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("Priming Token Recycling", total=None)
        tenths_shown = -1

        def report(made: int, rows: int) -> None:
            nonlocal tenths_shown
            progress.update(task, completed=made, total=rows)
            if not console.is_terminal and made * 10 // rows > tenths_shown:
                tenths_shown = made * 10 // rows
                console.print(f"Priming Token Recycling: {made} of {rows} tokens")

        yield report


def prepare(folder: Path, k: int) -> None:
    """Prime the model in `folder` in this process, into the cache.

    Raises:
        ValueError: The model cannot be primed; the message gives the reason.
        OSError: The cache cannot be written.
    """
    file = primed_file(folder, k)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with progress_shown(console) as report:
        prime(folder, file, k, "cuda" if torch.cuda.is_available() else "cpu", report)
    torch.cuda.empty_cache()  # free it for an engine that starts next
    console.print(f"Primed: {file}", markup=False)


def _end_with(parent: int) -> None:
    """Exit soon after the parent process does; prctl would watch one thread of it instead."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(
    folder: Annotated[Path, typer.Argument(help="The model's folder.")],
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    k: Annotated[int, typer.Option(min=1, help="Candidates kept for each token.")] = 8,
    device: Annotated[str, typer.Option(help="Device to run the model on: cpu or cuda.")] = "cpu",
    vocab_size: Annotated[
        int | None, typer.Option(help="Refuse a model with another vocabulary size.")
    ] = None,
    parent: Annotated[int | None, typer.Option(help="Exit when this process ends.")] = None,
) -> None:
    """Prime Token Recycling for a model; if interrupted, the same command continues."""
    if parent is not None:
        _end_with(parent)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with progress_shown(console) as report:
            prime(folder, out, k, device, report, vocab_size)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("interrupted: run the same command again to continue")
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
