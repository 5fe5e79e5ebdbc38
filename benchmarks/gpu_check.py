"""Check a GPU in ten minutes: is the output lossless, which sums keep their bits, and how fast is each method?

    python benchmarks/gpu_check.py                       # ten minutes, results in runs/gpu_check-...
    python benchmarks/gpu_check.py --quick               # two minutes
    python benchmarks/gpu_check.py --sections bits --out FOLDER
    python benchmarks/gpu_check.py --device cpu --models zoo:tiny --rows 1 --quick

No network is needed. Every result is written at once as a line of results.jsonl in the output folder (--out, else the
variable OUT, else a folder in runs/), so a check that is stopped keeps its results so far. The first line has the card,
its driver and all versions. table.md has the same results in readable form and is rewritten after every section.

check: every method on zoo:tiny, greedy and at temperature 1, in float32 and bfloat16, five prompts in a batch. Outputs
must equal plain decoding of each prompt alone, up to rounding, and drafts must be accepted. `verify` judges two
methods. A control accepts every draft, and must fail.
steps: operators that a decode step launches, and its copies between host and device.
bits: does a row of a matrix product, norm or attention have the same bits in every slot of a bucket, together with
other rows, and alone? Sums over a fixed bucket must keep them for the guarantee "fixed". A control reads its
neighbours, and must fail.
speed: plain decoding, methods and transformers in turns, without the governor. "forward_ms" is the median time between
CUDA events around a forward pass of the target, "step_ms" that of whole steps. "oracle" drafts four correct tokens:
the upper limit of a chain of four. For models without a draft model, draft models are random: they show costs only.
growth: time of steps after up to 4,096 tokens, and memory of keys and values.

Exit status: 0 if every check that was made passed; 3 if one failed; 130 if stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from guarantee import METHODS, TEXTS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StoppingCriteria

from foredraft import LLM, SamplingParams, accept, zoo
from foredraft.accept import Verdict
from foredraft.bench.provenance import provenance
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.errors import ForedraftError
from foredraft.loading.models import choose_device
from foredraft.model.execution.attention import grouped_sdpa
from foredraft.model.lm import CausalLM
from foredraft.testing import PerfectDrafter, token_gap, ungoverned
from foredraft.testing.divergence import NEAR_TIES
from foredraft.tree import DraftTree
from foredraft.verify import verify

HOLDS, FAILS, TOLD, LEFT_OUT = "holds", "fails", "told", "left out"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, seed=7, ignore_eos=True)
MODES = {"greedy": GREEDY, "T=1": replace(GREEDY, temperature=1.0)}
DTYPES = ("float32", "bfloat16")
QUICK_METHODS = ("ngram", "suffix", "token_recycling", "lookahead", "draft_model", "layer_skip", "medusa", "eagle3")
VERIFIED = ("suffix", "eagle3")
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "toy": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
"""Shapes of random models, by the name behind ``random:``."""


# -- results ---------------------------------------------------------------------------------------------------------


class Results:
    """Lines of results.jsonl, each written as it comes, and the table for people."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.lines = folder, list[dict[str, Any]]()
        self._file = (folder / "results.jsonl").open("w", encoding="utf-8")

    def add(self, section: str, status: str, **facts: Any) -> None:
        line = {"section": section, "status": status, **facts}
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        print("  ".join([f"{section:10} {status:8}", *(f"{key}={shown(value)}" for key, value in facts.items())]))
        sys.stdout.flush()

    def write_table(self) -> None:
        """Everything by section, a table for each set of facts."""
        parts = []
        for section in dict.fromkeys(line["section"] for line in self.lines):
            lines = [line for line in self.lines if line["section"] == section]
            for keys in dict.fromkeys(tuple(line) for line in lines):
                rows = [line for line in lines if tuple(line) == keys]
                names = keys[1:]
                parts.append(f"\n## {section}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
                parts += [f"| {' | '.join(shown(row[name]) for name in names)} |" for row in rows]
        (self.folder / "table.md").write_text("\n".join(parts) + "\n", encoding="utf-8")

    def close(self) -> None:
        self.write_table()
        self._file.close()

    @property
    def num_failing(self) -> int:
        return sum(line["status"] == FAILS for line in self.lines)


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def conditions(device: torch.device) -> dict[str, Any]:
    """Machine, versions, card and driver, and who else uses the card."""
    found = {**provenance(), "device": str(device), "cuda": torch.version.cuda, "card": None}
    if device.type != "cuda":
        return found
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    asked = "driver_version,clocks.sm,clocks.max.sm,power.limit,utilization.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        told = f"nvidia-smi: {error}"
    return found | {
        "card": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes_free": free,
        "memory_bytes_total": total,
        asked: told,
    }


# -- the device ------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """The time that a section has left."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.start > self.seconds

    def part(self, share: float) -> Clock:
        """A part of what is left."""
        return Clock(max(0.0, self.seconds - (time.monotonic() - self.start)) * share)


class Stopwatch:
    """Times spans on a device: by CUDA events, which the host does not wait for, elsewhere by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def milliseconds(self) -> list[float]:
        """All spans so far; waits for the device."""
        synchronize(self._device)
        is_cuda = self._device.type == "cuda"
        return [start.elapsed_time(end) if is_cuda else 1e3 * (end - start) for start, end in self._spans]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most memory since the last call; None off CUDA."""
    if device.type != "cuda":
        return None
    found = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


# -- self-check ------------------------------------------------------------------------------------------------------


def believe(tree: DraftTree, choose_at: Callable[[int], int]) -> Verdict:
    """Instead of `match`: accept the first drafted token of every node, whatever the target says."""
    path = [0]
    while tree.children[path[-1]]:
        path.append(tree.children[path[-1]][0])
    return Verdict(tuple(path), choose_at(path[-1]))


def believing() -> AbstractContextManager[object]:
    """The control: a decoder that accepts whatever is drafted."""
    return patch.object(accept, "match", believe)


@dataclass(frozen=True)
class CheckArm:
    """A way to decode that must say what plain decoding says.

    Args:
      config: as `LLM.with_speculative_config` takes it.
      around: what is open while it decodes.
      must_fail: it is a control.
    """

    name: str
    config: Any
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    must_fail: bool = False


CHECK_ARMS: list[CheckArm] = [CheckArm(name, config) for name, config in METHODS.items()]
"""Further ways to decode are added here."""
CONTROL = CheckArm("control: accepts any draft", {"method": "ngram", "prompt_lookup_min": 1}, believing, True)


def texts_of(llm: LLM, params: SamplingParams, size: int) -> tuple[list[tuple[int, ...]], int]:
    """Tokens after each prompt, so many prompts at a time, and how many drafted tokens were accepted."""
    results = [
        result for first in range(0, len(TEXTS), size) for result in llm.generate(TEXTS[first : first + size], params)
    ]
    accepted = sum(step.accepted for result in results for step in result.metrics.trace)
    return [tuple(result.outputs[0].token_ids) for result in results], accepted


def largest_gap(
    llm: LLM, params: SamplingParams, texts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]
) -> float | None:
    """How far apart the distribution puts the tokens at which texts part from plain ones; None where none do."""
    gaps = []
    for prompt, got, want in zip(TEXTS, texts, plain, strict=True):
        places = [place for place, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]]
        if places:
            first = places[0]
            ids = llm.tokenizer(prompt)["input_ids"]
            gaps.append(token_gap(llm.target, ids, want[:first], params, 0, (got[first], want[first])))
    return max(gaps, default=None)


