"""Which steps have a CUDA graph, by requests and draft tokens; needs no engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_ROWS = 256
"""Rows of a step with drafts. A step reads the target's weights once, whatever its rows; from some
150 (A100) to 300 rows (H100) in 16-bit floats on, computing takes longer than reading."""

_GROWTH = 1.5
"""Ratio of one number of requests with a graph to the next, where they are dense."""


@dataclass(frozen=True)
class GraphSizes:
    """The numbers of draft tokens with which a step may be verified.

    Attributes:
        requests: For each number of draft tokens, ascending, the numbers of requests for which a
            graph is captured, ascending. If there is one number of draft tokens, all steps have it.
    """

    requests: Mapping[int, tuple[int, ...]]

    @classmethod
    def one(cls, num_draft_tokens: int) -> GraphSizes:
        """All steps have as many draft tokens for each request."""
        return cls({num_draft_tokens: ()})

    @classmethod
    def within_rows(cls, draft_tokens: Sequence[int], requests: Sequence[int]) -> GraphSizes:
        """Sizes of steps of up to `MOST_ROWS` rows, or of as many as there may be requests.

        The largest steps of the largest trees have the most rows of all.

        Args:
            draft_tokens: Numbers of draft tokens, ascending from 0, of which plain steps have 0.
            requests: Numbers of requests for which the engine captures graphs, ascending.
        """
        tree_size = draft_tokens[-1] + 1
        rows = -(-max(MOST_ROWS, requests[-1]) // tree_size) * tree_size
        return cls(
            {
                each: _thinned(requests, min(requests[-1], rows // (each + 1)))
                for each in draft_tokens
            }
        )

    @property
    def num_draft_tokens(self) -> int:
        """The greatest number of draft tokens."""
        return max(self.requests)

    @property
    def are_several(self) -> bool:
        """Whether steps may have different numbers of draft tokens."""
        return len(self.requests) > 1

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(map(len, self.requests.values()))

    @property
    def most_rows(self) -> int:
        """Rows of the largest step with a graph."""
        return max((each + 1) * requests[-1] for each, requests in self.requests.items())

    def largest(self, requests: int) -> int:
        """The greatest number of draft tokens for a step of that many requests.

        Where no graph has as many requests, the engine verifies trees of one size without graphs.
        """
        return max(self._captured(requests), default=self.num_draft_tokens)

    def fitting(self, requests: int, num_draft_tokens: int) -> int:
        """The least number of draft tokens into which trees fit.

        Args:
            requests: Number of requests in the step.
            num_draft_tokens: Draft tokens of the trees, at most `largest(requests)`.
        """
        fitting = (each for each in self._captured(requests) if each >= num_draft_tokens)
        return min(fitting, default=self.num_draft_tokens)

    def step_of(self, rows: int) -> tuple[int, int]:
        """Requests and draft tokens of the step with the largest trees that has that many rows.

        It may have more rows, by less than a tree.

        Args:
            rows: At most `most_rows`.
        """
        for num_draft_tokens in sorted(self.requests, reverse=True):
            requests = -(-rows // (num_draft_tokens + 1))
            if num_draft_tokens < rows and requests <= self.requests[num_draft_tokens][-1]:
                return requests, num_draft_tokens
        return 1, min(each for each in self.requests if each >= rows - 1)

    def _captured(self, requests: int) -> Iterator[int]:
        return (each for each, sizes in self.requests.items() if sizes and requests <= sizes[-1])


def _thinned(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Sizes up to `most`, which is the last one, without such as differ little from others."""
    kept = [min(sizes[0], most)]
    known = [size for size in sizes if kept[0] < size < most]
    for size, larger in pairwise([*known, most]):
        if larger > _GROWTH * kept[-1]:
            kept.append(size)
    return tuple(sorted({*kept, most}))
