"""Token Recycling (arXiv 2408.08696): drafts from an adjacency matrix of recycled candidates.

The target computes the most likely next tokens at every node that it verifies, and plain
speculative decoding discards all but one of them. Token Recycling keeps them. It needs no training
and no draft model, only a matrix of V x k token ids for a vocabulary of V and k = 8 candidates:

    matrix = full((V, k), -1)                      # row t: likely next tokens after token t

    def draft(root):                               # section 3.3: breadth-first, one level at a time
        tokens = [root]
        for parent, rank in topology:              # parents come before their children
            tokens.append(matrix[tokens[parent], rank])
        return tokens

    def decode(root):
        while True:
            tokens = draft(root)
            logits = target(tokens, tree_mask)     # one forward verifies all paths of the tree
            matrix[tokens] = logits.topk(k)        # section 3.2: accepted or not, all are recycled
            path, bonus = longest_path(tokens, logits.argmax(-1))
            yield from (*path, bonus)
            root = bonus

`tables.py` has the matrix and the bigram table, and `static.py` is `draft` above with the paper's
topology. `dynamic.py` goes beyond the paper: it chooses the nodes of each tree by expected
acceptance, from the matrix, the bigram table and copies of what followed the same text earlier, in
the request's own text or in a memory of finished answers.
Where an engine verifies chains only, `chains.py` finds the best path of such a tree.
`priors.py` has the prior acceptance rate of each candidate source, and `sources.py` reports the
measured rates. `storage` keeps tables between runs (hot start) and fills the matrix before the
first request (priming). The loop itself, the target's forward and verification belong to the
engines and to `drafttree`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from drafttree.method import MODEL_FREE, Method, Remembered
from drafttree.target import Target
from recycle_plugin.config import RecycleOptions
from recycle_plugin.dynamic import DynamicTreeDrafter
from recycle_plugin.static import StaticTreeDrafter
from recycle_plugin.tables import Tables


def make_drafter(options: RecycleOptions, target: Target) -> DynamicTreeDrafter | StaticTreeDrafter:
    """Build the drafter that the options describe.

    Raises:
        ValueError: The target's vocabulary has fewer than `k` tokens.
    """
    # Imported here: processes that only read the options need none of these libraries.
    from recycle_plugin.storage.hot_start import open_hot_start
    from recycle_plugin.storage.primed_files import PrimedFile
    from recycle_plugin.storage.priming import Priming

    tables = Tables(
        target.vocab_size,
        options.k,
        target.device,
        bigrams=options.is_dynamic,
        hot_start=options.hot_start is not False,
        memory=options.memory_tokens,
    )
    target.logger.info("Token Recycling's tables take %.1f MiB", tables.nbytes / 2**20)
    if options.prime:
        tables.priming = Priming(
            target.vocab_size,
            options.k,
            target.device,
            bos=target.bos,
            seconds=options.prime_seconds,
            file=PrimedFile(target.folder, options.k, target.logger, target.changed_by),
            logger=target.logger,
        )
    if (file := options.hot_start_file) is not None:
        folder = target.folder or Path(target.model)
        tables.saver = open_hot_start(tables, file, folder, target.logger)
    tables.fill_unknown()
    longest = target.longest_chain
    drafter: DynamicTreeDrafter | StaticTreeDrafter
    if options.is_dynamic:
        num_draft_tokens = options.num_draft_tokens
        drafter = DynamicTreeDrafter(
            tables,
            num_draft_tokens if longest is None else min(num_draft_tokens, longest),
            auto=options.is_adaptive and not target.sizes_trees,
            private=options.sharing == "request",
            pads_trees=target.pads_trees,
            late_steps=target.late_steps,
            by_score=target.sizes_trees,
            chains=longest is not None,
        )
        if tables.saver is not None:
            tables.saver.belong_to(drafter, drafter.release_all)
    else:
        tree = options.topology
        drafter = StaticTreeDrafter(tables, tree if longest is None else tree.first_path(longest))
        if tables.saver is not None:
            tables.saver.belong_to(drafter)
    drafter.shares_texts = options.sharing == "engine" and options.hot_start is not False
    return drafter


def _remember(folder: Path, options: RecycleOptions, texts: Iterable[str]) -> Remembered:
    from recycle_plugin.storage.hot_start import remember_corpus

    return remember_corpus(folder, options, texts)


METHOD = Method(
    name="token_recycling",
    title="Token Recycling",
    kind=MODEL_FREE,
    options=RecycleOptions,
    make_drafter=make_drafter,
    primes=True,
    remember=_remember,
)

__all__ = [
    "METHOD",
    "DynamicTreeDrafter",
    "RecycleOptions",
    "StaticTreeDrafter",
    "Tables",
    "make_drafter",
]
