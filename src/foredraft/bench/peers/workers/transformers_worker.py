"""transformers in a race, in this library's environment: its `generate`, assisted generation and prompt lookup."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from foredraft.bench.arms import TransformersArm

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
    usual_entries,
)

SCHEDULES = ("constant", "heuristic")


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
        dtype = getattr(torch, options.dtype)
        return AutoModelForCausalLM.from_pretrained(options.folder / part, dtype=dtype).eval()

    def start() -> tuple[str, list[Entry]]:
        drafts = has_draft(options.folder) and not options.batch_sizes
        eos, lengths = eos_token_ids(options.folder), (options.assisted_lengths, options.lookup_lengths)
        engine = Transformers(load("target"), load("draft") if drafts else None, eos, *lengths)
        entries = usual_entries(engine, options, options.dtype, titles=("prompt lookup", "assisted"))
        return f"transformers {transformers.__version__}", entries

    serve(start)


if __name__ == "__main__":
    main()
