"""How many drafted tokens are accepted: as observed, and as if every token had the same independent chance."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

from foredraft.bench.arms import EngineArm
from foredraft.bench.report import Column, Line, Table
from foredraft.bench.trial import Sampling

_MAX_LISTED = 7
"""Lengths and positions that are listed one by one; the last column has all that are longer."""


def expected_length(rate: float, num_drafted: int) -> float:
    """Tokens that a step emits on average when each drafted one is accepted with the same chance, whatever went before.

    Source: Leviathan et al. 2022, arXiv:2211.17192, equation 1: (1 - rate^(K + 1)) / (1 - rate), the bonus included;
    the accepted ones follow a geometric law that is cut off at K.

    Args:
      rate: chance of acceptance, 0..1.
      num_drafted: K, 0 or more.

    At rate 0.5 and K = 2: 1 + 0.5 + 0.25 = 1.75.
    """
    return sum(rate**accepted for accepted in range(num_drafted + 1))


def wilson(found: float, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    share, z = found / total, 1.96
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Position:
    """The outcome of the drafted tokens in one place of their drafts, where all before them were accepted.

    Args:
      position: 1 for the first drafted token.
      num_tested: drafts that came so far.
    """

    position: int
    num_tested: int
    rate: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % for the rate (Wilson's), as if steps were independent of each other. For 1 of 2: 0.095 to 0.905."""
        return wilson(self.rate * self.num_tested, self.num_tested)


def by_position(steps: Iterable[tuple[int, int, int]]) -> Iterator[Position]:
    """The chance of every position, as deep as anything was tried.

    Args:
      steps: as of `AcceptedLengths`.
    """
    known = list(steps)
    for position in range(1, max((drafted for drafted, _, _ in known), default=0) + 1):
        reached = [(kept, count) for drafted, kept, count in known if drafted >= position and kept >= position - 1]
        num_tested = sum(count for _, count in reached)
        if num_tested:
            yield Position(position, num_tested, sum(count for kept, count in reached if kept >= position) / num_tested)


@dataclass(frozen=True)
class AcceptedLengths:
    """Steps of an arm by what they drafted and accepted.

    The last step of a text is left out: the end of the text cuts it short, and not the target.

    Args:
      arm, sampling: whose steps these are.
      num_prompts: that they are from.
      steps: (tokens drafted on a chain, accepted ones, how many such steps); steps without a draft are not among them.
    """

    arm: str
    sampling: str
    num_prompts: int
    steps: tuple[tuple[int, int, int], ...]

    @property
    def num_steps(self) -> int:
        return sum(count for _, _, count in self.steps)

    @property
    def mean_drafted(self) -> float:
        return self._mean(lambda drafted, accepted: drafted)

    @cached_property
    def rate(self) -> float:
        """The chance of a token that came to be tested: accepted by accepted and rejected.

        The likeliest chance, if there were one for all. Not the acceptance rate, which divides by all that was drafted.
        """
        num_accepted = sum(accepted * count for _, accepted, count in self.steps)
        num_rejected = sum(count for drafted, accepted, count in self.steps if accepted < drafted)
        return num_accepted / max(1, num_accepted + num_rejected)

    @property
    def observed(self) -> float:
        """Tokens per step that drafted, the bonus included."""
        return self._mean(lambda drafted, accepted: 1 + accepted)

    @property
    def expected(self) -> float:
        """The same by the formula, at `rate` and the length of every draft."""
        return self._mean(lambda drafted, accepted: expected_length(self.rate, drafted))

    @property
    def expected_from_first(self) -> float:
        """The same at the rate of first positions, which is what drafts of one token would show."""
        rate = self.positions[0].rate if self.steps else 0.0
        return self._mean(lambda drafted, accepted: expected_length(rate, drafted))

    @property
    def histogram(self) -> dict[int, float]:
        """Accepted tokens -> share of the steps."""
        found: Counter[int] = Counter()
        for _, accepted, count in self.steps:
            found[accepted] += count
        return {length: found[length] / self.num_steps for length in range(max(found, default=-1) + 1)}

    @property
    def expected_histogram(self) -> dict[int, float]:
        """The same by the truncated geometric law, at `rate` and the length of every draft."""
        found: defaultdict[int, float] = defaultdict(float)
        for drafted, _, count in self.steps:
            for length in range(drafted):
                found[length] += self.rate**length * (1 - self.rate) * count
            found[drafted] += self.rate**drafted * count
        return {length: found[length] / self.num_steps for length in range(max(found, default=-1) + 1)}

    @property
    def distance(self) -> float:
        """Total variation between both histograms, 0..1: the share of steps that would have to change."""
        lengths = self.histogram.keys() | self.expected_histogram.keys()
        return sum(abs(self.histogram.get(n, 0.0) - self.expected_histogram.get(n, 0.0)) for n in lengths) / 2

    @property
    def positions(self) -> tuple[Position, ...]:
        """The chance by position. Were acceptances independent, it would be the same everywhere."""
        return tuple(by_position(self.steps))

    def _mean(self, value: Callable[[int, int], float]) -> float:
        total = sum(value(drafted, accepted) * count for drafted, accepted, count in self.steps)
        return total / max(1, self.num_steps)


