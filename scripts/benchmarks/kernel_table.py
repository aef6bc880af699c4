"""Writes the table of kernels in `docs/kernels.md`, for an A100 and an H100, without either.

    .venv-vllm/bin/python scripts/benchmarks/kernel_table.py

Each kernel is compiled at the first size that `bench_kernels.py` times. Triton's compiler needs no
GPU for that, and says how many registers a thread takes and how much shared memory a program.
Occupancy and the floor are computed from these and from the GPUs' data sheets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import bench_kernels
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from gpu_compiler import compile_only, usage

DOCS = Path(__file__).resolve().parents[2] / "docs/kernels.md"
WARP = 32
MOST_WARPS, MOST_PROGRAMS, REGISTERS = 64, 32, 65536
"""Limits of a multiprocessor, which are the same on both GPUs."""
RESERVED = 1024
"""Bytes of shared memory that the GPU keeps for itself of each program."""


@dataclass(frozen=True)
class Gpu:
    """What the figures depend on.

    Attributes:
        name: Its name.
        bandwidth: Bytes of its memory that it reads or writes per microsecond.
        shared: Bytes of shared memory of a multiprocessor.
    """

    name: str
    bandwidth: float
    shared: int


GPUS = {
    80: Gpu("A100", 2.039e6, 164 * 1024),
    90: Gpu("H100", 3.35e6, 228 * 1024),
}
"""By compute capability: the SXM modules with 80 GB."""

INTRODUCTION = """# Kernels

The Triton kernels of `tree_kernels`, each at the first size that
`scripts/benchmarks/bench_kernels.py` times. Nothing in this table was measured. On an H200
these kernels gave what their references give, except `layer_rows`, which has not run there. The
kernels of `token_info`, `rejection` and `traversal`, `expand_kernel` and `priors_kernel` have
changed since and have not run on a GPU in their present form. `results/h200/kernels.csv` has the
times of the earlier forms at small sizes.
Registers and shared memory are what Triton {triton}'s compiler says; none spills. Occupancy is
computed from them: how many of a multiprocessor's {warps} warps can be resident.
The floor is the whole operation's: what it must read and write, each once, at the data sheet's
bandwidth of the 80 GB SXM modules ({bandwidths} TB/s). A launch takes some microseconds more, and
most floors are below that. `scripts/benchmarks/kernel_table.py` writes the table.

"""

HEADER = (
    "kernel",
    "size",
    "MiB",
    *(f"floor, {gpu.name} (µs)" for gpu in GPUS.values()),
    "warps",
    *(f"registers, {gpu.name}" for gpu in GPUS.values()),
    *(f"shared, {gpu.name} (KiB)" for gpu in GPUS.values()),
    *(f"occupancy, {gpu.name}" for gpu in GPUS.values()),
)


def occupancy(warps: int, registers: int, shared: int, gpu: Gpu) -> float:
    """The share of a multiprocessor's warps that can be resident.

    Args:
        warps: Warps of a program.
        registers: Registers of a thread, which are allocated in groups of 8.
        shared: Bytes of shared memory of a program.
        gpu: The GPU.
    """
    per_program = warps * WARP * (-(-registers // 8) * 8)
    programs = min(
        MOST_PROGRAMS,
        MOST_WARPS // warps,
        REGISTERS // per_program,
        gpu.shared // (shared + RESERVED),
    )
    return programs * warps / MOST_WARPS


def lines() -> Iterator[str]:
    """The table's lines."""
    yield f"| {' | '.join(HEADER)} |"
    yield "|" + "---|" * len(HEADER)
    for name, case in bench_kernels.KERNELS.items():
        if "cuda" not in case.devices:
            continue
        work = case.make(**case.sizes[0])
        compiled = {}
        for capability in GPUS:
            with compile_only(capability) as kernels, torch.inference_mode():
                work.ours()
            compiled[capability] = dict(zip(kernels.names, kernels.kernels, strict=True))
        size = ", ".join(f"{key} {value}" for key, value in case.sizes[0].items())
        floors = [f"{work.bytes / gpu.bandwidth:.2f}" for gpu in GPUS.values()]
        for kernel in compiled[next(iter(GPUS))]:
            each = {capability: named[kernel] for capability, named in compiled.items()}
            warps = [one.metadata.num_warps for one in each.values()]
            registers = [usage(one).registers for one in each.values()]
            shared = [one.metadata.shared for one in each.values()]
            shares = map(occupancy, warps, registers, shared, GPUS.values())
            cells = (
                f"`{name}`: `{kernel.strip('_')}`",
                size,
                f"{work.bytes / 2**20:.2f}",
                *floors,
                f"{max(warps)}",
                *map(str, registers),
                *(f"{each / 1024:.1f}" for each in shared),
                *(f"{share:.0%}" for share in shares),
            )
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the page."""
    introduction = INTRODUCTION.format(
        triton=metadata.version("triton"),
        warps=MOST_WARPS,
        bandwidths=" and ".join(f"{gpu.bandwidth / 1e6:.2f}" for gpu in GPUS.values()),
    )
    DOCS.write_text(introduction + "\n".join(lines()) + "\n")


if __name__ == "__main__":
    main()
