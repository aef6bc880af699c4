"""`drafttree prepare --corpus` puts files into the memory of a hot start."""

from __future__ import annotations

import logging
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from drafttree.cli import app
from drafttree.target import Target
from recycle_plugin import DynamicTreeDrafter, RecycleOptions, make_drafter
from recycle_plugin.storage.table_files import TableSpec, claim, load_tables

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."


VOCAB = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose tokens are bytes, without weights."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # A token more than the model has, as some tokenizers have.
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    LlamaConfig(vocab_size=VOCAB).save_pretrained(folder)
    return folder


def prepare(model: Path, *arguments: str) -> tuple[int, str]:
    command = ["prepare", "--method", "token-recycling", "--model", str(model), *arguments]
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.output + result.stderr


def drafter_of(model: Path, file: Path, **more: int) -> DynamicTreeDrafter:
    given = {"prime": False, "nodes": 80, "hot_start": file, **more}
    options = RecycleOptions.model_validate(given)
    logger = logging.getLogger(__name__)
    target = Target(str(model), VOCAB, torch.device("cpu"), torch.float32, logger)
    drafter = make_drafter(options, target)
    assert isinstance(drafter, DynamicTreeDrafter)
    assert drafter.tables.saver is not None
    drafter.tables.saver.close()
    drafter.allocate(2, 256)
    return drafter


def test_a_corpus_is_copied_from_by_the_next_engine(model: Path, tmp_path: Path) -> None:
    file, first, second = tmp_path / "tables", tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(TEXT, encoding="utf-8")
    second.write_text(TEXT[::-1], encoding="utf-8")
    kept = "--option", f"hot_start={file}"
    status, said = prepare(model, "--corpus", str(first), "--corpus", str(second), *kept)
    assert status == 0, said
    assert "tokens of 2 files are kept" in said
    tokens = AutoTokenizer.from_pretrained(model).encode(TEXT, add_special_tokens=False)
    for _ in range(2):
        drafter = drafter_of(model, file)
        drafter.start(0, tokens[:6])
        trees = drafter.propose(torch.tensor([0]), torch.tensor(tokens[5:6], dtype=torch.int32))
        deepest = trees.path(0, int(trees.tree_size[0]) - 1)
        assert len(deepest) > 15
        assert deepest == tokens[6 : 6 + len(deepest)]
        # A second corpus is added to the first.
        assert prepare(model, "--corpus", str(second), *kept)[0] == 0


def test_tokens_that_the_model_does_not_have_are_left_out(model: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "tables", tmp_path / "a.txt"
    text.write_text(f"{TEXT}[PAD]{TEXT[::-1]}", encoding="utf-8")
    status, said = prepare(model, "--corpus", str(text), "--option", f"hot_start={file}")
    assert status == 0
    assert f"{2 * len(TEXT)} tokens of 1 file are kept" in said
    # The file is used, and saved to again.
    drafter = drafter_of(model, file)
    tokens = AutoTokenizer.from_pretrained(model).encode(f"{TEXT}[PAD]")
    assert max(tokens) == VOCAB
    drafter.reset()
    # SGLang's server passes on what users have sent.
    drafter.remember(torch.tensor(tokens, dtype=torch.int32))
    drafter.start(0, tokens[-17:-1])
    root = torch.tensor(tokens[-2:-1], dtype=torch.int32)
    assert int(drafter.propose(torch.tensor([0]), root).tokens.max()) < VOCAB


def tokens_in(file: Path) -> int:
    """Number of tokens that a file remembers."""
    memory = load_tables(file, {"memory": TableSpec((None,))}, {})["memory"]
    return int((memory >= 0).sum())


def test_a_larger_memory_of_an_engine_is_kept_whole(model: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "tables", tmp_path / "a.txt"
    text.write_text(TEXT, encoding="utf-8")
    drafter = drafter_of(model, file, memory=1 << 21)
    count = 3 << 19
    drafter.remember(torch.arange(count, dtype=torch.int32) % VOCAB)
    assert drafter.tables.saver is not None
    assert drafter.tables.saver.save()
    status, said = prepare(model, "--corpus", str(text), "--option", f"hot_start={file}")
    assert status == 0
    assert f"{len(TEXT)} tokens of 1 file are kept" in said
    assert "the memory is full" not in said
    assert tokens_in(file) == count + len(TEXT)


def test_what_leaves_a_memory_that_is_full_is_said(model: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "tables", tmp_path / "a.txt"
    text.write_text(TEXT, encoding="utf-8")
    given = "--corpus", str(text), "--option", f"hot_start={file}", "--option"
    for size in (256, 128):
        status, said = prepare(model, *given, f"memory={size}")
        assert status == 0
        assert f"{len(TEXT)} tokens of 1 file are kept" in said
        assert ("the memory is full" in said) == (size == 128)
    # A text takes one place more than it has tokens, and one more when a file is read.
    dropped = 2 * len(TEXT) + 3 - 128
    assert f"{dropped} tokens of earlier texts" in said
    assert tokens_in(file) == 2 * len(TEXT) - dropped
    status, said = prepare(model, *given, "memory=64")
    assert status == 0
    assert f"the last 63 of {len(TEXT)} tokens of 1 file are kept" in said
    assert f"{2 * len(TEXT) - dropped} tokens of earlier texts" in said
    assert tokens_in(file) == 63


def save_until_told(pipe: Connection, file: Path) -> None:
    """An engine that saves to a file."""
    pipe.send(claim(file))
    pipe.recv()


def test_a_file_that_an_engine_saves_to_is_left_alone(model: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "tables", tmp_path / "a.txt"
    text.write_text(TEXT, encoding="utf-8")
    corpus = "--corpus", str(text), "--option", f"hot_start={file}"
    assert prepare(model, *corpus)[0] == 0
    before = file.read_bytes()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    # The first corpus claims the file no longer.
    engine = context.Process(target=save_until_told, args=(theirs, file))
    engine.start()
    try:
        assert ours.poll(60)
        assert ours.recv() is True
        status, said = prepare(model, *corpus)
        assert status == 2
        assert "an engine saves to hot_start=" in said
        assert "/add_external_corpus" in said
        assert file.read_bytes() == before
        ours.send("end")
    finally:
        engine.join(60)
        engine.kill()
    assert prepare(model, *corpus)[0] == 0
    assert file.read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--corpus", "{text}"), "hot_start=FILE"),
        (
            ("--corpus", "{text}", "--option", "hot_start={file}", "--option", "memory=0"),
            "memory=0",
        ),
        (("--corpus", "missing.txt", "--option", "hot_start={file}"), "missing.txt cannot be read"),
        (("--corpus", "{text}", "--option", "hot_start={text}"), "damaged, or not one of Token"),
        (("--option", "nodes=3"), "nodes=3 is for --corpus alone"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "tables"
    text.write_text(TEXT, encoding="utf-8")
    given = [each.format(text=text, file=file) for each in arguments]
    status, said = prepare(model, *given)
    assert status == 2
    assert message in said.replace("\n", " ")
    assert not file.exists()
    assert text.read_text(encoding="utf-8") == TEXT


def test_a_method_that_copies_nothing_refuses_a_corpus(model: Path) -> None:
    command = ["prepare", "--method", "rsd", "--model", str(model), "--corpus", "a.txt"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "copies no texts" in result.output + result.stderr
