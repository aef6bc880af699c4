"""Random inputs of `expand_trees`: texts and tables with equal tokens, scores and cells."""

from dataclasses import dataclass, replace

import torch
from plain_texts import ALONE, PlainMemory, PlainText, cell
from tree_kernels.candidates import NUM_SOURCES, TOP, CandidateTables
from tree_kernels.memory import TextMemory, remember
from tree_kernels.ngrams import NgramIndex, extend_ngrams

SLOTS = 4


@dataclass
class World:
    """The arguments of `expand_trees`, and its texts again in plain Python."""

    candidates: CandidateTables
    slots: torch.Tensor
    roots: torch.Tensor
    texts: list[PlainText]
    memory: PlainMemory

    def tables(self, row):
        """The matrix, the bigram table and the own table of a row of the batch, as lists."""
        tables = self.candidates
        own = tables.own[int(self.slots[row]) if len(tables.own) > 1 else 0]
        return tables.matrix.tolist(), tables.bigrams.tolist(), own.tolist()

    def tensors(self):
        return self.candidates, self.slots, self.roots

    def on(self, device):
        """The arguments of `expand_trees` on a device."""
        tables = self.candidates
        ngrams, memory = (
            type(each)(*(getattr(each, name).to(device) for name in each.__dataclass_fields__))
            for each in (tables.ngrams, tables.memory)
        )
        names = ("matrix", "bigrams", "own", "priors")
        moved = {name: getattr(tables, name).to(device) for name in names}
        tables = replace(tables, ngrams=ngrams, memory=memory, **moved)
        return tables, self.slots.to(device), self.roots.to(device)


def added_tokens(generator, batch, columns, vocab):
    """Random tokens `int32 [batch, columns]`, of which about one in six is -1."""
    tokens = torch.randint(0, vocab, (batch, columns), dtype=torch.int32, generator=generator)
    return tokens.masked_fill(torch.rand(batch, columns, generator=generator) < 1 / 6, -1)


def world(
    seed,
    batch=3,
    vocab=12,
    bigram_cells=64,
    length=60,
    cells=128,
    added=(50, 3, 9),
    own=False,
    places=64,
    sure=False,
):
    """Random inputs: some tokens are beyond the vocabulary, and rows may contain a token twice.

    Args:
        own: Whether each slot has its own table, which has rows of single tokens too.
        places: Places of the memory, which has parts of the texts and other tokens.
        sure: Whether copies are nearly certain, so that spines are long.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randint(0, vocab + 2, shape, dtype=torch.int32, generator=generator)

    def table(alone):
        rows = torch.full((bigram_cells, TOP + 2), -1, dtype=torch.int32)
        for number, (previous, token) in enumerate(drawn(min(40, bigram_cells - 1), 2).tolist()):
            key = [ALONE if alone and number % 3 == 0 else previous, token]
            row = torch.tensor(key, dtype=torch.int32)
            rows[cell(key, bigram_cells)] = torch.cat((row, drawn(TOP)))
        return rows

    matrix = drawn(vocab, TOP)
    matrix[torch.rand(vocab, generator=generator) < 0.3] = -1
    bigrams = table(False)
    mine = torch.full((1, 1, TOP + 2), -1, dtype=torch.int32)
    if own:
        mine = torch.stack([table(True) for _ in range(SLOTS)])
    priors = (torch.rand(NUM_SOURCES, generator=generator) * 8).round() / 8 * 0.95
    if sure:
        priors = 0.97 + priors / 40
    ngrams = NgramIndex.of(SLOTS, length, cells, torch.device("cpu"))
    slots = torch.randperm(SLOTS, generator=generator)[:batch]
    texts = [PlainText(length, cells) for _ in range(batch)]
    for columns in added:
        tokens = added_tokens(generator, batch, columns, vocab + 2)
        extend_ngrams(ngrams, slots, tokens)
        for text, line in zip(texts, tokens.tolist(), strict=True):
            text.extend(line)
    memory = TextMemory.of(places, torch.device("cpu"))
    plain = PlainMemory(len(memory.tokens), memory.index.shape[1])
    for text in texts if places else []:
        # The end of the text and what may follow it, then something else.
        for part in (text.tokens[-20:] + drawn(25).tolist(), drawn(9).tolist()):
            remember(memory, torch.tensor(part, dtype=torch.int32))
            plain.append(part)
    ends = [text.tokens[-1] if text.tokens else 0 for text in texts]
    roots = torch.tensor(ends, dtype=torch.int32)
    tables = CandidateTables(matrix, bigrams, mine, ngrams, memory, priors)
    return World(tables, slots, roots, texts, plain)
