"""OpenVINO GenAI in a race: needs openvino-genai and optimum-intel.

The checkpoints are exported on the first run. Prompts go in as token ids; a streamer notes when tokens come. With one
thread OpenVINO GenAI 2026.4 ends in a floating point exception (signal 8), so two or more are asked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import openvino
import openvino_genai

from .protocol import (
    Chosen,
    Decode,
    DecodedRows,
    Entry,
    EntrySettings,
    common_options,
    eos_token_ids,
    say,
    serve,
    stored_file,
    usual_entries,
)

LOOKUPS = ((3, 3), (5, 3), (8, 3), (10, 3), (5, 2), (5, 5))
"""Assistant tokens and longest n-gram of prompt lookup."""
DRAFTS: tuple[dict[str, Any], ...] = (
    *({"num_assistant_tokens": length} for length in (2, 3, 4, 5, 8)),
    {"assistant_confidence_threshold": 0.4},
)
KV_CACHES: tuple[dict[str, str], ...] = ({}, {"KV_CACHE_PRECISION": "u8"})
"""OpenVINO's own choice, and eight bits."""
BACKENDS = ("PA", "SDPA")
_EXTRA = {"int4": ("--group-size", "64")}  # its default of 128 divides too few widths
_NOTES = {"KV_CACHE_PRECISION": "KV", "ATTENTION_BACKEND": "attention"}


