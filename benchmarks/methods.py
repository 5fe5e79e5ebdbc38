"""Every method, forced on: tokens per step, nodes, drafting time and speed beside plain decoding.

    python benchmarks/methods.py [--methods ngram suffix] [--kinds chat code] [--num-prompts 2] [--max-new-tokens 48] \
        [--temperatures 0 1] [--scale 100m] [--out methods.json]

The target is zoo:tiny inflated in width to 98.6 M parameters, which says the same; all arms run interleaved (A B B A)
per prompt, ends of text are passed over, outputs are compared first, and a method whose text differs from plain
decoding gets no figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tau import BASELINE, BigramDrafter, bigram_table

from foretoken.bench.arms import EngineArm, Run, Sampling
from foretoken.bench.measure import Trial, compare, interleave
from foretoken.bench.models import load_pair
from foretoken.bench.suite import PLAIN, Settings, Suite
from foretoken.bench.workload import Prompt, load_prompts
from foretoken.engine.config import EngineConfig
from foretoken.engine.stats import SequenceStats

ASKED_AGAIN = "asked again"
KINDS = ("chat", "maths", "code", "summary", "copy", ASKED_AGAIN)
METHODS: dict[str, Any] = {
    "draft_model": "draft_model",
    "ngram": "ngram",
    "nasd": "nasd",
    "suffix": "suffix",
    "rest": "rest",
    "token_recycling": "token_recycling",
    "jacobi": "jacobi",
    "lookahead": "lookahead",
    "layer_skip": "layer_skip",
    "quantized_self": "quantized_self",
    "suffix+draft_model": "suffix+draft_model",
    "ngram>token_recycling": "ngram>token_recycling",
}


def arms(suite: Suite, names: list[str]) -> list[EngineArm]:
    """Plain, the context-free baseline, and the methods."""
    bigram = BigramDrafter(bigram_table(suite.target), 4)
    baseline = EngineArm(BASELINE, suite.target, bigram, suite.pair.eos_token_ids, EngineConfig(max_num_seqs=1))
    return [suite.plain_arm(), baseline, *(suite.engine_arm(name, METHODS[name]) for name in names)]


def prompts_of(suite: Suite, kind: str, count: int) -> list[Prompt]:
    if kind == ASKED_AGAIN:
        return suite.copying_prompts()[:count]
    questions = [question for question in suite.questions if question.category == kind]
    return load_prompts(suite.pair.tokenizer, questions[:count], None, suite._room)


def rows(trial: Trial, everyone: list[EngineArm]) -> dict[str, Any]:
    """Figures of every arm; the word "differs" for one that does not say what plain decoding says."""
    table: dict[str, Any] = {}
    for arm in everyone:
        runs: list[Run] = [run for runs in trial.runs[arm.name] for run in runs]
        if any(run.token_ids != plain for run, plain in zip(_firsts(trial, arm), trial.outputs(PLAIN), strict=True)):
            table[arm.name] = "differs"
            continue
        stats = SequenceStats()
        for run in runs:
            stats.add(run.stats or SequenceStats())
        profile = arm.engine.profile
        ratio = compare(trial, arm.name, PLAIN)
        table[arm.name] = {
            "tau": stats.tokens_per_step,
            "nodes_per_step": stats.num_draft_tokens / stats.num_steps + 1,
            "acceptance": stats.draft_acceptance_rate,
            "draft_us": 1e6 * (profile.propose_seconds + profile.observe_seconds) / max(1, profile.num_steps),
            "speed": ratio.ratio,
            "worst": ratio.worst,
            "best": ratio.best,
        }
    return table


def _firsts(trial: Trial, arm: EngineArm) -> list[Run]:
    return [runs[0] for runs in trial.runs[arm.name]]


def table_of(report: dict[str, Any], names: list[str]) -> str:
    """One line per method: tau and speed by kind, Markdown."""
    kinds = list(report)
    lines = [f"| method | {' | '.join(kinds)} | nodes | draft, us |", "|" + "---|" * (len(kinds) + 3)]
    for name in names:
        cells = [report[kind][name] for kind in kinds]
        shown = [cell if isinstance(cell, str) else f"{cell['tau']:.2f}, {cell['speed']:.2f}x" for cell in cells]
        known = [cell for cell in cells if not isinstance(cell, str)]
        nodes = statistics.mean(cell["nodes_per_step"] for cell in known) if known else float("nan")
        cost = statistics.median(cell["draft_us"] for cell in known) if known else float("nan")
        lines.append(f"| {name} | {' | '.join(shown)} | {nodes:.1f} | {cost:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--num-prompts", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--scale", default="100m", help="none, 100m or HIDDENxFFN")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = Settings(max_new_tokens=options.max_new_tokens, num_prompts=options.num_prompts)
    suite = Suite(load_pair("zoo:tiny", None, "float32"), options.scale, settings)
    everyone = arms(suite, options.methods)
    result: dict[str, Any] = {"target": suite.pair.label, **vars(options), "out": str(options.out)}
    for temperature in options.temperatures:
        report: dict[str, Any] = {}
        for kind in options.kinds:
            sampling = Sampling(temperature=temperature, seed=1, ignore_eos=True)
            prompts = prompts_of(suite, kind, options.num_prompts)
            for arm in everyone:
                arm.engine.profile = type(arm.engine.profile)()
            trial = interleave(list(everyone), prompts, sampling, options.max_new_tokens)
            report[kind] = rows(trial, everyone)
            print(f"T={temperature:g}, {kind}: done, others used {trial.other_cpu_share:.0%}", file=sys.stderr)
        print(f"\nT = {temperature:g}: tau and speed by plain decoding's, {suite.pair.label}\n")
        print(table_of(report, [arm.name for arm in everyone]), flush=True)
        result[f"T={temperature:g}"] = report
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
