"""Count the outputs that are bit-identical to plain decoding, for every method, on this machine.

    python benchmarks/guarantee.py                                       # zoo:tiny, all methods; a quarter of an hour
    python benchmarks/guarantee.py --model zoo:smollm2 --dtypes float32 bfloat16 --max-new-tokens 24 --json found.json
    python benchmarks/guarantee.py --methods ngram eagle3 --execution eager --top-p 0.6
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/guarantee.py --methods suffix token_recycling

A cell of the table is a method, a dtype, a temperature and a batch size. Plain decoding runs every prompt alone. The
cell has the number of outputs with the bits of plain decoding, log-probabilities included; for the other outputs, the
gap in the distribution between the first tokens that differ; the tokens per step relative to exactness="relaxed",
where no draft is cut; and the number of accepted draft tokens. During the run, stock kernels round differently for
every shape of their call (`foredraft.testing.hostile_kernels`), so that no bits are equal by chance; --stock leaves
them unchanged. No times are measured, so the machine may be busy. Methods for which the model includes no drafter are
left out, and their names are printed. The exit status is 3 if the guarantee was broken or drafts were cut.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.provenance import provenance
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.native.build import instruction_set
from foredraft.testing import hostile_kernels, token_gap, ungoverned
from foredraft.testing.divergence import NEAR_TIES
from foredraft.testing.hostile import KINDS

METHODS: Mapping[str, str | Mapping[str, Any]] = {
    **{
        name: name
        for name in (
            *("ngram", "nasd", "suffix", "rest", "token_recycling", "lookahead", "jacobi", "draft_model"),
            *("layer_skip", "quantized_self", "sparse_kv", "medusa", "hydra", "hydra++", "eagle", "eagle2", "eagle3"),
        )
    },
    "draft_model, tree": {"method": "draft_model", "num_draft_branches": 3, "max_draft_nodes": 24},
    "suffix+eagle3": "suffix+eagle3",
    "ngram>token_recycling": "ngram>token_recycling",
}
"""As a model of the zoo that brings what they need takes them."""

TEXTS = (
    "Once upon a time there was a boy. Once upon a time there was a girl. Once upon a time",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n    return",
    "The",
    "The cat sat on the mat. The dog sat on the log. " * 8 + "The cat",
    "<|user|>What is the capital of France?\n<|assistant|>",
)
"""Prompts of one token, of a few, and of more than a draft can have; some repeat themselves, so that lookups find."""

NUM_LOGPROBS = 4
"""Of how many tokens log-probabilities are compared, beside that of the token itself."""

LEAST_SHARE = 0.98
"""Of the tokens per step of "relaxed", below which drafts were cut."""


@dataclass(frozen=True)
class Said:
    """The text of one row.

    Args:
      prompt: token ids.
      token_ids: said after it.
      logprobs: of every token, by token id, its own and the most likely ones.
      counts: vLLM's counters of the row.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    counts: Mapping[str, Any]

    def difference(self, other: Said) -> str:
        """Where tokens or log-probabilities part from those of another, to the bit; empty where they do not."""
        for place, (mine, its) in enumerate(zip(self.token_ids, other.token_ids, strict=False)):
            if mine != its:
                return f"token {place} is {mine} instead of {its}"
            if self.logprobs[place] != other.logprobs[place]:
                return f"of token {place} log-probabilities are {self.logprobs[place]}, not {other.logprobs[place]}"
        mine, its = len(self.token_ids), len(other.token_ids)
        return "" if mine == its else f"{mine} tokens instead of {its}"


def said(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, batch_size: int) -> list[Said]:
    """What an LLM says after prompts, so many at a time. Where it samples, parameters need a seed."""
    asked, rows = replace(params, logprobs=NUM_LOGPROBS), []
    for first in range(0, len(prompts), batch_size):
        batch = [list(prompt) for prompt in prompts[first : first + batch_size]]
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], asked, use_tqdm=False)
        for prompt, result in zip(batch, results, strict=True):
            (output,) = result.outputs
            logprobs = tuple({token: each.logprob for token, each in place.items()} for place in output.logprobs or ())
            counts = result.metrics.speculative_decoding
            rows.append(Said(tuple(prompt), tuple(output.token_ids), logprobs, counts))
    return rows


