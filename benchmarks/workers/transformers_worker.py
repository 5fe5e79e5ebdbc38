"""transformers in a race, in this library's environment: its `generate`, assisted generation and prompt lookup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from foredraft.bench.trial import Arm, Run, Sampling, rows_of
from foredraft.progress import no_warnings
from foredraft.verify.generation import generation_config

from .foredraft_worker import decode_with
from .protocol import (
    Chosen,
    Decode,
    Entry,
    EntrySettings,
    common_options,
    eos_token_ids,
    has_draft,
    serve,
    stored_file,
    usual_entries,
)

SCHEDULES = ("constant", "heuristic")


class Clock:
    """A streamer in the sense of transformers, which is handed the prompt first and then every emission."""

    def __init__(self) -> None:
        self.started = perf_counter()
        self.emissions: list[tuple[float, int]] = []
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt:
            self.emissions.append((perf_counter(), value.numel()))
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


class TransformersArm(Arm):
    """`generate` of transformers on the same weights.

    Args:
      options: for the generation config, such as ``prompt_lookup_num_tokens`` or ``cache_implementation``.
      assistant: makes it assisted generation.
      assistant_options: set on the assistant's generation config before every run, since generation writes there;
        the old values are put back.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        eos_token_ids: Iterable[int] = (),
        options: Mapping[str, Any] | None = None,
        assistant: Any = None,
        assistant_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._eos = list(eos_token_ids)
        self.options = dict(options or {})
        self._assistant = assistant
        self.assistant_options = dict(assistant_options or {})

    def run(self, prompt_ids: Sequence[Any], max_new_tokens: int, sampling: Sampling) -> Run:
        """Of a group, rows of one batch, padded on the left to the longest prompt."""
        prompts = rows_of(prompt_ids)
        width = max(map(len, prompts))
        padding = [width - len(ids) for ids in prompts]
        config = generation_config(sampling.params(max_new_tokens), self._eos, self.options)
        torch.manual_seed(sampling.seed)
        with torch.inference_mode(), self._prepared() as extra:
            clock = Clock()
            ids = [[0] * wide + list(ids) for wide, ids in zip(padding, prompts, strict=True)]
            is_text = [[0] * wide + [1] * (width - wide) for wide in padding]
            output = self._model.generate(
                input_ids=torch.tensor(ids, device=self._model.device),
                attention_mask=torch.tensor(is_text, device=self._model.device),
                generation_config=config,
                streamer=clock,
                **extra,
            )
        rows = tuple(tuple(row) for row in output[:, width:].tolist())
        return Run.of(
            tuple(chain.from_iterable(rows)), clock.started, clock.emissions, rows=rows if len(rows) > 1 else ()
        )

    @contextmanager
    def _prepared(self) -> Iterator[dict[str, Any]]:
        """The assistant set up, and transformers' advice about settings kept quiet; both undone afterwards."""
        if self._assistant is None:
            extra, saved = {}, None
        else:
            extra, saved = {"assistant_model": self._assistant}, self._assistant.generation_config
            self._assistant.generation_config = GenerationConfig(**{**saved.to_dict(), **self.assistant_options})
        try:
            with no_warnings():
                yield extra
        finally:
            if saved is not None:
                self._assistant.generation_config = saved


class Transformers:
    """The target and its second model."""

    def __init__(self, target: Any, draft: Any, eos: set[int], assisted: list[int], lookups: list[int]) -> None:
        self._target = target
        self._draft = draft
        self._eos = eos
        self._assisted = assisted
        self._lookups = lookups

    def plain(self, chosen: Chosen) -> list[EntrySettings]:
        """With a cache that grows, and with one that is there from the beginning."""
        return [self._candidate({"cache_implementation": kind}) for kind in ("dynamic", "static")]

    def batches(self, num_rows: int, chosen: Chosen) -> list[EntrySettings]:
        """The same."""
        return self.plain(chosen)

    def lookups(self, chosen: Chosen) -> list[EntrySettings]:
        settings: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": length} for length in self._lookups]
        return [
            self._candidate(one) for one in (*settings, *({**one, "max_matching_ngram_size": 3} for one in settings))
        ]

    def drafted(self, chosen: Chosen) -> list[EntrySettings]:
        """Every number of assistant tokens under both schedules."""
        return [
            self._candidate({}, {"num_assistant_tokens": length, "num_assistant_tokens_schedule": schedule})
            for schedule in SCHEDULES
            for length in self._assisted
        ]

    def _candidate(
        self, options: Mapping[str, Any], assistant_options: Mapping[str, Any] | None = None
    ) -> EntrySettings:
        return EntrySettings(
            {**options, **(assistant_options or {})}, partial(self._decode, options, assistant_options)
        )

    def _decode(self, options: Mapping[str, Any], assistant_options: Mapping[str, Any] | None) -> Decode:
        draft = None if assistant_options is None else self._draft
        return decode_with(TransformersArm("", self._target, self._eos, options, draft, assistant_options))


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
        dtype, stored = getattr(torch, options.dtype), stored_file(options.folder, part)
        where, more = (options.folder / part, {}) if stored is None else (stored.parent, {"gguf_file": stored.name})
        return AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **more).eval()

    def start() -> tuple[str, list[Entry]]:
        drafts = has_draft(options.folder) and not options.batch_sizes
        eos, lengths = eos_token_ids(options.folder), (options.assisted_lengths, options.lookup_lengths)
        engine = Transformers(load("target"), load("draft") if drafts else None, eos, *lengths)
        is_stored = stored_file(options.folder, "target") is not None
        numerics = f"{options.dtype}, dequantised" if is_stored else options.dtype
        entries = usual_entries(engine, options, numerics, titles=("prompt lookup", "assisted"))
        return f"transformers {transformers.__version__}", entries

    serve(start)


if __name__ == "__main__":
    main()
