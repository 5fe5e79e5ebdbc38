"""Whether a method drafts and whether that pays, as far as a running engine can tell: one line where it does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace

from foredraft.engine.budget import NOTHING_FOUND, Cuts, counted
from foredraft.engine.outputs import RowOutput
from foredraft.engine.stats import SequenceStats, StepProfile

logger = logging.getLogger("foredraft")

MIN_STEPS = 64  # of rows that have ended, before anything is said
MIN_ROW_TOKENS = 16  # shorter rows have hardly a step that could draft
WARM_UP_STEPS = 8  # the first ones compile, pack and load, and are not timed
MIN_PLAIN_STEPS = 8  # without a draft, before their time counts as that of plain decoding
NEAR_ONE = 1.1  # tokens per step; a step that drafts costs that much more than a plain one on most machines
SURELY_SLOWER = 0.95  # of the speed of plain decoding, at best
MOST_UNDRAFTED = 32  # steps kept from drafting, and no draft meanwhile, after which it is said what keeps them from it
MEASURED_SLOWER = 0.9  # of it, by steps at other contexts than those that drafted

REMEDIES = {
    "governor": "By measured costs plain decoding is faster so far; it goes on trying, and length_policy='fixed' "
    "drafts all the same.",
    "bits": "A larger strict_width leaves more room, exactness='default' all of it.",
    "memory": "A larger max_kv_bytes leaves more room.",
    "budget": "A larger max_tokens leaves more room.",
    "context": "Drafting goes on for shorter texts; a draft model with a longer context, or a method without a model, "
    "drafts for all.",
}


@contextmanager
def unsaid() -> Iterator[None]:
    """Say nothing meanwhile of what drafting pays: no news where drafts are forced and only their tokens matter."""
    logger.addFilter(_is_no_payoff)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_payoff)


def _is_no_payoff(record: logging.LogRecord) -> bool:
    return record.pathname != __file__


@dataclass
class SingleRowTimes:
    """Times of steps with one row in them, which compare with one another; those of batches do not.

    Args:
      num_tokens, seconds: of all of them.
      num_plain_steps, plain_seconds: of those without a draft, since nothing was found or no room was left: what plain
        decoding takes.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    num_plain_steps: int = 0
    plain_seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float, *, is_plain: bool) -> None:
        self.num_tokens += num_tokens
        self.seconds += seconds
        if is_plain:
            self.num_plain_steps += 1
            self.plain_seconds += seconds

    @property
    def speed(self) -> float | None:
        """Relative to plain decoding; None where too few steps had no draft."""
        if self.num_plain_steps < MIN_PLAIN_STEPS:
            return None
        return self.num_tokens * (self.plain_seconds / self.num_plain_steps) / self.seconds


def describe_cuts(cuts: Cuts) -> str:
    """Why steps had no draft, in counts: what was cut or held back, and how often nothing was found."""
    nothing, held = cuts.steps[NOTHING_FOUND], cuts.describe()
    found = f"it has found nothing to draft in {counted(nothing, 'step')}" if nothing else ""
    return ", ".join(part for part in (found, held) if part)


