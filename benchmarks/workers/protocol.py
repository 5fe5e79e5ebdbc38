"""What a worker of a race is told and says, and how it chooses its settings. The standard library alone.

One JSON object per line. The worker's first line describes it; every later line answers one request. With the verb
"enter", ``prompts`` (lists of token ids) and ``max_new_tokens`` it makes every entry at the settings that are fastest
on these prompts; with "run", ``arm``, ``prompts`` and ``max_new_tokens`` it decodes. A worker may have more verbs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

PLAIN, LOOKUP, DRAFT = "plain", "no second model", "second model"
"""Kinds of entries, which are compared with those of the same kind."""

STORED = "stored"
"""The weights of a GGUF file as they are."""

_WARM_UP_TOKENS = 8
_NUM_FINALISTS = 3
_REASON = 200  # characters of an exception that are passed on


@dataclass(frozen=True)
class DecodedRows:
    """The token ids of every row, and decoding: what follows the first ``num_first`` tokens of all rows together.

    Of one row that is its first emission. Of a batch, the time starts when every row has its first token.
    """

    rows: list[list[int]]
    num_first: int
    first_seconds: float
    decode_seconds: float

    @property
    def num_decoded(self) -> int:
        return sum(map(len, self.rows)) - self.num_first


Decode = Callable[[list[list[int]], int], DecodedRows]
"""Prompts and a budget to an answer. One prompt ends where the model ends it, rows of a batch at the budget."""


@dataclass(frozen=True)
class EntrySettings:
    """Settings of an entry, and how to make what decodes with them."""

    settings: Mapping[str, Any]
    make: Callable[[], Decode]

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())


class NothingWorksError(Exception):
    """None of an entry's candidates decodes."""


Chosen = Mapping[str, Mapping[str, Any]]
"""The settings of the entries so far, by name."""


@dataclass(frozen=True)
class Entry:
    """One way to decode, which takes part at its best settings.

    Args:
      candidates: of settings, given those that were chosen for the entries before.
      counts: False for what computes another function than the checkpoint, such as quantised weights.
      num_rows: of its batch.
    """

    name: str
    kind: str
    numerics: str
    candidates: Callable[[Chosen], list[EntrySettings]]
    counts: bool = True
    num_rows: int = 1


def usual_entries(
    engine: Any,
    options: argparse.Namespace,
    numerics: str,
    *,
    titles: tuple[str, str],
    suffix: str = "",
    counts: bool = True,
) -> list[Entry]:
    """Plain decoding, of one row or of batches; of one row also by lookup, and with the second model if there is one.

    Args:
      engine: whose methods ``plain``, ``batches``, ``lookups`` and ``drafted`` give the candidates.
      options: of the worker; see `common_options`.
      titles: of lookups, and of decoding with a second model.
      suffix: of all names.
    """
    plain, lookup, draft = (f"{title}{suffix}" for title in ("plain", *titles))
    found = [Entry(plain, PLAIN, numerics, engine.plain, counts)]
    for rows in options.batch_sizes:
        found.append(Entry(f"{plain}, {rows} rows", PLAIN, numerics, partial(engine.batches, rows), counts, rows))
    if not options.batch_sizes:
        found.append(Entry(lookup, LOOKUP, numerics, engine.lookups, counts))
        if has_draft(options.folder):
            found.append(Entry(draft, DRAFT, numerics, engine.drafted, counts))
    return found


def one_way(settings: Mapping[str, Any], make: Callable[[], Decode]) -> Callable[[Chosen], list[EntrySettings]]:
    """Nothing to choose from."""
    return lambda chosen: [EntrySettings(settings, make)]


