"""Drafting over a constant part of the cache on long documents: acceptance by budget, cost of a draft, speed by batch.

    python benchmarks/sparse_kv.py acceptance --documents BOOKS --contexts 1024 2048 --budgets 64 256 1024
    python benchmarks/sparse_kv.py cost --documents BOOKS --contexts 1024 2048 4096 7168
    python benchmarks/sparse_kv.py speed --documents BOOKS --contexts 2048 7168 --batch-sizes 1 2 4 8 16
    python benchmarks/sparse_kv.py view --contexts 1024 7168 --batch-sizes 1 8

BOOKS is a folder of .txt files; a prompt is a piece of one, followed by one of three tasks: go on, answer, summarise.
Every text is compared with plain decoding of the same prompt. Acceptance can be taken on a busy machine; the others
take times, interleaved with plain decoding: leave the machine alone meanwhile, or let `speed` count the processor time
of one thread (--processor-time).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from foretoken import LLM, SamplingParams
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, make_drafter
from foretoken.drafters.none import EmptyDrafter
from foretoken.drafters.selfdraft.sparse_kv import SparseKVDrafter
from foretoken.engine import stats
from foretoken.engine.costs import Forward, filled_cache, forward_times
from foretoken.engine.drafter import Drafter
from foretoken.engine.engine import Engine
from foretoken.engine.governing import AnyGovernor
from foretoken.model.cache.prefixes import PrefixStore

TASKS = (
    None,
    "Who speaks or acts in this passage, and what do they do? Answer in a few sentences.",
    "Summarise this passage in a few sentences.",
)
"""None goes on with the text itself."""


def prompts(llm: LLM, folder: Path, context: int, count: int) -> Iterator[list[int]]:
    """Prompts of ``context`` tokens, task included, from places of their own in the documents."""
    texts = [llm.tokenizer(path.read_text(encoding="utf-8"))["input_ids"] for path in sorted(folder.glob("*.txt"))]
    if not texts:
        raise SystemExit(f"{folder} holds no .txt files; name a folder of documents")
    for number in range(count):
        text, task = texts[number % len(texts)], TASKS[number // len(texts) % len(TASKS)]
        start = 2000 + 9000 * (number // len(texts))
        if task is None:
            yield text[start : start + context]
            continue
        piece, ids = text[start : start + context], []
        while not ids or len(ids) > context:
            piece = piece[: len(piece) - (len(ids) - context if ids else 64)]
            message = [{"role": "user", "content": f"{llm.tokenizer.decode(piece)}\n\n{task}"}]
            ids = llm.tokenizer(llm.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))[
                "input_ids"
            ]
        yield ids


def sparse(llm: LLM, num_drafted: int, **keys: Any) -> Drafter:
    config = SpeculativeConfig(method="sparse_kv", num_speculative_tokens=num_drafted, **keys)
    return make_drafter(config, DrafterContext(llm.target, tokenizer=llm.tokenizer))


def run(
    llm: LLM,
    drafter: Drafter,
    texts: list[list[int]],
    options: argparse.Namespace,
    prefixes: PrefixStore,
    governor: AnyGovernor | None = None,
) -> Any:
    """Decode one batch; its rows and the seconds of its decode steps."""
    params = SamplingParams(max_tokens=options.new_tokens, temperature=options.temperature, seed=1, ignore_eos=True)
    config = EngineConfig(max_num_seqs=max(32, len(texts)))
    engine = Engine(llm.target, drafter, config, prefixes=prefixes, governor=governor)
    rows = [engine.add_request(text, params)[0] for text in texts]
    while engine.has_unfinished:
        engine.step()
    return rows, engine.profile.decode_seconds


def acceptance(llm: LLM, options: argparse.Namespace) -> None:
    for context in options.contexts:
        texts = list(prompts(llm, options.documents, context, options.num_prompts))
        prefixes = PrefixStore(len(texts))
        run(llm, EmptyDrafter(), texts, options, prefixes)  # what all later runs find in the cache, to the bit
        plain = [row.output_ids for row in run(llm, EmptyDrafter(), texts, options, prefixes)[0]]
        for selector in options.selectors:
            for budget in options.budgets:
                if budget > context:
                    continue
                drafter = sparse(llm, options.num_drafted, kv_budget=budget, kv_selector=selector, **options.keys)
                rows, _ = run(llm, drafter, texts, options, prefixes)
                drafted = sum(row.stats.num_draft_tokens for row in rows)
                kept = sum(row.stats.num_accepted_draft_tokens for row in rows)
                depths = sum((row.stats.acceptance_histogram for row in rows), Counter[int]())
                show(
                    options,
                    context=context,
                    selector=selector,
                    budget=budget,
                    acceptance=round(kept / drafted, 3),
                    survival=[
                        round(sum(n for depth, n in depths.items() if depth >= least) / depths.total(), 3)
                        for least in range(1, options.num_drafted + 1)
                    ],
                    tokens_per_step=round(
                        sum(row.stats.num_emitted_tokens for row in rows) / sum(row.stats.num_steps for row in rows), 2
                    ),
                    equal=f"{sum(a.output_ids == b for a, b in zip(rows, plain, strict=True))}/{len(rows)}",
                )


def cost(llm: LLM, options: argparse.Namespace) -> None:
    """Milliseconds of one node over the whole cache and over a view of it, of a verification, and of a choice."""
    for context in options.contexts:
        cache, length = filled_cache(llm.target, context, 64)
        for budget in options.budgets:
            if budget > length:
                continue
            drafter = sparse(llm, options.num_drafted, kv_budget=budget, kv_selector=options.selectors[0])
            assert isinstance(drafter, SparseKVDrafter)
            drafter.bind(llm.target, cache)
            view = drafter._view
            assert view is not None
            row = view.cache.add_rows()
            columns = (range(view.sinks), range(length - budget + view.sinks, length))
            start = perf_counter()
            view.cache.choose(row, cache, 0, [columns] * llm.target.num_layers)
            chosen = perf_counter() - start
            widths = (1, options.num_drafted + 1)
            forwards = [Forward(llm.target, cache, width) for width in widths]
            times = forward_times([*forwards, Forward(drafter.model, view.cache)], options.repeats)
            whole, verify, draft = (1e3 * min(taken) for taken in times)
            show(
                options,
                context=length,
                budget=budget,
                plain_ms=round(whole, 2),
                verify_ms=round(verify, 2),
                draft_ms=round(draft, 2),
                choice_ms=round(1e3 * chosen, 2),
            )


def speed(llm: LLM, options: argparse.Namespace) -> None:
    """Speed relative to plain decoding of the same batch, in turns: A B B A."""
    for context in options.contexts:
        for batch_size in options.batch_sizes:
            texts = list(prompts(llm, options.documents, context, batch_size))
            prefixes = PrefixStore(len(texts))
            configs = [(s, b) for s in options.selectors for b in options.budgets if b <= context]
            run(llm, EmptyDrafter(), texts, options, prefixes)
            expected = [row.output_ids for row in run(llm, EmptyDrafter(), texts, options, prefixes)[0]]
            for selector, budget in configs:
                ratios, plain_rates, equal = [], [], 0
                for turn in range(options.repeats):
                    seconds = {}
                    for arm in ("plain", "sparse") if turn % 2 == 0 else ("sparse", "plain"):
                        drafter = (
                            EmptyDrafter()
                            if arm == "plain"
                            else sparse(
                                llm, options.num_drafted, kv_budget=budget, kv_selector=selector, **options.keys
                            )
                        )
                        rows, seconds[arm] = run(llm, drafter, texts, options, prefixes)
                        if arm == "sparse":
                            equal = sum(row.output_ids == ids for row, ids in zip(rows, expected, strict=True))
                    ratios.append(seconds["plain"] / seconds["sparse"])
                    plain_rates.append(batch_size * options.new_tokens / seconds["plain"])
                show(
                    options,
                    context=context,
                    batch=batch_size,
                    selector=selector,
                    budget=budget,
                    plain_tokens_per_second=round(median(plain_rates), 1),
                    speed=round(median(ratios), 2),
                    lowest=round(min(ratios), 2),
                    highest=round(max(ratios), 2),
                    equal=f"{equal}/{batch_size}",
                )


@torch.inference_mode()
def view(llm: LLM, options: argparse.Namespace) -> None:
    """One layer of a draft: over a copy of chosen columns that is made once, or gathered anew for every token.

    Microseconds of processor time, least of many, in turns. The copy has what may be kept besides, 64 columns, as well.
    """
    config, dtype = llm.target.config, llm.target.dtype
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // heads
    for context in options.contexts:
        for rows in options.batch_sizes:
            keys, values = (torch.randn(rows, heads, context, size).to(dtype) for _ in range(2))
            query = torch.randn(rows, heads, group, size).to(dtype)
            for budget in options.budgets:
                if budget > context:
                    continue
                chosen = torch.rand(rows, heads, context).topk(budget).indices.sort().values
                index = chosen[..., None].expand(-1, -1, -1, size)
                wide = torch.arange(min(context, budget + 64))
                kept = [part[:, :, wide].clone() for part in (keys, values)]
                arms = {
                    "copy": lambda kept=kept: attend(query, *kept),  # noqa: B023
                    "gather": lambda index=index: attend(query, keys.gather(2, index), values.gather(2, index)),  # noqa: B023
                    "slices": lambda budget=budget: attend(query, ends(keys, budget), ends(values, budget)),  # noqa: B023
                    "copying": lambda index=index: (keys.gather(2, index), values.gather(2, index)),  # noqa: B023
                }
                taken: dict[str, list[float]] = {name: [] for name in arms}
                for _ in range(options.repeats):
                    for name, arm in arms.items():
                        start = process_time()
                        for _ in range(20):
                            arm()
                        taken[name].append((process_time() - start) / 20)
                least = {f"{name}_us": round(1e6 * min(times), 1) for name, times in taken.items()}
                show(options, context=context, batch=rows, budget=budget, **least)


def ends(states: torch.Tensor, budget: int) -> torch.Tensor:
    """The first four and the last columns."""
    return torch.cat([states[:, :, :4], states[:, :, 4 - budget :]], dim=2)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values)


def show(options: argparse.Namespace, **found: Any) -> None:
    print(
        json.dumps(found) if options.json else "  ".join(f"{key} {value}" for key, value in found.items()), flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("acceptance", "cost", "speed", "view"))
    parser.add_argument("--documents", type=Path, help="folder of .txt files")
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 7168])
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--selectors", nargs="+", default=["streaming", "snapkv"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--num-prompts", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--num-drafted", type=int, default=3, help="K")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keys", type=json.loads, default={}, help="further keys of sparse_kv, as JSON")
    parser.add_argument("--processor-time", action="store_true", help="count it instead of the clock; one thread")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.processor_time:
        torch.set_num_threads(1)
        stats.perf_counter = process_time  # type: ignore[attr-defined]
    llm = LLM(options.model, dtype=options.dtype)
    print(f"{options.model} {llm.target.dtype} {llm.target.execution.describe()} torch {torch.__version__}", flush=True)
    todo = {"acceptance": acceptance, "cost": cost, "speed": speed, "view": view}
    todo[options.what](llm, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
