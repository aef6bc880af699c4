"""A cache of a target's most likely next tokens along its answers and after draft tokens.

All settings evaluate one target at much the same nodes: after each prefix of the answer, and after
rejected draft tokens that follow one. Each node is evaluated once and cached in a file per answer,
so that many settings can be measured in the time of a few. An answer is the target's own, decoded
greedily, or a given one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tree_kernels.adjacency import top_candidates

from drafttree.model_files import weights_fingerprint

TOP = 8

_ROWS = 512
"""Rows per forward of the head; nodes are also evaluated once at least this many are pending."""

_OPEN = 16
"""Number of answers whose KV is kept at the same time."""


@dataclass
class Known:
    """The cached outputs for one prompt and its answer.

    A node is a text: node 0 is the prompt, node i the prompt and i tokens of the answer, up to its
    last but one token. Every other node is the text of its parent and one more token.

    Attributes:
        prompt: The tokens of the prompt.
        prompt_tops: Int32 `[P, 8]`, the most likely next tokens after each token of the prompt.
        answer: The tokens of the answer.
        given: Whether the answer was given, so that it need not be the target's own.
        parents: The parent of each node; -1 for node 0.
        tokens: The last token of each node.
        tops: The 8 most likely next tokens after each node; empty until the node is evaluated.
        kv: Keys and values of each layer for the prompt and the answer, while they are kept.
    """

    prompt: list[int]
    prompt_tops: Tensor
    answer: list[int] = field(default_factory=list)
    given: bool = False
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tops: list[list[int]] = field(default_factory=list)
    kv: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def child(self, parent: int, token: int) -> int:
        """The node of a parent's text and one more token, which is added if it is new."""
        node = self._children.setdefault((parent, token), len(self.parents))
        if node == len(self.parents):
            self.parents.append(parent)
            self.tokens.append(token)
            self.tops.append([])
        return node

    def on_answer(self, node: int) -> bool:
        """Whether a node is the prompt or a prefix of the answer."""
        return node < len(self.answer)

    def save(self, file: Path) -> None:
        """Write the cache of this prompt to a file."""
        columns = {"answer": self.answer, "parents": self.parents, "tokens": self.tokens}
        tensors = {name: torch.tensor(each, dtype=torch.int32) for name, each in columns.items()}
        tensors["tops"] = torch.tensor(self.tops, dtype=torch.int32)
        part = file.with_suffix(".part")
        save_file({**tensors, "prompt_tops": self.prompt_tops}, part)
        part.replace(file)

    @classmethod
    def load(cls, file: Path, prompt: Sequence[int], given: bool) -> Known:
        """Read the cache of a prompt and its answer from a file."""
        read = load_file(file)
        known = cls(
            list(prompt),
            read["prompt_tops"],
            answer=read["answer"].tolist(),
            given=given,
            parents=read["parents"].tolist(),
            tokens=read["tokens"].tolist(),
            tops=read["tops"].tolist(),
        )
        bigrams = zip(known.parents, known.tokens, strict=True)
        known._children = {bigram: node for node, bigram in enumerate(bigrams)}
        return known


