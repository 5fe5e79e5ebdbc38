"""Where a text ends when a stop string is completed inside a block: ours beside transformers' assisted generation.

The shipped target repeats itself after this prompt, so prompt lookup, and an assistant that equals the target, draft
whole blocks that are accepted. For every output length 1..14 there is a stop string that plain `generate` completes
with exactly that token.

    python benchmarks/stop_strings.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from foretoken import speculate, zoo

PROMPT = "The king said:"
WARM_UP, LENGTHS, BUDGET, NUM_DRAFT_TOKENS = 120, range(1, 15), 40, 6

Generate = Callable[..., int]


def ways(model: Any, tokenizer: Any, ids: torch.Tensor) -> dict[str, Generate]:
    """Ways of generating with a stop string, each of which returns the number of new tokens."""
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = NUM_DRAFT_TOKENS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0

    def run(**options: Any) -> int:
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=BUDGET, do_sample=False, **options)
        return int(output.shape[1] - ids.shape[1])

    def stop_of_transformers(stop: str) -> dict[str, Any]:
        return {"stop_strings": stop, "tokenizer": tokenizer}

    def as_criterion(stop: str) -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])}

    def ours(stop: str) -> int:
        options = {"num_speculative_tokens": NUM_DRAFT_TOKENS, "tokenizer": tokenizer, "stop_strings": stop}
        return run(custom_generate=speculate("ngram", **options))

    return {
        "plain": lambda stop: run(**stop_of_transformers(stop)),
        "foretoken ngram": ours,
        "prompt lookup": lambda stop: run(prompt_lookup_num_tokens=NUM_DRAFT_TOKENS, **stop_of_transformers(stop)),
        "assistant": lambda stop: run(assistant_model=assistant, **as_criterion(stop)),
    }


def stop_string(tokenizer: Any, tokens: list[int], length: int, plain: Generate) -> str:
    """The text of the last tokens up to this one, as few as make plain decoding end here."""
    for count in range(1, length + 4):
        text = tokenizer.decode(tokens[: WARM_UP + length][-count:])
        if plain(text) == length:
            return str(text)
    raise ValueError(f"no stop string ends after {length} tokens")


def table() -> list[dict[str, Any]]:
    """One row per length: the stop string, and the length that each way gives."""
    model, _, tokenizer = zoo.load()
    model.generation_config.eos_token_id = None
    prompt = tokenizer(PROMPT, return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=WARM_UP + 20, do_sample=False)[0]
    new = text[prompt["input_ids"].shape[1] :].tolist()
    ids = text[None, : prompt["input_ids"].shape[1] + WARM_UP]
    generators = ways(model, tokenizer, ids)
    rows = []
    for length in LENGTHS:
        stop = stop_string(tokenizer, new, length, generators["plain"])
        rows.append({"stop": stop} | {name: generate(stop) for name, generate in generators.items()})
    return rows


def main() -> None:
    rows = table()
    names = [name for name in rows[0] if name != "stop"]
    print(f"new tokens until the stop string, budget {BUDGET}, drafts of {NUM_DRAFT_TOKENS}")
    print("".join(f"{name:>17}" for name in names), "  stop string")
    for row in rows:
        print("".join(f"{row[name]:>17}" for name in names), f"  {row['stop']!r}")
    right = {name: sum(row[name] == row["plain"] for row in rows) for name in names}
    print("".join(f"{f'{right[name]} of {len(rows)}':>17}" for name in names), "  right")


if __name__ == "__main__":
    main()
