"""transformers in a race, in this library's environment: its `generate`, assisted generation and prompt lookup."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from foretoken.bench.arms import TransformersArm
from foretoken.bench.trial import Sampling

from .protocol import (
    DRAFT,
    LOOKUP,
    PLAIN,
    Answer,
    Candidate,
    Chosen,
    Decode,
    Entry,
    common_options,
    eos_token_ids,
    has_draft,
    serve,
)

GREEDY = Sampling()
SCHEDULES = ("constant", "heuristic")


class Transformers:
    """The target and its second model."""

    def __init__(self, target: Any, draft: Any, eos: set[int], assisted: list[int], lookups: list[int]) -> None:
        self._target = target
        self._draft = draft
        self._eos = eos
        self._assisted = assisted
        self._lookups = lookups

    def plain(self, chosen: Chosen) -> list[Candidate]:
        """With a cache that grows, and with one that is there from the beginning."""
        return [self._candidate({"cache_implementation": kind}) for kind in ("dynamic", "static")]

    def lookups(self, chosen: Chosen) -> list[Candidate]:
        settings: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": length} for length in self._lookups]
        return [
            self._candidate(one) for one in (*settings, *({**one, "max_matching_ngram_size": 3} for one in settings))
        ]

    def assisted(self, chosen: Chosen) -> list[Candidate]:
        """Every number of assistant tokens under both schedules."""
        return [
            self._candidate({}, {"num_assistant_tokens": length, "num_assistant_tokens_schedule": schedule})
            for schedule in SCHEDULES
            for length in self._assisted
        ]

    def _candidate(self, options: Mapping[str, Any], assistant_options: Mapping[str, Any] | None = None) -> Candidate:
        return Candidate({**options, **(assistant_options or {})}, partial(self._decode, options, assistant_options))

    def _decode(self, options: Mapping[str, Any], assistant_options: Mapping[str, Any] | None) -> Decode:
        draft = None if assistant_options is None else self._draft
        arm = TransformersArm("", self._target, self._eos, options, draft, assistant_options)

        def run(prompts: list[list[int]], max_new_tokens: int) -> Answer:
            done = arm.run(prompts[0], max_new_tokens, GREEDY)
            return Answer([list(done.token_ids)], done.num_first, done.first_seconds, done.decode_seconds)

        return run

    def batches(self, chosen: Chosen) -> list[Candidate]:
        """Rows padded on the left to the longest prompt."""
        return [Candidate({"cache_implementation": kind}, partial(self._batch, kind)) for kind in ("dynamic", "static")]

    def _batch(self, cache_implementation: str) -> Decode:
        @torch.inference_mode()
        def run(prompts: list[list[int]], max_new_tokens: int) -> Answer:
            width = max(map(len, prompts))
            padding = [width - len(ids) for ids in prompts]
            config = GenerationConfig(
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=[-1],  # None would be replaced by the model's own
                pad_token_id=0,
                cache_implementation=cache_implementation,
            )
            clock = Clock()
            output = self._target.generate(
                input_ids=torch.tensor([[0] * wide + ids for wide, ids in zip(padding, prompts, strict=True)]),
                attention_mask=torch.tensor([[0] * wide + [1] * (width - wide) for wide in padding]),
                generation_config=config,
                streamer=clock,
            )
            rows = output[:, width:].tolist()
            first, last = clock.times[1], clock.times[-1]  # the prompts are handed out before them
            return Answer(rows, len(rows), first - clock.started, last - first)

        return run


class Clock:
    """A streamer in the sense of transformers, which notes when something came."""

    def __init__(self) -> None:
        self.started = perf_counter()
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--assisted-lengths", type=int, nargs="+", required=True)
    parser.add_argument("--lookup-lengths", type=int, nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def load(part: str) -> Any:
        dtype = getattr(torch, options.dtype)
        return AutoModelForCausalLM.from_pretrained(options.folder / part, dtype=dtype).eval()

    def start() -> tuple[str, list[Entry]]:
        drafts = has_draft(options.folder) and not options.batch_sizes
        eos, lengths = eos_token_ids(options.folder), (options.assisted_lengths, options.lookup_lengths)
        engine = Transformers(load("target"), load("draft") if drafts else None, eos, *lengths)
        entries = [Entry("plain", PLAIN, options.dtype, engine.plain)]
        for rows in options.batch_sizes:
            entries.append(Entry(f"plain, {rows} rows", PLAIN, options.dtype, engine.batches, num_rows=rows))
        if not options.batch_sizes:
            entries.append(Entry("prompt lookup", LOOKUP, options.dtype, engine.lookups))
        if drafts:
            entries.append(Entry("assisted", DRAFT, options.dtype, engine.assisted))
        return f"transformers {transformers.__version__}", entries

    serve(start)


if __name__ == "__main__":
    main()