class KnownTarget:
    """A causal LM in float32 with a cache of its outputs.

    Args:
        folder: Folder of the target.
        work: Folder of the cache.
        most: Maximum number of tokens of a greedy answer.

    Attributes:
        vocab: Number of tokens of the vocabulary.
        ends: The tokens that end an answer.
    """

    def __init__(self, folder: Path, work: Path, most: int) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        end = model.generation_config.eos_token_id
        self.vocab: int = model.config.vocab_size
        self.ends: set[int] = set(end) if isinstance(end, list) else {end}
        self._model = model
        self._open: list[Known] = []
        self._most = most
        self._work = work
        self._weights = weights_fingerprint(folder)

    def begin(self, prompt: Sequence[int], answer: Sequence[int] | None = None) -> Known:
        """The cached outputs for a prompt and its answer; evaluated first if there are none.

        Args:
            prompt: The tokens of the prompt.
            answer: The tokens of the answer; None for the greedy one.
        """
        file = self._file(prompt, answer)
        if file.exists():
            return Known.load(file, prompt, answer is not None)
        if answer is not None:
            return self._follow(prompt, answer)
        cache = self._new_cache()
        known = Known(list(prompt), self._tops(self._read(cache, prompt)))
        known.parents, known.tokens = [-1], [prompt[-1]]
        known.tops = [known.prompt_tops[-1].tolist()]
        while True:
            token = known.tops[-1][0]
            known.answer.append(token)
            if token in self.ends or len(known.answer) == self._most:
                break
            node = known.child(len(known.answer) - 1, token)
            known.tops[node] = self._tops(self._read(cache, [token]))[0].tolist()
        self._keep(known, cache)
        return known

    def _follow(self, prompt: Sequence[int], answer: Sequence[int]) -> Known:
        """Evaluate a prompt and its given answer in one forward."""
        cache = self._new_cache()
        tops = self._tops(self._read(cache, [*prompt, *answer[:-1]]))
        known = Known(list(prompt), tops[: len(prompt)].clone(), list(answer), given=True)
        known.parents, known.tokens = [-1], [prompt[-1]]
        known.tops = [known.prompt_tops[-1].tolist()]
        for node, token in enumerate(answer[:-1]):
            known.child(node, token)
        known.tops[1:] = tops[len(prompt) :].tolist()
        self._keep(known, cache)
        return known

    def finish(self, known: Known) -> None:
        """Write the outputs for a prompt and its answer to the cache, and drop their KV."""
        known.kv = []
        self._open = [each for each in self._open if each is not known]
        self._work.mkdir(parents=True, exist_ok=True)
        known.save(self._file(known.prompt, known.answer if known.given else None))

    def learn(self, known: Known, trees: Iterable[Sequence[int]]) -> None:
        """Evaluate nodes of trees that are not cached."""
        missing: set[int] = set()
        for tree in trees:
            for node in tree:
                if known.tops[node]:
                    continue
                while not known.on_answer(node):
                    missing.add(node)
                    node = known.parents[node]
            if len(missing) >= _ROWS:
                self._read_nodes(known, sorted(missing))
                missing = set()
        if missing:
            self._read_nodes(known, sorted(missing))

    def _read_nodes(self, known: Known, nodes: list[int]) -> None:
        """Evaluate nodes in one forward. Parents off the answer must be among them, before them."""
        text = known.prompt + known.answer[:-1]
        cache = self._new_cache()
        if known.kv:
            for layer, (keys, values) in enumerate(known.kv):
                cache.update(keys, values, layer)
        else:
            self._read(cache, text)
            self._keep(known, cache)
        rows = {node: row for row, node in enumerate(nodes)}
        seen = torch.zeros(len(nodes), len(text) + len(nodes), dtype=torch.bool)
        places: list[int] = []
        for row, node in enumerate(nodes):
            parent = known.parents[node]
            if known.on_answer(parent):
                place = len(known.prompt) + parent
                seen[row, :place] = True
            else:
                place = places[rows[parent]] + 1
                seen[row] = seen[rows[parent]]
            seen[row, len(text) + row] = True
            places.append(place)
        hidden = self._read(
            cache,
            [known.tokens[node] for node in nodes],
            attention_mask=torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None],
            position_ids=torch.tensor([places]),
        )
        for node, tops in zip(nodes, self._tops(hidden).tolist(), strict=True):
            known.tops[node] = known.tops[node] or tops

    def _read(self, cache: Any, tokens: Sequence[int], **given: Any) -> Tensor:
        """The hidden states `[N, d]` at tokens that follow the text in the KV cache."""
        with torch.inference_mode():
            result = self._model.base_model(
                input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, **given
            )
        hidden: Tensor = result.last_hidden_state[0]
        return hidden

    def _tops(self, hidden: Tensor) -> Tensor:
        """The most likely next tokens, int32 `[N, 8]`."""
        head = self._model.get_output_embeddings()
        with torch.inference_mode():
            starts = range(0, len(hidden), _ROWS)
            tops = [top_candidates(head(hidden[start : start + _ROWS]), TOP) for start in starts]
        return torch.cat(tops)

    def _keep(self, known: Known, cache: Any) -> None:
        known.kv = [(layer.keys, layer.values) for layer in cache.layers]
        self._open.append(known)
        if len(self._open) > _OPEN:
            self._open.pop(0).kv = []

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache()

    def _file(self, prompt: Sequence[int], answer: Sequence[int] | None) -> Path:
        key = f"{self._weights} {self._most} {list(prompt)}"
        if answer is not None:
            key = f"{self._weights} {list(prompt)} {list(answer)}"
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self._work / f"{digest[:24]}.safetensors"
