"""Time every kernel of tree_kernels against its PyTorch reference and a floor.

    .venv-vllm/bin/python scripts/benchmarks/bench_kernels.py --output kernels.csv

On a GPU "ours" is the Triton kernel, on a CPU the C++ kernel. The floor is the time to copy the
bytes that the kernel must read and write, each once, at the copy bandwidth that is measured here.
On a CPU a kernel may be faster thanks to caches, and the floor has no meaning below the time of one
launch, which is printed too. Kernel and reference must give the same result before a size is timed.
A size that fails is reported, the others are still timed, and the exit status is 1.
Where vLLM is installed, its causal kernels are timed beside attention over trees. `--plot` needs
matplotlib.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import kernel_cases
import kernel_cases_target
import torch
import typer
from kernel_cases import Case, Size, Work
from rich.console import Console
from rich.table import Table
from tree_kernels._triton import triton
from tree_kernels.machine import find_compiler

from drafttree.bench.machine import processor_name

KERNELS: dict[str, Case] = {**kernel_cases.CASES, **kernel_cases_target.CASES}

OURS, REFERENCE = "ours", "reference"
_LEAST_RUNS, _MOST_RUNS = 5, 500
_COPIED = 1 << 28  # larger than any cache
_WIDTH = 140


class MismatchError(RuntimeError):
    """A kernel and its reference disagree."""


@dataclass(frozen=True)
class Line:
    """A line of the CSV: one implementation at one size of a kernel. Times are medians."""

    kernel: str
    size: str
    side: str
    microseconds: float
    floor_microseconds: float
    bytes: int


@dataclass(frozen=True)
class Bench:
    """A device and how long to time on it.

    Attributes:
        device: The device.
        seconds: Time to spend on each implementation of each size, after five runs.
    """

    device: torch.device
    seconds: float

    def microseconds(self, call: Callable[[], object]) -> float:
        """The median time of a call, which must have run before."""
        if self.device.type == "cuda":
            from triton.testing import do_bench

            return 1e3 * float(do_bench(call, rep=int(1e3 * self.seconds), return_mode="median"))
        times: list[float] = []
        while len(times) < _LEAST_RUNS or (sum(times) < self.seconds and len(times) < _MOST_RUNS):
            started = perf_counter()
            call()
            times.append(perf_counter() - started)
        return 1e6 * statistics.median(times)

    def bandwidth(self, size: int) -> float:
        """Bytes read and written per microsecond when `size` bytes are copied."""
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = source.clone()
        return 2 * size / self.microseconds(lambda: target.copy_(source))

    def launch(self) -> float:
        """The time of a call that does almost nothing, in microseconds."""
        one = torch.zeros(1, device=self.device)
        return self.microseconds(one.zero_)

    def lines(self, name: str, case: Case, size: Size, bandwidth: float) -> list[Line]:
        """Time all implementations of one size.

        Raises:
            MismatchError: The kernel and its reference disagree.
        """
        torch.manual_seed(0)
        with torch.device(self.device):
            work = case.make(**size)
        written = " ".join(f"{key}={value}" for key, value in size.items())
        agree(f"{name} ({written})", work, case.tolerance)
        sides = {OURS: work.ours, REFERENCE: work.reference, **work.others}
        floor = work.bytes / bandwidth
        for other in work.others.values():
            other()
        return [
            Line(name, written, side, self.microseconds(call), floor, work.bytes)
            for side, call in sides.items()
        ]

    def versions(self) -> dict[str, Any]:
        """The hardware and software that the times depend on."""
        on_gpu = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if on_gpu else processor_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "triton": "" if triton is None else metadata.version("triton"),
        }


def agree(what: str, work: Work, limit: float) -> None:
    """Compare the results of a kernel and its reference; NaN equals NaN.

    Args:
        what: The kernel and its size, for the error.
        work: The size.
        limit: Tolerance of floating-point results, relative and absolute.

    Raises:
        MismatchError: The results differ by more than `limit`.
    """
    both = zip(work.ours(), work.reference(), strict=True)
    for number, (ours, expected) in enumerate(both):
        bounds = {"rtol": limit, "atol": limit} if ours.is_floating_point() else {}
        try:
            torch.testing.assert_close(ours, expected, equal_nan=True, **bounds)
        except AssertionError as error:
            raise MismatchError(
                f"{what}: result {number} is not the reference's: {error}"
            ) from error


def table_of(lines: list[Line], title: str) -> Table:
    """A row for each size and implementation, with its time relative to the kernel's."""
    table = Table(title=title)
    for column in ("kernel", "size", "way"):
        table.add_column(column)
    for column in ("us", "relative", "floor, us"):
        table.add_column(column, justify="right", no_wrap=True)
    ours = lines[0]
    for line in lines:
        if line.side == OURS:
            ours = line
            table.add_section()
        table.add_row(
            *((line.kernel, line.size) if line is ours else ("", "")),
            *(line.side, f"{line.microseconds:.1f}"),
            f"{line.microseconds / ours.microseconds:.2f}",
            f"{line.floor_microseconds:.2f}" if line is ours else "",
        )
    return table


