"""How well a drafter drafts near and far: by position in held-out text, and in the engine.

    python training/measure_context.py --draft DIR --shards SHARDS

Prints one JSON object. Text: blocks of 1,536 tokens of the held-out shards; greedy agreement and the overlap
sum_v min(p(v), q(v)) with the target, pooled over sources of equal weight, by position in the block. Engine: tokens per
step with chains of K = 4 behind the last 256 and behind all 1,500 tokens of the same pieces of real text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from data import held_out_shards
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from foretoken import LLM, SamplingParams

BLOCK = 1536
SPANS = {"below_512": slice(0, 512), "512_to_1000": slice(512, 1000), "1000_to_1500": slice(1000, 1500)}
PROMPT = 1500
CONTEXTS = (256, PROMPT)
PROMPT_SOURCES = ("unseen_books", "unseen_gsm8k", "books", "dialogue", "python", "tldr")


def blocks(ids: np.ndarray, count: int) -> list[torch.Tensor]:
    """Up to ``count`` whole blocks, evenly spaced."""
    whole = len(ids) // BLOCK
    starts = sorted({index * whole // count * BLOCK for index in range(count)}) if whole else []
    return [torch.as_tensor(ids[start : start + BLOCK].astype("int64"))[None] for start in starts]


@torch.no_grad()
def by_position(target: LlamaForCausalLM, draft: LlamaForCausalLM, block: torch.Tensor) -> torch.Tensor:
    """[2, T]: whether the best tokens agree, and the overlap."""
    wanted, drafted = (model(input_ids=block, use_cache=False).logits[0] for model in (target, draft))
    agree = (wanted.argmax(-1) == drafted.argmax(-1)).float()
    overlap = torch.minimum(wanted.softmax(-1), drafted.softmax(-1)).sum(-1)
    return torch.stack([agree, overlap])


def on_text(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, shards: Mapping[str, np.ndarray], count: int
) -> dict[str, object]:
    found = {}
    for name, ids in shards.items():
        rows = [by_position(target, draft, block) for block in blocks(ids, count)]
        if rows:
            found[name] = torch.stack(rows).mean(0)  # [2, T]
    tables = {"all": torch.stack(list(found.values())).mean(0), **found}
    return {
        name: {span: [round(float(x), 4) for x in table[:, where].mean(-1)] for span, where in SPANS.items()}
        for name, table in tables.items()
    }


def in_engine(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, shards: Mapping[str, np.ndarray], options: argparse.Namespace
) -> dict[str, float]:
    """Tokens per step: emitted tokens by decode steps, all prompts pooled."""
    llm = LLM(target, {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}, seed=0)
    texts = [
        block[0, :PROMPT].tolist()
        for name in PROMPT_SOURCES
        if name in shards
        for block in blocks(shards[name], options.prompts_per_source)
    ]
    result = {}
    for temperature in (0.0, 1.0):
        for context in CONTEXTS:
            params = SamplingParams(temperature=temperature, max_tokens=options.new_tokens, ignore_eos=True, seed=0)
            prompts = [{"prompt_token_ids": text[-context:]} for text in texts]
            metrics = [output.metrics.speculative_decoding for output in llm.generate(prompts, params, use_tqdm=False)]
            emitted = sum(row["tokens_per_step"] * row["num_steps"] for row in metrics)
            steps = sum(row["num_steps"] for row in metrics)
            result[f"temperature_{temperature:g}_context_{context}"] = round(emitted / steps, 3)
    return {"prompts": len(texts), **result}


def measure(options: argparse.Namespace) -> dict[str, object]:
    from foretoken import zoo

    folder = options.target or zoo.path("tiny", "target")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (folder, options.draft)
    )
    shards = held_out_shards(options.shards)
    result: dict[str, object] = {"agreement_and_overlap": on_text(target, draft, shards, options.blocks)}
    if options.prompts_per_source:
        result["tokens_per_step"] = in_engine(target, draft, shards, options)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="default: the shipped one")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=8, help="per source, at most")
    parser.add_argument("--prompts-per-source", type=int, default=3, help="0: no engine")
    parser.add_argument("--new-tokens", type=int, default=36)
    print(json.dumps(measure(parser.parse_args()), indent=1))
