"""This library in a race, in its own environment: plain decoding and the methods that were asked for.

Verbs beside those of every worker: "answer" (the greedy text of one prompt, before anything has entered) and "gap" (by
how much the model prefers one token to another).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from foredraft.bench.arms import OwnArms
from foredraft.bench.equality import gap_of
from foredraft.bench.trial import Arm, Sampling
from foredraft.config.speculative import SpeculativeConfig
from foredraft.loading.models import load_model
from foredraft.tune.scale import inflated, sizes

from .protocol import DRAFT, LOOKUP, PLAIN, Decode, DecodedRows, Entry, common_options, one_way, serve

NOT_COUNTING = ("quantized_self",)
"""Methods that draft in fewer bits: beside engines that hold all of them, they are shown and not counted. So are those
whose requests learn from each other (``shared``), since a race asks everything more than once."""


def cast(model: Any, dtype: torch.dtype) -> None:
    """The parameters in another dtype, in place; buffers, such as the frequencies of rotations, keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


class Own:
    """The target, and arms over it.

    Args:
      activations: to which inputs of products with few bits are rounded, as in `LLM`.
      quantization: to which its weights are rounded; what that decodes does not count.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        scale: str,
        execution: str,
        exactness: str,
        activations: str | None = None,
        quantization: str | None = None,
    ) -> None:
        wanted = getattr(torch, dtype)
        loaded = load_model(model, dtype=dtype)
        if sizes(scale) is not None:  # in float32, as the checkpoint of the other engines was
            cast(loaded.model, torch.float32)
            loaded = inflated(loaded, scale)
            cast(loaded.model, wanted)
        given = model, dtype, execution, exactness
        self._arms = OwnArms(replace(loaded, quantization=quantization), *given, activations=activations)
        self.quantization = quantization
        weights = "" if quantization is None else f", {quantization} weights"
        if activations is not None:
            weights += f", {activations} activations"
        self.numerics = f"{dtype}{weights}, {self._arms.target.execution.describe()}, {exactness} exactness"

    def entries(self, methods: Mapping[str, Mapping[str, Any]], batch_sizes: Sequence[int]) -> Iterator[Entry]:
        """Plain decoding and the methods, of one row or of batches; plain decoding of one row is always there."""
        every = {PLAIN: {"method": "none"}, **methods}
        suffix = "" if self.quantization is None else f" {self.quantization}"
        for rows in (1, *batch_sizes):
            for name, given in every.items() if rows > 1 or not batch_sizes else [(PLAIN, every[PLAIN])]:
                yield self._entry(f"{name}{suffix}" if rows == 1 else f"{name}{suffix}, {rows} rows", given, rows)

    def _entry(self, name: str, given: Mapping[str, Any], num_rows: int) -> Entry:
        config = SpeculativeConfig.parse(given)
        kind = PLAIN if config.method == "none" else LOOKUP if config.model_part is None else DRAFT
        is_exact = self.quantization is None and not {part.method for part in config.parts} & set(NOT_COUNTING)
        make = partial(self._decode, config, num_rows)
        return Entry(name, kind, self.numerics, one_way({}, make), is_exact and not given.get("shared"), num_rows)

    def _decode(self, config: SpeculativeConfig, num_rows: int) -> Decode:
        return decode_with(self._arms.arm("", config, num_rows=num_rows))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The greedy text of one prompt."""
        decode = self._decode(SpeculativeConfig.parse({"method": "none"}), 1)
        return {"token_ids": decode([request["prompt"]], request["max_new_tokens"]).rows[0]}

    def gap(self, request: dict[str, Any]) -> dict[str, Any]:
        """In logits."""
        gap = gap_of(self._arms.target, Sampling())
        return {"gap": gap(request["prompt"], request["output"], request["one"], request["other"])}


def decode_with(arm: Arm) -> Decode:
    """Greedily: one row ends where the model ends it, rows of a batch at the budget."""

    def run(prompts: list[list[int]], max_new_tokens: int) -> DecodedRows:
        is_batch = len(prompts) > 1
        done = arm.run(prompts if is_batch else prompts[0], max_new_tokens, Sampling(ignore_eos=is_batch))
        return DecodedRows([list(row) for row in done.texts], done.num_first, done.first_seconds, done.decode_seconds)

    return run


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--scale", required=True)
    parser.add_argument("--execution", required=True)
    parser.add_argument("--exactness", required=True)
    parser.add_argument("--activations")
    parser.add_argument("--methods", type=json.loads, required=True, help="speculative configs by name, as JSON")
    parser.add_argument("--quantised", nargs="*", default=[], help="the same with weights in fewer bits, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    own: list[Own] = []

    def start() -> tuple[str, list[Entry]]:
        from foredraft import __version__

        where = options.model, options.dtype, options.scale, options.execution, options.exactness, options.activations
        own.extend(Own(*where, quantization) for quantization in (None, *options.quantised))
        entries = [entry for each in own for entry in each.entries(options.methods, options.batch_sizes)]
        return f"foredraft {__version__}", entries

    serve(start, {"answer": lambda request: own[0].answer(request), "gap": lambda request: own[0].gap(request)})


if __name__ == "__main__":
    main()