class EmissionClock(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Notes when how many tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.started = perf_counter()
        self.times: list[float] = []
        self.counts: list[int] = []

    def write(self, token: int | list[int]) -> Any:
        self.times.append(perf_counter())
        self.counts.append(len(token) if isinstance(token, list) else 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


class Pipeline:
    """A pipeline that lives as long as something decodes with it."""

    def __init__(self, made: Any) -> None:
        self.made = made


class OpenVINO:
    """The pipelines of one checkpoint.

    Args:
      weights: as stored, in the words of optimum: fp32, fp16, int8 or int4.
      precision: of the computation: f32, bf16 or f16.
    """

    def __init__(self, folder: Path, weights: str, precision: str, threads: int) -> None:
        self._folder = folder
        self._weights = weights
        self._device = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        self._eos = eos_token_ids(folder)
        self._pipelines: WeakValueDictionary[tuple[Any, ...], Pipeline] = WeakValueDictionary()

    # -- candidates --------------------------------------------------------------------------------------------

    def plain(self, chosen: Chosen) -> list[EntrySettings]:
        return [
            self._candidate({**cache, "ATTENTION_BACKEND": backend}, {}, {})
            for cache in KV_CACHES
            for backend in BACKENDS
        ]

    def lookups(self, chosen: Chosen) -> list[EntrySettings]:
        """With paged attention, which prompt lookup needs."""
        return [
            self._candidate(cache, {"prompt_lookup": True}, {"num_assistant_tokens": length, "max_ngram_size": longest})
            for cache in KV_CACHES
            for length, longest in LOOKUPS
        ]

    def drafted(self, chosen: Chosen) -> list[EntrySettings]:
        return [self._candidate(cache, {"draft": True}, options) for cache in KV_CACHES for options in DRAFTS]

    def _candidate(self, device: Mapping[str, Any], extra: Mapping[str, Any], options: dict[str, Any]) -> EntrySettings:
        settings = {_NOTES[name]: value for name, value in device.items()} | options
        return EntrySettings(settings, lambda: self._decode(self._pipeline(device, extra), options))

    def batches(self, num_rows: int, chosen: Chosen) -> list[EntrySettings]:
        return [
            EntrySettings(
                {_NOTES[name]: value for name, value in cache.items()} | {"tokens per step": most, "split fuse": fuse},
                partial(self._batch, num_rows, cache, most, fuse),
            )
            for cache in KV_CACHES
            for most, fuse in ((256, True), (4096, False))
        ]

    # -- pipelines ---------------------------------------------------------------------------------------------

    def _pipeline(self, device: Mapping[str, Any], extra: Mapping[str, Any]) -> Pipeline:
        key = (*sorted(device.items()), *sorted(extra))
        found = self._pipelines.get(key)
        if found is None:
            options = dict(extra)
            if options.pop("draft", False):
                draft = exported(self._folder, "draft", self._weights)
                options["draft_model"] = openvino_genai.draft_model(draft, "CPU", **self._device)
            target = exported(self._folder, "target", self._weights)
            made = openvino_genai.LLMPipeline(target, "CPU", **{**self._device, **device, **options})
            found = self._pipelines[key] = Pipeline(made)
        return found

    def _config(self, max_new_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = max_new_tokens, False, False
        return config

    def _decode(self, pipeline: Pipeline, options: Mapping[str, Any]) -> Decode:
        def run(prompts: list[list[int]], max_new_tokens: int) -> DecodedRows:
            config = self._config(max_new_tokens)
            config.stop_token_ids = self._eos
            for name, value in options.items():
                setattr(config, name, value)
            ids = np.array(prompts, dtype=np.int64)
            inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
            clock = EmissionClock()
            tokens = list(pipeline.made.generate(inputs, config, clock).tokens[0])
            first, last = clock.times[0], clock.times[-1]
            return DecodedRows([tokens], clock.counts[0], first - clock.started, last - first)

        return run

    def _batch(self, num_rows: int, cache: Mapping[str, str], most: int, fuse: bool) -> Decode:
        """Continuous batching, stepped from here."""
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = num_rows, most
        scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = fuse, False
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            exported(self._folder, "target", self._weights),
            scheduler_config=scheduler,
            device="CPU",
            properties={**self._device, **cache},
        )

        def run(prompts: list[list[int]], max_new_tokens: int) -> DecodedRows:
            config = self._config(max_new_tokens)
            config.ignore_eos = True
            started = perf_counter()
            handles = [
                pipeline.add_request(place, openvino.Tensor(np.array([ids], dtype=np.int64)), config)
                for place, ids in enumerate(prompts)
            ]
            rows: list[list[int]] = [[] for _ in prompts]

            def step() -> None:
                pipeline.step()
                for handle, row in zip(handles, rows, strict=True):
                    while handle.can_read():
                        row.extend(token for output in handle.read().values() for token in output.generated_ids)

            while not all(rows):
                step()
            num_first, entered = sum(map(len, rows)), perf_counter()
            while pipeline.has_non_finished_requests():
                step()
            return DecodedRows(rows, num_first, entered - started, perf_counter() - entered)

        return run


def exported(folder: Path, part: str, weights: str) -> str:
    """The checkpoint as OpenVINO reads it, written first where it is not there. It reads GGUF files itself."""
    stored = stored_file(folder, part)
    if stored is not None:
        return str(stored)
    out = folder / f"{part}-openvino-{weights}"
    if not (out / "openvino_model.xml").exists():
        say(f"exporting {part} with weights {weights}")
        unfinished = folder / f"{out.name}-unfinished-{os.getpid()}"
        command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(folder / part)]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, *_EXTRA.get(weights, ())]
        command.append(str(unfinished))
        done = subprocess.run([sys.executable, *command], stdout=sys.stderr)
        if done.returncode:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise RuntimeError(f"optimum could not export {part} with weights {weights} (exit code {done.returncode})")
        unfinished.replace(out)
    return str(out)


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--weights", default="fp32")
    parser.add_argument("--precision", default="f32", help="of the computation: f32, bf16 or f16")
    parser.add_argument("--quantised", nargs="*", default=[], help="more weights, such as int8 and int4")
    options = parser.parse_args()

    def start() -> tuple[str, list[Entry]]:
        if options.threads < 2:
            raise RuntimeError("OpenVINO GenAI crashes with one thread; give two or more")
        entries: list[Entry] = []
        exported(options.folder, "target", options.weights)
        for weights in (options.weights, *options.quantised):
            engine = OpenVINO(options.folder, weights, options.precision, options.threads)
            counts, suffix = weights == options.weights, "" if weights == options.weights else f" {weights}"
            numerics, titles = f"weights {weights}, computes in {options.precision}", ("prompt lookup", "draft model")
            entries += usual_entries(engine, options, numerics, titles=titles, suffix=suffix, counts=counts)
        return f"OpenVINO GenAI {openvino_genai.__version__}", entries

    serve(start)


if __name__ == "__main__":
    main()
