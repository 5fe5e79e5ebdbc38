"""Acceptance of methods that are forced on: tau, nodes per step and shares, by kind of prompt.

    python benchmarks/tau.py --method lookahead --method '{"method": "jacobi", "num_speculative_tokens": 8}' \
        [--model zoo:tiny] [--prompts question.jsonl] [--per-category 6] [--max-new-tokens 96] [--temperature 0]

The baseline is "bigram": one token after another, each the target's own argmax behind nothing but the token before
it. It knows the target, and nothing of the text: a method that looks at the text has to do better.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken import LLM, SamplingParams
from foretoken.config.engine import EngineConfig
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import ContextDrafter, Drafter
from foretoken.engine.engine import Engine
from foretoken.engine.sequence import Sequence
from foretoken.engine.stats import SequenceStats
from foretoken.model.lm import CausalLM, Nodes
from foretoken.tree import DraftTree

BASELINE = "bigram"


class Bigrams:
    """The target's argmax behind every token alone, asked for once per token that occurs."""

    def __init__(self, target: CausalLM) -> None:
        self._target = target
        self._known: dict[int, int] = {}

    @torch.inference_mode()
    def __getitem__(self, token: int) -> int:
        if token not in self._known:
            logits = self._target.forward(Nodes.from_chains([[token]]), self._target.new_cache(1, capacity=1))
            self._known[token] = int(logits[0, 0].argmax())
        return self._known[token]


class BigramDrafter(ContextDrafter):
    """Drafts what follows a token alone and looks at nothing else."""

    name = BASELINE

    def __init__(self, bigrams: Bigrams, depth: int) -> None:
        self._bigrams = bigrams
        self._depth = depth

    def propose_row(self, row: Sequence, budget: int) -> DraftTree:
        tokens = [row.pending]
        for _ in range(min(budget, self._depth)):
            tokens.append(self._bigrams[tokens[-1]])
        return DraftTree.chain(row.pending, tokens[1:], source=self.name)


@dataclass(frozen=True)
class Question:
    category: str
    token_ids: list[int]


def questions(llm: LLM, path: Path | None, per_category: int, categories: set[str]) -> list[Question]:
    """The first few prompts of every kind, as chats; those that leave no room for an answer are passed over."""
    from foretoken.bench.workload import read_questions

    found: dict[str, list[Question]] = defaultdict(list)
    for question in read_questions(path):
        if (categories and question.category not in categories) or len(found[question.category]) >= per_category:
            continue
        ids = llm.chat_prompt([{"role": "user", "content": question.text}])["prompt_token_ids"]
        if len(ids) + 256 <= (llm.target.context_length or 1 << 20):
            found[question.category].append(Question(question.category, ids))
    return [question for several in found.values() for question in several]


def run(
    llm: LLM, drafter: Drafter, asked: Iterable[Question], params: SamplingParams
) -> tuple[dict[str, SequenceStats], list[list[int]]]:
    """Counters by category, and all outputs."""
    engine = Engine(llm.target, drafter, EngineConfig(max_num_seqs=8), eos_token_ids=llm._eos_token_ids)
    asked = list(asked)
    rows = [engine.add_request(question.token_ids, params)[0] for question in asked]
    for _ in engine.run():
        pass
    stats: dict[str, SequenceStats] = defaultdict(SequenceStats)
    for question, row in zip(asked, rows, strict=True):
        stats[question.category].add(row.stats)
        stats["all"].add(row.stats)
    return stats, [row.output_ids for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--method", action="append", default=[], help="a name or JSON; may be repeated")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--per-category", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, action="append", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    llm = LLM(options.model)
    asked = questions(llm, options.prompts, options.per_category, set(options.category))
    bigrams = Bigrams(llm.target)
    for temperature in options.temperature or [0.0, 1.0]:
        params = SamplingParams(temperature=temperature, max_tokens=options.max_new_tokens, seed=1)
        _, plain = run(llm, EmptyDrafter(), asked, params)
        for method in [BASELINE, *options.method]:
            if method == BASELINE:
                drafter: Drafter = BigramDrafter(bigrams, 4)
            else:
                drafter = llm.with_speculative_config(method).drafting.new_drafter()
            stats, outputs = run(llm, drafter, asked, params)
            report(method, temperature, stats, outputs == plain, options.json)


def report(method: str, temperature: float, stats: dict[str, SequenceStats], is_equal: bool, as_json: bool) -> None:
    figures = {name: round(one.tokens_per_step, 3) for name, one in stats.items()}
    nodes = stats["all"].num_draft_tokens / max(1, stats["all"].num_steps)
    record = {
        "method": method, "temperature": temperature, "tau": figures, "nodes_per_step": round(nodes, 1),
        "equals_plain": is_equal,
    }  # fmt: skip
    if as_json:
        print(json.dumps(record), flush=True)
    else:
        print(f"T={temperature:g} {method}: nodes {nodes:.1f}, equal {is_equal}, tau {figures}", flush=True)


if __name__ == "__main__":
    main()