def gap_of(row: Said, plain: Said, target: CausalLM, params: SamplingParams) -> float | None:
    """How close the distribution puts the tokens at which a row parts from plain decoding; None where none differ."""
    for place, pair in enumerate(zip(row.token_ids, plain.token_ids, strict=False)):
        if pair[0] != pair[1]:
            return token_gap(target, row.prompt, plain.token_ids[:place], params, 0, pair)
    return None


def tokens_per_step(rows: Sequence[Said]) -> float:
    """Of all rows together."""
    steps = sum(row.counts["num_steps"] for row in rows)
    return sum(row.counts["num_steps"] * row.counts["tokens_per_step"] for row in rows) / max(1, steps)


@dataclass(frozen=True)
class Cell:
    """What one method made of all prompts.

    Args:
      guarantee: kind, as `foredraft.config.engine.Guarantee` has it.
      num_equal: texts with the bits of plain decoding, of ``num_texts``.
      first_difference: in words; empty where there is none.
      gaps: of tokens that differ from those of plain decoding.
      near_tie: the largest gap that rounding explains.
      share: tokens per step by those of "relaxed", over the ``num_compared`` rows that have the same text there.
    """

    method: str
    dtype: str
    temperature: float
    batch_size: int
    guarantee: str
    num_texts: int
    num_equal: int
    first_difference: str
    gaps: tuple[float, ...]
    near_tie: float
    tokens_per_step: float
    share: float
    num_compared: int
    num_drafted: int
    num_accepted: int

    @property
    def is_kept(self) -> bool:
        """Whether the guarantee holds: bits, or no difference but near-ties."""
        if self.guarantee != "up to rounding":
            return self.num_equal == self.num_texts
        return max(self.gaps, default=0.0) <= self.near_tie

    @property
    def is_whole(self) -> bool:
        """Whether drafts were not cut."""
        return self.num_compared > 0 and self.share >= LEAST_SHARE

    @property
    def is_good(self) -> bool:
        """All of it, and something was accepted."""
        return self.is_kept and self.is_whole and self.num_accepted > 0

    @property
    def label(self) -> str:
        """Names it."""
        return f"{self.method}, {self.dtype}, T = {self.temperature:g}, batch {self.batch_size}"

    def line(self) -> str:
        """A line of the table."""
        equal = f"{self.num_equal} of {self.num_texts}" + "".join(f", gap {gap:.2g}" for gap in self.gaps)
        steps = f"{self.tokens_per_step:.2f} ({self.share:.2f})"
        verdict = "kept" if self.is_kept else f"broken: {self.first_difference}"
        verdict += "" if self.is_whole else ", drafts cut"
        drafts = f"{self.num_accepted} of {self.num_drafted}"
        return f"| {' | '.join([self.label, self.guarantee, equal, steps, drafts, verdict])} |"


HEADER = (
    "| cell | guarantee | equal to plain | tokens per step (by relaxed) | accepted | verdict |\n"
    "|---|---|---|---|---|---|"
)


