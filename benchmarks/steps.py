"""Measure the time of a forward pass by execution: few nodes, ragged rows and prompts, compared with its linear layers.

    python benchmarks/steps.py [--model zoo:smollm2] [--dtype bfloat16] [--executions eager packed compiled]
        [--nodes 1 5 16 32] [--context 256] [--batch-sizes 8 32] [--prompts 512 2048] [--repeats 20] [--out steps.json]

    python benchmarks/steps.py --executions compiled --nodes --batch-sizes --prompts 2048 --chunks 128 512 --pauses 4000
    python benchmarks/steps.py --formats bfloat16 int8 int4 stored Q4_K gptq --prompts

All arms run in turns. Times are milliseconds, minimum and median; ratios are medians of pairs with 95 % intervals.
"linears" are the linear layers of a forward pass with as many rows, one after another, so that weights are as cold as
in a forward pass. "bandwidth" reads as many bytes as all weights have, once. Compile times are those of this run:
"cold" from an empty folder, "warm" from the same folder in a process that has not seen the graphs.
"chunks" reads a prompt up to its first token in chunks of these sizes, as the engine does. A pause is the longest time
between two tokens of a row while a prompt of that length is read.
Ragged rows have 60 to 400 tokens of context. "sum of nodes" is the time of one row with as many nodes as all rows have.
With "formats" the arms are formats of weights with one execution, the last one, and ratios are relative to the first
format. The formats of files are made in memory by rounding the model, with group sizes that fit. "floor" is the time to
read the weights at the bandwidth of the same turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft import SamplingParams, zoo
from foredraft.bench.provenance import provenance
from foredraft.config.engine import EngineConfig
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.engine import Engine
from foredraft.loading.models import adapter_of, load_model
from foredraft.model.cache.ragged import KVCache
from foredraft.model.execution import compiled_layers
from foredraft.model.execution.compiled_layers import CompiledLayers
from foredraft.model.execution.forwards import linears, replacement
from foredraft.model.execution.packing import PackedLinear, dense_weight
from foredraft.model.execution.rounding import ROUNDINGS, STORED, roundable, take_codes
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.native.codes import Codes, QuantLayout, StoredCodes, Unrounded, times_halves

RAGGED = (60, 400)
SINGLE, HALF, BYTE, MULTIPLE = torch.float32, torch.float16, torch.uint8, torch.int8
Q8_0, Q6_K = QuantLayout(8, 32, HALF), QuantLayout(8, 16, MULTIPLE, None, 4)
FORMS: dict[str, tuple[QuantLayout, QuantLayout | None]] = {
    "Q8_0": (Q8_0, Q8_0),
    "Q6_K": (Q6_K, Q6_K),
    "Q5_0": (Q8_0, Q8_0),
    "Q5_1": (QuantLayout(8, 32, HALF, HALF), Q8_0),
    "Q5_K": (QuantLayout(8, 32, MULTIPLE, MULTIPLE, 3), Q6_K),
    "Q4_0": (QuantLayout(4, 32, HALF), Q8_0),
    "Q4_1": (QuantLayout(4, 32, HALF, HALF), Q8_0),
    "Q4_K": (QuantLayout(4, 32, MULTIPLE, MULTIPLE, 3), Q6_K),
    "gptq": (QuantLayout(4, 64, HALF), None),
    "awq": (QuantLayout(4, 64, HALF, BYTE), None),  # and GPTQ with zero points
    "gptq-8": (QuantLayout(8, 64, HALF), None),
    "ct-int8": (QuantLayout(8, 0, SINGLE), None),  # compressed-tensors
    "ct-int4": (QuantLayout(4, 64, SINGLE), None),
    "ct-int4-zeros": (QuantLayout(4, 64, SINGLE, BYTE), None),
}
"""Of a format of files, how layers lie in memory, and the output embedding, which is left as it is by None."""


def load(options: argparse.Namespace) -> PreTrainedModel:
    name = options.model
    path = zoo.path(name.removeprefix("zoo:")) if name.startswith("zoo:") else name
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()


def in_form(layer: torch.nn.Module, form: QuantLayout) -> StoredCodes:
    """The weight of a layer, rounded."""
    if form.half_shift == 0:
        codes = Unrounded(dense_weight(layer), form).codes()
        return StoredCodes.of(Codes(codes.numbers, codes.bits, codes.scales.to(form.scales), codes.zeros, codes.group))
    codes = Unrounded(dense_weight(layer), QuantLayout(form.bits, form.group, SINGLE, form.zeros and SINGLE)).codes()
    scales, scale_halves = in_multiples(codes.scales, form.half_shift)
    zeros, zero_halves = (None, None) if codes.zeros is None else in_multiples(codes.zeros, form.half_shift)
    return StoredCodes.of(Codes(codes.numbers, form.bits, scales, zeros, form.group, scale_halves, zero_halves))


def in_multiples(scales: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales rounded to multiples of halves that 2^shift groups share, or as many as divide them, and the halves."""
    count = math.gcd(1 << shift, scales.shape[1])
    halves = (scales.abs().unflatten(1, (-1, count)).amax(-1) / 63).half()
    return times_halves((scales / times_halves(torch.ones_like(scales), halves)).nan_to_num().round(), halves), halves


