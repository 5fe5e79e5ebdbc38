"""Requests of every kind for a long time: each gives what it gives alone, and nothing of it is left behind.

    python benchmarks/soak.py --requests 2000
    python benchmarks/soak.py --model zoo:smollm2 --minutes 60 --max-kv-bytes 64MB --dtype float32

Requests of mixed lengths and parameters arrive at random at engines of all methods, which share one target and one
store of prefixes and have a plan for memory that is too small. Some are aborted, some have a processor or a tokenizer
that raises, some steps are cut off by Ctrl-C, and drafters raise in any of their calls or draft nonsense. Without a
model the target is a toy in float64, where every text must equal that of its request run alone, plainly; with one,
texts that differ are told and counted, since roundings may. Memory is read whenever all engines are empty; `kill -TERM`
ends a run after what it has begun.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter, process_time, sleep

import soak_world
import torch
from soaking import Soak, growth


class RunningTime:
    """Seconds in which this process could run: those after SIGSTOP and before SIGCONT are left out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        last = perf_counter()
        while True:
            sleep(0.5)
            now = perf_counter()
            self.seconds += now - last if now - last < 5 else 0.5
            last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="instead of --requests; time while stopped does not count")
    parser.add_argument("--model", help="a real model; without one, a toy in float64")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument(
        "--methods", nargs="+", help="of the toy: all; of a model: none, ngram, token_recycling, sparse_kv"
    )
    parser.add_argument("--max-kv-bytes", default="64MB", help="of a model: the plan of each method's engine")
    parser.add_argument("--texts", type=Path, default=Path(__file__).parents[1] / "docs", help="folder of .md files")
    parser.add_argument("--fault-rate", type=float, default=0.01, help="share of a drafter's calls that fail")
    parser.add_argument("--check-rate", type=float, help="share of requests that run alone, too; of a model: 0.1")
    parser.add_argument("--drain-every", type=int, help="requests between two readings of memory; 50, of a model 10")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("foretoken").setLevel(logging.ERROR)  # faults are told by the hundred
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            world = soak_world.toy_world(rng, Path(folder), tuple(options.methods or soak_world.METHODS))
        else:
            world = soak_world.model_world(
                options.model,
                tuple(options.methods or ("none", "ngram", "token_recycling", "sparse_kv")),
                options.max_kv_bytes,
                options.texts,
                dtype=options.dtype,
            )
        check_rate = options.check_rate if options.check_rate is not None else 1.0 if world.is_exact else 0.1
        soak = Soak(world, rng, fault_rate=options.fault_rate, check_rate=check_rate)
        clock, ended = RunningTime(), []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(True))

        def is_enough(num_requests: int) -> bool:
            if options.minutes is not None:
                return bool(ended) or clock.seconds > 60 * options.minutes
            return bool(ended) or num_requests >= options.requests

        soak.run(is_enough, drain_every=options.drain_every or (50 if world.is_exact else 10))
    shown = {
        "seconds": round(clock.seconds, 1),
        "plan_bytes": world.config.max_kv_bytes,
        "counts": dict(soak.counts),
        "faults": dict(soak.faults),
        "num_differing": len(soak.differing),
        "memory": soak.memory[:: max(1, len(soak.memory) // 10)],
        "growth_since_a_quarter": growth(soak.memory),
        "cpu_seconds": round(process_time(), 1),
    }
    print(json.dumps(shown, indent=1))
    print(*soak.differing, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
