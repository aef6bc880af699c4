"""Time drafting a tree as Lyanna and as EAGLE do, with the same layer (the paper's figure 13).

    .venv-vllm/bin/python -m scripts.experiments.lyanna.time_drafting \\
        TARGET --output results/lyanna_draft_time.json

The layer's forwards, the head and the sampling are timed separately. Weights are random, which does
not affect times. Lyanna and EAGLE alternate, and medians are reported.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from drafttree.bench.machine import processor_name
from lyanna_plugin.checkpoint import layer_config
from lyanna_plugin.model import AttendBatch, LyannaConfig, LyannaModel
from lyanna_plugin.tree import TokenTable, sample_tree
from scripts.experiments.lyanna.eagle_style import TreeKV, draft_tree

_PARTS = ("forward", "head", "sampling")


class Clock:
    """Adds up the seconds spent in each part."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is added to a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self._now()
            result = function(*args, **kwargs)
            self.seconds[part] += self._now() - started
            return result

        return timed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


class Drafting:
    """Drafts one tree per request, after a text of `context` tokens, as Lyanna or as EAGLE does."""

    def __init__(
        self, target: Path, requests: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer = layer_config(target)
        vocab, size = layer.vocab_size, layer.hidden_size
        torch.manual_seed(0)
        config = LyannaConfig(target=target.name, fingerprint="")
        hot = torch.arange(config.num_hot_tokens)
        self._drafter = LyannaModel(layer, config, hot).to(device, dtype)
        self._embeddings = torch.randn(vocab, size, dtype=dtype, device=device)
        self._head = torch.randn(vocab, size, dtype=dtype, device=device) / size**0.5
        info = self._drafter.token_info.float()
        self._table = TokenTable.of(info, self._embeddings[hot].float(), dtype)
        shape = requests, context, layer.num_key_value_heads, layer.head_dim
        self._keys, self._values = torch.randn(2, *shape, dtype=dtype, device=device)
        self._first = torch.randn(requests, size, dtype=dtype, device=device)
        self._roots = torch.arange(requests, dtype=torch.int32, device=device)
        self._positions = torch.full((requests,), context, device=device)
        self._clock = Clock(device)

    def seconds(self, way: str, **shape: int) -> dict[str, float]:
        """The seconds of drafting once, by part."""
        self._clock.seconds.clear()
        draft = self._lyanna if way == "lyanna" else self._eagle
        self._clock("all", draft)(**shape)
        found = dict(self._clock.seconds)
        found.setdefault("sampling", found["all"] - found["forward"] - found["head"])
        return found

    def _known(self) -> tuple[TreeKV, Tensor]:
        """The text's KV and the first states; both methods fuse the last accepted token."""
        cache = TreeKV(self._keys, self._values, self._positions)
        states = self._clock("forward", self._fused)(
            self._first[:, None], self._roots[:, None], self._positions[:, None], cache
        )
        return cache, states

    def _fused(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: TreeKV) -> Tensor:
        attend = functools.partial(cache.attend, torch.zeros_like(tokens, dtype=torch.int64))
        return self._layer(states, tokens, positions, attend)

    def _layer(
        self, states: Tensor, tokens: Tensor, positions: Tensor, attend: AttendBatch
    ) -> Tensor:
        embedded = self._embeddings[tokens.long()]
        result: Tensor = self._drafter(self._drafter.fuse(states, embedded), positions, attend)
        return result

    def _to_logits(self, states: Tensor) -> Tensor:
        return states @ self._head.T

    def _lyanna(self, depth: int, width: int, num_draft_tokens: int) -> None:
        cache, state = self._known()
        states = [state]
        chain = torch.zeros_like(self._positions)[:, None]

        def step(state: Tensor, ahead: int) -> Tensor:
            positions = (self._positions + ahead)[:, None]
            attend = functools.partial(cache.attend, chain)
            result: Tensor = self._drafter(self._drafter.between(state), positions, attend)
            return result

        for ahead in range(1, depth):
            states.append(self._clock("forward", step)(states[-1], ahead))
        logits = self._clock("head", self._to_logits)(torch.cat(states, 1))
        steps = torch.full_like(self._positions, depth)
        self._clock("sampling", sample_tree)(
            logits, steps, self._roots, self._table, width, num_draft_tokens
        )

    def _eagle(self, depth: int, width: int, num_draft_tokens: int) -> None:
        cache, state = self._known()
        draft_tree(
            *(self._clock("forward", self._layer), self._clock("head", self._to_logits)),
            *(state[:, 0], cache, self._positions + 1, self._roots),
            **{"depth": depth, "width": width, "num_draft_tokens": num_draft_tokens},
        )


def main(
    target: Path,
    output: Annotated[Path, typer.Option(help="JSON.")],
    context: int = 256,
    repeat: int = 50,
    dtype: str = "bfloat16",
    width: int = 4,
    nodes: int = 12,
) -> None:
    """Time drafting at depths 3 and 5."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    with torch.inference_mode():
        for requests in (1, 8):
            drafting = Drafting(target, requests, context, getattr(torch, dtype), device)
            for depth in (3, 5):
                shape = {"depth": depth, "width": width, "num_draft_tokens": nodes}
                times: dict[str, list[dict[str, float]]] = {"lyanna": [], "eagle": []}
                for _ in range(repeat + 5):
                    for way, found in times.items():
                        found.append(drafting.seconds(way, **shape))
                medians = {
                    way: {
                        part: 1000 * statistics.median(each[part] for each in found[5:])
                        for part in (*_PARTS, "all")
                    }
                    for way, found in times.items()
                }
                lower = 1 - medians["lyanna"]["all"] / medians["eagle"]["all"]
                size = {"depth": depth, "width": width, "nodes": nodes}
                rows.append({"requests": requests, **size, "ms": medians, "lower_by": lower})
                typer.echo(json.dumps(rows[-1]))
    report = {
        "target": target.name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "context": context,
        "repeat": repeat,
        "runs": rows,
    }
    output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
