"""Accepted lengths for people."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from rich.console import Console

from foretoken.bench.accepted import AcceptedLengths
from foretoken.bench.report import show_table, table_of

_MAX_LISTED = 7
"""Lengths and positions that are listed one by one; the last column has all that are longer."""


def show_accepted(console: Console, found: Seq[AcceptedLengths]) -> None:
    """Lengths by formula and as observed, the histograms of both, and the chance by position."""
    heads = ("arm", "law", "drafts", "K", "rate", "tokens", "for-\nmula", "by\nfirst", "dis-\ntance")
    means = table_of(heads, ("arm", "law"))
    for one in found:
        means.add_row(
            one.arm,
            one.sampling,
            str(one.num_steps),
            f"{one.mean_drafted:.1f}",
            *(f"{value:.3f}" for value in (one.rate, one.observed, one.expected, one.expected_from_first)),
            f"{one.distance:.3f}",
        )
    show_table(console, "tokens per step that drafted, observed and by formula", means)
    places = [*map(str, range(_MAX_LISTED)), f"{_MAX_LISTED}+"]
    shares = table_of(("arm", "law", "", *places), ("arm", "law"))
    for one in found:
        shares.add_row(one.arm, one.sampling, "seen", *_listed(one.histogram))
        shares.add_row("", "", "formula", *_listed(one.expected_histogram))
        rates = {place.position: place.rate for place in one.positions}
        shown = [f"{rates[place]:.2f}" if place in rates else "" for place in range(1, _MAX_LISTED + 1)]
        shares.add_row("", "", "next", *shown)
    show_table(console, "share of the steps by accepted tokens; next: chance of the token after so many", shares)
    console.print(
        "[dim]rate: accepted by accepted and rejected tokens; formula: sum of rate^0 to rate^K, every token with that "
        "chance whatever went before; by first: at the rate of first tokens; distance: share of the steps that would "
        "have to change for the formula to hold[/dim]"
    )


def _listed(shares: Mapping[int, float]) -> list[str]:
    """Shares of the first few lengths, and of all longer ones; nothing behind the longest."""
    shown = [f"{shares[length]:.3f}" if length in shares else "" for length in range(_MAX_LISTED)]
    longer = [share for length, share in shares.items() if length >= _MAX_LISTED]
    return [*shown, f"{sum(longer):.3f}" if longer else ""]
