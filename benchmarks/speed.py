"""Measure speed relative to plain decoding on a quiet machine: methods, `classic`, and busy neighbours.

    python benchmarks/speed.py kinds --prompts-file question.jsonl [--methods ngram suffix+eagle3 auto]
        [--temperatures 0 1] [--batch-sizes 1 8] [--kinds chat random] [--groups 2] [--out kinds.json]
    python benchmarks/speed.py classic [--model zoo:tiny --scale 100m] [--groups 6] [--repeats 3]
    python benchmarks/speed.py neighbours [--methods none ngram] [--cases two nice-10 nice-0] [--repeats 5]

kinds: plain decoding and all methods, with the governor as by default, decode the same groups of prompts in turns, A B
B A. EOS is ignored, and tokens are compared. A cell of the table is the ratio of the sums of seconds per token over the
groups of a kind, with a bootstrap interval over the groups; the last ones are the geometric mean of the kinds. The chat
parts of Spec-Bench count as one kind; "random" prompts are tokens drawn uniformly. Methods are named as in ``foredraft
bench --methods``; "wrong" drafts random tokens at no cost. As in an `LLM`, governors keep what they have learned from
prompt to prompt.

classic: the functions of `foredraft.classic` compared with their own autoregressive one and `model.generate`, with and
without a cache, greedy, prompts included. "kept" storages have seen the prompts before, as on a second call.

neighbours: slowdown of decoding and loading beside other programs, relative to the time without them. "two" are two
processes of Foredraft at once; "nice-10" and "nice-0" are runs beside a torch process that multiplies matrices on all
threads, at that niceness. Every repeat measures alone, beside, beside, alone. "quiet" is the share of the processors'
time that no other program used while decoding alone; below 0.95 the figures are not reliable. ``--torch-first`` imports
torch before Foredraft, so that Foredraft's setting of OpenMP comes too late. All processes end with this one, or after
``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pairs import load_pair, scaled
from transformers.utils import logging

from foredraft.bench.arms import OwnArms
from foredraft.bench.candidates import PLAIN, read_candidates
from foredraft.bench.equality import check
from foredraft.bench.provenance import provenance
from foredraft.bench.trial import Arm, Run, Sampling, Trial, bootstrap, compare, in_groups, interleave
from foredraft.bench.workload import BenchPrompt, load_prompts, read_questions, select
from foredraft.classic import last_trace
from foredraft.classic.ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
from foredraft.classic.sampling import autoregressive_generate, beam_search_generate, speculative_generate
from foredraft.config.speculative import SpeculativeConfig
from foredraft.engine.drafter import ContextDrafter, DraftSize
from foredraft.engine.row import Row
from foredraft.errors import ForedraftError
from foredraft.loading.models import load_model
from foredraft.tree import DraftTree
from foredraft.tune.scale import inflated

CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
RANDOM, WRONG = "random", "wrong"
KINDS = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag", RANDOM)
METHODS = (
    "ngram", "suffix", "nasd", "token_recycling", "lookahead", "jacobi", "layer_skip", "quantized_self", "sparse_kv",
    "eagle3", "draft_model", "ngram+suffix", "suffix>token_recycling", "suffix+eagle3", "auto",
)  # fmt: skip

Times = dict[str, list[tuple[float, float]]]
"""By kind: seconds per token of plain decoding and of a method, for every group."""


# -- kinds -----------------------------------------------------------------------------------------------------------


class Wrong(ContextDrafter):
    """Drafts ten tokens that are hardly ever right."""

    name = WRONG

    def __init__(self, vocab_size: int) -> None:
        self._random, self._vocab_size = random.Random(0), vocab_size

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        tokens = [self._random.randrange(self._vocab_size) for _ in range(min(budget, 10))]
        return DraftTree.chain(row.pending, tokens, source=self.name)


def kinds(options: argparse.Namespace) -> None:
    loaded = inflated(load_model(options.model, dtype=options.dtype), options.scale)
    own = OwnArms(loaded, options.model, options.dtype, options.execution, "default")
    wanted = ",".join(name for name in options.methods if name != WRONG)
    candidates = read_candidates(wanted, options.draft_model, None) if wanted else {}
    made: dict[str, Any] = {}
    for name, given in candidates.items():
        try:
            made[name] = own.drafters_of(SpeculativeConfig.parse(given))
        except ForedraftError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    every = {PLAIN: {"method": "none"}, **{name: given for name, given in candidates.items() if name in made}}
    if WRONG in options.methods:
        every[WRONG] = {"method": "ngram"}  # governed as any lookup is
        made[WRONG] = lambda: Wrong(own.target.vocab_size)
    cells: list[dict[str, Any]] = []
    print(f"| method | T | rows | {' | '.join(options.kinds)} | geometric mean | same rows |")
    print("|---" * (len(options.kinds) + 5) + "|")
    for temperature, size in product(options.temperatures, options.batch_sizes):
        groups = [group for kind in options.kinds for group in groups_of(own, kind, size, options)]
        arms = [
            own.arm(name, SpeculativeConfig.parse(given), made.get(name), num_rows=size)
            for name, given in every.items()
        ]
        sampling = Sampling(temperature=temperature, seed=1, ignore_eos=True)

        def note(trial: Trial, size: int = size, done: Sequence[Any] = tuple(cells), total: int = len(groups)) -> None:
            share = f"others used {trial.other_cpu_share:.0%} of the processors"
            print(f"{len(trial.prompts)} of {total} groups, {share}", file=sys.stderr, flush=True)
            keep(options.out, [*done, *cells_of(trial, size)])

        trial = interleave(arms, groups, sampling, options.max_new_tokens, options.repeats, note)
        found = cells_of(trial, size)
        cells += found
        for cell in found:
            shown = [told(cell["kinds"].get(kind)) for kind in options.kinds]
            where = f"`{cell['method']}` | {temperature:g} | {size}"
            print(f"| {where} | {' | '.join([*shown, told(cell['mean']), cell['same']])} |", flush=True)
    slow = [cell for cell in cells for speed in cell["kinds"].values() if speed[0] < 0.97]
    print(f"\n{len(slow)} of {sum(len(cell['kinds']) for cell in cells)} cells below 0.97; torch {torch.__version__}")


def groups_of(own: OwnArms, kind: str, size: int, options: argparse.Namespace) -> list[BenchPrompt]:
    """So many groups of prompts of a kind; of one row each where batches have one."""
    wanted = size * options.groups
    if kind == RANDOM:
        rng = random.Random(1)
        drawn = [tuple(rng.randrange(own.target.vocab_size) for _ in range(100)) for _ in range(wanted)]
        prompts = [BenchPrompt(f"{RANDOM}-{place}", kind, ids) for place, ids in enumerate(drawn)]
    else:
        prompts = prompts_of(own.tokenizer, kind, wanted, options)
    return [BenchPrompt(one.name, kind, one.token_ids) for one in (in_groups(prompts, size) if size > 1 else prompts)]


def prompts_of(tokenizer: Any, kind: str, wanted: int, options: argparse.Namespace) -> list[BenchPrompt]:
    """The first ones of a kind that are not too long."""
    questions = [
        one
        for one in read_questions(options.prompts_file)
        if one.category == kind or (kind == "chat" and one.category in CHAT)
    ]
    prompts = load_prompts(tokenizer, questions, max_length=options.max_prompt_tokens)[:wanted]
    if len(prompts) < wanted:
        raise SystemExit(f"{kind} has {len(prompts)} prompts of {options.max_prompt_tokens} tokens; {wanted} are asked")
    return prompts


def cells_of(trial: Trial, size: int) -> list[dict[str, Any]]:
    """What a trial has shown of every method: speed by kind and over all, with intervals, and which rows are same."""
    plain = trial.seconds_per_token(PLAIN)
    same = check(trial, lambda *_: math.nan, PLAIN, [name for name in trial.runs if name != PLAIN])
    found = []
    for equal in same:
        times: Times = {}
        pairs = zip(trial.prompts, plain, trial.seconds_per_token(equal.arm), strict=True)
        for prompt, slow, fast in pairs:
            times.setdefault(prompt.category, []).append((slow, fast))
        stats = trial.stats(equal.arm)
        found.append(
            {
                "method": equal.arm, "temperature": trial.sampling.temperature, "num_rows": size,
                "kinds": {kind: (ratio(of_kind), *bootstrap(of_kind, ratio)) for kind, of_kind in times.items()},
                "mean": (mean(times), *mean_interval(times)), "same": f"{equal.num_identical}/{equal.num_prompts}",
                "tokens_per_step": stats.tokens_per_step, "other_cpu_share": trial.other_cpu_share,
            }
        )  # fmt: skip
    return found


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(slow for slow, _ in pairs) / sum(fast for _, fast in pairs)


def mean(times: Times) -> float:
    """The geometric mean over kinds."""
    return math.exp(statistics.mean(math.log(ratio(pairs)) for pairs in times.values()))


def mean_interval(times: Times) -> tuple[float, float]:
    """95 % of the mean, over groups drawn again and again within every kind."""
    rng = random.Random(0)
    drawn = ({kind: rng.choices(pairs, k=len(pairs)) for kind, pairs in times.items()} for _ in range(2000))
    means = sorted(map(mean, drawn))
    return means[50], means[1949]


def told(found: tuple[float, float, float] | None) -> str:
    """1.50 (1.40-1.60)"""
    return "" if found is None else f"{found[0]:.2f} ({found[1]:.2f}-{found[2]:.2f})"


def keep(out: Path | None, found: Any) -> None:
    if out is not None:
        out.write_text(json.dumps({"conditions": provenance(), "found": found}, indent=1) + "\n", encoding="utf-8")


# -- classic -----------------------------------------------------------------------------------------------------------

Generate = Callable[[list[int]], list[int]]


class ClassicArm(Arm):
    """A function from a prompt to its tokens; all of its time counts.

    Attributes:
      num_steps, num_tokens: of all runs, as far as the function leaves a trace.
    """

    def __init__(self, name: str, generate: Generate) -> None:
        self.name, self._generate = name, generate
        self.num_steps = self.num_tokens = 0

    def run(self, prompt_ids: Sequence[Any], max_new_tokens: int, sampling: Sampling) -> Run:
        start = time.perf_counter()
        tokens = self._generate(list(prompt_ids))
        seconds = time.perf_counter() - start
        trace = None if "model." in self.name else last_trace()
        self.num_steps += len(tokens) if trace is None else len(trace.steps)
        self.num_tokens += len(tokens)
        return Run(tuple(tokens), 0, 0.0, seconds)


def transformers_generate(model: Any, length: int, **options: Any) -> Generate:
    """`model.generate`."""

    def run(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": length, "eos_token_id": [-1]}
        output = model.generate(ids, do_sample=False, pad_token_id=0, **given, **options)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return run


def classic_arms(target: Any, drafter: Any, length: int) -> list[ClassicArm]:
    """Every way to generate ``length`` tokens; ends are ignored, so that all have as much to do."""
    given: dict[str, Any] = {"max_gen_len": length, "eos_tokens_id": []}
    kept = NGramStorage(3, target.config.vocab_size)

    def nasd(prompt: list[int], storage: NGramStorage | None = None, **options: Any) -> list[int]:
        storage = NGramStorage(3, target.config.vocab_size) if storage is None else storage
        return ngram_assisted_speculative_generate(prompt, storage, target, stop_if_unknown=True, **given, **options)[0]

    ways: dict[str, Generate] = {}
    for words, use_cache in (("", True), (", no cache", False)):
        cached = {"use_cache": use_cache}
        ways[f"model.generate{words}"] = transformers_generate(target, length, **cached)
        ways[f"autoregressive_generate{words}"] = lambda p, c=cached: autoregressive_generate(p, target, **given, **c)
        ways[f"ngram_assisted{words}"] = lambda p, c=cached: nasd(p, **c)
        ways[f"ngram_assisted, kept{words}"] = lambda p, c=cached: nasd(p, kept, **c)
        if drafter is not None:
            ways[f"speculative_generate{words}"] = lambda p, c=cached: speculative_generate(
                p, drafter, target, **given, **c
            )[0]
    ways["model.generate, 4 beams"] = transformers_generate(target, length, num_beams=4)
    ways["beam_search_generate, 4 beams"] = lambda p: beam_search_generate(p, target, num_beams=4, top_k=8, **given)
    return [ClassicArm(name, generate) for name, generate in ways.items()]


def classic(options: argparse.Namespace) -> None:
    logging.set_verbosity_error()  # transformers warns of an end token that never comes
    pair = scaled(load_pair(options.model, options.draft_model, options.dtype), options.scale)
    questions = select(read_questions(options.prompts_file), options.groups)
    prompts = load_prompts(pair.tokenizer, questions, options.max_prompt_tokens)
    arms = classic_arms(pair.target, pair.drafter, options.max_new_tokens)
    trial = interleave(arms, prompts, Sampling(ignore_eos=True), options.max_new_tokens, options.repeats)
    load = f"others used {trial.other_cpu_share:.0%} of the processors"
    print(f"{pair.label}, {pair.target.dtype}, {torch.get_num_threads()} threads, {len(prompts)} prompts, {load}")
    print(
        "| function | tokens/s | tokens per step | x autoregressive | x model.generate | equal |\n" + "|---" * 6 + "|"
    )
    for arm in arms:
        words = ", no cache" if arm.name.endswith("no cache") else ", 4 beams" if arm.name.endswith("beams") else ""
        bases = [name for name in (f"autoregressive_generate{words}", f"model.generate{words}") if name in trial.runs]
        ratios = [""] * (2 - len(bases)) + [str(compare(trial, arm.name, base)) for base in bases]
        (equal,) = check(trial, lambda *_: math.nan, bases[-1], [arm.name])
        speed, tau = trial.tokens_per_second(arm.name), arm.num_tokens / arm.num_steps
        same = f"{equal.num_identical}/{equal.num_prompts}"
        print(f"| {arm.name} | {speed:.1f} | {tau:.2f} | {' | '.join(ratios)} | {same} |")


# -- neighbours --------------------------------------------------------------------------------------------------------

WORKER = """
import sys, time
if {torch_first}:
    import torch
