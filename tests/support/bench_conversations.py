"""Conversations for the engines' own clients for benchmarks, which read ShareGPT's format."""

from __future__ import annotations

import json
from pathlib import Path

from openai_chats import QUESTIONS

COUNT = len(QUESTIONS)
TOKENS = 32
"""Tokens of each answer."""


def write_conversations(file: Path) -> Path:
    """Write one conversation for each question; the clients send the first turn alone."""
    turns = [("human", "{}"), ("gpt", "An answer that no client reads.")]
    conversations = [
        {"conversations": [{"from": by, "value": text.format(question)} for by, text in turns]}
        for question in QUESTIONS
    ]
    file.write_text(json.dumps(conversations))
    return file
