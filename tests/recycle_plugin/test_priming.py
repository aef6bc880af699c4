"""Priming fills the matrix with the target's top tokens after [BOS, t], and keeps it in a file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_llama
from typer.testing import CliRunner

from drafttree.cli import app
from drafttree.target import Target
from recycle_plugin import DynamicTreeDrafter, RecycleOptions, StaticTreeDrafter, make_drafter
from recycle_plugin.storage import priming
from recycle_plugin.storage.primed_files import (
    PrimedFile,
    load_primed,
    primed_file,
    primed_identity,
    save_primed,
)
from recycle_plugin.storage.priming import IDLE_SECONDS, MIN_TOKENS

VOCAB = 300
K = 8
BOS = 3
LOGGER = logging.getLogger(__name__)


class RandomTarget:
    """A target whose logits depend on the root and on the token; records its forwards.

    Attributes:
        seconds: Duration of a forward of n tokens, on the clock that priming reads.
        forwards: Root and tokens of each forward.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        generator = torch.Generator().manual_seed(7)
        self._logits = torch.randn(VOCAB + 1, VOCAB, generator=generator)
        self._now = 0.0
        self.seconds: Callable[[int], float] = lambda tokens: 1e-3
        self.forwards: list[tuple[int | None, list[int]]] = []
        monkeypatch.setattr(priming, "perf_counter", lambda: self._now)

    def __call__(self, root: int | None, tokens: torch.Tensor) -> torch.Tensor:
        self._now += self.seconds(len(tokens))
        self.forwards.append((root, tokens.tolist()))
        return self.rows(root)[tokens.long()]

    def rows(self, root: int | None) -> torch.Tensor:
        """The logits after each token, `[V, V]`."""
        return self._logits[:VOCAB] + self._logits[VOCAB if root is None else root]

    def best(self, root: int | None = BOS) -> torch.Tensor:
        """The primed matrix, `int32 [V, k]`."""
        return self.rows(root).topk(K).indices.int()


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> RandomTarget:
    return RandomTarget(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, whose weights and tokenizer name the file."""
    made = make_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "cache"
    monkeypatch.setenv("DRAFTTREE_CACHE", str(made))
    return made


Drafter = DynamicTreeDrafter | StaticTreeDrafter


def make(
    folder: Path | None,
    bos: int | None = BOS,
    changed_by: str | None = None,
    **options: object,
) -> Drafter:
    parsed = RecycleOptions.model_validate({"prime_seconds": math.inf, **options})
    described = Target(
        "a model",
        VOCAB,
        torch.device("cpu"),
        torch.float32,
        LOGGER,
        bos=bos,
        folder=folder,
        changed_by=changed_by,
    )
    drafter = make_drafter(parsed, described)
    drafter.allocate(4, 64)
    return drafter


def finish(drafter: Drafter, target: RandomTarget, most: int = 64) -> None:
    while True:
        done, everything = drafter.prime(target, most, idle=True)
        if done == everything:
            return


def load(folder: Path) -> torch.Tensor:
    return load_primed(primed_file(folder, K), primed_identity(folder, K), VOCAB)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno > logging.INFO]


@pytest.mark.parametrize("bos", [BOS, None])
def test_rows_are_computed_by_ascending_id_below_the_bos(
    target: RandomTarget, folder: Path, bos: int | None
) -> None:
    drafter = make(folder, bos)
    assert drafter.prime(target, 64, idle=False) == (VOCAB, VOCAB)
    assert [token for _, tokens in target.forwards for token in tokens] == list(range(VOCAB))
    assert {len(tokens) for _, tokens in target.forwards[:-1]} == {64}
    assert {root for root, _ in target.forwards} == {bos}
    assert torch.equal(drafter.tables.matrix, target.best(bos))
    assert torch.equal(load(folder), target.best(bos))


def test_a_forward_that_would_end_too_late_is_not_started(
    target: RandomTarget, folder: Path
) -> None:
    target.seconds = lambda tokens: 1.0
    drafter = make(folder, prime_seconds=3.5)
    assert drafter.prime(target, 20, idle=False) == (60, VOCAB)
    assert len(target.forwards) == 3
    assert torch.equal(load(folder)[:60], target.best()[:60])
    assert (load(folder)[60:] == -1).all()


def test_with_no_seconds_nothing_is_computed_at_start(target: RandomTarget, folder: Path) -> None:
    drafter = make(folder, prime_seconds=0)
    assert drafter.prime(target, 64, idle=False) == (0, VOCAB)
    assert target.forwards == []
    assert not primed_file(folder, K).exists()
    finish(drafter, target)
    assert torch.equal(drafter.tables.matrix, target.best())


def test_without_priming_nothing_is_left_to_compute(target: RandomTarget, folder: Path) -> None:
    drafter = make(folder, prime=False)
    assert drafter.prime(target, 64, idle=False) == (0, 0)
    assert drafter.prime(target, 64, idle=True) == (0, 0)
    assert target.forwards == []


def test_idle_forwards_are_as_long_as_a_request_may_wait(
    target: RandomTarget, folder: Path
) -> None:
    """Of 1 ms a token, 50 fit; the size is approached from below."""
    target.seconds = lambda tokens: tokens * IDLE_SECONDS / 50
    finish(make(folder), target)
    sizes = [len(tokens) for _, tokens in target.forwards]
    assert sizes[0] == MIN_TOKENS
    assert max(sizes) == 50
    assert sizes[:4] == [MIN_TOKENS, 2 * MIN_TOKENS, 4 * MIN_TOKENS, 50]


def test_slow_targets_get_forwards_of_the_least_size(target: RandomTarget, folder: Path) -> None:
    target.seconds = lambda tokens: 10 * IDLE_SECONDS
    finish(make(folder), target)
    assert {len(tokens) for _, tokens in target.forwards[:-1]} == {MIN_TOKENS}


def test_the_host_bounds_the_size(target: RandomTarget, folder: Path) -> None:
    finish(make(folder), target, most=11)
    assert max(len(tokens) for _, tokens in target.forwards) == 11


def test_another_engine_continues_where_the_file_ends(
    target: RandomTarget, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target.seconds = lambda tokens: 1.0
    make(folder, prime_seconds=2.5).prime(target, 40, idle=False)
    target.forwards.clear()
    second = make(folder)
    assert torch.equal(second.tables.matrix[:80], target.best()[:80])
    assert second.prime(target, 64, idle=False) == (VOCAB, VOCAB)
    assert target.forwards[0][1][0] == 80
    target.forwards.clear()
    with caplog.at_level(logging.INFO):
        third = make(folder)
    assert third.prime(target, 64, idle=False) == (VOCAB, VOCAB)
    assert target.forwards == []
    assert torch.equal(third.tables.matrix, target.best())
    assert f"Token Recycling is primed from {primed_file(folder, K)}" in caplog.text
    assert not warnings(caplog)


def test_rows_that_another_engine_has_written_meanwhile_are_kept(
    target: RandomTarget, folder: Path
) -> None:
    target.seconds = lambda tokens: 1.0
    slow = make(folder, prime_seconds=1.5)
    make(folder).prime(target, 64, idle=False)
    assert slow.prime(target, 64, idle=False) == (64, VOCAB)
    assert torch.equal(load(folder), target.best())


@pytest.mark.parametrize("damage", ["cut", "of another model"])
def test_a_file_that_cannot_be_used_is_written_again_after_a_warning(
    target: RandomTarget, folder: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    file = primed_file(folder, K)
    whole = torch.zeros(VOCAB, K, dtype=torch.int32)
    save_primed(file, whole, {**primed_identity(folder, K), "weights": "others"})
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    drafter = make(folder)
    (warning,) = warnings(caplog)
    assert str(file) in warning
    assert ("damaged" if damage == "cut" else "made for weights others") in warning
    drafter.prime(target, 64, idle=False)
    assert torch.equal(load(folder), target.best())
    assert len(warnings(caplog)) == 1


def test_an_unwritable_cache_is_reported_once(
    target: RandomTarget, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.touch()  # a file, so that no folder can be created
    target.seconds = lambda tokens: 20.0  # each forward is followed by an attempt to save
    drafter = make(folder)
    finish(drafter, target)
    assert torch.equal(drafter.tables.matrix, target.best())
    (warning,) = warnings(caplog)
    assert "set DRAFTTREE_CACHE" in warning


@pytest.mark.parametrize("files", ["unknown", "without weights"])
def test_a_model_whose_weights_are_not_known_is_primed_in_memory(
    target: RandomTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture, files: str
) -> None:
    drafter = make(None if files == "unknown" else tmp_path)
    finish(drafter, target)
    assert torch.equal(drafter.tables.matrix, target.best())
    (warning,) = warnings(caplog)
    assert "in memory for this run only" in warning


def test_a_failure_ends_priming_and_keeps_what_is_done(
    target: RandomTarget, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = make(folder)
    drafter.prime(target, 64, idle=True)

    def failing(root: int | None, tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    for idle in (True, False):
        assert drafter.prime(failing, 64, idle=idle) == (MIN_TOKENS, MIN_TOKENS)
    (warning,) = warnings(caplog)
    assert "out of memory" in warning
    assert torch.equal(load(folder)[:MIN_TOKENS], target.best()[:MIN_TOKENS])


@pytest.mark.parametrize("options", [{"nodes": 8}, {"tree": "branch:8"}])
def test_primed_rows_are_drafted_and_learned_rows_stay(
    target: RandomTarget, folder: Path, options: dict[str, object]
) -> None:
    drafter = make(folder, **options)
    learned = torch.zeros(1, VOCAB)
    learned[0, 50:58] = torch.arange(8.0, 0.0, -1.0)
    slot, none = torch.zeros(1, dtype=torch.int64), torch.full((1,), -1, dtype=torch.int32)
    drafter.observe(slot, torch.tensor([5], dtype=torch.int32), none, learned)
    drafter.prime(target, 64, idle=False)
    matrix = drafter.tables.matrix
    assert matrix[5].tolist() == list(range(50, 58))
    drafter.start(0, [1, 6])
    tree = drafter.propose(slot, torch.tensor([6], dtype=torch.int32))
    children = tree.tokens[0][tree.parents[0] == 0]
    assert set(children.tolist()) <= set(target.best()[6].tolist())
    assert children[0] == target.best()[6, 0]
    drafter.reset()
    assert torch.equal(matrix, target.best())


def test_rows_of_other_weights_are_not_saved(target: RandomTarget, folder: Path) -> None:
    """An engine resets its drafter when its weights are replaced; the file is of the old ones."""
    drafter = make(folder)
    target.seconds = lambda tokens: 20.0  # every second forward is followed by saving
    for _ in range(2):
        drafter.prime(target, 64, idle=True)
    saved = load(folder)
    drafter.reset()
    finish(drafter, target)
    assert torch.equal(drafter.tables.matrix, target.best())
    assert torch.equal(load(folder), saved)
    assert (saved[:, 0] < 0).any()


def test_rows_of_another_model_than_the_files_hold_are_kept_from_the_cache(
    target: RandomTarget, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows in the cache are not used either, and all are dropped when other weights may come."""
    make(folder).prime(target, 64, idle=False)
    file = primed_file(folder, K)
    drafter = make(folder, changed_by="load_format=dummy")
    (warning,) = warnings(caplog)
    assert "load_format=dummy" in warning
    assert (drafter.tables.matrix == -1).all()
    file.unlink()
    finish(drafter, target)
    assert torch.equal(drafter.tables.matrix, target.best())
    assert not file.exists()
    drafter.reset()
    assert (drafter.tables.matrix == -1).all()
    finish(drafter, target)
    assert torch.equal(drafter.tables.matrix, target.best())
    assert not file.exists()


def prepare(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prepare", *arguments])
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("method", "model", "words"),
    [
        ("nothing", ".", "unknown method 'nothing'"),
        ("rsd", ".", "needs no preparation. Methods that do: token_recycling"),
        ("token-recycling", "no/such-model", "is neither a folder nor in the Hub's local cache"),
    ],
)
def test_errors_of_the_command(method: str, model: str, words: str) -> None:
    status, output = prepare("--method", method, "--model", model)
    assert status == 2
    assert words in output


def test_the_command_needs_a_cache_that_can_be_written(folder: Path, cache: Path) -> None:
    cache.touch()
    status, output = prepare("--method", "token-recycling", "--model", str(folder))
    assert status == 1
    assert str(cache) in output


def test_a_file_is_named_by_weights_tokenizer_and_candidates(folder: Path, cache: Path) -> None:
    found = PrimedFile(folder, K, LOGGER).path
    assert found == primed_file(folder, K)
    assert found != primed_file(folder, K - 1)
    assert found.is_relative_to(cache)
