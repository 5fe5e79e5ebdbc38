"""Golden traces: what every method decodes, step by step, as one commit does it, for others to be held against.

    python dev/golden.py --out before.json [--model zoo:tiny] [--dtype float32] [--methods ngram eagle3]
    python dev/golden.py --against before.json      # exit status 1 where anything differs

A redesign of the loop, of its state or of its drafters must leave these traces as they are. They are made at the commit
before it in a checkout of its own (``PYTHONPATH=OTHER/src``), and compared after every step of the redesign on the same
machine: log-probabilities are compared to the bit, and bits may differ between processors. Only public names are used,
so the script outlives what it looks at.

Every method of a model runs with drafts of fixed length, greedily and at T = 0.8: one row alone, and five ragged rows
of which three run at once, so that rows join and leave. Kept per row: token ids, the bits of each log-probability, and
per step the position, the depth of the draft and how much of it was accepted.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import foredraft
from foredraft import LLM, SamplingParams

PROMPTS = (
    "Once upon a time there was a little fox who lived by the river. Once upon a time there was a little",
    "One, two, three, one, two, three, one, two,",
    "The king said to the queen that",
    "A",
    "She sells sea shells by the sea shore; the shells she sells are sea shells, and the sea shore is where she",
)
MAX_TOKENS = (24, 7, 40, 1, 18)
"""One per prompt: rows end at different steps, and waiting ones take their slots."""
LENGTH = 4
METHODS = (
    *("none", "ngram", "nasd", "suffix", "rest", "token_recycling", "jacobi", "lookahead"),
    *("layer_skip", "quantized_self", "sparse_kv", "draft_model"),
    *("medusa", "hydra", "hydra++", "eagle", "eagle2", "eagle3", "suffix+eagle3", "ngram>suffix"),
)
BROUGHT = {"zoo:smollm2": {"rest", "draft_model", "medusa", "hydra", "hydra++", "eagle", "eagle2"}}
"""Methods for which a model of the zoo brings nothing."""


def config_of(method: str) -> dict[str, Any] | None:
    if method == "none":
        return None
    return {"method": method, "length_policy": "fixed", "num_speculative_tokens": LENGTH}


def bits(value: float) -> str:
    """A float32 as eight hexadecimal digits."""
    return struct.pack(">f", value).hex()


def rows_of(outputs: list[Any]) -> list[dict[str, Any]]:
    found = []
    for output in outputs:
        sample = output.outputs[0]
        ids = list(sample.token_ids)
        found.append(
            {
                "ids": ids,
                "logprobs": [bits(step[token].logprob) for token, step in zip(ids, sample.logprobs, strict=True)],
                "steps": [[step.position, step.drafted, step.accepted] for step in output.metrics.trace],
            }
        )
    return found


def traces(model: str, dtype: str, methods: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Names of cells, and the rows of each."""
    plain = LLM(model, dtype=dtype, max_num_seqs=3)
    for method in methods:
        llm = plain.with_speculative_config(config_of(method))
        for temperature in (0.0, 0.8):
            params = [
                SamplingParams(temperature=temperature, seed=7 + i, max_tokens=most, logprobs=0, ignore_eos=True)
                for i, most in enumerate(MAX_TOKENS)
            ]
            for name, number in (("one row", 1), ("five rows", len(PROMPTS))):
                outputs = llm.generate(list(PROMPTS[:number]), params[:number])
                yield f"{method}, T = {temperature}, {name}", rows_of(outputs)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for every cell that differs, with the first row and kind of figure in which it does.

    Log-probabilities are compared where they were kept before.
    """
    found = []
    for name in sorted(before.keys() | now.keys()):
        if name not in before or name not in now:
            found.append(f"{name}: only in {'the other' if name in before else 'this'} run")
            continue
        for number, (old, new) in enumerate(zip(before[name], now[name], strict=True)):
            kind = next((kind for kind in ("ids", "logprobs", "steps") if kind in old and old[kind] != new[kind]), None)
            if kind is not None:
                found.append(f"{name}, row {number}: {kind} {old[kind]} became {new[kind]}")
                break
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="Methods to trace; default: all.")
    parser.add_argument("--out", type=Path, help="File to write the traces to.")
    parser.add_argument("--without-bits", action="store_true", help="Leave out log-probabilities.")
    parser.add_argument("--against", type=Path, help="File of traces to compare with; its model and dtype are taken.")
    options = parser.parse_args(arguments)
    before = None if options.against is None else json.loads(options.against.read_text())
    model, dtype = (options.model, options.dtype) if before is None else (before["model"], before["dtype"])
    methods = options.methods or [name for name in METHODS if name not in BROUGHT.get(model, ())]
    started, cells = time.monotonic(), {}
    for name, rows in traces(model, dtype, methods):
        cells[name] = rows
        drafted = sum(step[1] for row in rows for step in row["steps"])
        accepted = sum(step[2] for row in rows for step in row["steps"])
        print(f"{time.monotonic() - started:6.1f} s  {name}: {drafted} drafted, {accepted} accepted", flush=True)
    if options.out is not None:
        if options.without_bits:
            for row in (row for rows in cells.values() for row in rows):
                del row["logprobs"]
        content = {"model": model, "dtype": dtype, "torch": torch.__version__, "cells": cells}
        options.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    if before is None:
        return 0
    wanted = {name: rows for name, rows in before["cells"].items() if name.split(",")[0] in methods}
    found = differences(wanted, cells)
    print("\n".join(found) or f"all {len(wanted)} cells equal ({foredraft.__file__})")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
