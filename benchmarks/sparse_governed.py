"""What the governor makes of `sparse_kv` on long documents, and which of several methods it picks.

    python benchmarks/sparse_governed.py --documents BOOKS --contexts 2048 7168 --batch-sizes 1 4

Every method runs with a governor, between runs of plain decoding of the same prompts (see `sparse_kv.py`), and `auto`
has all of them as arms. One thread's processor time stands for the clock, for the governor, too: other load of the
machine does not count. Speeds are by plain decoding.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from sparse_kv import prompts, run, show

from foretoken import LLM
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine import costs, stats
from foretoken.model.cache.prefixes import PrefixStore


def governed(llm: LLM, options: argparse.Namespace) -> None:
    """Speed by plain decoding under a governor, and who drafted what share of the nodes that were verified."""
    sparse_config = {"method": "sparse_kv", "kv_budget": options.budget}
    configs: dict[str, Any] = {
        "sparse_kv": sparse_config,
        "ngram": "ngram",
        "suffix": "suffix",
        "auto": {"method": "auto", "drafters": ["ngram", "suffix", sparse_config]},
    }
    for context in options.contexts:
        for batch_size in options.batch_sizes:
            texts = list(prompts(llm, options.documents, context, batch_size))
            prefixes = PrefixStore(len(texts))
            run(llm, EmptyDrafter(), texts, options, prefixes)
            seconds = [run(llm, EmptyDrafter(), texts, options, prefixes)[1]]
            found = {}
            for name, config in configs.items():
                drafting = llm.with_speculative_config(config).drafting
                drafter = drafting.new_drafter()
                found[name] = run(llm, drafter, texts, options, prefixes, drafting.governor(llm.target, drafter))
                seconds.append(run(llm, EmptyDrafter(), texts, options, prefixes)[1])
            for name, (rows, taken) in found.items():
                counted = [row.stats for row in rows]
                drafted = sum((Counter(one.drafted_by) for one in counted), Counter[str]())
                show(
                    options,
                    context=context,
                    batch=batch_size,
                    method=name,
                    speed=round(median(seconds) / taken, 2),
                    steps_with_drafts=round(
                        sum(one.num_spec_steps for one in counted) / sum(one.num_steps for one in counted), 2
                    ),
                    tokens_per_step=round(
                        sum(one.num_emitted_tokens for one in counted) / sum(one.num_steps for one in counted), 2
                    ),
                    drafted={who: round(count / drafted.total(), 2) for who, count in drafted.most_common()},
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 7168])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module in (stats, costs):
        module.perf_counter = process_time  # type: ignore[attr-defined]
    governed(LLM(options.model, dtype=options.dtype), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
