"""What a worker of the race says and is told. The standard library alone, since every engine has its own environment.

One JSON object per line. The worker's first line describes it; every later line answers one request:
``{"verb": "run", "arm": NAME, "prompt_ids": [...], "max_new_tokens": N}`` and what else the worker has handlers for.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

Decode = Callable[[list[int], int], "Answer"]


@dataclass
class Answer:
    """Token ids of an answer and its decoding: what follows the first emission, of ``num_first`` tokens."""

    token_ids: list[int]
    num_first: int
    first_seconds: float
    decode_seconds: float


def folder_and_threads(description: str | None) -> tuple[argparse.ArgumentParser, Callable[[], argparse.Namespace]]:
    """The options that every worker has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of benchmarks/export_pair.py, or its folder dense")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain-only", action="store_true")
    return parser, parser.parse_args


def status_bytes(name: str) -> int:
    """A size of this process: VmHWM is the largest resident one so far, VmRSS the present one; 0 where unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


class Arms:
    """Arms by name, and what the process held after each of them was made and had answered once."""

    def __init__(self, warm_up: list[int]) -> None:
        self._warm_up = warm_up
        self.runs: dict[str, Decode] = {}
        self.memory: dict[str, dict[str, int]] = {}

    def add(self, name: str, run: Decode) -> None:
        run(self._warm_up, 8)
        self.runs[name] = run
        self.memory[name] = {"peak_bytes": status_bytes("VmHWM"), "resident_bytes": status_bytes("VmRSS")}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return asdict(self.runs[request["arm"]](request["prompt_ids"], request["max_new_tokens"]))


def has_draft(folder: Path) -> bool:
    """Whether a drafter was exported beside the target."""
    return (folder / "draft" / "config.json").exists()


def eos_token_ids(folder: Path) -> set[int]:
    """Tokens that end a text, as the target's generation config has them."""
    path = folder / "target" / "generation_config.json"
    eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    return set(eos) if isinstance(eos, list) else {eos} - {None}


def first_prompt(folder: Path) -> list[int]:
    """The prompt to warm up with."""
    path = folder / "prompts.json"
    return json.loads((path if path.exists() else folder.parent / "prompts.json").read_text())[0]["prompt_ids"]


def serve(
    start: Callable[[], tuple[Arms, dict[str, Any]]],
    handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
) -> None:
    """Start the engine, describe it, and answer requests until the input ends.

    What engines print goes to standard error: their output must not mix with the answers.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def say(message: dict[str, Any]) -> None:
            out.write(json.dumps(message) + "\n")
            out.flush()

        try:
            arms, facts = start()
        except Exception:
            say({"error": traceback.format_exc()})
            raise
        say({"arms": list(arms.runs), "memory": arms.memory, **facts})
        verbs = {"run": arms.answer, **(handlers or {})}
        for line in sys.stdin:
            request = json.loads(line)
            before = process_time()
            try:
                found = verbs[request["verb"]](request)
            except Exception:
                found = {"error": traceback.format_exc()}
            say({**found, "cpu_seconds": process_time() - before, "peak_bytes": status_bytes("VmHWM")})
