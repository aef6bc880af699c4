"""What a target says after a prompt, after its greedy answer, and after texts that leave it.

All ways of drafting ask of one target the same things again and again: what comes after the answer
so far, and after drafts at its end that were not accepted. Each is read once and kept, in a file
for each prompt, so that many settings can be measured in the time of a few.
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
"""The most nodes that are read at a time, if no one tree has more."""


@dataclass
class Known:
    """What is known of one prompt's texts.

    A node is a text: node 0 the prompt, and node i the prompt with i tokens of the answer, without
    its last; the others go on from their parents by one token.

    Attributes:
        prompt_tops: int32 `[P, 8]`, the most likely next tokens after each of the prompt's.
        parents, tokens, tops: of all nodes; no tops where it was not read yet.
    """

    prompt: list[int]
    prompt_tops: Tensor
    answer: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tops: list[list[int]] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def child(self, parent: int, token: int) -> int:
        """The node that goes on from another by a token."""
        node = self._children.setdefault((parent, token), len(self.parents))
        if node == len(self.parents):
            self.parents.append(parent)
            self.tokens.append(token)
            self.tops.append([])
        return node

    def on_answer(self, node: int) -> bool:
        """Whether a node is the prompt or the answer so far."""
        return node < len(self.answer)

    def save(self, file: Path) -> None:
        """Write all to a file."""
        columns = {"answer": self.answer, "parents": self.parents, "tokens": self.tokens}
        tensors = {name: torch.tensor(each, dtype=torch.int32) for name, each in columns.items()}
        tensors["tops"] = torch.tensor(self.tops, dtype=torch.int32)
        part = file.with_suffix(".part")
        save_file({**tensors, "prompt_tops": self.prompt_tops}, part)
        part.replace(file)

    @classmethod
    def load(cls, file: Path, prompt: Sequence[int]) -> Known:
        """Read what was written of a prompt."""
        read = load_file(file)
        known = cls(
            list(prompt),
            read["prompt_tops"],
            answer=read["answer"].tolist(),
            parents=read["parents"].tolist(),
            tokens=read["tokens"].tolist(),
            tops=read["tops"].tolist(),
        )
        bigrams = zip(known.parents, known.tokens, strict=True)
        known._children = {bigram: node for node, bigram in enumerate(bigrams)}
        return known


class KnownTarget:
    """A causal LM in float32, and what it said so far.

    Args:
        work: where what it said is kept.
        most: tokens of an answer.
    """

    def __init__(self, folder: Path, work: Path, most: int) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        end = model.generation_config.eos_token_id
        self.vocab: int = model.config.vocab_size
        self._ends = set(end) if isinstance(end, list) else {end}
        self._model = model
        self._most = most
        self._work = work
        self._name = f"{weights_fingerprint(folder)} {most}"

    def begin(self, prompt: Sequence[int]) -> Known:
        """What is known of a prompt, its greedy answer at least."""
        self._text: list[tuple[Tensor, Tensor]] = []
        file = self._file(prompt)
        if file.exists():
            return Known.load(file, prompt)
        cache = self._new_cache()
        known = Known(list(prompt), self._tops(self._read(cache, prompt)))
        known.parents, known.tokens = [-1], [prompt[-1]]
        known.tops = [known.prompt_tops[-1].tolist()]
        while True:
            token = known.tops[-1][0]
            known.answer.append(token)
            if token in self._ends or len(known.answer) == self._most:
                break
            node = known.child(len(known.answer) - 1, token)
            known.tops[node] = self._tops(self._read(cache, [token]))[0].tolist()
        self._keep(cache)
        return known

    def finish(self, known: Known) -> None:
        """Keep what became known of a prompt."""
        self._work.mkdir(parents=True, exist_ok=True)
        known.save(self._file(known.prompt))

    def learn(self, known: Known, trees: Iterable[Sequence[int]]) -> None:
        """Read the nodes of trees, as far as they are not known; of the prompt begun last."""
        unread: set[int] = set()
        for tree in trees:
            for node in tree:
                if known.tops[node]:
                    continue
                while not known.on_answer(node):
                    unread.add(node)
                    node = known.parents[node]
            if len(unread) >= _ROWS:
                self._read_nodes(known, sorted(unread))
                unread = set()
        if unread:
            self._read_nodes(known, sorted(unread))

    def _read_nodes(self, known: Known, nodes: list[int]) -> None:
        """Read nodes with all that is between them and the answer, parents first."""
        text = known.prompt + known.answer[:-1]
        cache = self._new_cache()
        if self._text:
            for layer, (keys, values) in enumerate(self._text):
                cache.update(keys, values, layer)
        else:
            self._read(cache, text)
            self._keep(cache)
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
        """The hidden states `[N, d]` at tokens after what was read."""
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

    def _keep(self, cache: Any) -> None:
        self._text = [(layer.keys, layer.values) for layer in cache.layers]

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache()

    def _file(self, prompt: Sequence[int]) -> Path:
        digest = hashlib.sha256(f"{self._name} {list(prompt)}".encode()).hexdigest()
        return self._work / f"{digest[:24]}.safetensors"
