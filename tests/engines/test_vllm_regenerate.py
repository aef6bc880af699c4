"""Lyanna's training data, as vLLM writes it before the training in the same process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_models import make_tiny_chat_llama
from vllm_runs import ENVIRONMENT

from lyanna_plugin.training.regenerate import _transformers

PROGRAM = """
import json, multiprocessing, sys
from pathlib import Path
from lyanna_plugin.training.regenerate import _vllm

if __name__ == "__main__":
    with _vllm(Path(sys.argv[1]), 256) as answer:
        answers = answer(json.loads(sys.argv[2]), int(sys.argv[3]))
        engines = len(multiprocessing.active_children())
    print(json.dumps([answers, engines, len(multiprocessing.active_children())]))
"""
CHATS = [[{"role": "user", "content": text}] for text in ("Hello", "What comes after one and two?")]
TOKENS = 12


def test_the_engine_gives_greedy_answers_and_ends(tmp_path: Path) -> None:
    """If its process did not end, it would keep the memory that training needs."""
    target = make_tiny_chat_llama(tmp_path / "target")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, str(program), str(target), json.dumps(CHATS), str(TOKENS)],
        env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answers, before, after = json.loads(run.stdout.splitlines()[-1])
    with _transformers(target, 256) as answer:
        assert answers == [answer([chat], TOKENS)[0] for chat in CHATS]
    assert before > 0
    assert after == 0
