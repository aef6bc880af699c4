"""The part of vLLM's V1 model runner with draft trees that serves requests with a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drafttree.grammar.forced_tokens import ForcedTokens
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from drafttree.vllm import patches
from drafttree.vllm.adopted import AdoptedRunner
from drafttree.vllm.parameters import announce_undrafted, has_opted_out, is_grammar_bound
from drafttree.vllm.step import StepTrees
from drafttree.vllm.stored_tree import ROOT_ONLY, StoredTree
from drafttree.vllm.structured.binding import no_bound_drafts
from drafttree.vllm.structured.shapes import Proposal

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds


class GrammarRunner(AdoptedRunner):
    """Base class of `TreeModelRunner`.

    It knows which requests are drafted for, and exchanges the shapes of the trees of those with a
    grammar with the scheduler, which binds the trees to it.
    """

    def set_up(self, *args: Any, **kwargs: Any) -> None:
        """Prepare an adopted runner, before its model is loaded."""
        super().set_up(*args, **kwargs)
        self._stored: dict[str, StoredTree] = {}
        self._drafts_off: set[str] = set()
        self._grammar_bound: set[str] = set()
        self._no_bound_drafts = self._why_no_bound_drafts()
        self._forced = ForcedTokens(self.device)
        self._resets = 0

    def _why_no_bound_drafts(self) -> str | None:
        """Why requests with a grammar are served without drafts; None if they are not."""
        return no_bound_drafts(self)

    def _arrived(self, request_id: str, *, goes_on: bool) -> None:
        """A request starts, or goes on as a streaming session with its next turn."""
        parameters = self.requests[request_id].sampling_params
        # The scheduler binds all turns to the grammar of the first one, and none if that has none.
        is_bound = request_id in self._grammar_bound if goes_on else is_grammar_bound(parameters)
        is_off = has_opted_out(parameters)
        if is_bound and self._no_bound_drafts:
            announce_undrafted(self._no_bound_drafts)
            is_off = True
        for names, member in ((self._grammar_bound, is_bound), (self._drafts_off, is_off)):
            (names.add if member else names.discard)(request_id)

    def _finished(self, request_ids: Sequence[str]) -> None:
        """Requests have finished."""
        self._drafts_off.difference_update(request_ids)
        self._grammar_bound.difference_update(request_ids)
        for request_id in request_ids:
            self._stored.pop(request_id, None)

    def _tokens_left(self, request_id: str) -> int:
        """Greatest number of tokens that a request may still emit."""
        state = self.requests[request_id]
        room = self.max_model_len - state.num_tokens
        limit = state.sampling_params.max_tokens if state.sampling_params else None
        return room if limit is None else min(room, limit - len(state.output_token_ids))

    def _propose_bound(
        self, taken: DraftTokenIds, share: int, to_verify: Mapping[str, int]
    ) -> None:
        """Let the shapes of the trees of requests with a grammar travel to the scheduler.

        Args:
            taken: The draft tokens of all requests.
            share: Greatest number of nodes of a request's tree, the root counted.
            to_verify: How many of a request's draft tokens are to be verified.
        """
        proposals = {}
        for name, drafts in zip(taken.req_ids, taken.draft_token_ids, strict=True):
            if name in self._grammar_bound and name not in self._drafts_off:
                if not drafts:
                    self._stored[name] = ROOT_ONLY
                proposals[name] = self._bound_proposal(name, share, to_verify.get(name, 0))
        patches.send_proposals(taken, proposals)

    def _bound_proposal(self, name: str, share: int, most_proposed: int) -> Proposal | None:
        """The shape of a request's tree, of which `most_proposed` draft tokens are verified."""
        parents = self._stored[name].parents.tolist()
        most = min(share, 1 + self.num_spec_tokens)
        depth = max(self._tokens_left(name) - 1, 0)
        version = self._resets if self._drafter.shares_texts else None
        return Proposal(parents, most_proposed, most, depth, version)

    def _take_bound(self, scheduler_output: SchedulerOutput) -> None:
        """Take the shapes of the trees that the scheduler has bound to grammars."""
        for name, shape in patches.bound_in(scheduler_output).items():
            self._stored[name] = StoredTree.bound(self._stored.get(name, ROOT_ONLY), shape)

    def _count_forced(self, trees: StepTrees, drafts: DraftTree, verified: Verified) -> None:
        """Count the tokens of a step that grammars have forced."""
        if trees.columns is not None:
            forced = None if trees.forced is None else on_device(trees.forced, self.device)
            columns = on_device(trees.columns, self.device)
            self._forced.add_step(columns, forced, drafts, verified)

    def reset_drafting(self) -> None:
        """Forget everything learned, and all counts."""
        super().reset_drafting()
        self._resets += 1
        self._forced = ForcedTokens(self.device)

    def acceptance(self) -> dict[str, Any]:
        """How often drafts were accepted, those that grammars force as a source of their own."""
        return self._forced.beside(super().acceptance())