def of_format(name: str, options: argparse.Namespace) -> CausalLM:
    """The model with weights of a format, and nothing else in memory."""
    kind = options.executions[-1]
    if name in FORMS:
        model, (of_layers, of_output) = load(options), FORMS[name]
        output = model.get_output_embeddings()
        forms = {layer: of_output if layer is output else of_layers for layer in roundable(model)}
        codes = {layer: in_form(layer, form) for layer, form in forms.items() if form is not None}
        take_codes(model, codes, dtype=model.dtype)
        return CausalLM(model, execution=kind, release_originals=True, probe=False, quantization=STORED)
    if name not in (options.dtype, STORED, *ROUNDINGS):
        raise SystemExit(f"format {name!r}: known are {options.dtype}, {', '.join((*ROUNDINGS, STORED, *FORMS))}")
    rounded, stored = (name if name in ROUNDINGS else None), (name if name == STORED else None)
    return adapter_of(load_model(options.model, dtype=options.dtype, quantization=rounded, weights=stored), kind)


def filled(lm: CausalLM, lengths: list[int]) -> KVCache:
    """A cache with texts of these lengths."""
    cache = lm.new_cache(len(lengths), capacity=2 * max(lengths))
    for row, length in enumerate(lengths):
        lm.forward(Nodes.from_chains([text(length, row)]), cache, first_row=row, keep=slice(0, 0))
        cache.commit([range(length)], first_row=row)
    return cache


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 4000, length).tolist()


def products(lm: CausalLM) -> list[tuple[Any, int]]:
    """Every product of a forward once, and its number of inputs."""
    found: dict[int, tuple[Any, int]] = {}
    for layer in linears(lm.shadow):
        forward = replacement(layer)
        run = forward.product if isinstance(forward, PackedLinear) else layer
        found.setdefault(id(run), (run, layer.in_features))
    return list(found.values())


def bytes_read(lm: CausalLM) -> int:
    """Of all products of a forward."""
    return sum(run.matrix.num_bytes for run, _ in products(lm))


