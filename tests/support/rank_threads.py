"""Tensor-parallel ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore, ProcessGroupGloo

RANKS = 2
R = TypeVar("R")


class Ranks:
    """Each thread is a rank."""

    world_size = RANKS

    def __init__(self, store: HashStore, rank: int) -> None:
        self.rank_in_group = rank
        self._group = ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=20))

    def broadcast(self, input_: torch.Tensor) -> torch.Tensor:
        self._group.broadcast(input_, 0).wait()
        return input_


def on_ranks(run: Callable[[Ranks], R]) -> list[R]:
    """What a function returns on each rank."""
    store = HashStore()
    with ThreadPoolExecutor(RANKS) as threads:
        futures = [threads.submit(lambda rank: run(Ranks(store, rank)), n) for n in range(RANKS)]
        return [future.result() for future in futures]
