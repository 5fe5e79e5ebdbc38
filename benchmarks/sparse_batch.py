"""What `sparse_kv` gains by batch and context, as a replay of costs: MagicDec's question on one machine.

    python benchmarks/sparse_kv.py acceptance --documents BOOKS --contexts 2048 7168 --budgets 256 512 \\
        --selectors streaming --num-drafted 6 --new-tokens 64 --json > accepted.jsonl
    python benchmarks/sparse_batch.py cost --contexts 2048 7168 --batch-sizes 1 2 4 8 16 > costs.jsonl
    python benchmarks/sparse_batch.py cost --contexts 8192 32768 --random > long.jsonl
    python benchmarks/sparse_batch.py table --costs costs.jsonl long.jsonl --acceptance accepted.jsonl

Costs are those of whole steps of the engine, plain ones and ones that draft and verify K tokens, in turns over the same
rows: the least processor time of several, which other load of the machine does not count in, and the least time of a
clock beside it. Keys and values before the last token are random numbers, so that no prompt has to be read; rows are of
unlike lengths, a token apart. Nothing is timed with acceptance in it: a table puts both together, since how many
tokens are accepted depends on no clock. `--random` is a model of the same shape with random weights and room for 40,960
tokens. Choosing columns anew, once per `kv_refresh` tokens of a row, is timed apart and counted by its share.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, make_drafter
from foretoken.engine.budget import Budget
from foretoken.engine.drafter import Drafter
from foretoken.engine.engine import Engine
from foretoken.engine.sequence import Sequence
from foretoken.model.cache.prefixes import PrefixStore
from foretoken.model.cache.ragged import KVCache
from foretoken.model.lm import CausalLM, Nodes
from foretoken.tree import DraftTree

REFRESH = 64
"""Tokens of a row between two choices of its columns."""


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


def costs(target: CausalLM, context: int, num_rows: int, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
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


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = random_model(options.model) if options.random else options.model
    for dtype in options.dtypes:
        llm = LLM(model, dtype=dtype)
        print(f"{dtype} {llm.target.execution.describe()} torch {torch.__version__}", file=sys.stderr, flush=True)
        for context in options.contexts:
            for num_rows in options.batch_sizes:
                for found in costs(llm.target, context, num_rows, options):
                    print(json.dumps(found), flush=True)


# -- both together -------------------------------------------------------------------------------------------------


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
    parser.add_argument("what", choices=("cost", "table"))
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--random", action="store_true", help="its shape with random weights and a longer context")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 7168])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--num-drafted", type=int, nargs="+", default=[1, 2, 3, 4, 6], help="K")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--costs", type=Path, nargs="+", help="files of cost lines")
    parser.add_argument("--acceptance", type=Path, nargs="+", help="files of lines of sparse_kv.py acceptance --json")
    options = parser.parse_args()
    {"cost": measure, "table": table}[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
