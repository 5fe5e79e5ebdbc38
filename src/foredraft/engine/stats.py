"""Counters of speculation, with vLLM's definitions.

acceptance rate = accepted / drafted; mean acceptance length = 1 + accepted / steps that drafted (bonus included);
tokens per step (tau) = emitted tokens / all decode steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import TYPE_CHECKING

from foredraft.engine.cost_model import RATE
from foredraft.engine.prediction import PREDICTION

if TYPE_CHECKING:
    from foredraft.engine.budget import DraftSize, Limits
    from foredraft.tree import DraftTree


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Plan, draft and acceptance of one step in one row.

    Args:
      sample: which of the request's samples.
      position: index of the first token that the step emitted, prompt included.
      entropy, gamma: see `foredraft.tree.DraftPlan`; gamma is None where nothing was planned.
      drafted: depth of the draft that was verified.
      accepted: how many of one path of it were kept.
    """

    sample: int
    position: int
    entropy: float | None
    gamma: int | None
    drafted: int
    accepted: int


@dataclass
class RowStats:
    """Counters of one row.

    Attributes:
      num_draft_tokens: drafted tokens that were verified.
      num_cut_tokens: drafted tokens that were left out before verifying, by cause (`foredraft.engine.budget.CAUSES`).
      num_undrafted_steps: steps without a draft, by cause or `foredraft.engine.budget.NOTHING_FOUND`.
      drafter_error: the exception that has ended drafting for the row; empty where none has.
      num_preemptions: how often the row has left the cache for want of memory, to be read again.
    """

    num_steps: int = 0
    num_spec_steps: int = 0
    num_emitted_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    num_cut_tokens: Counter[str] = field(default_factory=Counter)
    num_undrafted_steps: Counter[str] = field(default_factory=Counter)
    drafter_error: str = ""
    num_preemptions: int = 0

    def credit(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Count the nodes of a draft, and those that were accepted, by the drafters that proposed them."""
        if tree.sources is None:
            self.drafted_by[tree.source] += tree.num_draft_tokens
            if accepted:
                self.accepted_by[tree.source] += len(accepted)
        else:
            self.drafted_by.update(tree.sources[1:])
            self.accepted_by.update(tree.sources[node] for node in accepted)

    def record(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verify step."""
        self.num_steps += 1
        self.num_emitted_tokens += num_emitted
        if num_drafted:
            self.num_spec_steps += 1
            self.num_draft_tokens += num_drafted
            self.num_accepted_draft_tokens += num_accepted
            self.acceptance_histogram[num_accepted] += 1

    def count_cuts(self, limits: Limits, budget: DraftSize, draft: DraftTree, tree: DraftTree) -> None:
        """Count what was cut from the draft of a step, or why the step has none.

        Of eight tokens the promise of bits leaves five, and the governor none. That counts three tokens for the
        promise, five for the governor, and a step without a draft for the governor.

        Args:
          budget: as much of that of ``limits`` as the governor has left, which the drafter was given.
          tree: the part of the draft that is verified.
        """
        if len(tree) == len(draft) > 1:
            return
        if budget != limits.budget:
            limits = limits._replace(depth="governor")
        if len(draft) == 1:
            self.num_undrafted_steps["fault" if self.drafter_error else limits.why_nothing(budget, draft)] += 1
            return
        left, last_cause = len(draft) - 1, ""
        for cause, num_left in (*limits.stages(budget, draft), ("governor", len(tree) - 1)):
            if num_left < left:
                self.num_cut_tokens[cause] += left - num_left
                left, last_cause = num_left, cause
        if not left:
            self.num_undrafted_steps[last_cause] += 1

    @classmethod
    def pooled(cls, several: Iterable[RowStats]) -> RowStats:
        """The counters of several rows together."""
        total = cls()
        for one in several:
            total.add(one)
        return total

    def add(self, other: RowStats) -> None:
        """Pool another row's counters into this one."""
        self.num_steps += other.num_steps
        self.num_spec_steps += other.num_spec_steps
        self.num_emitted_tokens += other.num_emitted_tokens
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_draft_tokens += other.num_accepted_draft_tokens
        self.acceptance_histogram.update(other.acceptance_histogram)
        self.drafted_by.update(other.drafted_by)
        self.accepted_by.update(other.accepted_by)
        self.num_cut_tokens.update(other.num_cut_tokens)
        self.num_undrafted_steps.update(other.num_undrafted_steps)
        self.drafter_error = self.drafter_error or other.drafter_error
        self.num_preemptions += other.num_preemptions

    @property
    def num_proposed_tokens(self) -> int:
        """Tokens that were drafted, whether they were verified or cut."""
        return self.num_draft_tokens + self.num_cut_tokens.total()

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of the output that the request had predicted, and that were drafted for that."""
        return self.accepted_by[PREDICTION]

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens of the prediction that were drafted and verified in vain."""
        return self.drafted_by[PREDICTION] - self.accepted_by[PREDICTION]

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps that drafted, the bonus included; 1.0 when no step drafted."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def tokens_per_step(self) -> float:
        """tau: emitted tokens per decode step, every step counted; 0.0 before the first step."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else 0.0


@dataclass
class StepProfile:
    """Times of an engine, in seconds, by the verbs of the loop.

    Args:
      ended: counters of the rows that have come to an end of their own.
    """

    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefill_seconds: float = 0.0
    propose_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    commit_seconds: float = 0.0
    observe_seconds: float = 0.0
    emit_seconds: float = 0.0
    ended: RowStats = field(default_factory=RowStats)

    @property
    def decode_seconds(self) -> float:
        """All of a decode step."""
        return (
            self.propose_seconds
            + self.verify_seconds
            + self.accept_seconds
            + self.commit_seconds
            + self.observe_seconds
            + self.emit_seconds
        )


@dataclass
class Totals:
    """Counts of the steps that a governor has seen, those without its drafter included.

    Args:
      num_drafted: steps that verified a draft.
      plain_seconds: the time that plain decoding would have taken for the same tokens, as far as is known.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Totals)})

    @property
    def speedup(self) -> float | None:
        """Estimated speed of these steps by that of plain decoding; None where there are none."""
        return self.plain_seconds / self.seconds if self.seconds else None


