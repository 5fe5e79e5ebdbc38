"""llama.cpp (wheel xllamacpp) in a race: needs xllamacpp, gguf and safetensors.

The checkpoints are converted on the first run. Prompts go in as token ids, token ids and llama.cpp's own timings come
out. Its decode time starts with the first token, so that one does not count; rows of a batch are timed by when their
tokens come. One server per arm, all in this process.
Its lookups ``ngram-mod`` and ``ngram-cache`` take no part: they remember the answers of earlier requests, and a race
asks everything more than once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import xllamacpp

from .protocol import Chosen, Decode, DecodedRows, Entry, EntrySettings, common_options, say, serve, usual_entries
from .to_gguf import MIXED, TYPES, convert

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
    """

    def __init__(self, folder: Path, types: list[str], threads: int, plain: str) -> None:
        self._folder = folder
        self._types = types
        self._plain = plain
        self._threads = threads

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
        params = xllamacpp.CommonParams()
        params.model.path = self._converted("target", settings["weights"])
        params.n_ctx, params.n_parallel, params.verbosity, params.cache_ram_mib = CONTEXT * num_rows, num_rows, 0, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
        if settings.get("flash") == "off":
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if "lookup" in settings:
            kind = settings["lookup"].replace("-", "_")
            sizes = getattr(params.speculative, kind)
            sizes.size_n, sizes.size_m = settings["match"], settings["drafted"]
            params.speculative.types = [_speculation(kind)]
        elif "drafted" in settings:
            draft = params.speculative.draft
            draft.mparams.path = self._converted("draft", settings["weights"])
            draft.n_max, draft.n_min, draft.p_min = settings["drafted"], 0, settings["p-min"]
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = self._threads
            params.speculative.types = [_speculation("draft_simple")]
        return xllamacpp.Server(params)

    def _converted(self, part: str, kind: str) -> str:
        path = self._folder / f"{part}-{kind}.gguf"
        if not path.exists():
            say(f"converting {part} to {kind}")
            unfinished = path.with_suffix(f".unfinished-{os.getpid()}")
            convert(self._folder / part, unfinished, kind)
            unfinished.replace(path)
        return str(path)


def _speculation(name: str) -> Any:
    return getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{name.upper()}")


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
    parser.add_argument("--types", nargs="+", choices=tuple(TYPES), default=["f32"], help="of the weights that count")
    parser.add_argument("--quantised", nargs="*", choices=(*TYPES, MIXED), default=[])
    options = parser.parse_args()

    def start() -> tuple[str, list[Entry]]:
        entries: list[Entry] = []
        for types in (options.types, *([kind] for kind in options.quantised)):
            counts, suffix = types == options.types, "" if types == options.types else f" {types[0]}"
            engine, titles = (
                LlamaCpp(options.folder, types, options.threads, f"plain{suffix}"),
                ("n-gram", "draft model"),
            )
            numerics = "keys and values f16"
            entries += usual_entries(engine, options, numerics, titles=titles, suffix=suffix, counts=counts)
        return f"llama.cpp, xllamacpp {xllamacpp.__version__}", entries

    serve(start)


if __name__ == "__main__":
    main()
