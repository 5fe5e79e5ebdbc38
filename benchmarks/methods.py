"""Every method, forced on: tokens per step, nodes, drafting time and speed beside plain decoding.

    python benchmarks/methods.py [--methods ngram suffix] [--kinds chat code] [--num-prompts 2] [--max-new-tokens 48]
        [--temperatures 0 1] [--repeats 1] [--scale 100m] [--prompts-file question.jsonl] [--out methods.json]

The target is zoo:tiny inflated in width to 98.6 M parameters, which says the same; all arms run interleaved (A B B A)
per prompt, ends of text are passed over, and a method whose text differs from plain decoding gets no figure. Ratios
are medians over prompts with 95 % intervals; the last column is over all kinds. The kind "rag" is a passage and a
question about it; "asked again" is a conversation in which a question returns. Finished prompts are written to --out
as they come, and an interrupted run prints the kinds it has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tau import BASELINE, BigramDrafter, bigram_table

from foretoken.bench.arms import EngineArm, Run, Sampling
from foretoken.bench.measure import Trial, bootstrap_median, compare, interleave
from foretoken.bench.models import load_pair
from foretoken.bench.provenance import provenance
from foretoken.bench.report import plain_data
from foretoken.bench.suite import PLAIN, Settings, Suite
from foretoken.bench.workload import COPY, Prompt, load_prompts
from foretoken.engine.config import EngineConfig
from foretoken.engine.model import CausalLM
from foretoken.engine.stats import SequenceStats

ASKED_AGAIN = "asked again"
RAG = "rag"
KINDS = ("chat", "maths", "code", "summary", "copy", RAG, ASKED_AGAIN)
RAG_QUESTION = "What does this text say? Answer in its own words."
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
    small = CausalLM(suite.original.target)  # says what the inflated one says
    bigram = BigramDrafter(bigram_table(small), 4)
    baseline = EngineArm(BASELINE, suite.target, bigram, suite.pair.eos_token_ids, EngineConfig(max_num_seqs=1))
    return [suite.plain_arm(), baseline, *(suite.engine_arm(name, METHODS[name]) for name in names)]


def prompts_of(suite: Suite, kind: str, count: int) -> list[Prompt]:
    """The first prompts of a kind, as many as there are room for; of the prompts file, or built in.

    Without a kind "rag" in the file, it is a passage to copy, put as a question about a text.
    """
    if kind == ASKED_AGAIN:
        return suite.copying_prompts()[:count]
    questions = [question for question in suite.questions if question.category == kind]
    if kind == RAG and not questions:
        passages = [question for question in suite.questions if question.category == COPY]
        questions = [replace(one, category=RAG, text=f"{one.text}\n\n{RAG_QUESTION}") for one in passages]
    prompts = load_prompts(suite.pair.tokenizer, questions, None, suite._room)[:count]
    if not prompts:
        known = sorted({question.category for question in suite.questions})
        raise SystemExit(f"no prompt of the kind {kind!r} fits; the prompts hold {', '.join(known)}")
    return prompts


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
        speeds = [one.num_decoded / one.decode_seconds for one in runs if one.num_decoded]
        table[arm.name] = {
            "tau": stats.tokens_per_step,
            "nodes_per_step": stats.num_draft_tokens / stats.num_steps + 1,
            "acceptance": stats.draft_acceptance_rate,
            "draft_us": 1e6 * (profile.propose_seconds + profile.observe_seconds) / max(1, profile.num_steps),
            "tokens_per_second": statistics.median(speeds) if speeds else float("nan"),
            "speed": asdict(compare(trial, arm.name, PLAIN)),
            "prompt_speeds": prompt_speeds(trial, arm.name),
        }
    return table


def prompt_speeds(trial: Trial, arm: str) -> list[float]:
    """Of every prompt: how many times faster than plain decoding."""
    pairs = zip(trial.seconds_per_token(PLAIN), trial.seconds_per_token(arm), strict=True)
    return [slow / fast for slow, fast in pairs if slow == slow and fast == fast]


def _firsts(trial: Trial, arm: EngineArm) -> list[Run]:
    return [runs[0] for runs in trial.runs[arm.name]]


def table_of(report: dict[str, Any], names: list[str]) -> str:
    """One line per method, Markdown: tau and speed by kind, speed over the prompts of all kinds."""
    kinds = list(report)
    lines = [f"| method | {' | '.join(kinds)} | all | nodes | draft, us |", "|" + "---|" * (len(kinds) + 4)]
    for name in names:
        cells = [report[kind]["arms"][name] for kind in kinds]
        shown = [cell if isinstance(cell, str) else f"{cell['tau']:.2f}, {interval(cell['speed'])}" for cell in cells]
        known = [cell for cell in cells if not isinstance(cell, str)]
        speeds = [speed for cell in known for speed in cell["prompt_speeds"]]
        everywhere = "differs" if len(known) < len(cells) or not speeds else overall(speeds)
        nodes = statistics.mean(cell["nodes_per_step"] for cell in known) if known else float("nan")
        cost = statistics.median(cell["draft_us"] for cell in known) if known else float("nan")
        lines.append(f"| {name} | {' | '.join(shown)} | {everywhere} | {nodes:.1f} | {cost:.0f} |")
    return "\n".join(lines)


def interval(speed: dict[str, Any]) -> str:
    return f"{speed['ratio']:.2f}x ({speed['low']:.2f}-{speed['high']:.2f})"


def overall(speeds: list[float]) -> str:
    low, high = bootstrap_median(speeds)
    return f"{statistics.median(speeds):.2f}x ({low:.2f}-{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="of the prompts, or 'asked again'")
    parser.add_argument("--num-prompts", type=int, default=2, help="per kind")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=1, help="rounds of A B B A per prompt")
    parser.add_argument("--scale", default="100m", help="none, 100m or HIDDENxFFN")
    parser.add_argument("--prompts-file", type=Path, help="Spec-Bench's question.jsonl; built-in prompts else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = Settings(
        max_new_tokens=options.max_new_tokens, num_prompts=options.num_prompts, prompts_file=options.prompts_file
    )
    suite = Suite(load_pair("zoo:tiny", None, "float32"), options.scale, settings)
    prompts = {kind: prompts_of(suite, kind, options.num_prompts) for kind in options.kinds}
    everyone = arms(suite, options.methods)
    result: dict[str, Any] = {"target": suite.pair.label, "conditions": provenance()}
    result["options"] = {name: str(value) for name, value in vars(options).items()}
    for temperature in options.temperatures:
        result[f"T={temperature:g}"] = report = {}
        try:
            for kind in options.kinds:
                measure(everyone, prompts[kind], kind, temperature, options, report, result)
        finally:  # an interrupted run shows what it has
            if report:
                print(f"\nT = {temperature:g}: tau and speed by plain decoding's, {suite.pair.label}\n")
                print(table_of(report, [arm.name for arm in everyone]), flush=True)


def measure(
    everyone: list[EngineArm],
    prompts: list[Prompt],
    kind: str,
    temperature: float,
    options: argparse.Namespace,
    report: dict[str, Any],
    result: dict[str, Any],
) -> None:
    """Run one kind; ``report[kind]`` and the file hold the prompts done so far."""
    for arm in everyone:
        arm.engine.profile = type(arm.engine.profile)()

    def note(trial: Trial) -> None:
        report[kind] = {
            "num_prompts": len(trial.prompts),
            "other_cpu_share": trial.other_cpu_share,
            "arms": rows(trial, everyone),
        }
        if options.out is not None:
            options.out.write_text(json.dumps(plain_data(result), indent=1) + "\n", encoding="utf-8")
        done = f"{len(trial.prompts)}/{len(prompts)}"
        print(
            f"T={temperature:g}, {kind}: {done}, others used {trial.other_cpu_share:.0%}", file=sys.stderr, flush=True
        )

    sampling = Sampling(temperature=temperature, seed=1, ignore_eos=True)
    interleave(list(everyone), prompts, sampling, options.max_new_tokens, options.repeats, note)


if __name__ == "__main__":
    main()
