"""What the filler of n-gram assisted decoding does to its acceptance: filler_top_k 1, 3 and 10, side by side.

    python benchmarks/classic_filler.py [--max-gen-len 64] [--repeats 3]

Counts only, no times: the prompts of ``foretoken bench`` on zoo:tiny, through the classic function. The storage is
cleared before every prompt ("fresh") or carried through all of them ("kept"); runners-up weigh 0.25 as the library has
it, or 1 as an observed token does (the original listing). The last column compares the acceptance rate with
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


class EvenStorage(NGramStorage):
    """Counts runners-up like observed tokens, as the original listing does."""

    def fill(self, input_ids: torch.Tensor, next_tokens: torch.Tensor) -> None:
        self.update(input_ids, next_tokens)


def prompts(tokenizer: Any) -> list[list[int]]:
    lines = (resources.files("foretoken.bench") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines if line]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer(text).input_ids for text in texts]


def measure(
    storage: NGramStorage, filler_top_k: int, is_kept: bool, processor: Any, repeats: int, length: int
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
                filler_top_k=filler_top_k,
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
    print(
        "| processor | storage | runners-up weigh | filler_top_k | drafted | accepted | rate | tau | rate against 1 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, processor in (("greedy", GreedyProcessor()), ("temperature 1", MultinomialProcessor(1.0))):
        repeats = 1 if name == "greedy" else options.repeats
        for is_kept in (False, True):
            base = 0.0
            for kind, filler_top_k in (
                (NGramStorage, 1),
                (NGramStorage, 3),
                (NGramStorage, 10),
                (EvenStorage, 3),
                (EvenStorage, 10),
            ):
                counts = measure(kind(3, vocab_size), filler_top_k, is_kept, processor, repeats, options.max_gen_len)
                drafted, accepted, emitted, steps = counts
                rate = accepted / drafted if drafted else 0.0
                base = rate if filler_top_k == 1 else base
                weight = "-" if filler_top_k == 1 else "1" if kind is EvenStorage else "0.25"
                change = f"{rate / base - 1:+.0%}" if base else "-"
                print(
                    f"| {name} | {'kept' if is_kept else 'fresh'} | {weight} | {filler_top_k} | {drafted} | {accepted} "
                    f"| {rate:.3f} | {emitted / steps:.3f} | {change} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