from foredraft import LLM, SamplingParams
started = time.perf_counter()
llm = LLM({model!r})
arms = {{method: llm.with_speculative_config(method) for method in {methods!r}}}
print(time.perf_counter() - started, flush=True)
params = SamplingParams(temperature=0, max_tokens={tokens}, ignore_eos=True)
for line in sys.stdin:
    started = time.perf_counter()
    arms[line.strip()].generate("Write a short story about a fox and a hound who meet in the woods.", params)
    print(time.perf_counter() - started, flush=True)
"""
BUSY = """
import os, torch
os.nice({niceness})
a = torch.randn(1024, 1024)
while os.getppid() == {parent}:
    a @ a
"""
CASES = ("two", "nice-10", "nice-0")


class Worker:
    """A process of the library that decodes when it is told to."""

    def __init__(self, options: argparse.Namespace) -> None:
        given = {"model": options.model, "methods": options.methods, "tokens": options.max_new_tokens}
        program = WORKER.format(torch_first=options.torch_first, **given)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.load_seconds = self.result()

    def ask(self, method: str) -> None:
        """Begin to decode."""
        assert self.process.stdin is not None
        self.process.stdin.write(method + "\n")
        self.process.stdin.flush()

    def result(self) -> float:
        """Seconds of what was asked for."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process of the library has ended early")
        return float(line)

    def seconds(self, method: str) -> float:
        self.ask(method)
        return self.result()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def busy(case: str) -> Iterator[None]:
    """Another program at work; the niceness counts within one session of the system."""
    niceness = int(case.removeprefix("nice-"))
    process = subprocess.Popen([sys.executable, "-c", BUSY.format(niceness=niceness, parent=os.getpid())])
    try:
        time.sleep(3)
        yield
    finally:
        process.kill()
        process.wait()


