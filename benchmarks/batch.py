"""Throughput by batch size: which method, and which number of draft tokens, pays at which batch.

    python benchmarks/batch.py [--batch-sizes 1 2 4 8] [--draft-lengths 1 2 3 4 5] [--methods ngram suffix] \
        [--model zoo:smollm2] [--dtype bfloat16] [--groups 3] [--group-size 8] [--max-new-tokens 32] [--temperature 0]
        [--out batch.json]

A toy is inflated in width to 98.6 M parameters; without a drafter there are no draft lengths to try. Prompts of all
kinds at their own lengths (ragged). Every arm is one method at one batch size and decodes the same group of prompts,
all arms interleaved (A B B A) per group; ends of text are passed over. Ratios are medians of the groups with their
95 % intervals: "by one" against the same method one by one, "by plain" against plain decoding at the same batch. Rows
that leave plain decoding's text are counted. Results so far are written after every group.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from groups import GroupArm, groups_of, tau

from foretoken import zoo
from foretoken.bench.arms import Sampling
from foretoken.bench.lineup import PLAIN
from foretoken.bench.measure import Trial, compare, interleave
from foretoken.bench.models import load_pair
from foretoken.bench.provenance import provenance
from foretoken.bench.report import plain_data
from foretoken.bench.settings import Settings
from foretoken.bench.suite import Suite
from foretoken.config.engine import EngineConfig


def speculations(options: argparse.Namespace, suite: Suite) -> dict[str, dict[str, Any]]:
    """Plain, the drafter at every length, and the other methods at their defaults."""
    drafter = {
        f"draft_model, K = {length}": {"method": "draft_model", "num_speculative_tokens": length}
        for length in (options.draft_lengths if suite.lineup.drafter is not None else ())
    }
    return {PLAIN: {"method": "none"}, **drafter, **{method: {"method": method} for method in options.methods}}


def name_of(method: str, size: int) -> str:
    return f"{method}, batch {size}"


def rows(trial: Trial, methods: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    expected = trial.outputs(name_of(PLAIN, 1))
    found = []
    for size, method in product(options.batch_sizes, methods):
        name = name_of(method, size)
        length = options.max_new_tokens
        same = sum(
            wanted[start : start + length] == got[start : start + length]
            for wanted, got in zip(expected, trial.outputs(name), strict=True)
            for start in range(0, len(wanted), length)
        )
        found.append(
            {
                "method": method, "batch_size": size, "tokens_per_second": trial.tokens_per_second(name),
                "tau": tau(trial.runs[name]),
                "by_one": compare(trial, name, name_of(method, 1)),
                "by_plain": compare(trial, name, name_of(PLAIN, size)),
                "num_same_rows": same, "num_rows": len(expected) * options.group_size,
            }
        )  # fmt: skip
    return found


def show(found: list[dict[str, Any]], title: str) -> None:
    print(f"\n{title}\n\n| batch | method | tok/s | by one | by plain | tau | same rows |\n|" + "---|" * 7)
    for row in found:
        print(
            f"| {row['batch_size']} | {row['method']} | {row['tokens_per_second']:.1f} "
            f"| {row['by_one']} | {row['by_plain']} | {row['tau']:.2f} | {row['num_same_rows']}/{row['num_rows']} |"
        )
    for size in dict.fromkeys(row["batch_size"] for row in found):
        best = max((row for row in found if row["batch_size"] == size), key=lambda row: row["by_plain"].ratio)
        print(f"best at batch {size}: {best['method']} ({best['by_plain'].ratio:.2f} of plain)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=zoo.default())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--methods", nargs="*", default=["ngram", "suffix"])
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scale", help="none, 100m or HIDDENxFFN; 100m for a toy by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if 1 not in options.batch_sizes:
        options.batch_sizes.insert(0, 1)
    settings = Settings(max_new_tokens=options.max_new_tokens)
    is_toy = options.model.startswith(zoo.PREFIX) and zoo.manifest(options.model).is_toy
    scale = options.scale or ("100m" if is_toy else "none")
    suite = Suite(load_pair(options.model, None, options.dtype), scale, settings)
    prompts = groups_of(suite, options.group_size, options.groups)
    methods = speculations(options, suite)
    arms = [
        GroupArm(name_of(method, size), suite, config, EngineConfig(max_num_seqs=size))
        for size, (method, config) in product(options.batch_sizes, methods.items())
    ]
    result: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "models": suite.pair.label}
    result["conditions"] = provenance()

    def note(trial: Trial) -> None:
        found = rows(trial, list(methods), options)
        result["table"] = plain_data({"num_groups": len(trial.prompts), "other_cpu_share": trial.other_cpu_share,
                                      "rows": found})  # fmt: skip
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{len(trial.prompts)}/{len(prompts)} groups, others used {trial.other_cpu_share:.0%}", file=sys.stderr,
              flush=True)  # fmt: skip

    sampling = Sampling(temperature=options.temperature, seed=1, ignore_eos=True)
    trial = interleave(arms, prompts, sampling, options.max_new_tokens, options.repeats, note)
    title = f"{suite.pair.label}, {sampling.label}, others used {trial.other_cpu_share:.0%}"
    show(rows(trial, list(methods), options), title)


if __name__ == "__main__":
    main()
