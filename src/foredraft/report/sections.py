"""The sections of a report, one function for every kind of record."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from foredraft.bench.accepted import by_position
from foredraft.bench.trial import bootstrap
from foredraft.report.charts import Bar, Bars, FigureTable, Lines, Paragraph, Part, Section, section

Record = Mapping[str, Any]


def conditions(record: Record) -> Section:
    """Machine, versions and what was run."""
    facts = record.get("provenance", {})
    versions = ", ".join(f"{name} {number}" for name, number in (facts.get("versions") or {}).items() if number)
    rows = [
        ("models", record.get("models")),
        ("arithmetic", ", ".join(str(record[key]) for key in ("dtype", "execution") if record.get(key))),
        ("machine", facts.get("gpu") or facts.get("cpu")),
        ("threads", facts.get("num_threads")),
        ("versions", versions),
        ("commit", facts.get("commit")),
        ("command", facts.get("command")),
        ("time", facts.get("time")),
    ]
    return section("Conditions", FigureTable(("fact", "value"), [row for row in rows if row[1]]))


def methods(record: Record) -> Section:
    """A comparison: speed with intervals, over all prompts and by kind; memory; what does not apply."""
    timed = [row for row in record["rows"] if row["comparison"] and row["comparison"]["num_prompts"]]
    timed.sort(key=lambda row: -row["comparison"]["ratio"])
    parts: list[Part] = [
        Bars("Speed by plain decoding's, all prompts", [_speed(row["method"], row["comparison"]) for row in timed], 1.0)
    ]
    for kind in dict.fromkeys(record["kinds"]):
        found = []
        for row in timed:
            pairs = zip(record["kinds"], row["prompt_ratios"], strict=False)
            ratios = [ratio for other, ratio in pairs if other == kind and ratio is not None]
            if ratios:
                found.append(_median(row["method"], ratios))
        parts.append(Bars(f"Speed by plain decoding's, {kind}", found, 1.0))
    accepted = [Bar(row["method"], row["tokens_per_step"]) for row in timed]
    parts.append(Bars("Tokens per step", accepted, 1.0))
    held = [row for row in [record["plain"], *record["rows"]] if row["memory_bytes"] is not None]
    memory = [Bar(row["method"], row["memory_bytes"] / 1e6, said=f"{row['memory_bytes'] / 1e6:.0f} MB") for row in held]
    parts.append(Bars("Memory that loading and a first run added", memory))
    parts.append(
        FigureTable(("does not apply", "reason"), [(one["method"], one["reason"]) for one in record["refused"]])
    )
    for one in record["different"]:
        parts.append(Paragraph(f"{one['arm']} differs from plain decoding where equality is promised."))
    return section("Methods", *parts)


def verdict(record: Record) -> Section:
    """The sentence of verify, and its findings."""
    rows = [(one["feature"], one["check"], one["status"], one["found"]) for one in record["findings"]]
    said = [
        Paragraph(record["sentence"]),
        Paragraph(f"Promise: {record['promise']}") if record.get("promise") else None,
    ]
    return section(
        f"Verdict: {record['status']}", *said, FigureTable(("setting", "check", "status", "what was found"), rows)
    )


def info(record: Record) -> Section:
    """The cost curve of a model here."""
    points = {"here": [(float(width), cost) for width, cost in record["step_cost"].items()]}
    memory = record.get("peak_memory_bytes")
    return section(
        f"Cost curve: {record['model']['name']}",
        Lines("Cost of a step over k tokens, by that over one", points, "tokens of a step"),
        Paragraph(f"{memory / 1e6:.0f} MB of memory at most.") if memory else None,
    )


def profile(record: Record) -> Section:
    """Costs, acceptance and best lengths of tune and tune profile; of tune, why it chose, and what it compared."""
    compared = [_with_interval(one["name"], one["speedup"], one) for one in record.get("compared", ())]
    curves = {
        f"{one['num_rows']} rows, {one['context']}": [(float(at), taken * 1e3) for at, taken in one["seconds"].items()]
        for one in record["costs"]
    }
    rates = [Bar(f"position {place}", rate) for place, rate in enumerate(record["acceptance"], 1)]
    found = [
        _with_interval(
            f"{one['num_rows']} rows, {one['context']}, K = {one['num_speculative_tokens']}", one["speedup"], one
        )
        for one in record["settings"]
    ]
    return section(
        f"Profile of {record['method']}",
        Paragraph(record["sentence"]) if "sentence" in record else None,
        Bars("Expected speed by plain decoding's, of what was compared", compared, 1.0),
        Bars("Expected speed by plain decoding's, at the best length", found, 1.0),
        Lines("Cost curve: milliseconds of a step", curves, "tokens of a step and row"),
        Bars("Acceptance by position", rates),
    )


def trace(records: Seq[Record]) -> Section:
    """What all texts of a trace say together; the token view follows in the page."""
    steps = [step for record in records for step in record["steps"]]
    pooled = Counter((step["drafted"], step["accepted"]) for step in steps if step.get("drafted"))
    sources = Counter(source for step in steps for source in step["sources"])
    who = [
        Bar("the model itself" if name == "target" else name, count, said=f"{count} tokens")
        for name, count in sources.most_common()
    ]
    rates = [
        Bar(
            f"text {place}",
            record["timings"]["tokens_per_second"],
            said=f"{record['timings']['tokens_per_second']:.1f} per s",
        )
        for place, record in enumerate(records)
    ]
    memory = max((record.get("peak_memory_bytes") or 0 for record in records), default=0)
    governor = next((g for record in records if (g := record["metrics"].get("governor"))), None)
    said = f"{sum(sources.values())} tokens in {len(steps)} steps"
    parts = [Paragraph(said + (f"; {memory / 1e6:.0f} MB of memory at most." if memory else "."))]
    if governor and governor.get("decision"):
        parts.append(Paragraph(f"Governor: {governor['decision']}"))
    return section(
        "What was generated",
        *parts,
        Bars("Who proposed the tokens", who),
        Bars("Tokens per second", rates),
        *acceptance([(*step, count) for step, count in pooled.items()]),
    )


def acceptance(steps: Seq[Seq[int]]) -> Iterable[Part]:
    """Accepted lengths, and for each position the chance of a token that came to be tested, with its interval.

    Args:
      steps: tokens drafted, accepted ones, and the number of such steps.
    """
    if not steps:
        return
    lengths: Counter[int] = Counter()
    for _, kept, count in steps:
        lengths[kept] += count
    total = lengths.total()
    told = [Bar(str(kept), count, said=f"{count} ({count / total:.0%})") for kept, count in sorted(lengths.items())]
    yield Bars("Accepted lengths: steps by how many drafted tokens they kept", told)
    rates = [
        Bar(
            f"position {one.position}",
            one.rate,
            *one.interval,
            f"{round(one.rate * one.num_tested)} of {one.num_tested}",
        )
        for one in by_position((drafted, kept, count) for drafted, kept, count in steps)
    ]
    yield Bars("Acceptance by position, of the tokens that came to be tested", rates)


def _speed(label: str, one: Record) -> Bar:
    if one["num_prompts"] < 2:
        return Bar(label, one["ratio"], said=f"{one['ratio']:.2f}, one prompt")
    return _with_interval(label, one["ratio"], one)


def _with_interval(label: str, value: float, one: Record) -> Bar:
    low, high = one["low"], one["high"]
    return Bar(label, value, low, high, f"{value:.2f} ({low:.2f}-{high:.2f})")


def _median(label: str, ratios: Seq[float]) -> Bar:
    low, high = bootstrap(ratios, statistics.median)
    return _speed(label, {"ratio": statistics.median(ratios), "low": low, "high": high, "num_prompts": len(ratios)})


SECTIONS: Mapping[str, Callable[[Record], Section]] = {
    "conditions": conditions,
    "methods": methods,
    "verdict": verdict,
    "info": info,
    "profile": profile,
}
"""By kind of record."""
