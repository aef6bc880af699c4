"""Corpora that SGLang's `/add_external_corpus` sends, as tokens."""

from __future__ import annotations

from collections.abc import Sequence


def split_documents(token_chunks: Sequence[Sequence[int]]) -> list[list[int]]:
    """The documents of a corpus.

    Args:
        token_chunks: The corpus in pieces. SGLang puts a negative token between documents.

    Returns:
        The tokens of each document that has any.
    """
    documents: list[list[int]] = [[]]
    for chunk in token_chunks:
        for token in chunk:
            if token < 0:
                documents.append([])
            else:
                documents[-1].append(token)
    return [document for document in documents if document]
