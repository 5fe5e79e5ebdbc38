"""Write the inflated pair and reference outputs for other engines: run in .venv.

    .venv/bin/python benchmarks/export_pair.py OUT [--scale 100m] [--num-prompts 24] [--max-new-tokens 64]

OUT/target, OUT/draft: checkpoints; OUT/prompts.json: prompts as token ids and the target's greedy tokens (float32),
of the prompts whose answers are long enough to time. OUT/dense/target: the target with small noise where inflating
left zeros: another function at the same shape, to see whether an engine profits from zeros.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretoken.bench.models import load_pair, scaled
from foretoken.bench.suite import Settings, Suite


def without_zeros(model: Any) -> Any:
    """The zeros of all matrices replaced by noise, in place."""
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.where(weight == 0, torch.randn(weight.shape, generator=noise) * 0.02, weight))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", default="100m")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    options = parser.parse_args()

    pair = load_pair("zoo:tiny", None, "float32")
    settings = Settings(num_prompts=options.num_prompts, max_new_tokens=options.max_new_tokens)
    small = Suite(pair, "none", settings)  # the same function, at a fraction of the cost
    arm = small.plain_arm()
    groups = {"all kinds": small.prompts(options.context), "asked again": small.copying_prompts()}
    ending = replace(small.greedy, ignore_eos=False)  # what other engines do with an ignored end differs
    records = [
        {
            "group": group,
            "name": prompt.name,
            "prompt_ids": list(prompt.token_ids),
            "reference_ids": list(arm.run(prompt.token_ids, options.max_new_tokens, ending).token_ids),
        }
        for group, prompts in groups.items()
        for prompt in prompts
    ]
    records = [record for record in records if len(record["reference_ids"]) >= options.max_new_tokens // 2]
    big = scaled(pair, options.scale)
    big.target.save_pretrained(options.out / "target")
    big.drafter.save_pretrained(options.out / "draft")
    without_zeros(big.target).save_pretrained(options.out / "dense" / "target")
    for part in ("target", "draft", "dense/target"):
        pair.tokenizer.save_pretrained(options.out / part)
    (options.out / "prompts.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()