def save(lines: list[Line], common: dict[str, Any], file: Path) -> None:
    """Write the CSV: one line for each size and implementation, with the columns `common`."""
    rows = [{**asdict(line), **common} for line in lines]
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(lines: list[Line], title: str, file: Path) -> None:
    """Plot microseconds over bytes on log axes, one panel for each kernel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kernels = list(dict.fromkeys(line.kernel for line in lines))
    columns = min(4, len(kernels))
    rows = math.ceil(len(kernels) / columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(4.5 * columns, 3.5 * rows), squeeze=False
    )
    for spare in panels.flat[len(kernels) :]:
        spare.set_visible(False)
    for panel, kernel in zip(panels.flat, kernels, strict=False):
        own = sorted((line for line in lines if line.kernel == kernel), key=lambda line: line.bytes)
        for side in dict.fromkeys(line.side for line in own):
            points = [(line.bytes, line.microseconds) for line in own if line.side == side]
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=side)
        floor = [(line.bytes, line.floor_microseconds) for line in own]
        panel.plot(*zip(*floor, strict=True), linestyle=":", color="black", label="floor")
        panel.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds")
        panel.set_title(kernel, fontsize=9)
        panel.legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def chosen(only: list[str], device: torch.device) -> dict[str, Case]:
    """The kernels named by `only`, or all kernels of the device.

    Raises:
        typer.BadParameter: The device has no kernel of a name.
    """
    available = {name: case for name, case in KERNELS.items() if device.type in case.devices}
    if unknown := [name for name in only if name not in available]:
        raise typer.BadParameter(
            f"--only {unknown[0]!r} is not a kernel on {device.type}: {', '.join(available)}"
        )
    return {name: available[name] for name in only} or available


def main(
    output: Annotated[Path | None, typer.Option(help="CSV.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="PNG.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a kernel; may be repeated.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Time one small size of each kernel, briefly.")
    ] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu; the GPU if there is one.")] = "",
) -> None:
    """Time the kernels."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device {device!r} is not cuda or cpu")
    if device == "cuda" and (triton is None or not torch.cuda.is_available()):
        raise typer.BadParameter("--device cuda needs a CUDA device and Triton")
    if device == "cpu" and find_compiler() is None:
        raise typer.BadParameter("--device cpu needs a C++ compiler, such as g++")
    bench = Bench(torch.device(device), 0.01 if quick else 0.3)
    cases = chosen(only or [], bench.device)
    with torch.inference_mode():
        bandwidth, launch = bench.bandwidth(_COPIED // 8 if quick else _COPIED), bench.launch()
        lines: list[Line] = []
        failures: list[str] = []
        for name, case in cases.items():
            for size in [case.quick] if quick else case.sizes:
                try:
                    lines += bench.lines(name, case, size, bandwidth)
                except Exception as error:  # a compiler's, a driver's or a mismatch
                    failures.append(f"{name} {size}: {type(error).__name__}: {error}")
                    typer.echo(failures[-1], err=True)
    versions = bench.versions()
    common = {**versions, "copy_gb_a_second": bandwidth / 1e3, "launch_microseconds": launch}
    speeds = f"copies at {bandwidth / 1e3:.0f} GB/s, a launch takes {launch:.1f} us"
    title = f"{versions['device']}: {speeds}"
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if lines:
        console.print(table_of(lines, title))
        if output is not None:
            save(lines, common, output)
        if plot_file is not None:
            plot(lines, title, plot_file)
    if failures:
        typer.echo(f"{len(failures)} sizes failed", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
