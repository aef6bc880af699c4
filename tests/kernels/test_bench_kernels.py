"""The kernel benchmark, with small sizes on a CPU."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import bench_kernels
import pytest
import torch
import typer
from click.testing import Result
from dense_attention import dense
from tree_kernels.machine import find_compiler
from typer.testing import CliRunner

native = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def bench(*options: str, device: str = "cpu") -> Result:
    app = typer.Typer()
    app.command()(bench_kernels.main)
    arguments = ["--quick", "--device", device, *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})


def test_flash_beside_the_tree_is_attention_with_a_mask() -> None:
    peers = dense(2, 9, 40, (4, 2), 16, torch.float32)
    masked = peers["dense sdpa with a mask"]()
    beside = peers["dense flash, the tree beside it"]()
    torch.testing.assert_close(beside, masked)


@native
def test_the_kernel_and_its_reference_are_timed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    table, picture = tmp_path / "kernels.csv", tmp_path / "kernels.png"
    only = ("--only", "recycle", "--only", "accept_walk")
    result = bench(*only, "--output", str(table), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    with table.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    sides = [(line["kernel"], line["side"]) for line in lines]
    assert sides == [
        ("recycle", "ours"),
        ("recycle", "reference"),
        ("recycle", "topk + index_put"),
        ("accept_walk", "ours"),
        ("accept_walk", "reference"),
    ]
    for line in lines:
        assert float(line["microseconds"]) > 0
        assert float(line["floor_microseconds"]) > 0
        assert line["torch"] == torch.__version__
        assert line["device"]
    # The logits alone: 9 rows of 5000 in bfloat16.
    assert int(lines[0]["bytes"]) > 9 * 5000 * 2
    assert picture.read_bytes().startswith(b"\x89PNG")


@native
def test_a_kernel_that_differs_from_its_reference_is_reported_and_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = bench_kernels.KERNELS["tree_mask"]

    def make(**size: int) -> bench_kernels.Work:
        work = case.make(**size)
        return replace(work, ours=lambda: [~mask for mask in work.ours()])

    monkeypatch.setitem(bench_kernels.KERNELS, "tree_mask", replace(case, make=make))
    table = tmp_path / "kernels.csv"
    result = bench(
        *("--only", "tree_mask", "--only", "depths", "--output", str(table)),
    )
    assert result.exit_code == 1
    assert "tree_mask (requests=2 tree_size=21): result 0 is not the reference's" in result.output
    assert "1 sizes failed" in result.output
    with table.open(newline="") as opened:
        assert {line["kernel"] for line in csv.DictReader(opened)} == {"depths"}


@native
def test_an_unknown_kernel_is_an_error() -> None:
    result = bench("--only", "full_mask")
    assert result.exit_code == 2
    assert "--only 'full_mask' is not a kernel on cpu: recycle, update_bigrams" in result.output


@pytest.mark.parametrize("name", list(bench_kernels.KERNELS))
def test_the_inputs_of_a_case_fit_its_kernel(name: str) -> None:
    # For kernels of GPUs alone the reference runs here in their place.
    case = bench_kernels.KERNELS[name]
    work = case.make(**case.quick)
    bench_kernels.agree(name, work, case.tolerance)
    for other in work.others.values():
        other()
    assert work.bytes > 0


@pytest.mark.cuda
def test_all_kernels_agree_on_a_gpu() -> None:
    result = bench(device="cuda")
    assert result.exit_code == 0, result.output
