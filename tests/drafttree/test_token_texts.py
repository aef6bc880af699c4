"""The texts of a traced answer's tokens, with tokenizers of both kinds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from drafttree.bench import trace as traces
from drafttree.bench.chat import Chat
from drafttree.bench.methods import BenchMethod
from drafttree.bench.prompts import Prompt
from drafttree.bench.protocol import EngineInfo, Generation, Traced
from drafttree.bench.run import BenchSettings
from drafttree.bench.token_texts import AnswerTexts
from drafttree.bench.trace import Trace
from drafttree.trace import StepSeconds, TracedNode, TracedStep, TracedToken

BYTE_LEVEL, METASPACE = "byte level", "Metaspace"
END = "</s>"
TEXT = "Hello, wörld 😀  中文 👩‍💻 שלום!\n\nso be it"


def pieces(kind: str, text: str) -> list[str]:
    """Names of tokens: one for each byte as in GPT-2, or words and rare bytes as in Llama 2."""
    if kind == BYTE_LEVEL:
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return [byte for name, _ in split.pre_tokenize_str(text) for byte in name]
    found: list[str] = []
    for each in re.findall(r"▁?[a-zA-Z]+|.", ("▁" + text).replace(" ", "▁"), re.S):
        rare = not each.isascii() and "▁" not in each
        found += [f"<0x{byte:02X}>" for byte in each.encode()] if rare else [each]
    return found


class Model:
    """A model's folder with nothing but a tokenizer.

    Args:
        folder: The folder, which is empty.
        kind: The kind of tokenizer.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        names = dict.fromkeys([*pieces(kind, TEXT), *pieces(kind, " so"), END])
        self.ids = {name: place for place, name in enumerate(names)}
        tokenizer = Tokenizer(models.BPE(self.ids, [], byte_fallback=kind == METASPACE))
        tokenizer.decoder = (
            decoders.ByteLevel()
            if kind == BYTE_LEVEL
            else decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            )
        )
        tokenizer.add_special_tokens([END])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
        )
        (folder / "config.json").write_text("{}")

    def tokens(self, names: list[str]) -> list[int]:
        return [self.ids[name] for name in names]


def step(tokens: list[int]) -> TracedStep:
    """A step in which the tokens after the first were emitted; each was drafted twice."""
    nodes = [TracedNode(token=tokens[0], parent=-1, accepted=True)]
    above = 0
    for token in tokens[1:-1]:
        nodes.append(TracedNode(token=token, parent=above, source="a", accepted=True))
        nodes.append(TracedNode(token=token, parent=above, source="b"))
        above = len(nodes) - 2
    return TracedStep(nodes=nodes, bonus=TracedToken(token=tokens[-1]), seconds=StepSeconds())


def traced(monkeypatch: pytest.MonkeyPatch, model: Model, answer: list[int]) -> Trace:
    """The trace of an answer that an engine would give in steps of three tokens."""
    steps = [step(answer[place : place + 4]) for place in range(0, len(answer) - 1, 3)]

    class Engine:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def wait_until_ready(self) -> EngineInfo:
            return EngineInfo("0", "cpu")

        def trace(self, request: object) -> Traced:
            generation = Generation(prompt_tokens=1, token_ids=answer, steps=len(steps))
            return Traced(generation, StepSeconds(), steps)

    monkeypatch.setattr(traces, "EngineProcess", Engine)
    monkeypatch.setattr(Chat, "render", lambda chat, turns, answers: [0])
    settings = BenchSettings(
        engine="vllm",
        method=BenchMethod("token-recycling", {}, {}),
        model=model.folder,
        prompts=[Prompt("0", "kind", ("so",))],
    )
    return traces.trace(settings)


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE])
@pytest.mark.parametrize("ending", ["whole", "special token", "within a character"])
def test_the_texts_of_the_tokens_are_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ending: str
) -> None:
    model = Model(tmp_path, kind)
    names = pieces(kind, TEXT)
    if ending == "special token":
        # Special tokens may also be within an answer.
        names = [*names, END, *pieces(kind, " so")[-3:], END]
    elif ending == "within a character":
        names = pieces(kind, TEXT[: TEXT.index("中") + 1])[:-1]
    answer = model.tokens(names)
    trace = traced(monkeypatch, model, answer)
    assert "".join(token.text for token in trace.tokens) == trace.answer
    assert trace.answer == Chat(model.folder).decode(answer)
    if ending == "whole":
        assert trace.answer == TEXT
        assert {token.text for token in trace.tokens} >= {"😀", "中", "ש"}
    elif ending == "special token":
        assert [token.text for token in trace.tokens if token.token == model.ids[END]] == ["", ""]


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE])
def test_nodes_are_decoded_after_the_tokens_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = Model(tmp_path, kind)
    answer = model.tokens([*pieces(kind, TEXT), END])
    trace = traced(monkeypatch, model, answer)
    emitted = [trace.steps[0].nodes[0], *(each for at in trace.steps for each in at.emitted)]
    assert [each.token for each in emitted] == answer
    for token, node in zip(trace.tokens, emitted, strict=True):
        if token.token == model.ids[END]:
            assert node.text == END
        elif token.text:
            assert node.text == token.text
        else:
            # Nothing, or a character that is not complete.
            assert node.text in ("", "\ufffd")
    for at in trace.steps:
        for accepted, rejected in zip(at.nodes[1::2], at.nodes[2::2], strict=True):
            assert rejected.text == accepted.text
    roots = [at.nodes[0].text for at in trace.steps[1:]]
    assert roots == [at.bonus.text for at in trace.steps[:-1]]


@pytest.mark.parametrize("kind", [BYTE_LEVEL, METASPACE])
def test_long_answers_are_decoded_in_short_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = Model(tmp_path, kind)
    answer = model.tokens([*pieces(kind, TEXT)] * 10)
    chat = Chat(model.folder)
    lengths: list[int] = []
    decode = Chat.decode

    def counted(self: Chat, tokens: list[int], **options: Any) -> str:
        lengths.append(len(tokens))
        return decode(self, tokens, **options)

    monkeypatch.setattr(Chat, "decode", counted)
    texts = AnswerTexts(chat, answer).texts
    assert "".join(texts) == decode(chat, answer)
    assert sorted(lengths)[-2] <= 12
    assert lengths.count(len(answer)) == 1