class Study:
    """A target, the same one under "relaxed", and what every method makes of the prompts.

    Args:
      model: as `LLM` takes it.
      options: for both LLMs.
      target: adapter whose distribution measures gaps; by default that of the model as it runs.
    """

    def __init__(
        self,
        model: Any,
        *,
        prompts: Sequence[Sequence[int]] = (),
        target: CausalLM | None = None,
        **options: Any,
    ) -> None:
        self.llm = LLM(model, **options)
        self.relaxed = LLM(model, exactness="relaxed", **options)
        self.target = target or self.llm.target
        self.prompts = [tuple(prompt) for prompt in prompts] or [
            tuple(self.llm.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS
        ]
        self._known: dict[Any, list[Said]] = {}

    @cached_property
    def dtype(self) -> str:
        """In which the model computes."""
        return str(self.llm.target.dtype).removeprefix("torch.")

    def plain(self, params: SamplingParams) -> list[Said]:
        """Every prompt alone and without drafts."""
        return self._once(self.llm, None, params, 1)

    def cell(self, method: str, params: SamplingParams, batch_size: int) -> Cell:
        """Draft by a method, and compare."""
        plain = self.plain(params)
        rows = self._once(self.llm, METHODS[method], params, batch_size)
        relaxed = self._once(self.relaxed, METHODS[method], params, batch_size)
        gaps = (gap_of(row, want, self.target, params) for row, want in zip(rows, plain, strict=True))
        differences = [row.difference(want) for row, want in zip(rows, plain, strict=True)]
        # a text that rounding has turned another way is another text, with other drafts
        same = [pair for pair in zip(rows, relaxed, strict=True) if pair[0].token_ids == pair[1].token_ids]
        ours, theirs = (tokens_per_step([pair[index] for pair in same]) for index in (0, 1))
        return Cell(
            method,
            self.dtype,
            params.temperature,
            batch_size,
            self.llm.guarantee.kind,
            len(rows),
            sum(not difference for difference in differences),
            next(filter(None, differences), ""),
            tuple(gap for gap in gaps if gap is not None),
            NEAR_TIES[self.llm.target.dtype],
            tokens_per_step(rows),
            ours / theirs if same else 0.0,
            len(same),
            sum(row.counts["num_draft_tokens"] for row in rows),
            sum(row.counts["num_accepted_draft_tokens"] for row in rows),
        )

    def _once(self, llm: LLM, config: Any, params: SamplingParams, batch_size: int) -> list[Said]:
        key = id(llm), repr(config), params, batch_size
        if key not in self._known:
            self._known[key] = said(llm.with_speculative_config(config), self.prompts, params, batch_size)
        return self._known[key]


# -- the script --------------------------------------------------------------------------------------------------------


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """All that were asked for."""
    for dtype in options.dtypes:
        largest = max(options.batch_sizes)
        study = Study(options.model, dtype=dtype, execution=options.execution, max_num_seqs=largest)
        print(f"{dtype}: {study.llm.guarantee.describe()}", file=sys.stderr, flush=True)
        for temperature, method, batch_size in product(options.temperatures, options.methods, options.batch_sizes):
            top_p = options.top_p if temperature else 1.0
            params = SamplingParams(
                temperature=temperature, top_p=top_p, seed=7, max_tokens=options.max_new_tokens, ignore_eos=True
            )
            try:
                yield study.cell(method, params, batch_size)
            except ConfigError as error:
                if temperature == options.temperatures[0] and batch_size == options.batch_sizes[0]:
                    print(f"{method} is left out: {error}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="zoo:tiny", help="zoo:NAME or a folder; it must include the heads of the methods"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--dtypes", nargs="+", default=["auto"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="top-p of sampled cells; with a lower value more drafts are accepted"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(1, 5))
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--execution", default="auto")
    parser.add_argument(
        "--perturb", nargs="+", choices=KINDS, default=KINDS, help="stock kernels to perturb; all by default"
    )
    parser.add_argument("--stock", action="store_true", help="do not perturb stock kernels")
    parser.add_argument("--json", type=Path, help="file to write after every cell")
    options = parser.parse_args()
    result: dict[str, Any] = {"conditions": {**provenance(), "instruction_set": instruction_set()}, "cells": []}
    is_good = True
    print(HEADER)
    with ungoverned(), nullcontext() if options.stock else hostile_kernels(*options.perturb):
        for cell in cells(options):
            print(cell.line(), flush=True)
            is_good &= cell.is_kept and cell.is_whole
            result["cells"].append({**asdict(cell), "is_kept": cell.is_kept, "is_whole": cell.is_whole})
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if is_good else 3)


if __name__ == "__main__":
    main()