def self_check(run: Check, clock: Clock) -> None:
    """Every arm beside plain decoding of each prompt alone."""
    for dtype in DTYPES:
        llm = LLM("zoo:tiny", device=run.device, dtype=dtype, max_num_seqs=len(TEXTS))
        limit = NEAR_TIES[llm.target.dtype]
        params = {mode: replace(one, max_tokens=run.num_check_tokens) for mode, one in MODES.items()}
        plain = {mode: texts_of(llm, one, 1)[0] for mode, one in params.items()}
        for arm in [CONTROL, *(arm for arm in CHECK_ARMS if arm.name in run.methods or arm.name not in METHODS)]:
            told = {"dtype": dtype, "arm": arm.name}
            if clock.is_over:
                run.add("check", LEFT_OUT, **told, why="no time")
                continue
            try:
                drafted = llm.with_speculative_config(arm.config)
            except ForedraftError as error:
                run.add("check", LEFT_OUT, **told, why=str(error))
                continue
            total = 0
            for mode, one in params.items():
                with ungoverned(), arm.around():
                    texts, accepted = texts_of(drafted, one, len(TEXTS))
                num_equal = sum(got == want for got, want in zip(texts, plain[mode], strict=True))
                gap = largest_gap(llm, one, texts, plain[mode])
                is_right, total = gap is None or gap <= limit, total + accepted
                run.add(
                    "check",
                    HOLDS if is_right is not arm.must_fail else FAILS,
                    **told,
                    mode=mode,
                    equal=f"{num_equal} of {len(TEXTS)}",
                    gap=gap,
                    near_tie=limit,
                    accepted=accepted,
                )
            if total == 0:
                run.add("check", FAILS, **told, why="no drafted token was accepted")


