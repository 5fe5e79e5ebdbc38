"""Drafting over a constant part of the cache on long documents: acceptance by budget, costs, and speed by batch.

    python benchmarks/sparse_kv.py acceptance --documents BOOKS --contexts 1024 2048 --budgets 64 256 1024
    python benchmarks/sparse_kv.py speed --documents BOOKS --contexts 2048 7168 --batch-sizes 1 2 4 8 16
    python benchmarks/sparse_kv.py speed --documents BOOKS --governed --contexts 2048 7168 --batch-sizes 1 4
    python benchmarks/sparse_kv.py steps --contexts 2048 7168 --batch-sizes 1 2 4 8 16 > costs.jsonl
    python benchmarks/sparse_kv.py table --costs costs.jsonl --acceptance accepted.jsonl

BOOKS is a folder of .txt files; a prompt is a piece of one, followed by one of three tasks: go on, answer, summarise.
Every text is compared with plain decoding of the same prompt. Acceptance can be taken on a busy machine; the others
take times, interleaved with plain decoding: leave the machine alone meanwhile, or count the processor time of one
thread instead (--processor-time), for the governor, too. ``--governed`` says what the governor makes of drafts, and
which of several methods `auto` picks.

"steps" and "table" replay costs, by batch and context: MagicDec's question. Costs are those of whole steps of the
engine, plain ones and ones that draft and verify K tokens, in turns over the same rows: the least processor time of
several, and the least time of a clock beside it. Keys and values before the last token are random numbers, so that no
prompt has to be read; rows are of unlike lengths, a token apart. How many tokens are accepted depends on no clock, so a
table takes that from lines of "acceptance --json". ``--random`` is a model of the same shape with random weights and
room for 40,960 tokens. Choosing columns anew, once per `kv_refresh` tokens of a row, is timed apart and counted by its
share.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, make_drafter
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine import costs as forward_costs
from foretoken.engine import stats
from foretoken.engine.budget import Budget
from foretoken.engine.drafter import Drafter
from foretoken.engine.engine import Engine
from foretoken.engine.governing import AnyGovernor
from foretoken.engine.sequence import Sequence
from foretoken.loading.models import load_model
from foretoken.model.cache.prefixes import PrefixStore
from foretoken.model.cache.ragged import KVCache
from foretoken.model.lm import CausalLM, Nodes
from foretoken.tree import DraftTree

TASKS = (
    None,
    "Who speaks or acts in this passage, and what do they do? Answer in a few sentences.",
    "Summarise this passage in a few sentences.",
)
"""None goes on with the text itself."""

REFRESH = 64
"""Tokens of a row between two choices of its columns."""


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
    small = None
    if "model" in keys:
        small = CausalLM(load_model(keys["model"], part="draft", dtype=llm.target.dtype).model)
    return make_drafter(config, DrafterContext(llm.target, small, tokenizer=llm.tokenizer))


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
                drafter = sparse(llm, options.num_drafted[0], kv_budget=budget, kv_selector=selector, **options.keys)
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
                        for least in range(1, options.num_drafted[0] + 1)
                    ],
                    tokens_per_step=round(
                        sum(row.stats.num_emitted_tokens for row in rows) / sum(row.stats.num_steps for row in rows), 2
                    ),
                    equal=f"{sum(a.output_ids == b for a, b in zip(rows, plain, strict=True))}/{len(rows)}",
                )


def speed(llm: LLM, options: argparse.Namespace) -> None:
    """Speed relative to plain decoding of the same batch, in turns (A B B A), and who drafted what share of nodes."""
    for context, batch_size in product(options.contexts, options.batch_sizes):
        texts = list(prompts(llm, options.documents, context, batch_size))
        prefixes = PrefixStore(len(texts))
        run(llm, EmptyDrafter(), texts, options, prefixes)
        expected = [row.output_ids for row in run(llm, EmptyDrafter(), texts, options, prefixes)[0]]
        for name, config in configs(options, context).items():
            drafting = llm.with_speculative_config(config).drafting
            seconds: dict[bool, list[float]] = {True: [], False: []}
            rows: list[Sequence] = []
            for is_plain in [True, False, False, True] * options.repeats:
                drafter = EmptyDrafter() if is_plain else drafting.new_drafter()
                governor = drafting.governor(llm.target, drafter) if options.governed and not is_plain else None
                found, taken = run(llm, drafter, texts, options, prefixes, governor)
                seconds[is_plain].append(taken)
                rows = rows if is_plain else found
            ratios = [slow / fast for slow, fast in zip(seconds[True], seconds[False], strict=True)]
            steps = sum(row.stats.num_steps for row in rows)
            drafted = sum((Counter(row.stats.drafted_by) for row in rows), Counter[str]())
            show(
                options,
                context=context,
                batch=batch_size,
                method=name,
                plain_tokens_per_second=round(batch_size * options.new_tokens / median(seconds[True]), 1),
                speed=round(median(ratios), 2),
                lowest=round(min(ratios), 2),
                highest=round(max(ratios), 2),
                steps_with_drafts=round(sum(row.stats.num_spec_steps for row in rows) / steps, 2),
                tokens_per_step=round(sum(row.stats.num_emitted_tokens for row in rows) / steps, 2),
                drafted={who: round(count / drafted.total(), 2) for who, count in drafted.most_common()},
                equal=f"{sum(row.output_ids == ids for row, ids in zip(rows, expected, strict=True))}/{batch_size}",
            )


def configs(options: argparse.Namespace, context: int) -> dict[str, Any]:
    """What is raced: every selector and budget at a fixed length, or governed beside other methods and `auto`."""
    sparse_kv = {
        f"{selector} {budget}": {"method": "sparse_kv", "kv_budget": budget, "kv_selector": selector, **options.keys}
        for selector in options.selectors
        for budget in options.budgets
        if budget <= context
    }
    if not options.governed:
        return {name: {**one, "num_speculative_tokens": options.num_drafted[0]} for name, one in sparse_kv.items()}
    auto = {"method": "auto", "drafters": ["ngram", "suffix", next(iter(sparse_kv.values()))]}
    return {**sparse_kv, "ngram": "ngram", "suffix": "suffix", "auto": auto}


def show(options: argparse.Namespace, **found: Any) -> None:
    print(
        json.dumps(found) if options.json else "  ".join(f"{key} {value}" for key, value in found.items()), flush=True
    )


# -- a replay of costs -------------------------------------------------------------------------------------------------


class Switch(Drafter):
    """Drafts with one of several drafters, so many tokens, or not at all: as told before every step.

    Attributes:
      seconds: of processor time, and by the clock, of the last draft.
    """

    name = "switch"

    def __init__(self, parts: dict[int, Drafter]) -> None:
        self.parts = parts
        self.budget, self.depth = 0, 0
        self.seconds = (0.0, 0.0)

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        for part in self.parts.values():
            part.bind(target, cache)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        if self.depth == 0:
            return [DraftTree.root(row.pending) for row in rows]
        begun = process_time(), perf_counter()
        given = [Budget(min(self.depth, budget), budget.nodes, budget.chains_only) for budget in budgets]
        trees = self.parts[self.budget].propose(rows, given)
        self.seconds = process_time() - begun[0], perf_counter() - begun[1]
        return trees

    def forget(self, rows: Seq[Sequence]) -> None:
        for part in self.parts.values():
            part.forget(rows)


def random_model(name: str) -> Any:
    """The shape of a model, its weights drawn anew, with a longer context."""
    config = LLM(name).target.config
    config.max_position_embeddings = 40_960
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@torch.inference_mode()
def random_prefix(target: CausalLM, token_ids: list[int]) -> PrefixStore:
    """A store that holds these tokens, whose keys and values are random numbers."""
    length = len(token_ids)
    cache = target.new_cache(1, capacity=length + 1)
    target.forward(Nodes.from_chains([token_ids[:1]]), cache)
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            buffer[:, :, :length] = torch.randn(buffer.shape[1], 1, buffer.shape[3]).to(buffer.dtype)
            buffer[:, :, :length] += 0.1 * torch.randn(1, length, 1).to(buffer.dtype)
    cache.lengths = [length]
    store = PrefixStore(1)
    store.keep(token_ids, cache, 0, length)
    return store


class Cell:
    """Rows of one context, and the engine that steps them."""

    def __init__(self, target: CausalLM, store: PrefixStore, token_ids: list[int], num_rows: int, budgets: Seq[int]):
        parts = {
            budget: make_drafter(
                SpeculativeConfig(
                    method="sparse_kv",
                    num_speculative_tokens=16,
                    length_policy="fixed",
                    kv_budget=budget,
                    kv_refresh=REFRESH,
                ),
                DrafterContext(target),
            )
            for budget in budgets
        }
        self.drafter = Switch(parts)
        self.engine = Engine(target, self.drafter, EngineConfig(max_num_seqs=num_rows), prefixes=store)
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        prompts = [token_ids[: len(token_ids) - row] for row in range(num_rows)]
        self.rows = [self.engine.add_request(prompt, params)[0] for prompt in prompts]
        while len(self.engine.decoding_rows) < num_rows:
            self.step(0, 0)

    def step(self, budget: int, depth: int) -> dict[str, tuple[float, float]]:
        """Seconds of one step and of its draft, of the processor and by the clock."""
        self.drafter.budget, self.drafter.depth = budget, depth
        self.drafter.seconds = (0.0, 0.0)
        begun = process_time(), perf_counter()
        self.engine.step()
        whole = process_time() - begun[0], perf_counter() - begun[1]
        return {"step": whole, "draft": self.drafter.seconds}

    def choose_anew(self, budget: int) -> None:
        """Let the next draft choose all columns."""
        self.drafter.parts[budget].forget(self.rows)


def least(times: list[dict[str, tuple[float, float]]], part: str) -> tuple[float, float]:
    """The least processor time and the least time by the clock, in milliseconds."""
    return tuple(1e3 * min(one[part][clock] for one in times) for clock in (0, 1))  # type: ignore[return-value]


def step_costs(target: CausalLM, context: int, num_rows: int, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Milliseconds of plain steps, and of steps with so many drafts over so many columns."""
    token_ids = [(7 * place + place // 11) % target.vocab_size for place in range(context)]
    budgets = [budget for budget in options.budgets if budget < context]
    cell = Cell(target, random_prefix(target, token_ids), token_ids, num_rows, budgets)
    kinds = [(0, 0), *((budget, depth) for budget in budgets for depth in options.num_drafted)]
    taken: dict[tuple[int, int], list[dict[str, tuple[float, float]]]] = {kind: [] for kind in kinds}
    anew: dict[int, list[dict[str, tuple[float, float]]]] = {budget: [] for budget in budgets}
    for turn in range(options.repeats + 1):
        for budget, depth in kinds if turn % 2 else kinds[::-1]:
            found = cell.step(budget, depth)
            if turn:
                taken[budget, depth].append(found)
        for budget in budgets if turn < 4 else ():
            cell.choose_anew(budget)
            found = cell.step(budget, options.num_drafted[0])
            if turn:
                anew[budget].append(found)
    plain = least(taken[0, 0], "step")
    for budget, depth in kinds[1:]:
        step, draft = least(taken[budget, depth], "step"), least(taken[budget, depth], "draft")
        choice = least(anew[budget], "draft")[0] - least(taken[budget, options.num_drafted[0]], "draft")[0]
        yield {
            "model": "random" if options.random else options.model,
            "dtype": str(target.dtype).removeprefix("torch."),
            "context": context,
            "batch": num_rows,
            "budget": budget,
            "num_drafted": depth,
            "plain_ms": round(plain[0], 2),
            "step_ms": round(step[0], 2),
            "draft_ms": round(draft[0], 2),
            "choice_ms": round(max(0.0, choice), 2),
            "plain_clock_ms": round(plain[1], 2),
            "step_clock_ms": round(step[1], 2),
        }


def steps(llm: LLM, options: argparse.Namespace) -> None:
    for context in options.contexts:
        for num_rows in options.batch_sizes:
            for found in step_costs(llm.target, context, num_rows, options):
                print(json.dumps(found), flush=True)


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    lines = (line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def survival_at(accepted: list[dict[str, Any]], context: int, budget: int) -> tuple[int, list[float]]:
    """The shares of drafts that are accepted to depth 1, 2, ... with this budget, at the nearest context measured."""
    known = [one for one in accepted if one["budget"] == budget]
    if not known:
        raise SystemExit(f"no acceptance was measured with a budget of {budget} columns; measure it, see --help")
    best = min(known, key=lambda one: abs(one["context"] - context))
    return best["context"], best["survival"]


def replayed(cost: dict[str, Any], survival: list[float]) -> tuple[float, float]:
    """Tokens per step and row, and speed by plain decoding."""
    tokens = 1.0 + sum(survival[: cost["num_drafted"]])
    return tokens, tokens * cost["plain_ms"] / (cost["step_ms"] + cost["choice_ms"] * tokens / REFRESH)


def table(options: argparse.Namespace) -> None:
    """The best number of drafts for every cell."""
    measured, accepted = read(options.costs), read(options.acceptance)
    print(
        "| model | dtype | context | batch | budget | K | tokens per step | draft, verify and rest (plain steps) |",
        end="",
    )
    print(" plain tokens/s | with drafts | speed |\n" + "|---" * 11 + "|")
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cost in measured:
        key = tuple(cost[name] for name in ("model", "dtype", "context", "batch", "budget"))
        cells.setdefault(key, []).append(cost)
    for key, of_cell in cells.items():
        _, survival = survival_at(accepted, of_cell[0]["context"], of_cell[0]["budget"])
        of_cell = [cost for cost in of_cell if cost["num_drafted"] <= len(survival)]
        best = max(of_cell, key=lambda cost: replayed(cost, survival)[1])
        tokens, speed = replayed(best, survival)
        plain = 1e3 * best["batch"] / best["plain_ms"]
        draft, rest = best["draft_ms"], best["step_ms"] - best["draft_ms"]
        parts = f"{draft / best['plain_ms']:.2f} + {rest / best['plain_ms']:.2f}"
        shown = (best["num_drafted"], f"{tokens:.2f}", parts, f"{plain:.1f}", f"{speed * plain:.1f}", f"{speed:.2f}")
        print("| " + " | ".join(map(str, (*key, *shown))) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    todo = {"acceptance": acceptance, "speed": speed, "steps": steps}
    parser.add_argument("what", choices=(*todo, "table"))
    parser.add_argument("--documents", type=Path, help="folder of .txt files")
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--random", action="store_true", help="its shape with random weights and a longer context")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 7168])
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--selectors", nargs="+", default=["streaming", "snapkv"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--num-prompts", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--num-drafted", type=int, nargs="+", default=[3], help="K; several for steps")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keys", type=json.loads, default={}, help="further keys of sparse_kv, as JSON")
    parser.add_argument("--processor-time", action="store_true", help="count it instead of the clock; one thread")
    parser.add_argument("--governed", action="store_true", help="of speed: under a governor, beside other methods")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--costs", type=Path, nargs="+", help="files of lines of steps")
    parser.add_argument("--acceptance", type=Path, nargs="+", help="files of lines of acceptance --json")
    options = parser.parse_args()
    if options.what == "table":
        table(options)
        return 0
    if options.processor_time:
        torch.set_num_threads(1)
        for module in (stats, forward_costs):
            module.perf_counter = process_time  # type: ignore[attr-defined]
    if options.what == "steps":
        torch.set_num_threads(1)
    llm = LLM(random_model(options.model) if options.random else options.model, dtype=options.dtype)
    said = f"{options.model} {llm.target.dtype} {llm.target.execution.describe()} torch {torch.__version__}"
    print(said, file=sys.stderr if options.json or options.what == "steps" else sys.stdout, flush=True)
    todo[options.what](llm, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