def used_seconds() -> float:
    """Of all processors, since the system started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    idle = int(fields[3]) + int(fields[4])
    return (sum(map(int, fields)) - idle) / os.sysconf("SC_CLK_TCK")


def quietness(worker: Worker, method: str) -> tuple[float, float]:
    """Seconds of decoding alone, and the share of the processors' time that nobody else used meanwhile."""
    used, mine, start = used_seconds(), worker.cpu_seconds(), time.perf_counter()
    seconds = worker.seconds(method)
    others = used_seconds() - used - (worker.cpu_seconds() - mine)
    return seconds, 1 - max(others, 0.0) / ((time.perf_counter() - start) * (os.cpu_count() or 1))


def beside(case: str, workers: list[Worker], method: str) -> list[float]:
    """Seconds of decoding beside others, twice; of two at once the longer ones."""
    if case == "two":
        found = []
        for _ in range(2):
            for worker in workers:
                worker.ask(method)
            found.append(max([worker.result() for worker in workers]))
        return found
    with busy(case):
        return [workers[0].seconds(method) for _ in range(2)]


def decoding(case: str, workers: list[Worker], method: str, repeats: int, deadline: float) -> dict[str, Any]:
    """Ratios of decoding beside others by decoding alone."""
    ratios, alone, quiet = [], [], []
    for worker in workers:
        worker.seconds(method)  # the first one warms up
    for _ in range(repeats):
        before = quietness(workers[0], method)
        together = beside(case, workers, method)
        after = quietness(workers[0], method)
        for seconds, share in (before, after):
            alone.append(seconds)
            quiet.append(share)
        ratios.append(sum(together) / (before[0] + after[0]))
        if time.monotonic() > deadline:
            break
    return of_case(case, method, alone, ratios, min(quiet))


