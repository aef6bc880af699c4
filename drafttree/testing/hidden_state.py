"""The conformance test of drafters that continue the target's hidden states."""

from __future__ import annotations

import torch
from tree_kernels.mask import depths

from drafttree.model_drafters import Attend, HiddenStateDrafter
from drafttree.target import Target
from drafttree.testing.session import (
    MAX_MODEL_LEN,
    MAX_REQUESTS,
    Session,
    as_verified,
    paths_of,
    set_up,
)
from drafttree.tree import DraftTree, Verified
from drafttree.verify import verify_target

_SHARPNESS = 5.0
"""Standard deviation of the target's logits."""

Proposed = dict[tuple[int, int, int], set[tuple[int, ...]]]
"""The paths of each tree, by slot, number of the request in its slot, and length of its text."""


def check_hidden_state(
    drafter: HiddenStateDrafter, num_draft_tokens: int, target: Target, steps: int, seed: int
) -> int:
    """Check a drafter that reads hidden states; `check_drafter` describes the arguments."""
    assert target.embed is not None, (
        "a hidden-state drafter needs a target with `embed`, such as that of random_target()"
    )
    heads, kv_heads, size = drafter.heads
    valid = min(heads, kv_heads, size) >= 1 and heads % kv_heads == 0
    assert valid, (
        f"heads={drafter.heads} must be the numbers of query heads and of KV heads, which divide "
        "them, and the head size"
    )
    set_up(drafter, num_draft_tokens)

    def run(order: int) -> _HiddenStateSession:
        session = _HiddenStateSession(drafter, num_draft_tokens, target, seed, order)
        with torch.inference_mode():
            session.run(steps)
        session.finish()
        drafter.reset()
        return session

    # Drafters that are random or that measure time may propose other trees the second time, so
    # orders are compared only if a repetition gives the same trees.
    first, again = run(order=0), run(order=0)
    if first.proposed == again.proposed:
        _check_same(first.proposed, run(order=1).proposed)
    return first.accepted


def _check_same(proposed: Proposed, reordered: Proposed) -> None:
    """Check that another order of the batch gave each request the same trees.

    A few may differ, as the rounding of a product depends on the order of its rows.
    """
    common = proposed.keys() & reordered.keys()
    different = sum(proposed[key] != reordered[key] for key in common)
    assert different <= len(common) // 8, (
        f"in another order of the batch {different} of {len(common)} trees are others: the state "
        "of a request must be indexed by its slot, not by its row"
    )


class _LayerCache:
    """The KV of the drafter's layer, by slot and position.

    Args:
        heads: The layer's query heads, KV heads and head size.
    """

    def __init__(self, heads: tuple[int, int, int]) -> None:
        self._heads = heads
        _, kv_heads, size = heads
        self._keys = torch.zeros(MAX_REQUESTS, MAX_MODEL_LEN, kv_heads, size)
        self._values = torch.zeros_like(self._keys)

    def attend(
        self, slots: torch.Tensor, positions: torch.Tensor, last: torch.Tensor | None = None
    ) -> Attend:
        """The attention of one call of the layer, for rows at `positions [N]` of `slots [N]`.

        If `last [M]` is given, only these rows attend.
        """
        calls = 0
        readers, upto = (slots, positions) if last is None else (slots[last], positions[last])

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            assert calls == 1, "layer must call attend once: there is KV for one layer"
            self._check_shapes(len(readers), len(slots), q, k, v)
            self._keys[slots, positions], self._values[slots, positions] = k.float(), v.float()
            length = int(positions.max()) + 1
            groups = q.shape[1] // k.shape[1]
            keys, values = (
                each[readers, :length].repeat_interleave(groups, 2)
                for each in (self._keys, self._values)
            )
            scores = torch.einsum("nhd,nlhd->nhl", q.float(), keys) * q.shape[2] ** -0.5
            ahead = torch.arange(length) > upto[:, None]
            weights = scores.masked_fill(ahead[:, None], -torch.inf).softmax(-1)
            return torch.einsum("nhl,nlhd->nhd", weights, values).to(q.dtype)

        return attend

    def _check_shapes(self, readers: int, rows: int, *given: torch.Tensor) -> None:
        heads, kv_heads, size = self._heads
        expected = [[readers, heads, size], [rows, kv_heads, size], [rows, kv_heads, size]]
        found = [[*each.shape] for each in given]
        assert found[0][:1] != [rows] or readers == rows, (
            f"attend was called with the queries of all {rows} rows: layer must give it those of "
            f"the {readers} rows of `last` alone"
        )
        assert found == expected, (
            f"attend was called with q, k and v of shapes {found}, but heads={self._heads} means "
            f"{expected}"
        )


