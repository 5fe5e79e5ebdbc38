"""Length policies: EGAG's curves, and tau and speed of every policy beside fixed lengths.

    python benchmarks/length_policies.py curves --plot curves.png
    python benchmarks/length_policies.py tau --num-prompts 6 --max-new-tokens 64
    python benchmarks/length_policies.py speed --kinds chat --num-prompts 2 --max-new-tokens 32

`tau` decodes with the shipped pair as it is, since inflating does not change what models say; `speed` inflates its
target to 98.6 M parameters and measures the arms interleaved (A B B A) per prompt.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from foretoken.bench.arms import Arm, EngineArm, Sampling
from foretoken.bench.lineup import PLAIN
from foretoken.bench.measure import compare, interleave
from foretoken.bench.models import load_pair
from foretoken.bench.settings import Settings
from foretoken.bench.suite import Suite
from foretoken.bench.workload import Prompt, load_prompts
from foretoken.drafters.lengths.egag import EgagLength, normalised_entropy
from foretoken.drafters.lengths.entropy import FIRST_REFERENCE, calibrated_share
from foretoken.engine.sequence import Sequence as Row
from foretoken.engine.stats import SequenceStats
from foretoken.views.traceplot import check_picture, require_matplotlib

KINDS = ("chat", "maths", "code")
VOCABULARIES = (4_096, 32_000, 128_256)
ENTROPIES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
LONGEST = 8
POLICIES: dict[str, dict[str, Any]] = {
    "confidence 0.4": {"length_policy": "confidence"},
    "egag paper": {"length_policy": "egag", "length_policy_mode": "paper"},
    "egag calibrated": {"length_policy": "egag"},
    "adaedl": {"length_policy": "adaedl"},
    "acceptance paper": {"length_policy": "acceptance", "length_policy_mode": "paper"},
    "acceptance code": {"length_policy": "acceptance", "length_policy_mode": "code"},
    "acceptance static": {"length_policy": "acceptance", "length_policy_mode": "static"},
    "heuristic": {"length_policy": "heuristic"},
}


# -- curves ----------------------------------------------------------------------------------------------------------


def law_of_entropy(nats: float, vocab_size: int) -> torch.Tensor:
    """A law (V,) with one likely token and the others alike, whose entropy is this, found by bisection."""
    low, high = 1.0 / vocab_size, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        rest = (1.0 - middle) / (vocab_size - 1)
        entropy = -middle * math.log(middle) - ((1.0 - middle) * math.log(rest) if rest else 0.0)
        low, high = (middle, high) if entropy > nats else (low, middle)
    law = torch.full((vocab_size,), (1.0 - high) / (vocab_size - 1), dtype=torch.float64)
    law[0] = high
    return law


def paper_length(nats: float, vocab_size: int, longest: int) -> int:
    """As published, of an actual law with this entropy."""
    if nats > math.log(vocab_size):
        return 1
    share = normalised_entropy(law_of_entropy(nats, vocab_size))
    return EgagLength(1, longest).length(share)[0]


def calibrated_length(nats: float, longest: int, reference: float = FIRST_REFERENCE) -> int:
    """Calibrated, where the reference is what it is before a row has shown its own entropies."""
    return EgagLength(1, longest).length(calibrated_share(nats, reference, longest))[0]


def curves(plot: str | None) -> None:
    """The table, and the picture."""
    for longest in (4, LONGEST):
        print(f"\ngamma_max = {longest}\n")
        print("| H, nats | " + " | ".join(f"paper, V = {v}" for v in VOCABULARIES) + " | calibrated, any V |")
        print("|" + "---|" * (len(VOCABULARIES) + 2))
        for nats in ENTROPIES:
            lengths = [paper_length(nats, vocab_size, longest) for vocab_size in VOCABULARIES]
            print(f"| {nats:g} | {' | '.join(map(str, lengths))} | {calibrated_length(nats, longest)} |")
    if plot is None:
        return
    figure = require_matplotlib().Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    nats = [i / 20 for i in range(161)]
    for vocab_size in VOCABULARIES:
        axes.plot(nats, [paper_length(x, vocab_size, LONGEST) for x in nats], label=f"paper, V = {vocab_size}")
    axes.plot(nats, [calibrated_length(x, LONGEST) for x in nats], label="calibrated, reference 2 nats", linewidth=2)
    axes.axvspan(0.12, 1.31, color="#dddddd", label="mean entropies of a real pair, 0.12 to 1.31")
    axes.set(xlabel="entropy of the drafter's law, nats", ylabel="gamma (gamma_max = 8)")
    axes.legend(fontsize="small")
    figure.savefig(check_picture(plot), dpi=120)


# -- measurements ----------------------------------------------------------------------------------------------------


def figures(stats: SequenceStats) -> dict[str, float]:
    return {
        "tau": stats.tokens_per_step,
        "drafted_per_step": stats.num_draft_tokens / stats.num_steps,
        "acceptance_rate": stats.draft_acceptance_rate,
    }


def arms(suite: Suite, lengths: Sequence[int], num_rows: int = 1) -> list[EngineArm]:
    """Plain, the fixed lengths and every policy."""
    configs: dict[str, dict[str, Any]] = {f"fixed {length}": {"num_speculative_tokens": length} for length in lengths}
    configs |= {name: {"num_speculative_tokens": LONGEST, **policy} for name, policy in POLICIES.items()}
    drafting = [
        suite.lineup.engine_arm(name, {"method": "draft_model", **config}, num_rows=num_rows)
        for name, config in configs.items()
    ]
    return [suite.lineup.plain_arm(num_rows), *drafting]


def prompts_of(suite: Suite, kind: str, count: int) -> list[Prompt]:
    questions = [question for question in suite.questions if question.category == kind]
    return load_prompts(suite.pair.tokenizer, questions[:count])


def check_equal(name: str, got: Sequence[int], want: Sequence[int]) -> None:
    if tuple(got) != tuple(want):
        raise SystemExit(f"{name} differs from plain decoding; no figure is given")


def decoded(arm: EngineArm, prompts: Sequence[Prompt], sampling: Sampling, max_new_tokens: int) -> list[Row]:
    """All prompts in one batch, each with a seed of its own."""
    rows = []
    for place, prompt in enumerate(prompts):
        rows += arm.engine.add_request(prompt.token_ids, replace(sampling, seed=place).params(max_new_tokens))
    for _ in arm.engine.run():
        pass
    return rows


def tau(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per step, drafted tokens per step and acceptance rate, per kind and arm; outputs checked for equality."""
    suite = Suite(load_pair("zoo:tiny", None, "float32"), "none", Settings())
    everyone = arms(suite, options.lengths, options.num_prompts)
    report: dict[str, Any] = {}
    for sampling in (suite.greedy, suite.sampled()):
        for kind in options.kinds:
            prompts = prompts_of(suite, kind, options.num_prompts)
            counts = {arm.name: SequenceStats() for arm in everyone}
            plain: list[list[int]] = []
            for arm in everyone:
                rows = decoded(arm, prompts, sampling, options.max_new_tokens)
                plain = plain or [row.output_ids for row in rows]
                for row, expected in zip(rows, plain, strict=True):
                    check_equal(arm.name, row.output_ids, expected)
                    counts[arm.name].add(row.stats)
            report[f"{sampling.label}, {kind}"] = {name: figures(count) for name, count in counts.items()}
    return report


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Speed of decoding by plain decoding's, per kind and arm: median over prompts, interleaved."""
    suite = Suite(load_pair("zoo:tiny", None, "float32"), "100m", Settings())
    everyone: list[Arm] = [*arms(suite, options.lengths)]
    sampling = Sampling(temperature=options.temperature, ignore_eos=True)
    report: dict[str, Any] = {}
    for kind in options.kinds:
        trial = interleave(everyone, prompts_of(suite, kind, options.num_prompts), sampling, options.max_new_tokens)
        for arm in everyone[1:]:
            for place, output in enumerate(trial.outputs(arm.name)):
                check_equal(arm.name, output, trial.outputs(PLAIN)[place])
        ratios = [compare(trial, arm.name, PLAIN) for arm in everyone[1:]]
        report[f"{sampling.label}, {kind}"] = {
            "plain_tokens_per_second": trial.tokens_per_second(PLAIN),
            "other_cpu_share": trial.other_cpu_share,
            **{ratio.arm: {"ratio": ratio.ratio, "worst": ratio.worst, "best": ratio.best} for ratio in ratios},
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("curves", "tau", "speed"))
    parser.add_argument("--plot")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(range(1, LONGEST + 1)))
    parser.add_argument("--num-prompts", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.part == "tau" else torch.get_num_threads())
    if options.part == "curves":
        curves(options.plot)
    else:
        print(json.dumps({"tau": tau, "speed": speed}[options.part](options), indent=1))


if __name__ == "__main__":
    main()