def judge(run: Check, clock: Clock) -> None:
    """`foredraft verify` of a few methods."""
    for method in VERIFIED:
        if method not in run.methods or clock.is_over:
            run.add("verify", LEFT_OUT, arm=method, why="no time" if clock.is_over else "not asked for")
            continue
        llm = LLM("zoo:tiny", method, device=run.device, dtype="float32")
        found = verify(llm, list(TEXTS[:2]), max_tokens=8, budget_seconds=max(1.0, clock.part(0.4).seconds))
        run.add("verify", FAILS if found.exit_status == 3 else HOLDS, arm=method, sentence=found.sentence())


# -- operators of a step ---------------------------------------------------------------------------------------------

VIEWS = frozenset(
    (
        *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "broadcast_tensors", "chunk", "detach", "diagonal"),
        *("expand", "expand_as", "lift_fresh", "movedim", "narrow", "numpy_T", "permute", "result_type", "select"),
        *("slice", "split", "split_with_sizes", "squeeze", "stride", "sym_size", "t", "transpose", "unbind"),
        *("unflatten", "unfold", "unsqueeze", "view", "view_as"),
    )
)
SOMETIMES_VIEWS = frozenset(("contiguous", "flatten", "reshape", "to", "_to_copy"))
"""Operators that copy only where they must."""
COPIES = frozenset(("clone", "contiguous", "flatten", "repeat", "reshape"))