class PayoffWatch:
    """Counts what rows gained by drafting; says once that it does not pay, and once what keeps a method from drafting.

    Near one token per step there is nothing to gain. Since verifying a draft takes at least as long as a plain step,
    the speed is at most tokens per step times the share of the time that is not spent on drafting. And where enough
    steps had no draft, their time is that of plain decoding. That a draft pays is never claimed: only a race can tell.

    Args:
      method: as one would write it.
      num_draft_tokens: longest draft.
      model: for the command that measures.
    """

    def __init__(self, method: str, num_draft_tokens: int, model: str = "MODEL") -> None:
        self._method = method
        self._num_draft_tokens = num_draft_tokens
        self._model = model
        self._stats = SequenceStats()
        self._times = SingleRowTimes()
        self._warm_up = StepProfile()
        self._before: tuple[int, int] = (-1, 0)  # of the row that ran last, alone: its id, and steps that drafted
        self._undrafted = Cuts()  # of the newest steps, as far back as none of them verified a draft
        self._has_told = False
        self._is_done = method == "none" or num_draft_tokens == 0

    def step(self, outputs: Seq[RowOutput], seconds: float, profile: StepProfile) -> None:
        """A step has run, with these rows; a prefill has none. Costs about a microsecond."""
        if self._is_done or not outputs:
            return
        if profile.num_steps <= WARM_UP_STEPS:
            self._warm_up = replace(profile)
        for output in outputs:
            self._note(output.row.stats.cuts)
        if not self._has_told and self._undrafted.num_held_steps >= MOST_UNDRAFTED:
            self._tell_what_holds()
        if len(outputs) > 1:
            return
        row = outputs[0].row
        row_id, num_spec_steps = self._before
        self._before = row.id, row.stats.num_spec_steps
        if row_id == row.id and profile.num_steps > WARM_UP_STEPS:
            is_plain = row.stats.num_spec_steps == num_spec_steps
            self._times.add(len(outputs[0].token_ids), seconds, is_plain=is_plain)

    def ended(self, stats: SequenceStats, profile: StepProfile) -> None:
        """A row has ended."""
        if self._is_done or stats.num_emitted_tokens < MIN_ROW_TOKENS:
            return
        self._stats.add(stats)
        if self._stats.num_steps < MIN_STEPS:
            return
        share = drafting_share(profile, self._warm_up)
        loss = describe_loss(self._method, self._stats, share, self._times.speed)
        if loss is not None and not (self._has_told and self._stats.num_draft_tokens == 0):
            self._is_done = True
            logger.warning("%s %s", loss, self._remedy())

    def _note(self, step: Cuts) -> None:
        """Take in why the newest step of a row had no draft; begin anew where it had one."""
        if step.latest == "request":
            return  # as asked
        if step.latest:
            self._undrafted.steps[step.latest] += 1
            self._undrafted.tokens.update(step.latest_tokens)
        elif self._undrafted.steps:
            self._undrafted = Cuts()

    def _tell_what_holds(self) -> None:
        """Name what keeps the method from drafting, once; that is no fault where it is the governor."""
        self._has_told = True
        cuts = self._undrafted
        level = logging.INFO if cuts.main_cause == "governor" else logging.WARNING
        held = f"method {self._method} has had no draft verified in {cuts.steps.total()} steps: {describe_cuts(cuts)}."
        logger.log(level, "%s %s", held, REMEDIES.get(cuts.main_cause) or self._remedy())

    def _remedy(self) -> str:
        shorter = self._num_draft_tokens // 2
        has_drafted = self._stats.num_draft_tokens > 0 and shorter > 0
        fewer = f"fewer tokens (num_speculative_tokens={shorter}), " if has_drafted else ""
        return (
            f"Try another method, {fewer}or method 'none'; foredraft bench --methods all --model {self._model} "
            "measures what pays."
        )


def describe_loss(method: str, stats: SequenceStats, share: float, speed: float | None = None) -> str | None:
    """Why drafting does not pay, or None where it may.

    Args:
      stats: of rows that have ended.
      share: of the time of decode steps, spent on drafting; see `drafting_share`.
      speed: relative to steps without a draft, where that was measured.
    """
    tokens = stats.tokens_per_step
    seen = f"{tokens:.2f} tokens per step over {stats.num_steps} steps"
    if stats.num_draft_tokens == 0:
        return f"method {method} cannot be faster than none here: {describe_cuts(stats.cuts)}."
    if tokens < NEAR_ONE:
        return (
            f"method {method} hardly pays so far: {seen} ({stats.num_accepted_draft_tokens} of "
            f"{stats.num_draft_tokens} drafted tokens were accepted), and a step that drafts costs more than a plain "
            "one."
        )
    if tokens * (1 - share) < SURELY_SLOWER:
        return (
            f"method {method} costs more than it saves so far: {seen}, but drafting takes {share:.0%} of the time, "
            f"which makes it {tokens * (1 - share):.2f} times as fast as plain decoding at best."
        )
    if speed is not None and speed < MEASURED_SLOWER:
        return (
            f"method {method} costs more than it saves so far: {seen}, but by the time of its steps without a draft "
            f"it is about {speed:.2f} times as fast as plain decoding."
        )
    return None


def drafting_share(profile: StepProfile, since: StepProfile) -> float:
    """Share of the time of decode steps since then that plain decoding does not need: proposing and observing."""
    drafting = profile.propose_seconds + profile.observe_seconds - since.propose_seconds - since.observe_seconds
    decoding = profile.decode_seconds - since.decode_seconds
    return drafting / decoding if decoding > 0 else 0.0