def loading(case: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Ratios of loading beside others by loading alone."""
    ratios, alone = [], []
    for _ in range(max(1, options.repeats // 2)):
        alone.append(load_seconds(options))
        with busy(case):
            ratios.append(load_seconds(options) / alone[-1])
        if time.monotonic() > deadline:
            break
    return of_case(case, "loading", alone, ratios, None)


def load_seconds(options: argparse.Namespace) -> float:
    worker = Worker(options)
    worker.end()
    return worker.load_seconds


def of_case(case: str, method: str, alone: list[float], ratios: list[float], quiet: float | None) -> dict[str, Any]:
    """What is kept of a case, and shown."""
    row = {
        "case": case, "method": method, "alone_seconds": statistics.median(alone), "ratio": statistics.median(ratios),
        "least": min(ratios), "largest": max(ratios), "repeats": len(ratios), "quiet": quiet,
    }  # fmt: skip
    print(
        f"{case:8} {method:8} alone {row['alone_seconds']:.2f} s, beside {row['ratio']:.2f} times as "
        f"long ({row['least']:.2f}-{row['largest']:.2f}, {row['repeats']} repeats)"
        + ("" if quiet is None else f", quiet {quiet:.2f}"),
        flush=True,
    )
    return row


def neighbours(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + options.limit
    load_seconds(options)  # fills the caches on disk
    workers = [Worker(options) for _ in range(2)]
    rows = []
    try:
        for case, method in product(options.cases, options.methods):
            rows.append(decoding(case, workers, method, options.repeats, deadline))
    finally:
        for worker in workers:
            worker.end()
    for case in options.cases:
        if case != "two" and not options.no_loading and time.monotonic() < deadline:
            rows.append(loading(case, options, deadline))
    keep(options.out, rows)


# -- the command -------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    "kinds": {"methods": list(METHODS), "max_new_tokens": 48, "repeats": 1, "groups": 2},
    "classic": {"max_new_tokens": 32, "repeats": 2, "groups": 4},
    "neighbours": {"methods": ["none", "ngram"], "max_new_tokens": 48, "repeats": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=DEFAULTS)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--scale", default="none", help="make the target wider: none, 100m or HIDDENxFFN")
    parser.add_argument("--prompts-file", type=Path, help="prompts, as in foredraft bench")
    parser.add_argument("--kinds", nargs="+", default=KINDS[:-1])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1])
    parser.add_argument("--groups", type=int, help="groups of prompts of a kind; a prompt each if the batch size is 1")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--repeats", type=int, help="rounds of A B B A")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--torch-first", action="store_true")
    parser.add_argument("--no-loading", action="store_true")
    parser.add_argument("--limit", type=float, default=900.0)
    parser.add_argument("--out", type=Path)
    what = parser.parse_known_args()[0].what
    parser.set_defaults(**DEFAULTS[what])
    {"kinds": kinds, "classic": classic, "neighbours": neighbours}[what](parser.parse_args())


if __name__ == "__main__":
    main()
