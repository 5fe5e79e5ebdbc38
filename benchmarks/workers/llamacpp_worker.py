"""llama.cpp in a race: the wheel xllamacpp, or with ``--binary`` a llama-server that was built for this processor.

GGUF files are taken as they are. Checkpoints are converted on the first run, which needs gguf and safetensors. Prompts
go in as token ids, token ids and llama.cpp's own timings come out. Its decode time starts with the first token, so that
one does not count; rows of a batch are timed by when their tokens come. One server per arm: all in this process, or
each in a process of its own.
Its lookups ``ngram-mod`` and ``ngram-cache`` take no part: they remember the answers of earlier requests, and a race
asks everything more than once.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import finalize

from .protocol import (
    STORED,
    Chosen,
    Decode,
    DecodedRows,
    Entry,
    EntrySettings,
    common_options,
    instruction_sets,
    say,
    serve,
    stored_file,
    usual_entries,
)

CONTEXT = 4096
FLASH: tuple[dict[str, Any], ...] = ({}, {"flash": "off"})
"""llama.cpp's own choice, and none."""
DRAFTS = tuple({"drafted": length, "p-min": p_min} for length in (2, 3, 4, 6) for p_min in (0.0, 0.5))
LOOKUPS: tuple[dict[str, Any], ...] = (
    {"lookup": "ngram-simple", "match": 12, "drafted": 48},  # its own defaults
    {"lookup": "ngram-simple", "match": 3, "drafted": 5},
    {"lookup": "ngram-simple", "match": 4, "drafted": 8},
    {"lookup": "ngram-simple", "match": 5, "drafted": 16},
    {"lookup": "ngram-map-k", "match": 3, "drafted": 5},
    {"lookup": "ngram-map-k4v", "match": 3, "drafted": 5},
)


class LlamaCpp:
    """Servers on one checkpoint.

    Args:
      types: of the weights, in the words of GGUF, among which the fastest is chosen.
      plain: name of its plain decoding, with whose settings it also drafts.
      start: starts a server.
    """

    def __init__(self, folder: Path, types: list[str], threads: int, plain: str, start: Start) -> None:
        self._folder = folder
        self._types = types
        self._plain = plain
        self._threads = threads
        self._start = start

    def plain(self, chosen: Chosen) -> list[EntrySettings]:
        return [self._candidate({"weights": kind, **flash}) for kind in self._types for flash in FLASH]

    def lookups(self, chosen: Chosen) -> list[EntrySettings]:
        return [self._candidate({**chosen[self._plain], **lookup}) for lookup in LOOKUPS]

    def drafted(self, chosen: Chosen) -> list[EntrySettings]:
        return [self._candidate({**chosen[self._plain], **draft}) for draft in DRAFTS]

    def batches(self, num_rows: int, chosen: Chosen) -> list[EntrySettings]:
        return [
            EntrySettings(settings, partial(self._batch, settings, num_rows))
            for kind in self._types
            for settings in ({"weights": kind, **flash} for flash in FLASH)
        ]

    def _candidate(self, settings: Mapping[str, Any]) -> EntrySettings:
        return EntrySettings(settings, lambda: decode(self._server(settings)))

    def _batch(self, settings: Mapping[str, Any], num_rows: int) -> Decode:
        return decode_together(self._server(settings, num_rows))

    def _server(self, settings: Mapping[str, Any], num_rows: int = 1) -> Any:
        target = self._converted("target", settings["weights"])
        draft = (
            self._converted("draft", settings["weights"])
            if "drafted" in settings and "lookup" not in settings
            else None
        )
        return self._start(target, draft, settings, self._threads, num_rows)

    def _converted(self, part: str, kind: str) -> str:
        if kind == STORED:
            return str(stored_file(self._folder, part))
        from .to_gguf import convert

        path = self._folder / f"{part}-{kind}.gguf"
        if not path.exists():
            say(f"converting {part} to {kind}")
            unfinished = path.with_suffix(f".unfinished-{os.getpid()}")
            convert(self._folder / part, unfinished, kind)
            unfinished.replace(path)
        return str(path)


Start = Callable[[str, "str | None", Mapping[str, Any], int, int], Any]
"""Target, draft model, settings, threads and rows to a server that answers requests."""


def start_in_process(target: str, draft: str | None, settings: Mapping[str, Any], threads: int, num_rows: int) -> Any:
    """Start a server of the wheel."""
    import xllamacpp

    def speculation(name: str) -> Any:
        return getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{name.upper()}")

    params = xllamacpp.CommonParams()
    params.model.path = target
    params.n_ctx, params.n_parallel, params.verbosity, params.cache_ram_mib = CONTEXT * num_rows, num_rows, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if settings.get("flash") == "off":
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if "lookup" in settings:
        kind = settings["lookup"].replace("-", "_")
        sizes = getattr(params.speculative, kind)
        sizes.size_n, sizes.size_m = settings["match"], settings["drafted"]
        params.speculative.types = [speculation(kind)]
    elif draft is not None:
        drafter = params.speculative.draft
        drafter.mparams.path = draft
        drafter.n_max, drafter.n_min, drafter.p_min = settings["drafted"], 0, settings["p-min"]
        drafter.cpuparams.n_threads = drafter.cpuparams_batch.n_threads = threads
        params.speculative.types = [speculation("draft_simple")]
    return xllamacpp.Server(params)


