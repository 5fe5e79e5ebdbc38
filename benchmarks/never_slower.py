"""Twelve cells in which drafting by default must not be slower than plain decoding, some of which it must win.

    python benchmarks/never_slower.py --prompts-file question.jsonl [--model zoo:smollm2] [--dtype bfloat16]
        [--cells 1/chat/ngram 8/random/wrong] [--max-new-tokens 64] [--repeats 3] [--out cells.json]

A cell is batch / text / method. Texts: chat (the questions of MT-Bench), summary (summarisation), copy (the beginnings
of these articles, said once and begun again), random (tokens drawn evenly). Methods run as they do by default,
governed; "wrong" drafts random tokens at no cost, "itself" drafts with the target as its own draft model, right and
slower than the target. Both arms of a cell decode the same prompts, interleaved (A B B A), after one run of each that
is not counted; ends of text are passed over. Tokens of rows are compared. The time is that of decode steps; the
governor's learning in the counted runs is part of it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.bench.arms import EngineArm, Sampling
from foretoken.bench.measure import bootstrap_median, no_garbage_collection
from foretoken.bench.models import load_pair
from foretoken.bench.provenance import provenance
from foretoken.bench.workload import load_prompts, read_questions
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, make_drafter
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import Budget, ContextDrafter, Drafter
from foretoken.engine.sequence import Sequence as Row
from foretoken.model.lm import CausalLM
from foretoken.tree import DraftTree

CELLS = (
    "1/chat/ngram",
    "1/chat/itself",
    "1/summary/suffix",
    "1/summary/auto",
    "1/random/token_recycling",
    "8/chat/suffix",
    "8/chat/lookahead",
    "8/summary/ngram",
    "8/random/wrong",
    "32/chat/ngram",
    "32/summary/suffix",
    "32/random/wrong",
)
MUST_WIN = ("1/summary/suffix", "1/summary/auto", "8/summary/ngram")
CHAT = ("writing", "roleplay", "reasoning", "stem", "humanities", "extraction", "coding", "math")


class Wrong(ContextDrafter):
    """Drafts ten tokens that are hardly ever right."""

    name = "wrong"

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def propose_row(self, row: Row, budget: Budget) -> DraftTree:
        tokens = [self._random.randrange(self._vocab_size) for _ in range(min(budget, 10))]
        return DraftTree.chain(row.pending, tokens, source=self.name)


class Cells:
    """Runs cells over one model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.pair = load_pair(options.model, None, options.dtype)
        self.target = CausalLM(self.pair.target, execution=options.execution)
        self.questions = read_questions(options.prompts_file)

    def drafter(self, method: str) -> tuple[Drafter, bool]:
        """A drafter, and whether it is governed."""
        if method == "plain":
            return EmptyDrafter(), False
        if method == "wrong":
            return Wrong(self.target.vocab_size), True
        model = self.target if method == "itself" else None
        config = SpeculativeConfig({"itself": "draft_model"}.get(method, method))
        context = DrafterContext(self.target, model, self.pair.tokenizer, self.pair.zoo_name)
        return make_drafter(config, context), config.is_governed

    def arm(self, method: str, num_rows: int) -> EngineArm:
        drafter, is_governed = self.drafter(method)
        config = EngineConfig(max_num_seqs=num_rows)
        return EngineArm(method, self.target, drafter, (), config, is_governed=is_governed)

    def prompts(self, kind: str, count: int) -> list[tuple[int, ...]]:
        if kind == "random":
            rng = random.Random(1)
            return [tuple(rng.randrange(self.target.vocab_size) for _ in range(100)) for _ in range(count)]
        wanted = CHAT if kind == "chat" else ("summarization",)
        chosen = [question for question in self.questions if question.category in wanted]
        if kind == "copy":
            chosen = [replace(question, category="copy", text=question.text[:700]) for question in chosen]
        found = load_prompts(self.pair.tokenizer, chosen, max_length=self.options.max_prompt_tokens)
        if len(found) < count:
            raise SystemExit(f"{self.options.prompts_file} has {len(found)} prompts of {kind}; {count} are needed")
        return [prompt.token_ids for prompt in found[:count]]

    def run(self, cell: str) -> dict[str, Any]:
        size, kind, method = cell.split("/")
        num_rows = int(size)
        groups = max(1, self.options.groups if num_rows == 1 else self.options.groups // 2)
        prompts = self.prompts(kind, num_rows * groups)
        arms = [self.arm("plain", num_rows), self.arm(method, num_rows)]
        ratios, tokens = [], {0: 0, 1: 0}
        num_same = num_texts = 0
        for group in range(groups):
            texts = prompts[group * num_rows : (group + 1) * num_rows]
            if group == 0:
                for arm in arms:
                    self._seconds(arm, texts)
            seconds: dict[int, list[float]] = {0: [], 1: []}
            outputs: dict[int, list[list[int]]] = {}
            for repeat in range(self.options.repeats):
                for place in (0, 1) if repeat % 2 == 0 else (1, 0):
                    taken, outputs[place], steps = self._seconds(arms[place], texts)
                    seconds[place].append(taken)
                    tokens[place] = steps
            num_same += sum(a == b for a, b in zip(outputs[0], outputs[1], strict=True))
            num_texts += num_rows
            ratios += [plain / other for plain, other in zip(seconds[0], seconds[1], strict=True)]
        governor = arms[1].engine.governor
        return {
            "cell": cell, "speed": statistics.median(ratios), "low": min(ratios), "high": max(ratios),
            "interval": bootstrap_median(ratios), "same": f"{num_same}/{num_texts}", "num_ratios": len(ratios),
            "estimate": None if governor is None else governor.speedup,
            "decision": None if governor is None else governor.describe(), "must_win": cell in MUST_WIN,
        }  # fmt: skip

    def _seconds(self, arm: EngineArm, texts: Sequence[tuple[int, ...]]) -> tuple[float, list[list[int]], int]:
        with no_garbage_collection():
            sampling = Sampling(ignore_eos=True)
            rows, _, seconds = arm.decode_batch(texts, self.options.max_new_tokens, sampling)
        return seconds, [row.output_ids for row in rows], arm.engine.profile.num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts-file", type=Path, required=True)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int, default=700)
    parser.add_argument("--groups", type=int, default=4, help="prompts of a cell with one row; half as many batches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cells = Cells(options)
    found = []
    print("| cell | speed by plain | 95 % | range | same rows | decision |\n|---|---|---|---|---|---|")
    for cell in options.cells:
        one = cells.run(cell)
        found.append(one)
        low, high = one["interval"]
        print(
            f"| {cell} | {one['speed']:.2f} | {low:.2f}-{high:.2f} | {one['low']:.2f}-{one['high']:.2f} "
            f"| {one['same']} | {one['decision']} |"
        )
        sys.stdout.flush()
        if options.out is not None:
            options.out.write_text(json.dumps({"provenance": provenance(), "cells": found}, indent=1, default=str))


if __name__ == "__main__":
    main()
