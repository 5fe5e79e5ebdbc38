"""Reading long prompts: beside transformers' own forward, and for how long rows that run wait meanwhile.

    python benchmarks/prefill.py speed --lengths 512 2048 8000 --chunks 128 512
    python benchmarks/prefill.py pause --lengths 4000 --chunks 64 128 256 512

speed: seconds of processor time for one prompt, ours by chunk and transformers' in one forward (its default) over the
same weights, in turns within one process; least of all repeats. pause: the longest time between two tokens of a row
that runs while a prompt of that length comes, and the seconds until that prompt has its first token; processor time,
too, which is what a clock would show on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

import torch

from foretoken import LLM, SamplingParams, zoo
from foretoken.config.engine import EngineConfig
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.engine import Engine

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def prompt(llm: LLM, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(10, llm.target.vocab_size, (length,), generator=generator).tolist()


def read_by_us(llm: LLM, text: list[int], chunk: int) -> float:
    """Until the first token is there."""
    engine = Engine(llm.target, EmptyDrafter(), EngineConfig(prefill_chunk_size=chunk))
    engine.add_request(text, ONE)
    start = process_time()
    while engine.has_unfinished:
        engine.step()
    return process_time() - start


@torch.inference_mode()
def read_by_transformers(model: Any, text: list[int]) -> float:
    """As ``generate`` reads it: one forward with a cache, whose last logits give the first token."""
    ids = torch.tensor([text])
    start = process_time()
    int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
    return process_time() - start


def speed(llm: LLM, options: argparse.Namespace) -> None:
    theirs, *_ = zoo.load(options.model.removeprefix("zoo:"), dtype=llm.target.dtype)
    for length in options.lengths:
        text = prompt(llm, length)
        arms: dict[str, Callable[[], float]] = {
            f"chunks of {chunk}": partial(read_by_us, llm, text, chunk) for chunk in options.chunks
        }
        arms["transformers"] = partial(read_by_transformers, theirs, text)
        taken: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(options.repeats):
            for name in list(arms) if turn % 2 == 0 else list(arms)[::-1]:
                taken[name].append(arms[name]())
        least = {name: min(seconds) for name, seconds in taken.items()}
        reference = least["transformers"]
        show(length=length, **{n: f"{s:.2f} s ({reference / s:.2f} times as fast)" for n, s in least.items()})


def pause(llm: LLM, options: argparse.Namespace) -> None:
    for length in options.lengths:
        for chunk in options.chunks:
            engine = Engine(llm.target, EmptyDrafter(), EngineConfig(prefill_chunk_size=chunk))
            (running,) = engine.add_request(
                prompt(llm, 40), SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
            )
            while running.num_output_tokens < 5:
                engine.step()
            arrived = last = process_time()
            (row,) = engine.add_request(prompt(llm, length), ONE)
            gaps, said = [], running.num_output_tokens
            while not row.is_finished:
                engine.step()
                if running.num_output_tokens > said:
                    now = process_time()
                    gaps.append(now - last)
                    last, said = now, running.num_output_tokens
            show(
                length=length,
                chunk=chunk,
                longest_pause_ms=round(1e3 * max(gaps)),
                first_token_s=round(process_time() - arrived, 2),
                tokens_meanwhile=len(gaps),
            )


def show(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "pause"))
    parser.add_argument("--model", default="zoo:smollm2", help="zoo:NAME")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(options.model, "none", dtype=options.dtype)
    print(f"{options.model} {llm.target.dtype} {llm.target.execution.describe()} torch {torch.__version__}", flush=True)
    {"speed": speed, "pause": pause}[options.what](llm, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
