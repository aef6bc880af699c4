"""Corpora that SGLang's `/add_external_corpus` sends, as to its own n-gram speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from drafttree.drafter import Drafter


class CorpusWorker(BaseSpecWorker):
    """SGLang's worker with the calls for corpora, whose texts its drafter remembers.

    Attributes:
        drafter: The method's drafter.
    """

    drafter: Drafter
    _runner: Any
    _device: torch.device

    def __init__(self) -> None:
        super().__init__()
        self._corpora: dict[str, int] = {}
        self._loading = torch.empty(0, dtype=torch.int32)

    def add_external_corpus(self, corpus_id: str, token_chunks: Sequence[Sequence[int]]) -> int:
        """Read a corpus, and return its number of tokens; SGLang calls this in a thread.

        Raises:
            ValueError: There is a corpus of this name, or the drafter remembers no texts. SGLang
                answers with the message.
        """
        self.drafter.check_remembers()
        if corpus_id in self._corpora:
            raise ValueError(f"there is a corpus {corpus_id!r} already: give another corpus_id")
        self._loading = joined_documents(token_chunks)
        return int((self._loading >= 0).sum())

    def commit_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Let the drafter remember the corpus that was read, between two steps."""
        self._await_steps()
        self.drafter.remember(self._loading)
        self._loading = torch.empty(0, dtype=torch.int32)
        self._corpora[corpus_id] = loaded_token_count

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Refuse: a memory's texts are forgotten together.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"corpus {corpus_id!r} cannot be removed alone: /flush_cache forgets all texts"
        )

    def list_external_corpora(self) -> dict[str, int]:
        """The number of tokens of each corpus."""
        return dict(self._corpora)

    def _await_steps(self) -> None:
        """Let the device finish the steps under way before what follows; the host does not wait.

        With overlapping scheduling they run on a stream of their own.
        """
        stream = torch.get_device_module(self._device).current_stream()
        stream.wait_stream(self._runner.forward_stream)

    def _forget_corpora(self) -> None:
        """Forget the names of all corpora."""
        self._corpora.clear()


def joined_documents(token_chunks: Sequence[Sequence[int]]) -> torch.Tensor:
    """The documents of a corpus in one tensor, so that they are remembered in one call.

    Args:
        token_chunks: The corpus in pieces. SGLang puts a negative token between documents.

    Returns:
        Int32 `[n]` on the CPU: the documents' tokens, with -1 where SGLang has a negative token.
    """
    chunks = [np.asarray(chunk, np.int32) for chunk in token_chunks]
    return torch.from_numpy(np.concatenate([*chunks, np.empty(0, np.int32)]).clip(min=-1))
