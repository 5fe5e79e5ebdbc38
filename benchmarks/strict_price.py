"""What keeping the bits of rows costs: the same texts in every mode of exactness, interleaved, context by context.

    python benchmarks/strict_price.py [--model zoo:smollm2] [--dtypes float32 bfloat16] [--contexts 100 1000 4000]
        [--batch-sizes 1] [--methods none ngram] [--groups 3] [--max-new-tokens 24] [--out strict.json]
    python benchmarks/strict_price.py --model zoo:tiny --scale 100m --contexts 100 1000

"relaxed" runs every step at its own shape; "default" and "strict" run at shapes at which rows were measured to keep
their bits, the default in half precision only. No price is shown where a mode that promises equal tokens breaks its
promise. Ratios are relaxed seconds per token by those of the mode, below 1 where it costs: medians over groups of
prompts with 95 % intervals. Results so far are written after every group.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from groups import GroupArm, groups_of, tau

from foretoken.bench.arms import Sampling
from foretoken.bench.measure import Trial, compare, interleave
from foretoken.bench.models import load_pair
from foretoken.bench.provenance import provenance
from foretoken.bench.report import plain_data
from foretoken.bench.settings import Settings
from foretoken.bench.suite import Suite
from foretoken.config.engine import EngineConfig

MODES = ("relaxed", "default", "strict")
GREEDY = Sampling(ignore_eos=True)


def name_of(method: str, size: int, mode: str) -> str:
    return f"{method}, batch {size}, {mode}"


def arms_of(suite: Suite, options: argparse.Namespace) -> list[GroupArm]:
    """Every mode of every method at every batch size."""
    return [
        GroupArm(name_of(method, size, mode), suite, {"method": method}, EngineConfig(size, exactness=mode))
        for method, size, mode in product(options.methods, options.batch_sizes, MODES)
    ]


def rows(suite: Suite, trial: Trial, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line per method and batch size."""
    has_bucket = suite.target.kernel_facts(EngineConfig.strict_width).bucket is not None
    promising = ["strict"] + ["default"] * (has_bucket and suite.target.dtype.itemsize == 2)
    found = []
    for method, size in product(options.methods, options.batch_sizes):
        relaxed, *modes = (name_of(method, size, mode) for mode in MODES)
        line: dict[str, Any] = {"method": method, "batch_size": size, "tau": tau(trial.runs[relaxed])}
        for mode, arm in zip(MODES[1:], modes, strict=True):
            line[f"{mode}_by_relaxed"] = compare(trial, arm, relaxed)
            line[f"{mode}_speedup"] = compare(trial, arm, name_of("none", size, mode))
            line[f"{mode}_equals_plain"] = trial.outputs(arm) == trial.outputs(name_of("none", size, mode))
        line["relaxed_equals_plain"] = trial.outputs(relaxed) == trial.outputs(name_of("none", size, "relaxed"))
        line["keeps_its_promise"] = all(line[f"{mode}_equals_plain"] for mode in promising)
        found.append(line)
    return found


def show(title: str, found: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n")
    keys = ("default_by_relaxed", "strict_by_relaxed", "default_speedup", "strict_speedup",
            "default_equals_plain", "strict_equals_plain", "relaxed_equals_plain")  # fmt: skip
    print(f"| method | batch | tau | {' | '.join(key.replace('_', ' ') for key in keys)} |")
    print("|" + "---|" * (3 + len(keys)))
    for line in found:
        values = " | ".join(str(line[key]) for key in keys)
        print(f"| {line['method']} | {line['batch_size']} | {line['tau']:.2f} | {values} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--scale", default="none", help="none, 100m or HIDDENxFFN")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16", "float32"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--methods", nargs="+", default=["none", "ngram"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--groups", type=int, default=3, help="of as many prompts as the largest batch has rows")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.methods = list(dict.fromkeys(["none", *options.methods]))
    result: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "conditions": provenance()}
    keeps_promises = True
    for dtype in options.dtypes:
        settings = Settings(max_new_tokens=options.max_new_tokens, execution=options.execution)
        suite = Suite(load_pair(options.model, None, dtype), options.scale, settings)
        facts = suite.target.kernel_facts(EngineConfig.strict_width).describe()
        for context in options.contexts:
            key = f"{dtype}, {context} tokens"
            prompts = groups_of(suite, max(options.batch_sizes), options.groups, context)

            def note(trial: Trial, key: str = key, suite: Suite = suite, facts: str = facts) -> None:
                found = {"rows": rows(suite, trial, options), "other_cpu_share": trial.other_cpu_share,
                         "num_groups": len(trial.prompts), "kernels": facts, "models": suite.pair.label,
                         "execution": suite.target.execution.describe()}  # fmt: skip
                result[key] = plain_data(found)
                if options.out is not None:
                    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(f"{key}: {len(trial.prompts)} groups, others used {trial.other_cpu_share:.0%}",
                      file=sys.stderr, flush=True)  # fmt: skip

            trial = interleave(arms_of(suite, options), prompts, GREEDY, options.max_new_tokens, options.repeats, note)
            found = rows(suite, trial, options)
            if not all(line["keeps_its_promise"] for line in found):
                print(f"{key}: a promise of equal tokens was broken, so no price is shown", file=sys.stderr)
                keeps_promises = False
                continue
            show(f"{key}, {suite.target.execution.describe()}, others used {trial.other_cpu_share:.0%}; {facts}", found)
    sys.exit(0 if keeps_promises else 3)


if __name__ == "__main__":
    main()
