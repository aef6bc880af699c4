"""The benchmark that writes where flash attention is used, with a stand-in for it on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import bench_attention_routes
import pytest
import torch
import typer
from bench_attention_routes import FILE, both_ways, least_context, measure, replaced
from flash_stand_in import flash_attn_varlen_func

from drafttree.attention_routes import NEVER, Routes, parse


@pytest.mark.parametrize(
    ("faster", "least"),
    [
        ((False, False, False), NEVER),
        ((True, True, True), 256),
        ((True, False, True), 1024),
        ((False, True, False), NEVER),
        ((False, True, True), 512),
    ],
)
def test_it_must_be_faster_at_all_greater_contexts(faster: tuple[bool, ...], least: int) -> None:
    times = [(256 << at, 2.0, 1.0 if is_faster else 2.0) for at, is_faster in enumerate(faster)]
    assert least_context(times) == least


def test_the_entries_of_one_gpu_are_replaced() -> None:
    before = FILE.read_text()
    found = Routes("sm_90", 64, "measured on a GPU", (1, 2), (4,), ((NEVER,), (512,)))
    after = replaced(before, [found])
    assert after.startswith(before[: before.index("[[routes]]")])
    others = [each for each in parse(before) if each.architecture != "sm_90"]
    assert others
    assert [*parse(after)] == [*others, found]
    assert replaced(before, parse(before)) == before


def test_the_package_has_tables_of_both_kinds_of_gpus() -> None:
    """Those of Hopper were measured, those of Ampere are estimates."""
    tables = parse(FILE.read_text())
    kinds = {(each.architecture, each.head_size) for each in tables}
    assert kinds == {(kind, size) for kind in ("sm_80", "sm_90") for size in (64, 128)}
    for each in tables:
        measured = each.source.startswith("measured on NVIDIA H200")
        assert measured if each.architecture == "sm_90" else each.source == "estimated"


def small(monkeypatch: pytest.MonkeyPatch, flash: Callable[..., Any]) -> Callable[..., Any]:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    shapes = {"REQUESTS": (1, 2), "ROWS": (3, 5), "HEAD_SIZES": (16,), "CONTEXTS": (32, 64)}
    for name, value in {**shapes, "HEADS": 4, "KV_HEADS": 2}.items():
        monkeypatch.setattr(bench_attention_routes, name, value)
    return partial(both_ways, flash, 3)


def test_both_ways_are_timed_at_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two requests and five rows flash attention is faster, from the greater context on."""
    timed = []

    def time(call: Callable[[], torch.Tensor]) -> float:
        timed.append(call)
        after, context = len(timed) % 2 == 0, (len(timed) - 1) // 2 % 2
        return 1.0 if after and context == 1 and len(call()) == 10 else 2.0

    ways = small(monkeypatch, flash_attn_varlen_func)
    (table,) = measure(time, ways, "sm_90", "a test", (32, 64))
    assert len(timed) == 16
    assert table == Routes("sm_90", 16, "a test", (1, 2), (3, 5), ((NEVER, NEVER), (NEVER, 64)))


def test_ways_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, log_sums = flash_attn_varlen_func(**given)
        return out, log_sums + 1

    ways = small(monkeypatch, wrong)
    with pytest.raises(AssertionError):
        measure(lambda call: 1.0, ways, "sm_90", "a test", (32, 64))


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="CUDA"):
        bench_attention_routes.main()