@torch.inference_mode()
def in_turns(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every task, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(-2, repeats):
        for name in tasks if turn % 2 else reversed(tasks):
            start = time.perf_counter()
            tasks[name]()
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def show(title: str, times: dict[str, list[float]], base: str | None = None) -> dict[str, Any]:
    print(f"\n{title}")
    found = {}
    for name, each in times.items():
        line = {"min": min(each), "median": statistics.median(each)}
        if base is not None and name != base:
            line.update(ratio(each, times[base]))
        found[name] = line
        by = f"   {line['ratio']:.2f} ({line['low']:.2f}-{line['high']:.2f}) of {base}" if "ratio" in line else ""
        print(f"  {name:28} {line['min']:8.1f} {line['median']:8.1f}{by}")
    return found


def ratio(mine: list[float], others: list[float]) -> dict[str, float]:
    pairs = np.array(mine) / np.array(others)
    draws = np.random.default_rng(0).choice(pairs, (2000, len(pairs)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return {"ratio": float(np.median(pairs)), "low": float(low), "high": float(high)}


def compile_times(options: argparse.Namespace) -> dict[str, float]:
    """Seconds to compile the model, from an empty folder and from the disk."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            compiled_layers._graphs.clear()
            lm = CausalLM(load(options), execution="compiled", probe=False)
            made = lm.execution.compiled = CompiledLayers(folder, None)
            lm.execution.make_ready()
            found[name] = made.compile_seconds
            if made.reason:
                print(f"not compiled: {made.reason}")
    print("\ncompiling: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items()))
    return found


def read(lm: CausalLM, prompt: list[int], chunk: int) -> None:
    """Read a prompt in chunks, up to its first token."""
    engine = Engine(lm, EmptyDrafter(), EngineConfig(prefill_chunk_size=chunk))
    engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()


def pause(lm: CausalLM, length: int, chunk: int) -> dict[str, float]:
    """The longest pause of a row while a prompt is read, and the time until that has its first token, milliseconds."""
    engine = Engine(lm, EmptyDrafter(), EngineConfig(prefill_chunk_size=chunk))
    (running,) = engine.add_request(text(40, 0), SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True))
    while running.num_output_tokens < 5:
        engine.step()
    arrived = last = time.perf_counter()
    (row,) = engine.add_request(text(length, 1), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    gaps, said = [], running.num_output_tokens
    while not row.is_finished:
        engine.step()
        if running.num_output_tokens > said:
            now = time.perf_counter()
            gaps.append(1e3 * (now - last))
            last, said = now, running.num_output_tokens
    found = {"longest": max(gaps), "first_token": 1e3 * (time.perf_counter() - arrived), "tokens_meanwhile": len(gaps)}
    print(f"\na prompt of {length} tokens in chunks of {chunk}: {', '.join(f'{k} {v:.0f}' for k, v in found.items())}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--executions", nargs="+", default=["eager", "packed", "compiled"])
    parser.add_argument(
        "--formats", nargs="*", default=[], help=f"formats: {STORED}, {', '.join((*ROUNDINGS, *FORMS))}, a dtype"
    )
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 5, 16, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[8, 32])
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048])
    parser.add_argument("--chunks", nargs="*", type=int, default=[], help="chunk sizes, with the last execution")
    parser.add_argument(
        "--pauses", nargs="*", type=int, default=[], help="lengths of prompts that are read while a row is decoding"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--skip-compile-times", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance(), "options": {k: str(v) for k, v in vars(options).items()}}
    if "compiled" in options.executions and not options.formats and not options.skip_compile_times:
        result["compile_seconds"] = compile_times(options)
    model = load(options)
    if options.formats:
        lms = {name: of_format(name, options) for name in options.formats}
        sizes = {name: bytes_read(lm) for name, lm in lms.items()}
    else:
        lms, sizes = {kind: CausalLM(model, execution=kind, probe=False) for kind in options.executions}, {}
    last = list(lms.values())[-1]

    every = [] if options.formats else products(last)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    caches = {kind: filled(lm, [options.context]) for kind, lm in lms.items()}
    for count in options.nodes:
        nodes = Nodes.from_chains([text(count, 9)])
        given = {size: torch.randn(1, count, size).to(last.dtype) for size in {size for _, size in every}}
        tasks: dict[str, Callable[[], object]] = {
            kind: lambda lm=lm, kind=kind, nodes=nodes: lm.forward(nodes, caches[kind]) for kind, lm in lms.items()
        }
        if not options.formats:
            tasks["linears"] = lambda given=given: [run(given[size]) for run, size in every]
        tasks["bandwidth"] = memory.sum
        title = f"{count} nodes after {options.context} tokens"
        found = result[f"nodes {count}"] = show(
            title, in_turns(tasks, options.repeats), (options.formats or ["linears"])[0]
        )
        for name, size in sizes.items():
            floor = found["bandwidth"]["median"] * size / num_bytes
            found[name] |= {"bytes": size, "floor": floor}
            print(
                f"  {name:28} {size / 1e6:8.1f} MB read, floor {floor:.1f}, {floor / found[name]['median']:.2f} of it"
            )
    for size in options.batch_sizes:
        lengths = np.random.default_rng(size).integers(*RAGGED, size).tolist()
        batches = {kind: filled(lm, lengths) for kind, lm in lms.items() if kind != "eager"}
        one, chain = Nodes.from_chains([[7]] * size), Nodes.from_chains([text(size, 3)])
        wide = Nodes.from_chains([text(8 if row == 0 else 1, row) for row in range(size)])
        tasks = {}
        for kind, cache in batches.items():
            lm = lms[kind]
            tasks[f"{kind}, a node each"] = lambda lm=lm, cache=cache, one=one: lm.forward(one, cache, listed=True)
            tasks[f"{kind}, one row of 8"] = lambda lm=lm, cache=cache, wide=wide: lm.forward(wide, cache, listed=True)
            tasks[f"{kind}, sum of nodes"] = lambda lm=lm, kind=kind, chain=chain: lm.forward(chain, caches[kind])
        base = f"{options.formats[0]}, a node each" if options.formats else f"{list(batches)[-1]}, sum of nodes"
        result[f"batch {size}"] = show(f"{size} ragged rows", in_turns(tasks, options.repeats), base)
    for length in options.prompts:
        prompt = torch.tensor([text(length, 1)])
        nodes = Nodes.from_chains(prompt.tolist())
        tasks = {"transformers": lambda prompt=prompt: model(prompt, use_cache=True, logits_to_keep=1)}
        for kind, lm in lms.items():
            tasks[kind] = lambda lm=lm, nodes=nodes, length=length: lm.forward(
                nodes, lm.new_cache(1, capacity=length), keep=slice(0, 0)
            )
        for chunk in options.chunks:
            tasks[f"chunks of {chunk}"] = lambda length=length, chunk=chunk: read(last, text(length, 1), chunk)
        repeats = max(3, options.repeats // 4)
        result[f"prompt {length}"] = show(f"a prompt of {length} tokens", in_turns(tasks, repeats), "transformers")
    for length, chunk in product(options.pauses, options.chunks or [EngineConfig.prefill_chunk_size]):
        result[f"pause {length} {chunk}"] = pause(last, length, chunk)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
