"""What decides whether a pair is shipped: held-out loss, looping, and how often the drafter is right.

    python training/measure_pair.py --target DIR --draft DIR --shards SHARDS --prompts question.jsonl

Prints one JSON object. Everything is float32 and seeded, so two pairs are compared on the same prompts.
Without ``--stop`` every continuation has ``--new-tokens`` tokens, ends of turns included.

- loop share: generated tokens (greedy, and sampled at temperature 1) that lie inside an 8-gram which occurs more than
  once in the same continuation;
- greedy agreement: positions of the target's greedy text where the drafter's best token is the target's;
- overlap: mean of sum_v min(p(v), q(v)) along text sampled from the target at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from data import held_out_shards
from train_tiny import held_out_loss
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

ORDER = 8


def questions(path: Path, count: int) -> list[str]:
    """``count`` first turns, evenly spaced over the file (and so over its categories)."""
    turns = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf8").splitlines()]
    return turns[:: max(1, len(turns) // count)][:count]


def loop_share(ids: list[int]) -> float:
    """Share of tokens inside an 8-gram that occurs more than once: 1 for a pure loop, 0 for fresh text."""
    places: dict[tuple[int, ...], list[int]] = {}
    for begin in range(len(ids) - ORDER + 1):
        places.setdefault(tuple(ids[begin : begin + ORDER]), []).append(begin)
    inside = {
        index
        for begins in places.values()
        if len(begins) > 1
        for begin in begins
        for index in range(begin, begin + ORDER)
    }
    return len(inside) / max(1, len(ids))


def continuation(model: LlamaForCausalLM, prompt: list[int], new_tokens: int, sampled: bool) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sampled else {"do_sample": False}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **settings)
    return found[0, len(prompt) :].tolist()


@torch.no_grad()
def agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: list[int], text: list[int]
) -> dict[str, float]:
    ids = torch.tensor([prompt + text])
    rows = slice(len(prompt) - 1, -1)
    wanted, drafted = (model(input_ids=ids).logits[0, rows] for model in (target, draft))
    return {
        "agreement": float((wanted.argmax(-1) == drafted.argmax(-1)).float().mean()),
        "overlap": float(torch.minimum(wanted.softmax(-1), drafted.softmax(-1)).sum(-1).mean()),
    }


def measure(options: argparse.Namespace) -> dict[str, object]:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (options.target, options.draft)
    )
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.target)
    endings = target.generation_config.eos_token_id
    target.generation_config.eos_token_id = endings if options.stop else None
    shards = held_out_shards(options.shards)
    result: dict[str, object] = {
        f"held_out_{name}": {
            source: round(loss, 4)
            for source, loss in held_out_loss(model, shards, 512, options.held_out_tokens).items()
        }
        for name, model in (("target", target), ("draft", draft))
    }
    prompts = [
        tokenizer.encode(f"<|user|>{question}\n<|assistant|>")[-400:]
        for question in questions(options.prompts, options.num_prompts)
    ]
    for label, sampled in (("greedy", False), ("temperature_1", True)):
        torch.manual_seed(0)
        texts = [continuation(target, prompt, options.new_tokens, sampled) for prompt in prompts]
        rates = [agreement(target, draft, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        result[label] = {
            "loop_share": round(sum(map(loop_share, texts)) / len(texts), 4),
            **{key: round(sum(rate[key] for rate in rates) / len(rates), 4) for key in ("agreement", "overlap")},
        }
        if options.show:
            result[label]["texts"] = [tokenizer.decode(text) for text in texts[: options.show]]
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--held-out-tokens", type=int, default=16384)
    parser.add_argument("--stop", action="store_true", help="let texts end where the target ends them")
    parser.add_argument("--show", type=int, default=0)
    print(json.dumps(measure(parser.parse_args()), indent=1))