class _HiddenStateSession(Session[HiddenStateDrafter]):
    """A session whose target has the last token's embedding as its hidden state.

    Its tokens are sampled, and depend on the request and the position alone.

    Attributes:
        proposed: The trees that were proposed.
    """

    def __init__(
        self,
        drafter: HiddenStateDrafter,
        num_draft_tokens: int,
        target: Target,
        seed: int,
        order: int,
    ) -> None:
        super().__init__(drafter, num_draft_tokens, target, seed, order)
        assert target.embed is not None
        self._hidden = target.embed
        some = self._hidden(torch.arange(min(64, self._vocab_size), dtype=torch.int32)).float()
        self._width, self._dtype = some.shape[1], target.dtype
        head = torch.randn(self._vocab_size, self._width, generator=self._generator)
        self._head = head * (_SHARPNESS / some.norm(dim=1).mean())
        drafter.read_head(self._logits)
        self._cache = _LayerCache(drafter.heads)
        self._coins = torch.zeros(MAX_REQUESTS, MAX_MODEL_LEN + drafter.max_depth + 1)
        # The layer's output after each request's last token.
        self._states = torch.zeros(MAX_REQUESTS, self._width, dtype=target.dtype)
        self._numbers = [0] * MAX_REQUESTS
        self.proposed: Proposed = {}

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = states.float() @ self._head.T
        return logits

    def _target_tokens(
        self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The target's tokens after `tokens [N]` at `positions [N]`, `int32 [N]`."""
        cumulative = self._logits(self._hidden(tokens)).softmax(-1).cumsum(-1)
        coins = self._coins[slots, positions, None] * cumulative[:, -1:]
        found = torch.searchsorted(cumulative, coins, right=True)[:, 0]
        return found.clamp(max=self._vocab_size - 1).int()

    def _start(self, slot: int, prompt: list[int]) -> None:
        self._numbers[slot] += 1
        coins = torch.rand(self._coins.shape[1], generator=self._of_slots[slot])
        self._coins[slot] = coins
        if self._drafter.tables is not None:
            self._drafter.tables.start(slot, prompt)
        tokens, end = torch.tensor(prompt, dtype=torch.int32), len(prompt)
        last = torch.tensor([end - 1])
        token = int(self._target_tokens(torch.tensor([slot]), tokens[-1:], last))
        following = torch.tensor([*prompt[1:], token], dtype=torch.int32)
        positions = torch.arange(end)
        # The prompt is read in two parts.
        for part in (slice(0, end // 2), slice(end // 2, end)):
            self._read(
                torch.full_like(positions[part], slot),
                self._hidden(tokens[part]),
                following[part],
                positions[part],
            )
            emitted = token if part.stop == end else -1
            self._prompt_read(slot, prompt[part.stop - 1], emitted)
        self._texts[slot] = [*prompt, token]

    def _read(
        self,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        following: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Let the layer read known tokens, and keep its output at each request's last one.

        Args:
            slots: `int64 [N]`, the slot of each row; the rows of a request are in order.
            hidden: `[N, d]`, the target's hidden states.
            following: `int32 [N]`, the token after each of them.
            positions: `int64 [N]`.
        """
        x = self._drafter.fuse(hidden, following)
        self._check_states("fuse", x, len(slots))
        is_end = slots != slots.roll(-1)
        is_end[-1] = True
        last = is_end.nonzero()[:, 0]
        attend = self._cache.attend(slots, positions, last)
        states = self._drafter.layer(x, positions, attend, last)
        self._check_states("layer", states, len(last))
        self._states[slots[last]] = states.to(self._dtype)

    def _check_states(self, name: str, states: torch.Tensor, rows: int) -> None:
        expected = [rows, self._width]
        assert [*states.shape] == expected, f"{name} must return {expected}, not {[*states.shape]}"

    def _decode(
        self, slots: torch.Tensor, roots: torch.Tensor, drafting: torch.Tensor, limit: int
    ) -> tuple[DraftTree, Verified]:
        most = self._most(slots)
        lengths = self._lengths(slots)
        logits = self._draft_logits(slots, lengths)
        # As in vLLM, a request has as many steps as it has columns, and none without drafts.
        sizes = most.clamp(max=limit).masked_fill(~drafting, 0)
        steps = (1 + (1 + sizes).clamp(max=logits.shape[1] - 1)).masked_fill(sizes == 0, 0)
        trees = self._drafter.propose(slots, roots.clone(), logits, steps)
        self._check_trees(trees, roots)
        self._check_sizes(slots, trees, steps, most)
        trees = as_verified(trees, roots, drafting, limit)
        verified = self._verify(slots, trees, lengths)
        path, accepted = verified.path.long(), verified.path >= 0
        rows = torch.arange(len(path))[:, None].expand_as(path)[accepted]
        along = lengths[:, None] + torch.arange(path.shape[1])
        hidden = self._hidden(trees.tokens[rows, path[accepted]])
        self._read(slots[rows], hidden, verified.emitted[accepted], along[accepted])
        return trees, verified

    def _most(self, slots: torch.Tensor) -> torch.Tensor:
        most = self._drafter.max_draft_tokens(slots)
        assert (most.dtype, most.shape) == (torch.int64, slots.shape), (
            f"max_draft_tokens must return int64 [{len(slots)}], not {most.dtype} {[*most.shape]}"
        )
        assert ((most >= 0) & (most <= self._num_draft_tokens)).all(), (
            f"max_draft_tokens is {most.tolist()}, but num_draft_tokens={self._num_draft_tokens}"
        )
        return most

    def _draft_logits(self, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The logits `[B, L, C]` of the layer's steps from each request's last token."""
        states = [self._states[slots]]
        for ahead in range(self._drafter.steps - 1):
            x = self._drafter.between(states[-1])
            self._check_states("between", x, len(slots))
            positions = lengths + ahead
            state = self._drafter.layer(x, positions, self._cache.attend(slots, positions))
            self._check_states("layer", state, len(slots))
            states.append(state)
        outputs = torch.stack(states, 1)
        logits = self._drafter.logits(outputs.flatten(0, 1), self._logits)
        return logits.view(*outputs.shape[:2], -1)

    def _check_sizes(
        self, slots: torch.Tensor, trees: DraftTree, steps: torch.Tensor, most: torch.Tensor
    ) -> None:
        rows = zip(slots.tolist(), paths_of(trees), steps.tolist(), most.tolist(), strict=True)
        for slot, paths, valid, limit in rows:
            count = len(paths)
            assert valid or not count, (
                f"{count} draft tokens were proposed for a request whose steps are 0, which is not "
                "to be drafted for"
            )
            assert count <= limit, (
                f"{count} draft tokens were proposed for a request, but max_draft_tokens says "
                f"{limit}"
            )
            self.proposed[slot, self._numbers[slot], len(self._texts[slot])] = paths

    def _verify(self, slots: torch.Tensor, trees: DraftTree, lengths: torch.Tensor) -> Verified:
        width = trees.tokens.shape[1]
        positions = lengths[:, None] + depths(trees.parents, trees.tree_size)
        rows, tokens = slots.repeat_interleave(width), trees.tokens.flatten()
        if (tables := self._drafter.tables) is not None:
            logits = self._logits(self._hidden(tokens.clamp(min=0)))
            self._observe(tables, slots, trees, logits)
        target = self._target_tokens(rows, tokens.clamp(min=0), positions.flatten().long())
        return verify_target(trees, target.view(-1, width), self._drafter.max_depth)
