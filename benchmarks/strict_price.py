"""What exactness="strict" costs: the same texts with and without it, interleaved, on zoo:tiny inflated to 98.6 M.

    python benchmarks/strict_price.py [--dtypes float32 bfloat16] [--batch-sizes 1 4] [--groups 3] [--max-new-tokens 32]
        [--max-model-len 512] [--strict-widths 8] [--out strict.json]

Strict mode runs every step at one shape: strict_width nodes, max_num_seqs rows, max_model_len columns. So plain
decoding pays for nodes that it does not use, and everybody for columns. Its outputs must be equal token for token
between plain and drafted decoding of one batch size, in bfloat16 too: no price is shown otherwise. Ratios are default
mode's seconds per token by strict mode's, below 1 where strictness costs: medians of groups of prompts with their
95 % intervals. Results so far are written after every group.
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
from foretoken.bench.suite import Settings, Suite
from foretoken.engine.config import EngineConfig

METHODS: dict[str, dict[str, Any]] = {"plain": {"method": "none"}, "draft_model": {"method": "draft_model"}}
GREEDY = Sampling(ignore_eos=True)


def arms_of(suite: Suite, options: argparse.Namespace) -> list[GroupArm]:
    """Default and strict, plain and drafted, at every batch size."""
    found = []
    for size, (method, speculation) in product(options.batch_sizes, METHODS.items()):
        shape = {"max_num_seqs": size, "max_model_len": options.max_model_len}
        found.append(GroupArm(f"{method}, batch {size}", suite, speculation, EngineConfig(**shape)))
        for width in options.strict_widths:
            config = EngineConfig(**shape, exactness="strict", strict_width=width)
            found.append(GroupArm(f"{method}, batch {size}, strict {width}", suite, speculation, config))
    return found


def rows(trial: Trial, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line per strict arm, against the default arm of the same method and batch size."""
    found = []
    for size, width, method in product(options.batch_sizes, options.strict_widths, METHODS):
        default, strict = f"{method}, batch {size}", f"{method}, batch {size}, strict {width}"
        plain, plain_strict = f"plain, batch {size}", f"plain, batch {size}, strict {width}"
        found.append(
            {
                "method": method, "batch_size": size, "strict_width": width,
                "default_per_second": trial.tokens_per_second(default),
                "strict_per_second": trial.tokens_per_second(strict),
                "strict_by_default": compare(trial, strict, default),
                "speedup_default": compare(trial, default, plain),
                "speedup_strict": compare(trial, strict, plain_strict),
                "tau_default": tau(trial.runs[default]), "tau_strict": tau(trial.runs[strict]),
                "strict_equals_strict_plain": trial.outputs(strict) == trial.outputs(plain_strict),
                "default_equals_default_plain": trial.outputs(default) == trial.outputs(plain),
                "strict_equals_default": trial.outputs(strict) == trial.outputs(default),
            }
        )  # fmt: skip
    return found


def show(dtype: str, found: list[dict[str, Any]]) -> None:
    print(f"\n{dtype}\n")
    heads = ("method", "batch", "width", "default tok/s", "strict tok/s", "strict by default", "speed-up, default",
             "speed-up, strict", "tau", "strict = strict plain", "default = default plain",
             "strict = default")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n" + "|" + "---|" * len(heads))
    for row in found:
        ratios = [row[name] for name in ("strict_by_default", "speedup_default", "speedup_strict")]
        print(
            f"| {row['method']} | {row['batch_size']} | {row['strict_width']} | {row['default_per_second']:.1f} "
            f"| {row['strict_per_second']:.1f} | "
            + " | ".join(map(str, ratios))
            + f" | {row['tau_strict']:.2f} | {row['strict_equals_strict_plain']} "
            f"| {row['default_equals_default_plain']} | {row['strict_equals_default']} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--strict-widths", type=int, nargs="+", default=[8])
    parser.add_argument("--group-size", type=int, default=4, help="prompts per group")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scale", default="100m")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "conditions": provenance()}
    is_equal = True
    for dtype in options.dtypes:
        settings = Settings(max_new_tokens=options.max_new_tokens, execution=options.execution)
        suite = Suite(load_pair("zoo:tiny", None, dtype), options.scale, settings)
        prompts = groups_of(suite, options.group_size, options.groups)

        def note(trial: Trial, dtype: str = dtype, count: int = len(prompts), suite: Suite = suite) -> None:
            found = {"rows": rows(trial, options), "other_cpu_share": trial.other_cpu_share,
                     "num_groups": len(trial.prompts), "models": suite.pair.label,
                     "execution": suite.target.execution.describe()}  # fmt: skip
            result[dtype] = plain_data(found)
            if options.out is not None:
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(f"{dtype}: {len(trial.prompts)}/{count} groups, others used {trial.other_cpu_share:.0%}",
                  file=sys.stderr, flush=True)  # fmt: skip

        arms = arms_of(suite, options)
        trial = interleave(arms, prompts, GREEDY, options.max_new_tokens, options.repeats, note)
        found = rows(trial, options)
        if not all(row["strict_equals_strict_plain"] for row in found):
            print(f"{dtype}: strict outputs differ from strict plain decoding, so no price is shown", file=sys.stderr)
            is_equal = False
            continue
        show(f"{dtype}, {suite.target.execution.describe()}, others used {trial.other_cpu_share:.0%}", found)
    sys.exit(0 if is_equal else 3)


if __name__ == "__main__":
    main()
