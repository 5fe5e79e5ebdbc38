"""The speed of methods over all kinds of Spec-Bench at once: the geometric mean of the kinds, with an interval.

    python benchmarks/mean_speed.py --prompts-file question.jsonl --methods suffix suffix+eagle3
        [--prompts-per-kind 4] [--repeats 2] [--max-new-tokens 48] [--out speeds.json]

Arms, prompts and turns are those of `by_kind.py`. Of the repeats of a prompt the least counts, in plain decoding, too,
so that a pause of the machine is nobody's. A kind is the ratio of sums over its prompts; the interval is a bootstrap
that draws prompts within every kind.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from pathlib import Path

from by_kind import KINDS, Table

from foretoken.bench.provenance import provenance

Seconds = dict[str, list[float]]
"""By kind, of every prompt."""


def speed(plain: list[float], other: list[float]) -> float:
    return sum(plain) / sum(other)


def mean(plain: Seconds, other: Seconds) -> float:
    """The geometric mean over kinds."""
    return math.exp(sum(math.log(speed(plain[kind], other[kind])) for kind in plain) / len(plain))


def interval(plain: Seconds, other: Seconds) -> tuple[float, float]:
    """95 % of the mean over prompts drawn again and again within every kind."""
    rng, means = random.Random(0), list[float]()
    for _ in range(2000):
        drawn = {kind: [rng.randrange(len(times)) for _ in times] for kind, times in plain.items()}
        chosen = [{kind: [times[kind][i] for i in drawn[kind]] for kind in drawn} for times in (plain, other)]
        means.append(mean(*chosen))
    means.sort()
    return means[50], means[1949]


def measured(table: Table, temperature: float) -> tuple[dict[str, Seconds], dict[str, int]]:
    """The least seconds by arm, and how many texts were those of plain decoding."""
    arms = table.arms()
    seconds: dict[str, Seconds] = {arm.name: defaultdict(list) for arm in arms}
    same: dict[str, int] = defaultdict(int)
    for kind, prompts in table.prompts.items():
        for arm in arms:
            table._decode(arm, prompts[0].token_ids, temperature, 0)
        for number, prompt in enumerate(prompts):
            times: dict[str, list[float]] = defaultdict(list)
            texts: dict[str, list[list[int]]] = defaultdict(list)
            for repeat in range(table.options.repeats):
                for arm in arms if repeat % 2 == 0 else reversed(arms):
                    time, output = table._decode(arm, prompt.token_ids, temperature, number)
                    times[arm.name].append(time)
                    texts[arm.name].append(output)
            for arm in arms:
                seconds[arm.name][kind].append(min(times[arm.name]))
                same[arm.name] += texts[arm.name] == texts["plain"]
        print(kind, {n: round(speed(seconds["plain"][kind], s[kind]), 2) for n, s in seconds.items()}, file=sys.stderr)
        if table.options.out:
            found = {"conditions": provenance(), "seconds": seconds, "same": same}
            table.options.out.write_text(json.dumps(found, indent=1))
    return seconds, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts-file", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["suffix", "suffix+token_recycling", "eagle3", "suffix+eagle3"])
    for name, value in (("model", "zoo:smollm2"), ("dtype", "bfloat16"), ("execution", "auto")):
        parser.add_argument(f"--{name}", default=value)
    for name, number in (("prompts-per-kind", 4), ("repeats", 2), ("max-new-tokens", 48), ("max-prompt-tokens", 900)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(draft_model=None, scale=None, kinds=list(KINDS))
    options = parser.parse_args()
    table = Table(options)
    seconds, same = measured(table, options.temperature)
    print("| method | " + " | ".join(table.prompts) + " | geometric mean (95 %) | same texts |")
    print("|---|" + "---|" * (len(table.prompts) + 2))
    total = sum(map(len, table.prompts.values()))
    for name, times in seconds.items():
        if name != "plain":
            kinds = " | ".join(f"{speed(seconds['plain'][kind], times[kind]):.2f}" for kind in times)
            low, high = interval(seconds["plain"], times)
            found = f"{mean(seconds['plain'], times):.2f} ({low:.2f}-{high:.2f})"
            print(f"| `{name}` | {kinds} | {found} | {same[name]}/{total} |", flush=True)


if __name__ == "__main__":
    main()