class Operators(TorchDispatchMode):
    """Counts the operators that compute something on a device, by name, and copies from the host to it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type
        self.counts: Counter[str] = Counter()
        self.num_uploads = 0
        self.copied_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        is_result_there = any(self._is_there(each) for each in tree_leaves(found))
        if name in ("to", "_to_copy", "copy_") and is_result_there and not self._is_there(args[name == "copy_"]):
            self.num_uploads += 1
        elif is_result_there and name not in VIEWS and not (name in SOMETIMES_VIEWS and _is_view(found, args[0])):
            self.counts[name] += 1
            self.copied_bytes += found.nbytes if name in COPIES else 0
        return found

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self._kind


def _is_view(found: torch.Tensor, given: torch.Tensor) -> bool:
    return found.data_ptr() == given.data_ptr() and found.dtype == given.dtype


@dataclass(frozen=True)
class StepCount:
    """One decode step: nodes that were verified, operators launched on the device, copies to it, bytes copied there."""

    num_nodes: int
    num_operators: int
    num_uploads: int
    copied_bytes: int
    by_name: Mapping[str, int]


def count_steps(llm: LLM, params: SamplingParams, prompts: Sequence[str] = TEXTS[:1]) -> list[StepCount]:
    """Count every decode step of a generation."""
    found: list[StepCount] = []
    decode = Engine._decode

    def counted(engine: Engine, rows: Any) -> Any:
        with Operators(engine.target.device) as operators:
            outputs = decode(engine, rows)
        nodes = sum(len(output.tree) for output in outputs)
        total = sum(operators.counts.values())
        counts = operators.num_uploads, operators.copied_bytes
        found.append(StepCount(nodes, total, *counts, dict(operators.counts)))
        return outputs

    with patch.object(Engine, "_decode", counted), ungoverned():
        llm.generate(list(prompts), params)
    return found


STEP_ARMS: list[tuple[str, Any]] = [
    ("plain", None),
    ("ngram", {"method": "ngram", "prompt_lookup_min": 1}),
    ("token_recycling", "token_recycling"),
    ("eagle3", "eagle3"),
]


def count_operators(run: Check, clock: Clock) -> None:
    """The operators of the steps of some methods on zoo:tiny, which has few layers."""
    llm = LLM("zoo:tiny", device=run.device, dtype="bfloat16", execution="eager")
    num_layers = llm.target.num_layers
    for (name, config), (mode, params) in product(STEP_ARMS, MODES.items()):
        counted = count_steps(llm.with_speculative_config(config), replace(params, max_tokens=12))
        for what, steps in (
            ("one node", [one for one in counted if one.num_nodes == 1]),
            ("a draft", [one for one in counted if one.num_nodes > 1]),
        ):
            if steps:
                operators = statistics.median_high([one.num_operators for one in steps])
                uploads = statistics.median_high([one.num_uploads for one in steps])
                copied = statistics.median_high([one.copied_bytes for one in steps])
                counts = {"operators": operators, "layers": num_layers, "copies_to_device": uploads, "copied": copied}
                run.add("steps", TOLD, arm=name, mode=mode, step=what, **counts)


# -- bits ------------------------------------------------------------------------------------------------------------

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
BACKENDS = {
    "chosen by torch": None,
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class BitsCase:
    """An operation over rows, of which none should look at another.

    Args:
      rows: makes so many random rows, louder or not: (M, ...).
      run: (M, ...) -> (M, ...).
    """

    name: str
    rows: Callable[[int, float], torch.Tensor]
    run: Callable[[torch.Tensor], torch.Tensor]
    must_differ: bool = False


@torch.inference_mode()
def bits_of(case: BitsCase, bucket: int) -> dict[str, bool]:
    """Whether a row has the same bits in every slot of a bucket, beside other rows, and alone."""
    row, quiet, loud = case.rows(1, 1.0), case.rows(bucket, 1.0), case.rows(bucket, 100.0)

    def at(slot: int, others: torch.Tensor) -> torch.Tensor:
        placed = others.clone()
        placed[slot] = row[0]
        return case.run(placed)[slot]

    first = at(0, quiet)
    return {
        "same_in_every_slot": all(torch.equal(at(slot, quiet), first) for slot in range(1, bucket)),
        "same_beside_others": torch.equal(at(0, loud), first),
        "same_as_alone": torch.equal(case.run(row)[0], first),
    }


def bits_cases(device: torch.device, dtype: torch.dtype, shapes: Sequence[Mapping[str, int]]) -> Iterator[BitsCase]:
    """Products, norms and attention of models of these shapes."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    def vectors(size: int, count: int, scale: float) -> torch.Tensor:
        return random(count, size) * scale

    for shape in shapes:
        hidden, wide = shape["hidden_size"], shape["intermediate_size"]
        for inputs, outputs in dict.fromkeys([(hidden, hidden), (hidden, wide), (wide, hidden)]):
            weight = random(outputs, inputs) / inputs**0.5
            yield BitsCase(f"product {inputs} -> {outputs}", partial(vectors, inputs), partial(F.linear, weight=weight))
        scale = random(hidden)
        yield BitsCase(f"norm {hidden}", partial(vectors, hidden), lambda x, w=scale: rms_norm(x, w))
        yield from attention_cases(shape, random)
    weight = random(64, 64)
    yield BitsCase(
        "control: reads its neighbours",
        partial(vectors, 64),
        lambda x: F.linear(x + x.float().mean(0, keepdim=True).to(x.dtype), weight),
        must_differ=True,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As models of transformers take it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def attention_cases(shape: Mapping[str, int], random: Callable[..., torch.Tensor]) -> Iterator[BitsCase]:
    """Attention of rows over keys of their own, and of nodes of a chain over the same keys."""
    num_heads, num_kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    size, columns = shape["hidden_size"] // num_heads, 256
    module = torch.nn.Module()
    keys, values = random(1, num_kv_heads, columns, size), random(1, num_kv_heads, columns, size)

    def queries(count: int, scale: float) -> torch.Tensor:
        return random(count, num_heads, size) * scale

    def texts(count: int, scale: float) -> torch.Tensor:
        """A query and its own keys and values side by side: (count, heads + 2 * columns * kv heads, D)."""
        return random(count, num_heads + 2 * columns * num_kv_heads, size) * scale

    def of_rows(given: torch.Tensor, backend: SDPBackend | None) -> torch.Tensor:
        count, numbers = len(given), columns * num_kv_heads
        query = given[:, :num_heads, None]
        parts = given[:, num_heads : num_heads + numbers], given[:, num_heads + numbers :]
        own_keys, own_values = (part.reshape(count, num_kv_heads, columns, size) for part in parts)
        mask = torch.zeros(count, 1, 1, columns, dtype=given.dtype, device=given.device)
        mask[..., columns - 9 :] = torch.finfo(given.dtype).min
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return grouped_sdpa(module, query, own_keys, own_values, mask)[0][:, 0]

    def of_nodes(given: torch.Tensor, backend: SDPBackend | None) -> torch.Tensor:
        """All nodes see the same columns here, so that each may stand in every slot."""
        query = given.transpose(0, 1)[None]
        mask = torch.zeros(1, 1, len(given), columns, dtype=given.dtype, device=given.device)
        mask[..., columns - 9 :] = torch.finfo(given.dtype).min
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return grouped_sdpa(module, query, keys, values, mask)[0][0]

    for name, backend in BACKENDS.items():
        what = f"{num_heads} heads of {size}, {name}"
        yield BitsCase(f"attention of rows, {what}", texts, partial(of_rows, backend=backend))
        yield BitsCase(f"attention of nodes, {what}", queries, partial(of_nodes, backend=backend))


def check_bits(run: Check, clock: Clock) -> None:
    """The table that says which guarantee is possible on this card."""
    for dtype in (torch.bfloat16, torch.float32):
        for case in bits_cases(run.device, dtype, run.bits_shapes):
            for bucket in run.buckets:
                told = {"operation": case.name, "dtype": str(dtype).removeprefix("torch."), "bucket": bucket}
                if clock.is_over:
                    run.add("bits", LEFT_OUT, **told, why="no time")
                    return
                try:
                    found = bits_of(case, bucket)
                except RuntimeError as error:  # a backend that does not take these arguments
                    run.add("bits", LEFT_OUT, **told, why=str(error).splitlines()[0][:100])
                    break
                is_blind = case.must_differ and bucket > 1 and found["same_beside_others"]
                run.add("bits", FAILS if is_blind else TOLD, **told, **found)


# -- speed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """One generation, without the reading of prompts.

    Args:
      forwards: milliseconds of every forward of the target on the device, where that is known.
    """

    seconds: float
    num_tokens: int
    num_steps: int
    forwards: tuple[float, ...] = ()
    peak_bytes: int | None = None
    kv_bytes: int | None = None
    texts: tuple[tuple[int, ...], ...] = ()


class Model:
    """A model that speed is measured of.

    Args:
      name: of the zoo, or ``random:SHAPE``.
    Raises: ForedraftError where it is not installed, or does not fit.
    """

    def __init__(self, name: str, device: torch.device, max_rows: int) -> None:
        self.name, self.device = name, device
        if name.startswith("random:"):
            shape = SHAPES[name.removeprefix("random:")]
            self._check_fits(shape)
            self.llm = LLM(random_model(shape, device), max_num_seqs=max_rows, num_cached_prefixes=0)
        else:
            self.llm = LLM(name, device=device, dtype="bfloat16", max_num_seqs=max_rows, num_cached_prefixes=0)
        self.plain_texts: dict[int, tuple[tuple[int, ...], ...]] = {}

    def _check_fits(self, shape: Mapping[str, int]) -> None:
        width = shape["hidden_size"]
        per_layer = 2 * width * width + 3 * width * shape["intermediate_size"]
        needed = 2 * 1.5 * (shape["num_hidden_layers"] * per_layer + 2 * shape["vocab_size"] * width)
        if self.device.type == "cuda" and torch.cuda.mem_get_info(self.device)[0] < needed:
            raise ForedraftError(f"{self.name} needs {needed / 1e9:.0f} GB of free memory")

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random tokens that repeat, so that lookups draft; of different lengths."""
        generator = torch.Generator().manual_seed(1)
        vocab_size = min(self.llm.target.vocab_size, 4000)
        lengths = [max(4, length - 3 * (row % 5)) for row in range(count)]
        halves = [torch.randint(5, vocab_size, (-(-each // 2),), generator=generator).tolist() for each in lengths]
        return [(half * 2)[:each] for half, each in zip(halves, lengths, strict=True)]

    @cached_property
    def plain_model(self) -> PreTrainedModel:
        """What transformers runs: the same weights, by its own attention."""
        if self.name.startswith("random:"):
            return self.llm.target._owner()  # type: ignore[no-any-return]
        loaded = AutoModelForCausalLM.from_pretrained(zoo.path(self.name), dtype=torch.bfloat16)
        return loaded.to(self.device).eval()  # type: ignore[no-any-return]

    @cached_property
    def draft_model(self) -> CausalLM:
        """A random one of an eighth of the layers, a quarter as wide."""
        config = self.llm.target.config
        shape = {
            "vocab_size": self.llm.target.vocab_size,
            "hidden_size": max(64, config.hidden_size // 256 * 64),
            "intermediate_size": max(128, config.intermediate_size // 4),
            "num_hidden_layers": max(1, config.num_hidden_layers // 8),
            "num_attention_heads": max(1, config.hidden_size // 256),
            "num_key_value_heads": 1,
        }
        return CausalLM(random_model(shape, self.device))


def random_model(shape: Mapping[str, int], device: torch.device) -> PreTrainedModel:
    """A Llama with random weights in bfloat16, made on the device."""
    config = LlamaConfig(**shape, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=device).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # computes its frequencies
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.02)
    return model  # type: ignore[no-any-return]


Decoder = Callable[[Model, Sequence[Sequence[int]], int], Timing]


@dataclass(frozen=True)
class SpeedArm:
    """A way to decode whose speed is measured.

    Args:
      run: decodes after prompts.
      most_rows: it is left out for more.
    """

    name: str
    run: Decoder
    most_rows: int = 64


def by_engine(new_drafter: Callable[[Model, Sequence[Sequence[int]]], Drafter]) -> Decoder:
    """Decode with the library."""

    def run(model: Model, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        return decode(model, new_drafter(model, prompts), prompts, num_tokens)

    return run


def decode(model: Model, drafter: Drafter, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
    """Read all prompts, then take the time of what follows."""
    llm, device = model.llm, model.device
    watch, forward = Stopwatch(device), llm.target.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        with watch.span():
            return forward(*args, **kwargs)

    peak_bytes(device)
    with ungoverned(), llm.engine(drafter) as engine, torch.inference_mode():
        params = replace(GREEDY, max_tokens=num_tokens)
        rows = [engine.add_request(list(prompt), params)[0] for prompt in prompts]
        while any(row.num_output_tokens == 0 for row in rows):
            engine.step()
        synchronize(device)
        begun, num_steps = sum(row.num_output_tokens for row in rows), 0
        start = time.perf_counter()
        with patch.object(llm.target, "forward", timed):
            while engine.has_unfinished:
                engine.step()
                num_steps += 1
        synchronize(device)
        seconds = time.perf_counter() - start
        texts = tuple(tuple(row.token_ids) for row in rows)
        kv_bytes = engine.cache.num_bytes
    num_new = sum(row.num_output_tokens for row in rows) - begun
    return Timing(seconds, num_new, num_steps, tuple(watch.milliseconds()), peak_bytes(device), kv_bytes, texts)


def plain(model: Model, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
    found = decode(model, EmptyDrafter(), prompts, num_tokens)
    model.plain_texts[len(prompts)] = found.texts
    return found


def by_method(config: Any) -> Decoder:
    """Decode by a method, which the model must bring what is needed for."""
    return by_engine(lambda model, _: model.llm.with_speculative_config(config).drafting.new_drafter())


def oracle(model: Model, prompts: Sequence[Sequence[int]]) -> Drafter:
    """Drafts four tokens of what plain decoding has said."""
    return PerfectDrafter(model.plain_texts[len(prompts)], 4, vocab_size=model.llm.target.vocab_size)


def draft_model(model: Model, _: Sequence[Sequence[int]]) -> Drafter:
    if not model.name.startswith("random:") and zoo.includes(model.name, "draft"):
        return model.llm.with_speculative_config("draft_model").drafting.new_drafter()
    return DraftModelDrafter(model.draft_model, target_vocab_size=model.llm.target.vocab_size)


class _Started(StoppingCriteria):  # type: ignore[misc]
    """Takes the time of the first token."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.at is None:
            synchronize(self._device)
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def by_transformers(**options: Any) -> Decoder:
    """Decode by ``model.generate``."""

    def run(model: Model, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        started = _Started(model.device)
        peak_bytes(model.device)
        found = model.plain_model.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None, stopping_criteria=[started], **options,
        )  # fmt: skip
        synchronize(model.device)
        assert started.at is not None
        seconds = time.perf_counter() - started.at
        steps = num_tokens - 1
        return Timing(seconds, steps * len(prompts), steps, peak_bytes=peak_bytes(model.device), texts=of_rows(found))

    return run


def of_rows(ids: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ids.tolist()))


SPEED_ARMS: list[SpeedArm] = [
    SpeedArm("plain", plain),
    SpeedArm("ngram", by_method("ngram")),
    SpeedArm("suffix+eagle3", by_method("suffix+eagle3")),
    SpeedArm("draft_model", by_engine(draft_model)),
    SpeedArm("oracle", by_engine(oracle)),
    SpeedArm("transformers", by_transformers()),
    SpeedArm("transformers, compiled", by_transformers(cache_implementation="static"), most_rows=16),
]
"""Further ways to decode are added here; "plain" comes first."""


def measure_speed(run: Check, clock: Clock) -> None:
    """All arms in turns, forwards and backwards."""
    for index, name in enumerate(run.models):
        of_model = clock.part(1 / (len(run.models) - index))
        try:
            model = Model(name, run.device, max(run.rows))
        except (ForedraftError, torch.OutOfMemoryError) as error:
            run.add("speed", LEFT_OUT, model=name, why=str(error).splitlines()[0])
            continue
        weights = sum(each.nbytes for each in model.llm.target.shadow.parameters())
        run.add("memory", TOLD, model=name, weights_bytes=weights, allocated_bytes=peak_bytes(run.device))
        for rows in run.rows:
            prompts = model.prompts(rows, run.prompt_length)
            measure_arms(run, model, prompts, of_model)
        del model
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_arms(run: Check, model: Model, prompts: Sequence[Sequence[int]], clock: Clock) -> None:
    rows, times = len(prompts), dict[str, list[Timing]]()
    arms = {arm.name: arm for arm in run.speed_arms}
    told = {"model": model.name, "rows": rows}
    for turn in range(-1, run.repeats):  # the first one warms up
        for name in list(arms) if turn % 2 else [*reversed(arms)]:
            why = "no time" if clock.is_over else "too many rows" if rows > arms[name].most_rows else ""
            if not why:
                try:
                    timing = arms[name].run(model, prompts, run.num_tokens)
                except Exception as error:  # of a method that the model brings nothing for, of memory, of a compiler
                    why = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            if why and name not in times:
                run.add("speed", LEFT_OUT, **told, arm=name, why=why)
            if why:
                del arms[name]
            elif turn >= 0 or run.repeats == 0:
                times.setdefault(name, []).append(timing)
    base = times.get("plain")
    for name, found in times.items():
        speed = statistics.median(one.num_tokens / one.seconds for one in found)
        of_plain = base and speed / statistics.median(one.num_tokens / one.seconds for one in base)
        forwards = [each for one in found for each in one.forwards]
        run.add(
            "speed",
            TOLD,
            **told,
            arm=name,
            tokens_per_second=speed,
            relative_to_plain=of_plain,
            step_ms=statistics.median(1e3 * one.seconds / one.num_steps for one in found),
            forward_ms=statistics.median(forwards) if forwards else None,
            tokens_per_step=statistics.median(one.num_tokens / one.num_steps / rows for one in found),
            turns=len(found),
            peak_bytes=max((one.peak_bytes or 0 for one in found), default=0) or None,
            kv_bytes=found[-1].kv_bytes,
            same_as_plain=None
            if base is None or name.startswith("transformers")
            else sum(a == b for a, b in zip(found[0].texts, base[0].texts, strict=True)),
        )


# -- growth ----------------------------------------------------------------------------------------------------------


def measure_growth(run: Check, clock: Clock) -> None:
    """Steps behind texts of growing length, and what keys and values take."""
    for name in run.models:
        try:
            model = Model(name, run.device, max(run.growth_rows))
        except (ForedraftError, torch.OutOfMemoryError) as error:
            run.add("growth", LEFT_OUT, model=name, why=str(error).splitlines()[0])
            continue
        longest = (model.llm.target.context_length or run.lengths[-1]) - run.num_growth_tokens
        for rows, length in product(run.growth_rows, run.lengths):
            told = {"model": name, "rows": rows, "context": min(length, longest)}
            if clock.is_over:
                run.add("growth", LEFT_OUT, **told, why="no time")
                continue
            prompts = model.prompts(rows, min(length, longest))
            for arm in ("plain", "ngram"):
                one = next(each for each in SPEED_ARMS if each.name == arm)
                try:
                    found = one.run(model, prompts, run.num_growth_tokens)
                except Exception as error:
                    run.add("growth", LEFT_OUT, **told, arm=arm, why=f"{type(error).__name__}: {error}"[:120])
                    continue
                run.add(
                    "growth",
                    TOLD,
                    **told,
                    arm=arm,
                    step_ms=1e3 * found.seconds / found.num_steps,
                    forward_ms=statistics.median(found.forwards),
                    kv_bytes=found.kv_bytes,
                    peak_bytes=found.peak_bytes,
                )
        del model


# -- the script ------------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """What is asked for, and where results go."""

    device: torch.device
    results: Results
    methods: Sequence[str]
    models: Sequence[str]
    rows: Sequence[int]
    buckets: Sequence[int]
    bits_shapes: Sequence[Mapping[str, int]]
    lengths: Sequence[int]
    growth_rows: Sequence[int]
    speed_arms: Sequence[SpeedArm]
    num_check_tokens: int
    num_tokens: int
    num_growth_tokens: int
    prompt_length: int
    repeats: int

    def add(self, section: str, status: str, **facts: Any) -> None:
        self.results.add(section, status, **facts)


SECTIONS: dict[str, tuple[Callable[[Check, Clock], None], float]] = {
    "check": (self_check, 0.3),
    "verify": (judge, 0.15),
    "steps": (count_operators, 0.3),
    "bits": (check_bits, 0.3),
    "speed": (measure_speed, 0.75),
    "growth": (measure_growth, 1.0),
}
"""Sections in their order, with the share of the time that is left which each may take."""


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="output folder; else the variable OUT, else a new one in runs/")
    parser.add_argument("--quick", action="store_true", help="two minutes: fewer methods, rows, shapes and repeats")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="time limit; 600, or 120 with --quick")
    parser.add_argument("--device", default="cuda", help="device; cpu tests the script itself")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="methods of the section check")
    parser.add_argument(
        "--models", nargs="+", metavar="MODEL", help="models of the section speed: zoo:NAME or random:SHAPE"
    )
    parser.add_argument("--rows", nargs="+", type=int, help="batch sizes of the section speed")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="arms of the section speed; all by default")
    parser.add_argument("--lengths", nargs="+", type=int, help="context lengths of the section growth, in tokens")
    parser.add_argument("--buckets", nargs="+", type=int, help="numbers of rows of the section bits")
    parser.add_argument("--num-tokens", type=int, help="tokens per row in the section speed")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="shapes of the section bits")
    return parser.parse_args(arguments)


def check_of(options: argparse.Namespace, results: Results, device: torch.device) -> Check:
    quick = options.quick
    shapes = options.shapes or (["1b"] if quick else ["1b", "8b"])
    arms = [arm for arm in SPEED_ARMS if options.arms is None or arm.name in options.arms]
    return Check(
        device=device,
        results=results,
        methods=options.methods or (QUICK_METHODS if quick else list(METHODS)),
        models=options.models or (["zoo:smollm2"] if quick else ["zoo:smollm2", "random:8b"]),
        rows=options.rows or ([1, 16] if quick else [1, 4, 16, 64]),
        buckets=options.buckets or ((1, 8, 16) if quick else BUCKETS),
        bits_shapes=[SHAPES[name] for name in shapes],
        lengths=options.lengths or ([512, 4096] if quick else [128, 512, 1024, 2048, 4096]),
        growth_rows=[1] if quick else [1, 16],
        speed_arms=arms,
        num_check_tokens=12 if quick else 24,
        num_tokens=options.num_tokens or (24 if quick else 48),
        num_growth_tokens=8 if quick else 16,
        prompt_length=96,
        repeats=1 if quick else 3,
    )


def folder_of(options: argparse.Namespace) -> Path:
    """Where results go."""
    if options.out is not None:
        return Path(options.out)
    if "OUT" in os.environ:
        return Path(os.environ["OUT"])
    return Path("runs") / f"gpu_check-{time.strftime('%Y%m%d-%H%M%S')}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    device = choose_device(options.device)
    results = Results(folder_of(options))
    clock = Clock(options.budget or (120.0 if options.quick else 600.0))
    run = check_of(options, results, device)
    try:
        run.add("conditions", TOLD, **conditions(device))
        for name in options.sections:
            measure, share = SECTIONS[name]
            start = time.monotonic()
            try:
                measure(run, clock.part(share))
            except Exception as error:  # the next section may still run
                run.add(name, FAILS, error=f"{type(error).__name__}: {error}"[:500])
            run.add("seconds", TOLD, part=name, seconds=time.monotonic() - start)
            results.write_table()
    except KeyboardInterrupt:
        print(f"stopped; what was found lies in {results.folder}", file=sys.stderr)
        return 130
    finally:
        results.close()
    print(f"{results.num_failing} of {len(results.lines)} results fail; they lie in {results.folder}")
    return 3 if results.num_failing else 0


if __name__ == "__main__":
    sys.exit(main())
