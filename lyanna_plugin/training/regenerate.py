"""Regenerate the answers of conversations with the target: a drafter learns best from its text.

The target answers every user turn; answers in the data are ignored. Finished conversations are
written to a file in batches, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from lyanna_plugin.training.dataset import Messages

_BATCH = 128


class Answerer(Protocol):
    """Answers chats greedily."""

    def __call__(self, chats: Sequence[Messages], max_tokens: int) -> list[str]:
        """The answer to each chat, of at most `max_tokens` tokens."""


def regenerate(
    conversations: Sequence[Messages],
    target: Path,
    max_tokens: int,
    context: int,
    folder: Path,
    advance: Callable[[int], None],
) -> Path:
    """Write the conversations with new answers as JSON lines in ShareGPT's format.

    Args:
        conversations: The conversations. One without a user turn has no turn in the file.
        target: Folder of the target.
        max_tokens: Maximum number of tokens of an answer.
        context: Maximum number of tokens of a conversation.
        folder: Folder of the file, whose name is a hash of the conversations, target, `max_tokens`
            and `context`.
        advance: Called with the number of conversations finished since the last call.

    Returns:
        The file.
    """
    asked = json.dumps([conversations, str(target), max_tokens, context])
    file = folder / f"regenerated-{hashlib.sha256(asked.encode()).hexdigest()[:12]}.jsonl"
    done = whole_lines(file)
    advance(done)
    if done == len(conversations):
        return file
    make = _vllm if importlib.util.find_spec("vllm") else _transformers
    with make(target, context) as answerer, file.open("a", encoding="utf-8") as written:
        for start in range(done, len(conversations), _BATCH):
            for chat in _answered(conversations[start : start + _BATCH], answerer, max_tokens):
                said = [{"from": message["role"], "value": message["content"]} for message in chat]
                written.write(json.dumps({"conversations": said}, ensure_ascii=False) + "\n")
            written.flush()
            advance(min(_BATCH, len(conversations) - start))
    return file


def renderable(tokenizer: Any, chat: Messages) -> Messages:
    """The chat, if the chat template renders all that the target will be asked in it.

    Raises:
        TemplateError: It does not.
    """

    def answer(chats: Sequence[Messages], max_tokens: int) -> list[str]:
        tokenizer.apply_chat_template(list(chats), tokenize=False, add_generation_prompt=True)
        return ["Yes."] * len(chats)

    _answered([chat], answer, 1)
    return chat


def prompts(chat: Messages) -> Messages:
    """The turns of a chat that the target reads: all up to the last user turn, but no answers.

    A system turn after that asks for nothing.
    """
    end = max((number for number, turn in enumerate(chat, 1) if turn["role"] == "user"), default=0)
    return [message for message in chat[:end] if message["role"] != "assistant"]


def whole_lines(file: Path) -> int:
    """The number of lines of a file, after removing an incomplete last line from it."""
    if not file.exists():
        return 0
    text = file.read_bytes()
    if not text.endswith(b"\n"):
        # To write the lines again would lose them if the disk were full.
        os.truncate(file, text.rfind(b"\n") + 1)
    return text.count(b"\n")


def _answered(
    conversations: Sequence[Messages], answerer: Answerer, max_tokens: int
) -> list[Messages]:
    """The conversations with an answer of the target after every user turn.

    One without a user turn has no turn in the result.
    """
    chats: list[Messages] = [[] for _ in conversations]
    left = [prompts(chat) for chat in conversations]
    while any(left):
        asked = []
        for chat, messages in zip(chats, left, strict=True):
            while messages:
                message = messages.pop(0)
                chat.append(message)
                if message["role"] == "user":
                    asked.append(chat)
                    break
        for chat, answer in zip(asked, answerer(asked, max_tokens), strict=True):
            chat.append({"role": "assistant", "content": answer})
    return chats


@contextmanager
def _vllm(target: Path, context: int) -> Iterator[Answerer]:
    from vllm import LLM, SamplingParams

    llm: Any = LLM(str(target), dtype="bfloat16", max_num_seqs=_BATCH, max_model_len=context)

    def answer(chats: Sequence[Messages], max_tokens: int) -> list[str]:
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        outputs = llm.chat(list(chats), parameters, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    try:
        yield answer
    finally:
        # Its process would keep the memory that training needs. One that is killed, after 5 s by
        # default, is not waited for.
        llm.llm_engine.engine_core.shutdown(timeout=60)


@contextmanager
def _transformers(target: Path, context: int) -> Iterator[Answerer]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).to(device)
    # The target's own configuration may have penalties, with which the text is not the greedy one.
    # `generate` takes from it whatever the one that it is given leaves out.
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )

    def answer(chats: Sequence[Messages], max_tokens: int) -> list[str]:
        rendered = tokenizer.apply_chat_template(
            list(chats),
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        ).to(device)
        written = model.generate(**rendered, max_new_tokens=max_tokens)
        start = rendered["input_ids"].shape[1]
        decoded: list[str] = tokenizer.batch_decode(written[:, start:], skip_special_tokens=True)
        return decoded

    try:
        yield answer
    finally:
        # Frees the weights, to which `answer` still refers.
        model.to("meta")
        torch.cuda.empty_cache()
