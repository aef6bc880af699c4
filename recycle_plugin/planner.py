"""How many draft nodes a request pay at the current batch size.

A tree grown best-first knows the tokens that each further node is worth; `Costs` knows what the
node costs. The planner takes the rung of a short ladder of node counts that promises the least time
a token, the mean over the batch's requests, holds the promises against what came of them, and stays
with plain decoding where drafting does not clearly win. Not the most tokens a second: a step takes
all requests equally long, and a few that copy would slow down all others, only to leave a batch
that decodes hardly faster without them. It is deterministic: time and outcomes come as arguments.

What it spends on learning is bounded by three purses, filled by a small part of all time spent.
One pays for looking in vain while at rest, as often as it can: any step, a text may begin to repeat
itself. One pays for trials. The last pays for drafting that turned out slower than plain decoding
by the tokens of the whole batch, and what drafting saves flows into it: once it is empty, steps are
plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from recycle_plugin.costs import Costs, bucket_of
from recycle_plugin.outcomes import Calibration, Outcomes

# Drafting must beat plain decoding by this factor, and a new choice the present one by the other.
MARGIN, HYSTERESIS = 1.02, 1.015
# The part of all time that each purse gets, and what it holds at first and at most, in plain steps.
ALLOWANCE = 0.005
MOST_LOOKING = 0.5
LEARNING, MOST_LEARNING = 4.0, 8.0
LOSSES, MOST_LOSSES = 6.0, 20.0
# Steps after which plain decoding, a neighbouring rung and drafting at all are tried again.
PLAIN_AGE, NEIGHBOUR_AGE, DRAFT_AGE = 128, 256, 128
# A rung seen less often than steps ago by this factor is tried again sooner.
YOUNG = 16
# Drafting that falls short of plain decoding by no more than this is tried for as long as the
# purse for trials is half full: bad luck with a few drafts looks the same.
CLOSE = 0.8
# What a look is taken to cost before it has been timed, as part of a plain step.
LOOK = 0.03
# The weight of the last look in what looks cost and are worth.
LOOK_RATE = 1 / 8
# A look counts as no longer than the average by this factor.
ODD_LOOK = 4.0


@dataclass
class _Mode:
    """What goes on in one bucket.

    Attributes:
        n: the rung chosen last, trials aside.
        gain: the harmonic mean of the tokens that were expected of the requests with it, by which
            it divides the mean time a token.
        look: the seconds of a look on average, once there was one.
        worth: what a look saves on average, as part of a plain step.
    """

    n: int = 0
    gain: float = 1.0
    look: float | None = None
    worth: float = 0.0


@dataclass(frozen=True)
class _Plan:
    """A step on its way.

    Attributes:
        n: its rung.
        promised: the tokens a request.
        expected: the same, corrected by what came of promises before.
        least: the tokens of the request that gains least, on which all may have to wait.
    """

    n: int
    promised: float = 1.0
    expected: float = 1.0
    least: float = 1.0
    trial: bool = False
    in_vain: bool = False


class Planner:
    """Chooses a rung for each decode step.

    Before each step ask `rests`. If it says no, look for drafts and ask `choose`. After the step,
    and before the next is asked about, tell `finished`; a step left out is only not learnt from.
    """

    def __init__(self, ladder: Sequence[int], costs: Costs) -> None:
        """Plan for node counts `ladder`, rising from 0.

        Raises:
            ValueError: the ladder does not start at 0 or does not rise.
        """
        if list(ladder[:1]) != [0] or any(a >= b for a, b in pairwise(ladder)):
            raise ValueError(f"ladder={list(ladder)}: node counts must rise, from 0")
        self.ladder = tuple(ladder)
        self.costs = costs
        self._calibration = Calibration()
        self._outcomes = Outcomes()
        self._modes: dict[int, _Mode] = {}
        self._bucket = 0
        self._plan: _Plan | None = None
        self._looking = self._learning = self._losses = 0.0

    def rests(self, batch: int) -> bool:
        """Whether the next step is plain and drafts need not even be looked for."""
        mode = self._mode(batch)
        if not self._rests(mode, batch):
            return False
        self._plan = _Plan(0, trial=mode.n > 0)
        return True

    def choose(self, batch: int, tokens: np.ndarray[Any, Any]) -> int:
        """The rung for the next step.

        Args:
            batch: requests in the step.
            tokens: `[R, rungs]`, what each of them, or of those of a step before, is expected to
                emit: 1 plus the probabilities of the rung's nodes.

        Raises:
            ValueError: there are not as many columns as rungs.
        """
        rungs = len(self.ladder)
        if tokens.shape[1] != rungs:
            raise ValueError(f"tokens of {tokens.shape[1]} rungs for a ladder of {rungs}")
        mode, costs = self._mode(batch), self.costs
        plain = costs.seconds(batch, 0)
        ratios = self._calibration.ratios(bucket_of(batch), self.ladder, costs.clock)
        corrected = 1 + np.array(ratios) * (tokens - 1)
        corrected[:, 0] = 1.0
        promised, expected = tokens.mean(0).tolist(), corrected.mean(0).tolist()
        gains = (1 / (1 / corrected).mean(0)).tolist()
        least = corrected.min(0).tolist()
        rates = [gain / costs.seconds(batch, n) for gain, n in zip(gains, self.ladder, strict=True)]
        # More nodes than there are drafts for are no choice, whatever noise says of their cost.
        for rung, (fewer, more) in enumerate(pairwise(promised), 1):
            rates[rung] = rates[rung] if more > fewer else 0.0
        best = self._best(mode, rates)
        trial = self._trial(batch, best, gains, least, rates)
        if trial is None:
            mode.n, mode.gain = self.ladder[best], gains[best]
            if best:
                saved = gains[best] - rates[0] * costs.seconds(batch, mode.n)
            else:
                saved = -self._look(mode, batch) / plain
            mode.worth += LOOK_RATE * (saved - mode.worth)
        i = best if trial is None else trial
        self._plan = _Plan(
            self.ladder[i],
            promised[i],
            expected[i],
            least[i],
            trial=trial is not None,
            in_vain=i == 0,
        )
        return self.ladder[i]

    def finished(self, batch: int, n: int, seconds: float, look: float, emitted: int) -> None:
        """Book a step.

        Args:
            batch: its requests.
            n: the draft nodes of each.
            seconds: its whole time.
            look: the part of it in which drafts were looked for.
            emitted: the tokens that came of it.
        """
        mode, costs = self._mode(batch), self.costs
        bucket, plan = bucket_of(batch), self._plan
        self._plan = None
        if plan is None or plan.n != n:
            came = emitted / batch
            plan = _Plan(n, promised=came, expected=came, least=came)
        if look > 0:
            known = self._look(mode, batch)
            # The machine may have been busy with something else.
            mode.look = known + LOOK_RATE * (min(look, ODD_LOOK * known) - known)
        in_vain = look if plan.in_vain else 0.0
        predicted = costs.seconds(batch, n) + in_vain
        costs.observe(batch, n, seconds - in_vain)
        if n > 0:
            self._calibration.book(bucket, n, plan.promised - 1, emitted / batch - 1, costs.clock)
        self._settle(mode, batch, plan, emitted / batch)
        self._outcomes.book(
            bucket,
            n,
            batch,
            predicted=predicted,
            seconds=seconds,
            promised=batch * plan.expected,
            emitted=emitted,
            trial=plan.trial,
            in_vain=plan.in_vain,
        )

    def cut(self, batch: int, seconds: float, emitted: int) -> None:
        """Pay for a step of fewer nodes than were chosen, which teaches nothing about any rung."""
        self._mode(batch)
        self._plan = None
        self.costs.clock += 1
        plain = self.costs.seconds(batch, 0)
        self._losses += ALLOWANCE * seconds + emitted / batch * plain - seconds
        self._bound(plain)

    def explain(self) -> list[dict[str, float]]:
        """What was foreseen and what came of it, a row for each bucket and rung; see `Row`."""
        return self._outcomes.explain()

    def _mode(self, batch: int) -> _Mode:
        bucket = bucket_of(batch)
        mode = self._modes.setdefault(bucket, _Mode())
        if bucket != self._bucket:
            if not self._bucket:
                plain = self.costs.seconds(batch, 0)
                self._looking = MOST_LOOKING * plain
                self._learning, self._losses = LEARNING * plain, LOSSES * plain
            self._bucket = bucket
            mode.worth = 0.0
        return mode

    def _rests(self, mode: _Mode, batch: int) -> bool:
        if self._losses < 0:
            mode.n = 0
            return True
        if mode.n > 0:
            loss = self._plain_loss(mode, batch)
            if self.costs.unsure(batch, 0):
                # On credit: drafting may just have become dear, which costs more each step.
                return self._learning + MOST_LEARNING * self.costs.seconds(batch, 0) >= loss
            return self.costs.age(batch, 0) >= PLAIN_AGE and self._learning >= loss
        return mode.worth <= 0 and self._looking < self._look(mode, batch)

    def _best(self, mode: _Mode, rates: list[float]) -> int:
        """The index of the rung to take, by gain a second."""
        best = max(range(1, len(rates)), key=rates.__getitem__, default=0)
        margin = MARGIN
        if mode.n == 0:
            margin *= HYSTERESIS
        else:
            present = self.ladder.index(mode.n)
            if rates[best] < HYSTERESIS * rates[present]:
                best = present
        return best if rates[best] > margin * rates[0] else 0

    def _trial(
        self,
        batch: int,
        best: int,
        gains: list[float],
        least: list[float],
        rates: list[float],
    ) -> int | None:
        """The index of a rung to try for once in place of the best one, if it can be paid."""
        if best:
            others = [i for i in (best - 1, best + 1) if 0 < i < len(rates)]
            age = NEIGHBOUR_AGE
        else:
            others = sorted(range(1, len(rates)), key=rates.__getitem__)[-1:]
            age = DRAFT_AGE
        for i in others:
            n = self.ladder[i]
            if gains[i] <= MARGIN or not rates[i]:
                continue  # not worth it at any price
            old = self.costs.age(batch, n) >= min(age, YOUNG * self.costs.count(batch, n))
            close = best == 0 and rates[i] >= CLOSE * rates[0] and self._is_rich(1 / rates[0])
            if old or close or self.costs.unsure(batch, n):
                loss = self.costs.latest(batch, n) - least[i] / rates[best]
                if self._learning >= loss:
                    return i
        return None

    def _is_rich(self, plain: float) -> bool:
        return self._learning >= MOST_LEARNING / 2 * plain

    def _look(self, mode: _Mode, batch: int) -> float:
        """Seconds that looking for drafts takes."""
        return LOOK * self.costs.seconds(batch, 0) if mode.look is None else mode.look

    def _plain_loss(self, mode: _Mode, batch: int) -> float:
        """Seconds that a plain step loses where the mode's rung is in use."""
        instead = self.costs.seconds(batch, mode.n) / mode.gain if mode.n else 0.0
        return max(0.0, self.costs.latest(batch, 0) - instead)

    def _settle(self, mode: _Mode, batch: int, plan: _Plan, emitted: float) -> None:
        """Fill the purses by their part of the step's time and pay for the step.

        Times are the estimates with this step taken in, not the step's own, as an outlier would
        have hit a plain step too.
        """
        costs = self.costs
        plain, spent = costs.seconds(batch, 0), costs.seconds(batch, plan.n)
        self._looking += ALLOWANCE * spent
        self._learning += ALLOWANCE * spent
        self._losses += ALLOWANCE * spent
        if plan.in_vain and mode.worth > 0:
            self._losses -= self._look(mode, batch)  # one of many looks that pay together
        elif plan.in_vain:
            self._looking -= self._look(mode, batch)
        elif plan.trial and plan.n == 0:
            self._learning -= self._plain_loss(mode, batch)
        elif plan.trial:
            best = costs.seconds(batch, mode.n) / mode.gain
            spent = min(spent, costs.latest(batch, plan.n))
            self._learning -= max(0.0, spent - plan.least * min(plain, best))
        elif plan.n > 0:
            self._losses += emitted * plain - spent
        self._bound(plain)

    def _bound(self, plain: float) -> None:
        """Keep the purses from overflowing, and from debts that no saving would ever pay."""
        self._looking = min(self._looking, MOST_LOOKING * plain)
        self._learning = min(self._learning, MOST_LEARNING * plain)
        self._losses = max(-MOST_LOSSES * plain, min(self._losses, MOST_LOSSES * plain))