@dataclass(slots=True)
class Steps:
    """What steps have brought and taken.

    Args:
      num_drafted: of them that verified a draft.
      num_tokens: emitted, by all rows together.
      tokens_per_row, nodes_per_row: emitted, and drafted and verified; sums over the steps.
      plain_seconds: of those that verified none, without what was spent on drafting.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_tokens: int = 0
    tokens_per_row: float = 0.0
    nodes_per_row: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def add(self, num_rows: int, num_nodes: int, num_tokens: int, drafting: float, other: float) -> None:
        """Count one step.

        Args:
          num_nodes: of drafts that were verified, the pending ones left out.
          drafting, other: seconds.
        """
        self.num_steps += 1
        self.num_drafted += num_nodes > 0
        self.num_tokens += num_tokens
        self.tokens_per_row += num_tokens / num_rows
        self.nodes_per_row += num_nodes / num_rows
        self.seconds += drafting + other
        if not num_nodes:
            self.plain_seconds += other


class Pace:
    """Speed by plain decoding and lengths of drafts, of late and of all steps.

    Attributes:
      share: of the last steps that verified a draft.
      length: how many nodes per row those had, the pending one left out.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.share = self.length = 0.0
        self._tokens = self._time = 0.0

    def add(self, steps: Steps, plain: float) -> None:
        """Count steps, of which one without a draft would have taken ``plain`` seconds."""
        totals, num_steps, drafted = self.totals, steps.num_steps, steps.num_drafted
        faded = (1.0 - RATE) ** num_steps
        self._tokens = faded * self._tokens + steps.tokens_per_row
        self._time = faded * self._time + steps.seconds / plain
        self.share += max(1.0 - faded, num_steps / (totals.num_steps + num_steps)) * (drafted / num_steps - self.share)
        if drafted:
            moved = max(1.0 - (1.0 - RATE) ** drafted, drafted / (totals.num_drafted + drafted))
            self.length += moved * (steps.nodes_per_row / drafted - self.length)
        totals.num_steps += num_steps
        totals.num_drafted += drafted
        totals.num_tokens += steps.num_tokens
        totals.seconds += steps.seconds
        num_plain = num_steps - drafted  # which took what plain ones take: one token per row each
        totals.plain_seconds += steps.plain_seconds + plain * (steps.tokens_per_row - num_plain)

    @property
    def gain(self) -> float:
        """Speed of late by that of plain decoding, as far as is known."""
        return self._tokens / self._time if self._time > 0.0 else 1.0


class Clock:
    """Adds the time since the last lap to a field of a profile; ``laps`` has those of this clock alone."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self._last = perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = perf_counter()
        taken = now - self._last
        self.laps[name] = self.laps.get(name, 0.0) + taken
        self._profile.__dict__[name] += taken
        self._last = now

    def skip(self) -> None:
        """Count the time since the last lap nowhere."""
        self._last = perf_counter()
