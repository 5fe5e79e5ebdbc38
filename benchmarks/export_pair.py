"""Write a model and its drafter, prompts and reference outputs for other engines: run in .venv.

    .venv/bin/python benchmarks/export_pair.py OUT [--model zoo:smollm2] [--scale none] [--num-prompts 24]
        [--max-new-tokens 64]

OUT/target and, where the model brings one, OUT/draft: checkpoints in float32, which holds half precision exactly;
OUT/prompts.json: prompts as token ids and the target's greedy tokens (float32), of the prompts whose answers are long
enough to time. A toy is inflated in width to 98.6 M parameters, and its prompts are padded to 256 tokens. Of an
inflated target there is OUT/dense/target too: the target with small noise where inflating left zeros: another function
at the same shape, to see whether an engine profits from zeros.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretoken import zoo
from foretoken.bench.models import load_pair, scaled, sizes
from foretoken.bench.settings import Settings
from foretoken.bench.suite import Suite
from foretoken.loading.models import is_zoo

PADDED_CONTEXT = 256


def without_zeros(model: Any) -> Any:
    """The zeros of all matrices replaced by noise, in place."""
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.where(weight == 0, torch.randn(weight.shape, generator=noise) * 0.02, weight))
    return model


def export(
    model: str,
    out: Path,
    scale: str | None = None,
    num_prompts: int = 24,
    max_new_tokens: int = 64,
    context: int | None = None,
) -> None:
    """See the module.

    Args:
      scale: None inflates toys.
      context: tokens to which prompts are padded; None pads those of toys.
    """
    is_toy = is_zoo(model) and zoo.manifest(model).is_toy
    scale = scale or ("100m" if is_toy else "none")
    context = context or (PADDED_CONTEXT if is_toy else None)
    pair = load_pair(model, None, "float32")
    settings = Settings(num_prompts=num_prompts, max_new_tokens=max_new_tokens)
    small = Suite(pair, "none", settings)  # the same function, at a fraction of the cost where it is inflated
    arm = small.lineup.engine_arm("ngram", {"method": "ngram"})  # what plain decoding says, sooner
    groups = {"all kinds": small.prompts(context), "asked again": small.copying_prompts()}
    ending = replace(small.greedy, ignore_eos=False)  # what other engines do with an ignored end differs
    records: list[dict[str, Any]] = []
    for group, prompts in groups.items():
        for place, prompt in enumerate(prompts, 1):
            answer = arm.run(prompt.token_ids, max_new_tokens, ending).token_ids
            print(f"{group}: prompt {place} of {len(prompts)}, {len(answer)} tokens", file=sys.stderr, flush=True)
            if len(answer) >= max_new_tokens // 2:
                ids = {"prompt_ids": list(prompt.token_ids), "reference_ids": list(answer)}
                records.append({"group": group, "name": prompt.name, **ids})
    big = scaled(pair, scale)
    parts = {"target": big.target} | ({} if big.drafter is None else {"draft": big.drafter})
    for part, saved in parts.items():
        _save(saved, pair.tokenizer, out / part)
    if sizes(scale) is not None:
        _save(without_zeros(big.target), pair.tokenizer, out / "dense" / "target")
    (out / "prompts.json").write_text(json.dumps(records))  # last: its presence says that all is there


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=zoo.default())
    parser.add_argument("--scale", help="none, 100m or HIDDENxFFN")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--context", type=int)
    options = parser.parse_args()
    export(options.model, options.out, options.scale, options.num_prompts, options.max_new_tokens, options.context)


if __name__ == "__main__":
    main()
