"""How much slower decoding and loading are beside other programs, by what they take alone.

    python benchmarks/neighbours.py [--model zoo:smollm2] [--methods none ngram] [--max-new-tokens 48] [--repeats 5]
        [--cases two nice-10 nice-0] [--torch-first] [--no-loading] [--limit 900] [--out neighbours.json]

Cases: "two" are two processes of this library that decode at once; "nice-10" and "nice-0" are decoding beside another
process of torch that multiplies matrices on all threads, at that niceness. Every repeat measures alone, beside, beside,
alone; a ratio is that of the sums of these pairs. Shown are medians, the least and the largest. "quiet" is the share of
the processors' time that nobody else used while decoding alone: below 0.95 the figures say little.
``--torch-first`` imports torch before this library, so that its own setting of OpenMP comes too late.
All processes that this starts end with it, and no later than the limit in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

WORKER = """
import sys, time
if {torch_first}:
    import torch
from foretoken import LLM, SamplingParams
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


class Worker:
    """A process of the library that decodes when it is told to."""

    def __init__(self, options: argparse.Namespace) -> None:
        program = WORKER.format(
            torch_first=options.torch_first,
            model=options.model,
            methods=options.methods,
            tokens=options.max_new_tokens,
        )
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

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def busy(niceness: int) -> Iterator[None]:
    """Another program at work; the niceness counts within one session of the system."""
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
    stat = Path(f"/proc/{worker.process.pid}/stat")

    def own() -> float:
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    used, mine, start = used_seconds(), own(), time.perf_counter()
    seconds = worker.seconds(method)
    others = used_seconds() - used - (own() - mine)
    return seconds, 1 - max(others, 0.0) / ((time.perf_counter() - start) * (os.cpu_count() or 1))


def race(case: str, workers: list[Worker], method: str, repeats: int, deadline: float) -> dict[str, object]:
    """Ratios of decoding beside others by decoding alone."""
    first, second = workers

    def beside() -> list[float]:
        if case == "two":
            first.ask(method)
            second.ask(method)
            return [first.result(), second.result()]
        return [first.seconds(method)]

    ratios: list[float] = []
    alone: list[float] = []
    quiet: list[float] = []
    for worker in workers:
        worker.seconds(method)  # the first one warms up
    for _ in range(repeats):
        before = quietness(first, method)
        if case == "two":
            together = [beside(), beside()]
        else:
            with busy(int(case.removeprefix("nice-"))):
                together = [beside(), beside()]
        after = quietness(first, method)
        alone += [before[0], after[0]]
        quiet += [before[1], after[1]]
        worst = [max(seconds) for seconds in together]
        ratios.append(sum(worst) / (before[0] + after[0]))
        if time.monotonic() > deadline:
            break
    return {
        "case": case,
        "method": method,
        "alone_seconds": statistics.median(alone),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "largest": max(ratios),
        "repeats": len(ratios),
        "quiet": min(quiet),
    }


def load_seconds(options: argparse.Namespace) -> float:
    worker = Worker(options)
    worker.end()
    return worker.load_seconds


def loading(case: str, options: argparse.Namespace, deadline: float) -> dict[str, object]:
    """Ratios of loading beside others by loading alone."""
    ratios: list[float] = []
    alone: list[float] = []
    for _ in range(max(1, options.repeats // 2)):
        alone.append(load_seconds(options))
        with busy(int(case.removeprefix("nice-"))):
            ratios.append(load_seconds(options) / alone[-1])
        if time.monotonic() > deadline:
            break
    return {
        "case": case,
        "method": "loading",
        "alone_seconds": statistics.median(alone),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "largest": max(ratios),
        "repeats": len(ratios),
        "quiet": None,
    }


def show(row: dict[str, object]) -> None:
    quiet = "" if row["quiet"] is None else f", quiet {row['quiet']:.2f}"
    print(
        f"{row['case']:8} {row['method']:8} alone {row['alone_seconds']:.2f} s, beside {row['ratio']:.2f} times as "
        f"long ({row['least']:.2f}-{row['largest']:.2f}, {row['repeats']} repeats){quiet}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--methods", nargs="+", default=["none", "ngram"])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cases", nargs="+", default=["two", "nice-10", "nice-0"], choices=["two", "nice-10", "nice-0"]
    )
    parser.add_argument("--torch-first", action="store_true")
    parser.add_argument("--no-loading", action="store_true")
    parser.add_argument("--limit", type=float, default=900.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit
    load_seconds(options)  # fills the caches on disk
    workers = [Worker(options) for _ in range(2)]
    rows = []
    try:
        for case in options.cases:
            for method in options.methods:
                rows.append(race(case, workers, method, options.repeats, deadline))
                show(rows[-1])
    finally:
        for worker in workers:
            worker.end()
    for case in options.cases:
        if case != "two" and not options.no_loading and time.monotonic() < deadline:
            rows.append(loading(case, options, deadline))
            show(rows[-1])
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
