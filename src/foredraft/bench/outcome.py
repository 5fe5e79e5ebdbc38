"""The outcome of a comparison of methods: equality and figures of every method, and a recommendation."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from foredraft.bench.equality import Equality
from foredraft.bench.report import NOTHING, WHY_NOTHING, Column, figure, load_lines, percent, table
from foredraft.bench.trial import Comparison, bootstrap
from foredraft.engine.stats import counted

MIN_PROMPTS = 6
"""Smallest number of prompts for which the smallest and largest ratio enclose the median with a chance of 95 % (1 - 2 /
2^n)."""

NO_DRAFTING: Mapping[str, Any] = {"method": "none"}

_LOOPING = 0.25
"""Share of repeated text above which lookup methods look better than they are."""

_HELD_BACK = 0.5
"""Share of steps that the governor decodes plainly, above which the figures of a method say little about its drafts."""

_SHOWN_PER_KIND = 3


@dataclass(frozen=True)
class RefusedMethod:
    """A method that cannot be used with this model, and the reason."""

    method: str
    reason: str


@dataclass(frozen=True)
class MethodRow:
    """The results of one method. Figures are None if the method's tokens differ from plain decoding, or if nothing was
    timed.

    Args:
      given: the speculative config.
      comparison: speed relative to plain decoding.
      prompt_ratios: the same ratio for every prompt; None if the first step emitted all tokens.
      tokens_per_step: tau, bonus included.
      nodes_per_step: verified nodes per step, pending token included.
      draft_seconds: seconds per step for proposing and observing.
      memory_bytes: growth of the process when the method was loaded and first run. It includes the method's own
        key-value cache of the target. None if the system does not report it.
      equality: comparison of the method's tokens with plain decoding; None if only the distribution is the same.
      lossless: True if the acceptance rule keeps the distribution of the target.
      drafted_share: share of the steps that verified a draft.
      governed_share: share of the steps in which the governor decided to decode plainly.
    """

    method: str
    given: Mapping[str, Any]
    tokens_per_second: float | None
    comparison: Comparison | None
    prompt_ratios: tuple[float | None, ...]
    tokens_per_step: float
    acceptance_rate: float | None
    nodes_per_step: float
    draft_seconds: float
    memory_bytes: int | None
    equality: Equality | None
    lossless: bool = True
    drafted_share: float = 0.0
    governed_share: float = 0.0

    @property
    def is_timed(self) -> bool:
        return self.comparison is not None and self.comparison.num_prompts > 0


@dataclass(frozen=True)
class MethodsOutcome:
    """All results of a comparison.

    Args:
      kinds: kind of every prompt, in order.
      num_prompts_planned: number of prompts including those that an interrupted run did not reach.
      guarantee: the guarantee against which equality was judged, in words.
      repeated_share: share of plain decoding's tokens that are inside repeated 8-grams.
      different: methods whose tokens differ from plain decoding by more than the guarantee allows.
      is_forced: True if no governor ran.
    """

    sampling: str
    kinds: tuple[str, ...]
    num_prompts_planned: int
    runs_per_prompt: int
    other_cpu_share: float
    guarantee: str
    repeated_share: float
    plain: MethodRow
    rows: tuple[MethodRow, ...]
    different: tuple[Equality, ...]
    refused: tuple[RefusedMethod, ...]
    is_forced: bool = False

    @property
    def num_prompts(self) -> int:
        return len(self.kinds)

    def shown(self, model: str, notes: tuple[str, ...] = ()) -> Iterator[Group | Text]:
        """Yield tables and lines with all results, the recommendation last.

        Args:
          model: name of the model as given by the user.
          notes: remarks about the model.
        """
        found = by_kind(self)
        name = "methods without the governor" if self.is_forced else "methods"
        title = f"{name}: {self.sampling}, {counted(self.num_prompts, 'prompt')}"
        rows = (self.plain, *ranked(self), *(row for row in self.rows if not row.is_timed))
        yield table(title + (f" of {len(found)} kinds" if len(found) > 1 else ""), _COLUMNS, rows)
        yield Text(self._legend(), "dim")
        if (held_back := governor_note(self.rows)) is not None:
            yield Text(f"note: {held_back}")
        yield from load_lines(self.other_cpu_share)
        yield from self._equality()
        if len(found) > 1:
            yield table("by kind of prompt: x plain, the fastest first", _KIND_COLUMNS, found, is_wide=True)
        if self.refused:
            yield table("methods that cannot be used with this model", _REFUSED_COLUMNS, self.refused, is_wide=True)
        advice = advise(self)
        yield Text(f"\nrecommended: {advice.reason}")
        for line in usage(advice.config, model):
            yield Text(f"  {line}", no_wrap=True)
        for note in (*advice.notes, *notes):
            yield Text(f"note: {note}")

    def _legend(self) -> str:
        interval = " (95 % interval)" if self.num_prompts > 1 else ""
        parts = [
            f"x plain: speed relative to plain decoding, median of the prompts{interval}, "
            f"{counted(self.runs_per_prompt, 'interleaved run')} each",
            "tau: tokens per step",
            "acc.: share of drafted tokens that were accepted",
            "nodes: verified per step",
            "draft: proposing and observing, per step",
            "MB: memory added by loading and a first run, with the method's own key-value cache",
            "same: prompts with the tokens of plain decoding",
        ]
        if not all(row.is_timed for row in self.rows):
            parts.append(WHY_NOTHING)
        return "; ".join(parts)

    def _equality(self) -> Iterator[Text]:
        """Yield the guarantee, the number of outputs that differ from plain decoding, and the largest gap."""
        judged = [row.equality for row in self.rows if row.equality is not None]
        if judged:
            total, parted = sum(one.num_prompts for one in judged), sum(len(one.divergences) for one in judged)
            gap = max(one.largest_gap for one in judged)
            others = f"; {parted} differ, with gaps of at most {gap:.2g} in logits" if parted else ""
            same = f"Outputs with the tokens of plain decoding: {total - parted} of {total}{others}"
            yield Text(f"guarantee: {self.guarantee}. {same}")
        for one in self.different:
            first = one.divergences[0]
            yield Text(
                f"{one.arm} differs from plain decoding on {one.num_prompts - one.num_identical} of "
                f"{one.num_prompts} prompts, first on {first.prompt} at token {first.position} (gap {first.gap:.3g}). "
                "The guarantee requires equal tokens, so no speed is shown for it",
                "red",
            )


@dataclass(frozen=True)
class KindRow:
    """The methods on the prompts of one kind, the fastest first, with medians of their speed relative to plain
    decoding."""

    kind: str
    num_prompts: int
    ratios: tuple[tuple[str, float], ...]


def same_of(found: Equality | None) -> str:
    """Return the number of identical prompts out of all, such as "3/4"."""
    return "" if found is None else f"{found.num_identical}/{found.num_prompts}"


def _best(row: KindRow) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in row.ratios[:_SHOWN_PER_KIND]) or NOTHING


_COLUMNS = (
    Column("method", lambda row: row.method, is_text=True),
    Column("x plain", lambda row: "1" if row.comparison is None else str(row.comparison)),
    Column("tok/s", lambda row: NOTHING if row.tokens_per_second is None else figure(row.tokens_per_second, 1)),
    Column("tau", lambda row: figure(row.tokens_per_step)),
    Column("acc.", lambda row: percent(row.acceptance_rate)),
    Column("nodes", lambda row: figure(row.nodes_per_step, 1)),
    Column("draft\nms", lambda row: figure(row.draft_seconds * 1e3)),
    Column("MB", lambda row: "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:.0f}"),
    Column("same", lambda row: same_of(row.equality)),
)
_KIND_COLUMNS = (
    Column("kind", lambda row: row.kind, is_text=True),
    Column("prompts", lambda row: str(row.num_prompts)),
    Column("methods", _best, is_text=True),
)
_REFUSED_COLUMNS = (
    Column("", lambda refused: refused.method, is_text=True),
    Column("", lambda refused: refused.reason, is_text=True),
)


def governor_note(rows: Iterable[MethodRow]) -> str | None:
    """Return a note on the methods that drafted in under half of the steps because of the governor; None if there are
    none."""
    held_back = [row for row in rows if row.governed_share > _HELD_BACK]
    if not held_back:
        return None
    first, *others = (f"{row.method} drafted in {row.drafted_share:.0%}" for row in held_back)
    shares = ", ".join([f"{first} of the steps", *others])
    return (
        f"{shares}: the governor decoded plainly in most steps, where drafts were not worth their cost; --forced "
        f"measures {'them' if others else 'it'} without the governor"
    )


def ranked(outcome: MethodsOutcome) -> list[MethodRow]:
    """Return the methods that were timed, the fastest first."""
    timed = [row for row in outcome.rows if row.is_timed]
    return sorted(timed, key=lambda row: -row.comparison.ratio if row.comparison else 0.0)


def by_kind(outcome: MethodsOutcome) -> list[KindRow]:
    """Return the speed of the methods on each kind of prompt, so that users can look at the kind closest to theirs."""
    rows = []
    for kind in dict.fromkeys(outcome.kinds):
        places = [place for place, other in enumerate(outcome.kinds) if other == kind]
        found = []
        for row in ranked(outcome):
            ratios = [ratio for place in places if (ratio := row.prompt_ratios[place]) is not None]
            if ratios:
                found.append((row.method, statistics.median(ratios)))
        rows.append(KindRow(kind, len(places), tuple(sorted(found, key=lambda pair: -pair[1]))))
    return rows


# -- advice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """A recommended config.

    Args:
      config: value for ``--speculative-config`` or ``speculative_config=``; plain decoding if no method is faster.
      reason: reason in one sentence.
      notes: doubts about the recommendation.
    """

    config: Mapping[str, Any]
    reason: str
    notes: tuple[str, ...]


def advise(outcome: MethodsOutcome) -> Advice:
    """Choose the method with the largest median ratio, if it is clearly above 1; plain decoding otherwise."""
    timed = ranked(outcome)
    notes = []
    if outcome.num_prompts < outcome.num_prompts_planned:
        notes.append(f"interrupted after {outcome.num_prompts} of {outcome.num_prompts_planned} prompts")
    if not timed:
        return Advice(NO_DRAFTING, "nothing was timed, so there is nothing to recommend", tuple(notes))
    best = timed[0]
    assert best.comparison is not None
    ratio, num_timed = best.comparison.ratio, best.comparison.num_prompts
    if num_timed < MIN_PROMPTS:
        notes.append(
            f"{num_timed} {'prompt is' if num_timed == 1 else 'prompts are'} too few for a reliable result; use "
            f"--num-prompts {2 * MIN_PROMPTS} or more"
        )
    if outcome.repeated_share > _LOOPING:
        notes.append(
            f"{outcome.repeated_share:.0%} of the output is inside repeated 8-grams: the model repeats itself on these "
            "prompts, so lookup methods look faster than they would be on other prompts"
        )
    if ratio <= 1:
        reason = f"no method beats plain decoding: the best, {best.method}, runs at {best.comparison} times its speed"
        return Advice(NO_DRAFTING, reason, tuple(notes))
    if best.comparison.low <= 1 and num_timed > 1:
        reason = (
            f"no method clearly beats plain decoding: the best, {best.method}, runs at {best.comparison} times its "
            "speed, which may be chance"
        )
        if num_timed >= MIN_PROMPTS:
            notes.append(f"more prompts may give a clear result: --num-prompts {2 * num_timed}")
        return Advice(NO_DRAFTING, reason, tuple(notes))
    notes += [note for other in timed[1:] if (note := _tie(best, other)) is not None]
    reason = f"{best.method} runs at {best.comparison} times the speed of plain decoding"
    return Advice(best.given, reason, tuple(notes))


def _tie(best: MethodRow, other: MethodRow) -> str | None:
    """Return a sentence if the prompts cannot separate two methods. Ratios are paired: prompts differ more than
    methods."""
    pairs = zip(best.prompt_ratios, other.prompt_ratios, strict=True)
    ratios = [one / two for one, two in pairs if one is not None and two is not None]
    if len(ratios) < 2:
        return None
    low, high = bootstrap(ratios, statistics.median)
    if low > 1 and len(ratios) >= MIN_PROMPTS:
        return None
    middle = statistics.median(ratios)
    return (
        f"{len(ratios)} prompts are too few to separate {best.method} from {other.method} "
        f"({middle:.2f} times as fast, {low:.2f}-{high:.2f})"
    )


def usage(config: Mapping[str, Any], model: str) -> list[str]:
    """Return lines that show how to use a config, on the command line and in Python."""
    text = json.dumps(dict(config))
    return [
        f"foredraft generate -m {shlex.quote(model)} --speculative-config {shlex.quote(text)} ...",
        f"LLM({model!r}, speculative_config={dict(config)!r})",
    ]
