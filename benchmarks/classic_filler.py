"""What the filler of n-gram assisted decoding does to its acceptance: filler_top_k 1, 3 and 10, side by side.

    python benchmarks/classic_filler.py [--max-gen-len 64] [--repeats 3]

Counts only, no times: the prompts of ``foretoken bench`` on zoo:tiny, through the classic function. The storage is
cleared before every prompt ("fresh") or carried through all of them ("kept"); each of the likeliest tokens counts 1 as
in the original listing, or 0.25 (`filler_weight`). The last column compares the acceptance rate with
filler_top_k=1 of the same setting.
"""

from __future__ import annotations

import argparse
import json
from importlib import resources
from typing import Any

import torch

from foretoken import zoo
from foretoken.classic import last_trace
from foretoken.classic.ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
from foretoken.classic.utils.logits_processor import GreedyProcessor, MultinomialProcessor


def prompts(tokenizer: Any) -> list[list[int]]:
    lines = (resources.files("foretoken.bench") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines if line]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer(text).input_ids for text in texts]


def measure(
    storage: NGramStorage, filler: dict[str, Any], is_kept: bool, processor: Any, repeats: int, length: int
) -> tuple[int, int, int, int]:
    """Drafted, accepted and emitted tokens, and steps."""
    target, _, tokenizer = zoo.load("tiny")
    drafted = accepted = emitted = steps = 0
    for seed in range(repeats):
        storage.reset()
        for number, inputs in enumerate(prompts(tokenizer)):
            if not is_kept:
                storage.reset()
            torch.manual_seed(1000 * seed + number)
            tokens, _ = ngram_assisted_speculative_generate(
                inputs,
                storage,
                target,
                **filler,
                logits_processor=processor,
                max_gen_len=length,
                eos_tokens_id=[tokenizer.eos_token_id],
                use_cache=True,
                stop_if_unknown=True,
            )
            trace = last_trace()
            assert trace is not None
            drafted += trace.num_drafted
            accepted += trace.num_accepted
            emitted += len(tokens)
            steps += len(trace.steps)
    return drafted, accepted, emitted, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-gen-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="seeds at temperature 1")
    options = parser.parse_args()
    vocab_size = zoo.load("tiny")[0].config.vocab_size
    print("| processor | storage | filler_weight | filler_top_k | drafted | accepted | rate | tau | rate against 1 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, processor in (("greedy", GreedyProcessor()), ("temperature 1", MultinomialProcessor(1.0))):
        repeats = 1 if name == "greedy" else options.repeats
        for is_kept in (False, True):
            base = 0.0
            for weight, filler_top_k in ((1.0, 1), (1.0, 3), (1.0, 10), (0.25, 3), (0.25, 10)):
                filler = {"filler_top_k": filler_top_k, "filler_weight": weight}
                storage = NGramStorage(3, vocab_size)
                counts = measure(storage, filler, is_kept, processor, repeats, options.max_gen_len)
                drafted, accepted, emitted, steps = counts
                rate = accepted / drafted if drafted else 0.0
                base = rate if filler_top_k == 1 else base
                change = f"{rate / base - 1:+.0%}" if base else "-"
                print(
                    f"| {name} | {'kept' if is_kept else 'fresh'} | {weight:g} | {filler_top_k} | {drafted} "
                    f"| {accepted} | {rate:.3f} | {emitted / steps:.3f} | {change} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
