"""Host time of one proposal and one observation of drafters that look at text only, without any model.

    OMP_NUM_THREADS=1 python benchmarks/draft_cost.py [--vocab-size 32000] [--context 1000]... [--steps 300]

Process time, median over the steps of a row whose "target" draws tokens from a text with many repetitions.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from statistics import median
from time import process_time_ns
from types import SimpleNamespace
from typing import Any

import torch

from foretoken.drafters.base import Drafter, Features, StepResult
from foretoken.drafters.jacobi import JacobiDrafter
from foretoken.drafters.lookahead import LookaheadDrafter
from foretoken.drafters.nasd import NasdDrafter
from foretoken.drafters.ngram import NGramDrafter
from foretoken.drafters.token_recycling import TokenRecyclingDrafter
from foretoken.engine.verify import match

DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": lambda _: NGramDrafter(10),
    "nasd": lambda _: NasdDrafter(5),
    "jacobi, 16 guesses": lambda _: JacobiDrafter(16),
    "lookahead, W=7 N=5 G=7": lambda _: LookaheadDrafter(),
    "lookahead, W=15 N=5 G=15": lambda _: LookaheadDrafter(window_size=15, guess_set_size=15),
    "token_recycling, 32 nodes": lambda size: TokenRecyclingDrafter(size, max_nodes=32),
    "token_recycling, 80 nodes": lambda size: TokenRecyclingDrafter(size),
}


def measure(make: Callable[[int], Drafter], vocab_size: int, context: int, num_steps: int) -> tuple[float, ...]:
    """Milliseconds of ``start``; median microseconds of ``propose`` and of ``observe``; mean nodes."""
    draw = random.Random(0)
    phrases = [[draw.randrange(vocab_size) for _ in range(8)] for _ in range(40)]
    text = [token for _ in range((context + num_steps * 9) // 8) for token in draw.choice(phrases)]
    row: Any = SimpleNamespace(
        id=0, token_ids=text[:context], num_prompt_tokens=context, seed=1, num_steps=0,
        law=SimpleNamespace(eos_token_ids=()), params=SimpleNamespace(stop_token_ids=()), pending=text[context - 1],
    )  # fmt: skip
    drafter = make(vocab_size)
    drafter.bind(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    start = process_time_ns()
    drafter.start([row], [Features()])
    start_time = process_time_ns() - start
    proposals, observations, nodes = [], [], []
    for _ in range(num_steps):
        begin = process_time_ns()
        tree = drafter.propose([row], [100])[0]
        proposals.append(process_time_ns() - begin)
        done = len(row.token_ids)
        future = [text[done + depth] for depth in tree.depths]
        verdict = match(tree, future.__getitem__)
        emitted = (*(tree.tokens[node] for node in verdict.path[1:]), verdict.next_token)
        choices = tuple(token if draw.random() < 0.7 else draw.choice(text) for token in future)
        which = range(len(tree)) if drafter.requires.all_nodes else verdict.path
        k = drafter.requires.top_k
        top = torch.stack([torch.randperm(64)[:k] for _ in which]) if k else None
        row.token_ids.extend(emitted)
        row.pending = row.token_ids[-1]
        begin = process_time_ns()
        drafter.observe([row], [StepResult(tree, verdict.path, emitted, Features(top_ids=top, choices=choices))])
        observations.append(process_time_ns() - begin)
        nodes.append(len(tree))
    return start_time / 1e6, median(proposals) / 1e3, median(observations) / 1e3, sum(nodes) / len(nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print("| drafter | context | start, ms | propose, us | observe, us | nodes |\n|---|---|---|---|---|---|")
    for name, make in DRAFTERS.items():
        for context in options.context or [1000, 16000]:
            start, propose, observe, nodes = measure(make, options.vocab_size, context, options.steps)
            print(f"| {name} | {context} | {start:.1f} | {propose:.0f} | {observe:.0f} | {nodes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