class ServerProcess:
    """A llama-server, which ends with this object.

    Raises: RuntimeError with the end of its log where it does not start.
    """

    def __init__(
        self, binary: str, target: str, draft: str | None, settings: Mapping[str, Any], threads: int, num_rows: int
    ) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port: int = found.getsockname()[1]
        given: list[object] = ["-m", target, "--host", "127.0.0.1", "--port", self._port, "-c", CONTEXT * num_rows]
        given += ["-np", num_rows, "-t", threads, "-tb", threads, "--cache-ram", 0, "--no-ui"]
        given += ["-fa", settings.get("flash", "auto")]
        if "lookup" in settings:
            kind = settings["lookup"]
            sizes = [f"--spec-{kind}-size-n", settings["match"], f"--spec-{kind}-size-m", settings["drafted"]]
            given += ["--spec-type", kind, *sizes]
        elif draft is not None:
            limits = ["--spec-draft-n-max", settings["drafted"], "--spec-draft-n-min", 0]
            given += ["--spec-type", "draft-simple", "-md", draft, *limits, "--spec-draft-p-min", settings["p-min"]]
            given += ["--spec-draft-threads", threads, "--spec-draft-threads-batch", threads]
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed with this object
        self.process = subprocess.Popen([binary, *map(str, given)], stdout=log, stderr=log)
        finalize(self, _end, self.process, log)
        while not self._is_ready():
            if self.process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"llama-server ended with {self.process.returncode}: ...{log.read()[-500:]}")
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def handle_completions(self, request: dict[str, Any], on_part: Callable[[Any], bool] | None = None) -> Any:
        """Return the answer to a request, or hand the parts of a stream to `on_part`, as the wheel's servers do."""
        connection = HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server answered {response.status}: {response.read().decode()[:200]}")
            if on_part is None:
                return json.loads(response.read())
            for line in response:
                if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                    on_part(json.loads(line[6:]))
        finally:
            connection.close()


def _end(process: subprocess.Popen[str], log: Any) -> None:
    process.kill()
    process.wait()
    log.close()


def description(binary: str | None) -> str:
    """Name, version and instruction sets of the build."""
    if binary is None:
        import xllamacpp

        return f"llama.cpp, xllamacpp {xllamacpp.__version__}{instruction_sets(xllamacpp.get_system_info())}"
    told = subprocess.run([binary, "--version"], capture_output=True, text=True)
    version = re.search(r"version: (\S+ \(\w+\))", told.stdout + told.stderr)
    flags = subprocess.run([binary, "-m", os.devnull, "-v"], capture_output=True, text=True)
    number = f" {version[1]}" if version else ""
    return f"llama.cpp, llama-server{number} built here{instruction_sets(flags.stdout + flags.stderr)}"


def decode(server: Any) -> Decode:
    """Of one row."""

    def run(prompts: list[list[int]], max_new_tokens: int) -> DecodedRows:
        started = perf_counter()
        found = server.handle_completions(request(prompts[0], max_new_tokens))
        total = perf_counter() - started
        tokens, seconds = found["__verbose"]["tokens"], found["timings"]["predicted_ms"] / 1e3
        return DecodedRows([tokens], 1 + len(tokens) - found["timings"]["predicted_n"], total - seconds, seconds)

    return run


def decode_together(server: Any) -> Decode:
    """Of all rows of a server at once: a request each, from as many threads."""

    def run(prompts: list[list[int]], max_new_tokens: int) -> DecodedRows:
        arrivals: list[list[tuple[float, list[int]]]] = [[] for _ in prompts]

        def ask(place: int) -> None:
            def note(part: dict[str, Any]) -> bool:
                arrivals[place].append((perf_counter(), part["__verbose"]["tokens"]))
                return False  # go on

            more = {"ignore_eos": True, "stream": True}
            server.handle_completions(request(prompts[place], max_new_tokens) | more, note)

        started = perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            list(threads.map(ask, range(len(prompts))))
        arrivals = [[(time, tokens) for time, tokens in row if tokens] for row in arrivals]  # the last part has none
        entered, ended = max(row[0][0] for row in arrivals), max(row[-1][0] for row in arrivals)
        num_first = sum(len(tokens) for row in arrivals for time, tokens in row if time <= entered)
        rows = [[token for _, tokens in row for token in tokens] for row in arrivals]
        return DecodedRows(rows, num_first, entered - started, ended - entered)

    return run


def request(prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Greedy, nothing kept from earlier requests."""
    return {
        "prompt": prompt,
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
        "top_k": 1,
        "cache_prompt": False,
        "return_tokens": True,
        "verbose": True,  # hands the tokens out
    }


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--binary", help="a llama-server instead of the wheel")
    parser.add_argument("--types", nargs="+", default=["f32"], help="of the weights that count")
    parser.add_argument("--quantised", nargs="*", default=[])
    options = parser.parse_args()
    start_server: Start = start_in_process if options.binary is None else partial(ServerProcess, options.binary)

    def start() -> tuple[str, list[Entry]]:
        entries: list[Entry] = []
        for types in (options.types, *([kind] for kind in options.quantised)):
            counts, suffix = types == options.types, "" if types == options.types else f" {types[0]}"
            plain = f"plain{suffix}"
            engine = LlamaCpp(options.folder, types, options.threads, plain, start_server)
            titles, numerics = ("n-gram", "draft model"), "keys and values f16"
            entries += usual_entries(engine, options, numerics, titles=titles, suffix=suffix, counts=counts)
        return description(options.binary), entries

    serve(start)


if __name__ == "__main__":
    main()
