"""Counters of speculation, with vLLM's definitions, and the causes that keep tokens from being drafted.

acceptance rate = accepted / drafted; mean acceptance length = 1 + accepted / steps that drafted (bonus included);
tokens per step (tau) = emitted tokens / all decode steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from foredraft.engine.acceptance_model import PREDICTION

if TYPE_CHECKING:
    from foredraft.tree import DraftSize, DraftTree

NOTHING_FOUND = "nothing_found"
"""Cause of a step without a draft in which the drafter was called and proposed nothing."""

CAUSES: Mapping[str, str] = {
    "governor": "the governor",
    "bits": "the limit of bitwise exactness",
    "chains": "a model or rule that verifies only chains",
    "memory": "the memory limit",
    "budget": "the end of the token budget",
    "policy": "the length policy",
    "context": "the context of the draft model",
    "request": "the request",
    "doubt": "a step that gave no token",
    "fault": "a fault of the drafter",
}
"""Causes that prevent tokens from being drafted or verified, with their names in messages."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Plan, draft and acceptance of one step in one row.

    Args:
      sample: index of the sample in its request.
      position: index of the first token that the step emitted, prompt included.
      entropy, gamma: see `foredraft.tree.DraftPlan`; gamma is None if there was no plan.
      drafted: depth of the draft that was verified.
      accepted: number of accepted tokens of the draft.
    """

    sample: int
    position: int
    entropy: float | None
    gamma: int | None
    drafted: int
    accepted: int


class Limits(NamedTuple):
    """Maximum draft size of a row, and the causes (`CAUSES`) of its bounds.

    Args:
      budget: largest draft that all limits allow.
      depth: cause of the limit on the depth.
      nodes: cause of the limit on the number of nodes.
    """

    budget: DraftSize
    depth: str
    nodes: str = "memory"

    def stages(self, budget: DraftSize, draft: DraftTree) -> Iterator[tuple[str, int]]:
        """Number of tokens that are left of a draft within a budget, cause by cause."""
        if budget.chains_only:
            draft = draft.main_chain()
            yield "chains", len(draft) - 1
        yield self.depth if draft.depth > budget.depth else self.nodes, len(budget.cut(draft)) - 1

    def why_nothing(self, budget: DraftSize, draft: DraftTree) -> str:
        """Return the cause of an empty draft."""
        if not budget:
            return self.depth
        if budget.nodes <= 1:
            return self.nodes
        return draft.plan.cause if draft.plan is not None and draft.plan.gamma == 0 else NOTHING_FOUND


def describe_cuts(tokens: Counter[str], steps: Counter[str]) -> str:
    """Describe cuts for people, the most frequent cause first; empty if nothing was cut.

    Args:
      tokens: drafted tokens that were left out, by cause.
      steps: steps without a draft, by cause; those of `NOTHING_FOUND` are not described.

    Example:
        >>> describe_cuts(Counter(governor=8), Counter(governor=2, nothing_found=1))
        'the governor cut 8 drafted tokens and left 2 steps without a draft'
    """
    phrases = []
    for cause in sorted(CAUSES, key=lambda cause: (-steps[cause], -tokens[cause])):
        parts = [f"cut {counted(tokens[cause], 'drafted token')}"] if tokens[cause] else []
        parts += [f"left {counted(steps[cause], 'step')} without a draft"] if steps[cause] else []
        if parts:
            phrases.append(f"{CAUSES[cause]} {' and '.join(parts)}")
    return ", ".join(phrases)


def describe_drafting(counts: RowStats, governor: Mapping[str, Any] | None) -> list[str]:
    """Lines for people about the drafts and the latest decision of the governor; none for plain decoding.

    Args:
      governor: result of `foredraft.engine.governor.Governor.report`, if there is a governor.
    """
    lines = [f"drafts: {', '.join(drafts)}"] if (drafts := describe_drafts(counts)) else []
    if decision := (governor or {}).get("decision"):
        lines.append(f"latest decision: {decision}")
    return lines


def describe_drafts(counts: RowStats) -> list[str]:
    """Phrases on drafted, accepted and cut tokens; none for plain decoding."""
    if not counts.num_proposed_tokens and not counts.num_undrafted_steps:
        return []
    verified = f"{counts.num_accepted_draft_tokens} of {counts.num_draft_tokens} verified draft tokens accepted"
    phrases = [verified if counts.num_proposed_tokens else "nothing was drafted"]
    cut = describe_cuts(counts.num_cut_tokens, counts.num_undrafted_steps)
    return [*phrases, cut] if cut else phrases


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 step``, ``2,000 steps``, ``2 guesses``."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


@dataclass
class RowStats:
    """Counters of one row.

    Attributes:
      num_draft_tokens: drafted tokens that were verified.
      num_cut_tokens: drafted tokens that were left out before verifying, by cause (`foredraft.engine.stats.CAUSES`).
      num_undrafted_steps: steps without a draft, by cause or `foredraft.engine.stats.NOTHING_FOUND`.
      drafter_error: the exception that ended drafting for the row; empty if there was none.
      num_preemptions: number of times that the row had to leave the cache because memory was short.
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

    def record(self, tree: DraftTree, accepted: Sequence[int], num_emitted: int) -> None:
        """Count one verify step, and its drafted nodes by the drafters that proposed them.

        Args:
          accepted: nodes of the draft that were accepted.
        """
        self.num_steps += 1
        self.num_emitted_tokens += num_emitted
        num_drafted, num_accepted = len(tree.tokens) - 1, len(accepted)
        if not num_drafted:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_draft_tokens += num_accepted
        self.acceptance_histogram[num_accepted] += 1
        if tree.sources is None:
            self.drafted_by[tree.source] += num_drafted
            if accepted:
                self.accepted_by[tree.source] += num_accepted
        else:
            for node in range(1, num_drafted + 1):
                self.drafted_by[tree.sources[node]] += 1
            for node in accepted:
                self.accepted_by[tree.sources[node]] += 1

    def count_cuts(
        self, limits: Limits, size: DraftSize, draft: DraftTree, cut: DraftTree, *, is_empty: bool, is_plain: bool
    ) -> None:
        """Count the tokens that limits cut from the draft of a step, or the cause of an empty draft.

        Args:
          size: draft size that the drafter received: ``limits.budget``, or less if the governor reduced it.
          cut: part of the draft within ``size``.
          is_empty: True if the row has no other draft either.
          is_plain: True if the row runs without the drafter.
        """
        if size != limits.budget:
            limits = limits._replace(depth="governor")
        cause = "fault" if self.drafter_error else "governor" if is_plain else limits.why_nothing(size, draft)
        left = len(draft.tokens) - 1
        if left:
            for reason, num_left in limits.stages(size, draft):
                if num_left < left:
                    self.num_cut_tokens[reason] += left - num_left
                    left, cause = num_left, reason
        if is_empty:
            self.num_undrafted_steps[cause] += 1

    def count_unverified(self, draft: DraftTree, tree: DraftTree) -> None:
        """Count the tokens that the governor left out of a draft; ``tree`` is the part that will be verified."""
        num_left, num_drafted = len(tree.tokens), len(draft.tokens)
        if num_left < num_drafted:
            self.num_cut_tokens["governor"] += num_drafted - num_left
            if num_left == 1:
                self.num_undrafted_steps["governor"] += 1

    @classmethod
    def pooled(cls, several: Iterable[RowStats]) -> RowStats:
        """Sum the counters of several rows."""
        total = cls()
        for one in several:
            total.add(one)
        return total

    def add(self, other: RowStats) -> None:
        """Add another row's counters to these."""
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
        """Number of tokens that were drafted, verified or cut."""
        return self.num_draft_tokens + self.num_cut_tokens.total()

    @property
    def accepted_prediction_tokens(self) -> int:
        """Number of accepted tokens that were drafted from the request's prediction."""
        return self.accepted_by[PREDICTION]

    @property
    def rejected_prediction_tokens(self) -> int:
        """Number of rejected tokens that were drafted from the request's prediction."""
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
    """Time spent by an engine, in seconds, per part of the loop.

    Args:
      ended: counters of rows that ended normally.
    """

    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefill_seconds: float = 0.0
    govern_seconds: float = 0.0
    propose_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    commit_seconds: float = 0.0
    observe_seconds: float = 0.0
    emit_seconds: float = 0.0
    ended: RowStats = field(default_factory=RowStats)

    @property
    def decode_seconds(self) -> float:
        """Seconds of all parts of decode steps."""
        return (
            self.govern_seconds
            + self.propose_seconds
            + self.verify_seconds
            + self.accept_seconds
            + self.commit_seconds
            + self.observe_seconds
            + self.emit_seconds
        )


class StepSeconds(NamedTuple):
    """Seconds of a step.

    Args:
      drafting: time of the drafter.
      verifying: time of all other parts.
      governing: time of the governor's decisions.
    """

    drafting: float
    verifying: float
    governing: float = 0.0


STAGES = (
    "govern_seconds",
    "propose_seconds",
    "govern_seconds",
    "verify_seconds",
    "accept_seconds",
    "emit_seconds",
    "commit_seconds",
    "observe_seconds",
)
"""Fields of a profile for the stages of a step: plan, propose, select, verify, accept, append, commit, observe."""


class StepClock(list[float]):
    """Times at which a decode step began and its stages ended."""

    def __init__(self) -> None:
        super().__init__((perf_counter(),))

    def enter(self, profile: StepProfile) -> StepSeconds:
        """Add the time of every stage to a profile, and return the seconds of the step."""
        fields, start = profile.__dict__, self[0]
        for name, end in zip(STAGES, self[1:], strict=True):
            fields[name] += end - start
            start = end
        drafting, governing = self[2] - self[1] + self[8] - self[7], self[1] - self[0] + self[3] - self[2]
        return StepSeconds(drafting, self[8] - self[0] - drafting - governing, governing)
