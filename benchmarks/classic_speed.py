"""Speed of the classic functions by their own autoregressive one and by `model.generate`, with and without a cache.

    python benchmarks/classic_speed.py --model zoo:smollm2 --num-prompts 6 --max-gen-len 48 --repeats 3
    python benchmarks/classic_speed.py --model zoo:tiny --scale 100m --num-prompts 6 --max-gen-len 48 --repeats 3

Greedy, one prompt at a time, prompts read included. All arms run in turns in one process, forwards and backwards; of
every arm and prompt the fastest run counts, by the clock and by processor time, which says something on a busy machine
too. Ratios are medians over prompts, with the least and the most. "kept" storages have seen the prompts before, as on a
second call; adapters are made before the clock starts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging

from foretoken.bench.models import load_pair, scaled
from foretoken.bench.workload import load_prompts, read_questions, select
from foretoken.classic import last_trace
from foretoken.classic.ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
from foretoken.classic.sampling import autoregressive_generate, beam_search_generate, speculative_generate

Arm = Callable[[list[int]], list[int]]


@dataclass
class Best:
    """The fastest run of an arm on one prompt."""

    wall: float = float("inf")
    processor: float = float("inf")
    tokens: list[int] = field(default_factory=list)
    steps: int = 0


def generate(model: Any, length: int, **options: Any) -> Arm:
    """`model.generate` of transformers."""

    def run(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": length, "eos_token_id": [-1]}
        output = model.generate(ids, do_sample=False, pad_token_id=0, **given, **options)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return run


def arms_of(target: Any, drafter: Any, length: int) -> dict[str, Arm]:
    """Every way to generate ``length`` tokens; ends are ignored, so that all have as much to do."""
    given: dict[str, Any] = {"max_gen_len": length, "eos_tokens_id": []}
    kept = NGramStorage(3, target.config.vocab_size)

    def nasd(prompt: list[int], storage: NGramStorage | None = None, **options: Any) -> list[int]:
        storage = NGramStorage(3, target.config.vocab_size) if storage is None else storage
        return ngram_assisted_speculative_generate(prompt, storage, target, stop_if_unknown=True, **given, **options)[0]

    arms: dict[str, Arm] = {}
    for words, use_cache in (("", True), (", no cache", False)):
        cached = {"use_cache": use_cache}
        arms[f"model.generate{words}"] = generate(target, length, **cached)
        arms[f"autoregressive_generate{words}"] = lambda p, c=cached: autoregressive_generate(p, target, **given, **c)
        arms[f"ngram_assisted{words}"] = lambda p, c=cached: nasd(p, **c)
        arms[f"ngram_assisted, kept{words}"] = lambda p, c=cached: nasd(p, kept, **c)
        if drafter is not None:
            arms[f"speculative_generate{words}"] = lambda p, c=cached: speculative_generate(
                p, drafter, target, **given, **c
            )[0]
    arms["model.generate, 4 beams"] = generate(target, length, num_beams=4)
    arms["beam_search_generate, 4 beams"] = lambda p: beam_search_generate(p, target, num_beams=4, top_k=8, **given)
    return arms


def measure(arms: dict[str, Arm], prompts: list[list[int]], repeats: int) -> dict[str, list[Best]]:
    found = {name: [Best() for _ in prompts] for name in arms}
    for number, prompt in enumerate(prompts):
        for repeat in range(2 * repeats):
            for name in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
                wall, processor = time.perf_counter(), time.process_time()
                tokens = arms[name](prompt)
                wall, processor = time.perf_counter() - wall, time.process_time() - processor
                best, trace = found[name][number], last_trace()
                best.wall, best.processor = min(best.wall, wall), min(best.processor, processor)
                best.tokens = tokens
                best.steps = len(trace.steps) if trace is not None and "model" not in name else len(tokens)
    return found


def ratio(found: dict[str, list[Best]], name: str, base: str, what: str) -> str:
    ratios = [getattr(b, what) / getattr(a, what) for a, b in zip(found[name], found[base], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--scale", default="none", help="of a toy, as in foretoken bench")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-gen-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    logging.set_verbosity_error()  # transformers warns of an end token that never comes
    pair = scaled(load_pair(options.model, None, options.dtype), options.scale)
    questions = select(read_questions(None), options.num_prompts)
    prompts = [list(prompt.token_ids) for prompt in load_prompts(pair.tokenizer, questions, None, 400)]
    arms = arms_of(pair.target, pair.drafter, options.max_gen_len)
    for arm in arms.values():
        arm(prompts[0][:8])
    found = measure(arms, prompts, options.repeats)
    print(f"{pair.label}, {pair.target.dtype}, {torch.get_num_threads()} threads, {len(prompts)} prompts")
    print(
        "| function | tokens/s | tokens per step | x autoregressive | x model.generate | same, by processor | equal |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, bests in found.items():
        words = ", no cache" if name.endswith("no cache") else ", 4 beams" if name.endswith("beams") else ""
        plain, theirs = f"autoregressive_generate{words}", f"model.generate{words}"
        speed = sum(len(best.tokens) for best in bests) / sum(best.wall for best in bests)
        tau = sum(len(best.tokens) for best in bests) / sum(best.steps for best in bests)
        equal = sum(a.tokens == b.tokens for a, b in zip(bests, found[theirs], strict=True))
        own = ratio(found, name, plain, "wall") if plain in found else "-"
        cells = [own, ratio(found, name, theirs, "wall"), ratio(found, name, theirs, "processor")]
        print(f"| {name} | {speed:.1f} | {tau:.2f} | {' | '.join(cells)} | {equal}/{len(bests)} |", flush=True)


if __name__ == "__main__":
    main()
