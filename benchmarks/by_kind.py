"""Every method by its defaults over the kinds of Spec-Bench: speed by plain decoding, which `auto` must come close to.

    python benchmarks/by_kind.py --prompts-file question.jsonl [--model zoo:smollm2] [--dtype bfloat16]
        [--methods ngram suffix auto] [--temperature 0 1] [--prompts-per-kind 2] [--out table.json]

One row. Plain decoding and all methods decode the same prompts in turns, forwards and backwards, after a warm-up that
is not counted; ends of text are passed over; tokens are compared. A cell is the ratio of the sums of decode seconds
over the prompts of a kind, with a bootstrap interval over prompts. Governors keep what they learn from prompt to
prompt, as they do in an `LLM`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from foretoken.bench.arms import EngineArm, Sampling
from foretoken.bench.measure import no_garbage_collection
from foretoken.bench.models import load_pair, scaled
from foretoken.bench.provenance import provenance
from foretoken.bench.workload import load_prompts, read_questions
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, make_drafter
from foretoken.drafters.none import EmptyDrafter
from foretoken.model.lm import CausalLM

CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
KINDS = {
    "chat": CHAT,
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}
METHODS = (
    "ngram", "suffix", "nasd", "token_recycling", "lookahead", "jacobi", "layer_skip", "quantized_self", "sparse_kv",
    "eagle3", "draft_model", "ngram+suffix", "suffix>token_recycling", "suffix+eagle3", "auto",
)  # fmt: skip


def interval(plain: list[float], other: list[float]) -> tuple[float, float]:
    """95 % of the ratio of sums over prompts drawn again and again."""
    rng, count = random.Random(0), len(plain)
    ratios = []
    for _ in range(2000):
        drawn = [rng.randrange(count) for _ in range(count)]
        ratios.append(sum(plain[index] for index in drawn) / sum(other[index] for index in drawn))
    ratios.sort()
    return ratios[50], ratios[1949]


class Table:
    """Runs all arms over all prompts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.done: list[dict[str, Any]] = []
        pair = load_pair(options.model, options.draft_model, options.dtype)
        self.pair = scaled(pair, options.scale) if options.scale else pair
        self.target = CausalLM(self.pair.target, execution=options.execution)
        drafter = None if self.pair.drafter is None else CausalLM(self.pair.drafter, execution=options.execution)
        self.context = DrafterContext(self.target, drafter, self.pair.tokenizer, self.pair.zoo_name)
        questions = read_questions(options.prompts_file)
        self.prompts = {
            kind: load_prompts(
                self.pair.tokenizer,
                [q for q in questions if q.category in wanted],
                max_length=options.max_prompt_tokens,
            )[: options.prompts_per_kind]
            for kind, wanted in KINDS.items()
            if kind in options.kinds
        }

        if empty := [kind for kind, prompts in self.prompts.items() if not prompts]:
            raise SystemExit(f"no prompts of {', '.join(empty)} are as short as {options.max_prompt_tokens} tokens")

    def arms(self) -> list[EngineArm]:
        config = EngineConfig(max_num_seqs=1)
        made = [EngineArm("plain", self.target, EmptyDrafter(), (), config, is_governed=False)]
        for method in self.options.methods:
            parsed = SpeculativeConfig(method)
            try:
                drafter = make_drafter(parsed, self.context)
            except Exception as error:
                print(f"{method}: left out, {error}", file=sys.stderr)
                continue
            made.append(EngineArm(method, self.target, drafter, (), config, is_governed=parsed.is_governed))
        return made

    def run(self, temperature: float) -> list[dict[str, Any]]:
        arms = self.arms()
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        same: dict[tuple[str, str], int] = defaultdict(int)
        for kind, prompts in self.prompts.items():
            for number, prompt in enumerate(prompts):
                if number == 0:
                    for arm in arms:
                        self._decode(arm, prompt.token_ids, temperature, 0)
                taken: dict[str, float] = defaultdict(float)
                texts: dict[str, list[list[int]]] = defaultdict(list)
                for repeat in range(self.options.repeats):
                    for arm in arms if repeat % 2 == 0 else reversed(arms):
                        time, output = self._decode(arm, prompt.token_ids, temperature, number)
                        taken[arm.name] += time
                        texts[arm.name].append(output)
                for arm in arms:
                    seconds[kind, arm.name].append(taken[arm.name])
                    same[kind, arm.name] += texts[arm.name] == texts["plain"]
            speeds = {arm.name: sum(seconds[kind, "plain"]) / sum(seconds[kind, arm.name]) for arm in arms}
            print(kind, {name: round(speed, 2) for name, speed in speeds.items()}, file=sys.stderr, flush=True)
            self._keep(arms, seconds, same, temperature)
        return self._cells(arms, seconds, same, temperature)

    def _keep(self, arms: list[EngineArm], seconds: Any, same: Any, temperature: float) -> None:
        """Write what there is so far, so that a run which is cut off is not lost."""
        if self.options.out:
            cells = [*self.done, *self._cells(arms, seconds, same, temperature)]
            self.options.out.write_text(json.dumps({"conditions": provenance(), "cells": cells}, indent=1))

    def _cells(self, arms: list[EngineArm], seconds: Any, same: Any, temperature: float) -> list[dict[str, Any]]:
        """The kinds that are done."""
        found = []
        for arm in arms[1:]:
            for kind, prompts in self.prompts.items():
                if (kind, "plain") not in seconds:
                    continue
                plain, other = seconds[kind, "plain"], seconds[kind, arm.name]
                found.append(
                    {
                        "method": arm.name, "kind": kind, "temperature": temperature,
                        "speed": sum(plain) / sum(other), "interval": interval(plain, other),
                        "same": same[kind, arm.name], "prompts": len(prompts),
                    }
                )  # fmt: skip
        return found

    def _decode(
        self, arm: EngineArm, prompt: tuple[int, ...], temperature: float, seed: int
    ) -> tuple[float, list[int]]:
        with no_garbage_collection():
            sampling = Sampling(temperature=temperature, seed=seed, ignore_eos=True)
            rows, _, taken = arm.decode_batch([prompt], self.options.max_new_tokens, sampling)
        return taken, rows[0].output_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts-file", type=Path, required=True)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--draft-model")
    parser.add_argument("--scale")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts-per-kind", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = Table(options)
    for temperature in options.temperature:
        table.done += table.run(temperature)
    found = table.done
    print("\n| method | T | " + " | ".join(options.kinds) + " | same texts |")
    print("|---|---|" + "---|" * (len(options.kinds) + 1))
    for temperature in options.temperature:
        for method in dict.fromkeys(cell["method"] for cell in found):
            cells = [cell for cell in found if cell["method"] == method and cell["temperature"] == temperature]
            shown = [f"{c['speed']:.2f} ({c['interval'][0]:.2f}-{c['interval'][1]:.2f})" for c in cells]
            same, total = sum(c["same"] for c in cells), sum(c["prompts"] for c in cells)
            print(f"| `{method}` | {temperature:g} | " + " | ".join(shown) + f" | {same}/{total} |")
    slow = [c for c in found if c["speed"] < 0.97]
    print(f"\n{len(slow)} of {len(found)} cells below 0.97; torch {torch.__version__}")


if __name__ == "__main__":
    main()