def accepted_lengths(
    arm: EngineArm, prompts: Iterable[Seq[int]], max_new_tokens: int, sampling: Sampling
) -> AcceptedLengths:
    """Decode prompts one after another with an arm that drafts chains, and count its steps.

    Raises: what a row ended with, if that is an error.
    """
    found: Counter[tuple[int, int]] = Counter()
    num_prompts = 0
    for prompt in prompts:
        steps = arm.run(prompt, max_new_tokens, sampling).trace[:-1]
        found.update((step.drafted, step.accepted) for step in steps if step.drafted)
        num_prompts += 1
    return AcceptedLengths(
        arm.name, sampling.label, num_prompts, tuple((*step, count) for step, count in sorted(found.items()))
    )


def shown(found: Seq[AcceptedLengths]) -> Iterator[Table | Line]:
    """Lengths by formula and as observed, the histograms of both, and the chance by position."""

    def three(value: Callable[[AcceptedLengths], float]) -> Callable[[AcceptedLengths], str]:
        return lambda one: f"{value(one):.3f}"

    whose = [Column("arm", lambda one: one.arm, is_text=True), Column("law", lambda one: one.sampling, is_text=True)]
    means = [
        Column("drafts", lambda one: str(one.num_steps)),
        Column("K", lambda one: f"{one.mean_drafted:.1f}"),
        Column("rate", three(lambda one: one.rate)),
        Column("tokens", three(lambda one: one.observed)),
        Column("for-\nmula", three(lambda one: one.expected)),
        Column("by\nfirst", three(lambda one: one.expected_from_first)),
        Column("dis-\ntance", three(lambda one: one.distance)),
    ]
    yield Table("tokens per step that drafted, observed and by formula", [*whose, *means], found)
    rows = []
    for one in found:
        rows.append([one.arm, one.sampling, "seen", *_listed(one.histogram)])
        rows.append(["", "", "formula", *_listed(one.expected_histogram)])
        rates = {place.position: f"{place.rate:.2f}" for place in one.positions}
        rows.append(["", "", "next", *(rates.get(place, "") for place in range(1, _MAX_LISTED + 1)), ""])
    heads = ("arm", "law", "", *map(str, range(_MAX_LISTED)), f"{_MAX_LISTED}+")
    columns = [
        Column(head, lambda row, place=place: row[place], is_text=place < 2)  # type: ignore[misc]
        for place, head in enumerate(heads)
    ]
    yield Table("share of the steps by accepted tokens; next: chance of the token after so many", columns, rows)
    yield Line(
        "rate: accepted by accepted and rejected tokens; formula: sum of rate^0 to rate^K, every token with that "
        "chance whatever went before; by first: at the rate of first tokens; distance: share of the steps that would "
        "have to change for the formula to hold",
        "dim",
    )


def _listed(shares: Mapping[int, float]) -> list[str]:
    """Shares of the first few lengths, and of all longer ones; nothing behind the longest."""
    each = [f"{shares[length]:.3f}" if length in shares else "" for length in range(_MAX_LISTED)]
    longer = [share for length, share in shares.items() if length >= _MAX_LISTED]
    return [*each, f"{sum(longer):.3f}" if longer else ""]