@dataclass
class _Tried:
    """A candidate and what its runs have shown."""

    candidate: EntrySettings
    decode: Decode
    num_tokens: int = 0
    seconds: float = 0.0

    def run(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        answer = self.decode(prompts, max_new_tokens)
        self.num_tokens += answer.num_decoded
        self.seconds += answer.decode_seconds

    @property
    def speed(self) -> float:
        """Decoded tokens per second."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class Field:
    """The entries of one engine."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._decodes: dict[str, Decode] = {}
        self._chosen: dict[str, Mapping[str, Any]] = {}

    def enter(self, request: dict[str, Any]) -> dict[str, Any]:
        """Every entry at the settings that are fastest on the prompts of the request; why the others cannot enter."""
        prompts, length = request["prompts"], request["max_new_tokens"]
        started = perf_counter()
        first = self._entries[0].candidates({})[0].make()
        load_seconds = perf_counter() - started
        first(prompts[:1], length)
        plain_peak_bytes = peak_bytes()
        del first
        arms, failed = [], {}
        for entry in self._entries:
            try:
                arms.append(self._enter(entry, prompts, length))
            except NothingWorksError as error:
                failed[entry.name] = str(error)
        return {"arms": arms, "failed": failed, "peak_bytes": plain_peak_bytes, "load_seconds": load_seconds}

    def _enter(self, entry: Entry, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
        groups = [
            [prompts[(place + row) % len(prompts)] for row in range(entry.num_rows)] for place in range(len(prompts))
        ]
        groups = groups[:1] if entry.num_rows > 1 else groups
        best, tried = _fastest(entry.candidates(self._chosen), groups, max_new_tokens)
        self._decodes[entry.name] = best.decode
        self._chosen[entry.name] = best.candidate.settings
        return {
            "name": entry.name,
            "kind": entry.kind,
            "numerics": entry.numerics,
            "counts": entry.counts,
            "num_rows": entry.num_rows,
            "settings": best.candidate.label,
            "tuned_tokens_per_second": best.speed,
            "tried": tried,
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One answer of one arm."""
        return asdict(self._decodes[request["arm"]](request["prompts"], request["max_new_tokens"]))


def _fastest(
    candidates: list[EntrySettings], groups: list[list[list[int]]], max_new_tokens: int
) -> tuple[_Tried, dict[str, Any]]:
    """The fastest candidate, and the tokens per second of all, on the first prompts and on all, or why one fails.

    All decode the first group of prompts; the best three then decode all of them, forwards and backwards.
    """
    found: dict[str, Any] = {}
    finalists: list[_Tried] = []
    for candidate in candidates:
        say(f"trying {candidate.label or 'the only way'}")
        try:
            tried = _Tried(candidate, candidate.make())
            tried.decode(groups[0], min(_WARM_UP_TOKENS, max_new_tokens))
            tried.run(groups[0], max_new_tokens)
        except Exception as error:
            say(traceback.format_exc())
            found[candidate.label] = f"does not work: {' '.join(str(error).split())[-_REASON:]}"
            continue
        found[candidate.label] = {"on_first": tried.speed}
        finalists = sorted([*finalists, tried], key=lambda one: -one.speed)[:_NUM_FINALISTS]
    if not finalists:
        raise NothingWorksError("; ".join(f"{label}: {reason}" for label, reason in found.items()))
    if len(finalists) > 1:
        for tried in finalists:
            tried.num_tokens, tried.seconds = 0, 0.0
        for group in groups:
            for tried in [*finalists, *reversed(finalists)]:
                tried.run(group, max_new_tokens)
        for tried in finalists:
            found[tried.candidate.label]["on_all"] = tried.speed
    return max(finalists, key=lambda one: one.speed), found


def common_options(description: str | None) -> argparse.ArgumentParser:
    """The options that every worker has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="checkpoints in target, and in draft where there is a second model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[], help="plain batches instead of one row")
    return parser


def stored_file(folder: Path, part: str) -> Path | None:
    """Return the GGUF file of a part, in the folder where it lies; None if the part is a checkpoint."""
    link = folder / f"{part}-{STORED}.gguf"
    return link.resolve() if link.exists() else None  # by its own name, which tells whether it has further parts


def instruction_sets(info: str) -> str:
    """Return what a build uses of a processor, from llama.cpp's description, with a comma in front.

    A race beside a build that leaves instruction sets of the processor out says so by this.
    """
    used = re.findall(r"\b(AVX2|AVX_VNNI|AVX512\w*|AMX\w*|NEON|SVE|MATMUL_INT8) = 1", info)
    return f", uses {' '.join(used)}" if used else ""


def say(text: str) -> None:
    """Into the worker's log."""
    print(text, file=sys.stderr, flush=True)


def process_ids(root: int | str = "self") -> list[int]:
    """Return a process and those that it started and that still run; none where `/proc` does not list them."""
    try:
        found = [int(Path(f"/proc/{root}/stat").read_text().split()[0])]
        children = [path.read_text().split() for path in Path(f"/proc/{found[0]}/task").glob("*/children")]
    except OSError:
        return []
    return found + [each for ids in children for child in ids for each in process_ids(child)]


def cpu_seconds_of(ids: Iterable[int]) -> float:
    """Return the processor seconds of processes so far."""
    total = 0
    for number in ids:
        try:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def peak_bytes() -> int:
    """Return the largest resident size so far of this process and those that it started, all together."""
    total = 0
    for number in process_ids():
        try:
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
    return total


def has_draft(folder: Path) -> bool:
    """Whether a second model lies beside the target."""
    return (folder / "draft" / "config.json").exists()


def eos_token_ids(folder: Path) -> set[int]:
    """Tokens that end a text, as the target's generation config has them."""
    path = folder / "target" / "generation_config.json"
    eos: Any = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    return set() if eos is None else set(eos) if isinstance(eos, list) else {eos}


def serve(
    start: Callable[[], tuple[str, list[Entry]]],
    verbs: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
) -> None:
    """Start the engine, describe it, and answer requests until the input ends.

    What engines print goes to standard error: their output must not mix with the answers.

    Args:
      start: to the engine's name with its version, and its entries.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def answer(message: dict[str, Any]) -> None:
            out.write(json.dumps(message) + "\n")
            out.flush()

        started = perf_counter()
        try:
            engine, entries = start()
        except Exception as error:
            answer({"error": " ".join(str(error).split()) or type(error).__name__, "trace": traceback.format_exc()})
            return
        field = Field(entries)
        start_seconds = perf_counter() - started
        answer({"engine": engine, "entries": [entry.name for entry in entries], "start_seconds": start_seconds})
        every = {"enter": field.enter, "run": field.run, **(verbs or {})}
        for line in sys.stdin:
            request = json.loads(line)
            before = cpu_seconds_of(process_ids())
            try:
                found = every[request["verb"]](request)
            except Exception as error:
                found = {"error": " ".join(str(error).split()) or type(error).__name__, "trace": traceback.format_exc()}
            answer(
                {
                    **found,
                    "cpu_seconds": max(0.0, cpu_seconds_of(process_ids()) - before),
                    "process_peak_bytes": peak_bytes(),
                }
            )
