"""Measure from how many tokens on flash attention before a tree's rows is worth its launch.

    .venv-vllm/bin/python scripts/benchmarks/bench_attention_routes.py

Needs a GPU and vLLM. Attention to draft trees is timed both ways in captured graphs, as it is
served: by drafttree's kernel alone, and by vLLM's flash attention to the context and the kernel for
the rest. Both must agree. The entries of this kind of GPU in `drafttree/attention_routes.toml` are
replaced by what was measured, and those of others stay. Without vLLM's flash attention for the GPU
nothing is written, and the exit status is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from kernel_cases_target import trees_over_pages
from rich.progress import track
from tree_kernels.tree_attention import tree_attention

from drafttree import attention_routes
from drafttree.attention_routes import NEVER, Routes

FILE = Path(attention_routes.__file__).with_name(attention_routes.FILE)
HEADS, KV_HEADS = 32, 8
HEAD_SIZES = (64, 128)
REQUESTS, ROWS = (1, 8, 32), (8, 32, 64)
CONTEXTS = tuple(256 << step for step in range(8))
TOLERANCE = 2e-2

Ways = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]
"""Attention by the kernel alone, and after flash attention."""


def both_ways(
    function: Any, version: int, requests: int, rows: int, context: int, head_size: int
) -> Ways:
    """Attention of trees of one size, both ways.

    Args:
        function: vLLM's `flash_attn_varlen_func`.
        version: The version of flash attention.
        requests: Number of trees.
        rows: Number of nodes of each.
        context: Number of tokens before each.
        head_size: Size of the heads.
    """
    from drafttree.vllm.attention.prefix import FlashAttention

    given = trees_over_pages(requests, rows, context, HEADS, KV_HEADS, head_size)
    query, keys, values, table, starts, *_ = given
    alone, after, scale = torch.empty_like(query), torch.empty_like(query), head_size**-0.5
    always = Routes("", head_size, "", (1,), (1,), ((0,),))
    flash = FlashAttention(function, version, always, KV_HEADS, requests, query.device)
    common: Any = SimpleNamespace(
        query_start_loc=starts, max_query_len=rows, max_seq_len=CONTEXTS[-1] + rows
    )
    step = flash.of_graph(common)
    assert step is not None
    step.lengths.fill_(context)

    def merged() -> torch.Tensor:
        prefix = step.attend(query, keys, values, table, starts, rows, scale, 0.0, after)
        return tree_attention(*given, scale, rows, after, prefix=prefix)

    return partial(tree_attention, *given, scale, rows, alone), merged


def least_context(times: Sequence[tuple[int, float, float]]) -> int:
    """From which context on flash attention is faster.

    Args:
        times: Contexts, ascending, and the times of the kernel alone and after flash attention.

    Returns:
        The least context such that it is faster there and at all greater ones, or `NEVER`.
    """
    least = NEVER
    for context, alone, after in reversed(times):
        if after >= alone:
            break
        least = context
    return least


def measure(
    time: Callable[[Callable[[], object]], float],
    ways: Callable[[int, int, int, int], Ways],
    architecture: str,
    source: str,
    contexts: Sequence[int] = CONTEXTS,
) -> list[Routes]:
    """Measure the tables of a GPU, one for each head size.

    Args:
        time: Times a call.
        ways: Makes both ways, given requests, rows, context and head size.
        architecture: The kind of GPU.
        source: What the numbers come from.
        contexts: Numbers of tokens before the rows, ascending.

    Raises:
        AssertionError: The two ways disagree.
    """

    def entry(requests: int, rows: int, head_size: int) -> int:
        times = []
        for context in contexts:
            alone, after = ways(requests, rows, context, head_size)
            torch.testing.assert_close(after(), alone(), rtol=TOLERANCE, atol=TOLERANCE)
            times.append((context, time(alone), time(after)))
        return least_context(times)

    tables = []
    for head_size in HEAD_SIZES:
        lines = [
            tuple(entry(requests, rows, head_size) for rows in ROWS)
            for requests in track(REQUESTS, f"heads of {head_size}")
        ]
        table = Routes(architecture, head_size, source, REQUESTS, ROWS, tuple(lines))
        tables.append(table)
    return tables


def as_text(table: Routes) -> str:
    """A table as an entry of the file."""
    lines = "".join(f"    {[*line]},\n" for line in table.contexts)
    return (
        f'[[routes]]\narchitecture = "{table.architecture}"\nhead_size = {table.head_size}\n'
        f'source = "{table.source}"\nrequests = {[*table.requests]}\nrows = {[*table.rows]}\n'
        f"contexts = [\n{lines}]\n"
    )


def replaced(text: str, tables: Sequence[Routes]) -> str:
    """The text of a file in which these tables take the places of all of their kinds of GPUs."""
    introduction = text[: text.index("[[routes]]")]
    kinds = {table.architecture for table in tables}
    kept = [table for table in attention_routes.parse(text) if table.architecture not in kinds]
    both = sorted([*kept, *tables], key=lambda table: (table.architecture, table.head_size))
    return introduction + "\n".join(map(as_text, both))


def main(
    output: Annotated[
        Path, typer.Option(help="Where to write the table; the package's own by default.")
    ] = FILE,
) -> None:
    """Measure and write the table."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this needs a CUDA device")
    from triton.testing import do_bench_cudagraph
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    from drafttree.vllm.attention.prefix import VERSIONS, architecture

    version, kind = get_flash_attn_version(), architecture()
    if version not in VERSIONS or kind is None:
        typer.echo(f"flash attention {version} on {kind} is not used", err=True)
        raise typer.Exit(1)
    software = f"vLLM {metadata.version('vllm')}, flash attention {version}"
    source = f"measured on {torch.cuda.get_device_name()}, {software}"
    time = partial(do_bench_cudagraph, return_mode="median")
    with torch.inference_mode(), torch.device("cuda"):
        ways = partial(both_ways, flash_attn_varlen_func, version)
        tables = measure(time, ways, kind, source)
    output.write_text(replaced(FILE.read_text(), tables))
    typer.echo(output.read_text())


if __name__ == "__main__":
    typer.run(main)
