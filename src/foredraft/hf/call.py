"""One call of ``generate``: decodes its rows in an engine and returns their tokens in the order of plain generation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from foredraft.config.sampling import SamplingParams
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row as EngineRow
from foredraft.engine.stats import RowStats
from foredraft.hf.processors import RowPlace, is_shared, sampling_fields
from foredraft.hf.rows import Columns, InputRow
from foredraft.model.lm import CausalLM, Nodes
from foredraft.sampling.distribution import Sampler, scores
from foredraft.sampling.noise import mix

logger = logging.getLogger("foredraft")

TAIL_CHUNK = 512
"""Tokens per forward pass when scores over the padding of a row are computed."""


class Call:
    """Decoder of one call of ``generate``.

    Args:
      engine: engine that is used only for this call, with one slot per row of the batch.
      lock: lock that is held while the target runs.
      columns: collector of the result.
      rows: rows of the batch, expanded by ``num_return_sequences``.
      processors: logits processors of transformers.
      seed: seed of the call; None decodes greedily.
    """

    def __init__(
        self,
        engine: Engine,
        lock: threading.RLock,
        columns: Columns,
        rows: Sequence[InputRow],
        *,
        processors: Sequence[Any],
        seed: int | None,
    ) -> None:
        self._engine = engine
        self._lock = lock
        self._columns = columns
        self._inputs, self._processors, self._seed = rows, processors, seed
        self._longest = max(len(row.token_ids) for row in rows)
        self._rows: list[EngineRow] = []
        self._params: list[SamplingParams] = []
        self._add_rows()
        self._index_of = {row: index for index, row in enumerate(self._rows)}

    def _add_rows(self) -> None:
        """Queue the rows. Consecutive equal rows share their prefill, if their processors treat all rows alike."""
        while (first := len(self._rows)) < len(self._inputs):
            params = self._params_of(first)
            row = self._inputs[first]
            count = len(list(takewhile(row.__eq__, self._inputs[first:]))) if is_shared(params) else 1
            params = replace(params, seed=mix(self._seed or 0, first), n=count)
            self._rows += self._engine.add_request(
                row.token_ids, params, history_ids=row.shown_ids, longest=self._longest
            )
            self._params += [params] * params.n

    def _params_of(self, index: int) -> SamplingParams:
        """Return the parameters of one row, with the seed of the call."""
        row, endings = self._inputs[index], self._columns.endings
        place = RowPlace(index, len(self._inputs), row, endings.eos_token_ids, self._columns.device)
        fields = sampling_fields(self._processors, self._seed is not None, place)
        if endings.max_length is not None:
            fields["max_tokens"] = max(1, endings.max_length - len(row.shown_ids))
            fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
        return SamplingParams(**{"max_tokens": None, "detokenize": False, "seed": self._seed or 0, **fields})

    @property
    def stats(self) -> RowStats:
        """Counters of all rows."""
        pooled = RowStats()
        for row in self._rows:
            pooled.add(row.stats)
        return pooled

    def run(self) -> None:
        """Run steps until plain generation would have ended.

        A row that reaches the end of the context ends, with a warning.

        Raises: NumericsError for logits without a distribution, and any exception of a processor, criterion or
          streamer.
        """
        while not self._columns.is_done:
            with self._lock:
                outputs = self._engine.step()
            for output in outputs:
                if output.error is not None:
                    raise output.error
                self._columns.take(self._index_of[output.row], output)
            self._advance()
            while (full := self._full_row()) is not None:
                self._cut(full)
                self._advance()

    def _advance(self) -> None:
        for index in self._columns.advance():
            self._end(self._rows[index])

    def _end(self, row: EngineRow) -> None:
        if not row.is_finished:
            with self._lock:
                self._engine.abort_row(row)

    def _full_row(self) -> int | None:
        """Return a row that has filled its context and needs a next token; None if there is none."""
        waiting = (i for i, row in enumerate(self._rows) if row.is_finished and self._columns.is_waiting_for(i))
        return next(waiting, None)

    def _cut(self, index: int) -> None:
        logger.warning(
            "row %d has filled the %d tokens of the model's context and ends there, although no stopping criterion "
            "ended it. Plain generate would continue. To continue with foredraft: %s.",
            index,
            self._rows[index].max_length,
            self._engine.target.beyond_context
            or "raise max_position_embeddings in the config of the model, which then runs at positions that it was "
            "not trained on",
        )
        self._columns.cut(index)
        if self._columns.is_done:
            for row in self._rows:
                self._end(row)

    # -- rows that ended early -----------------------------------------------------------------------------------

    def fill_tails(self) -> None:
        """Compute scores and logits of ended rows over their padding, as ``generate`` returns them."""
        columns = self._columns
        if not columns.scores and not columns.logits:
            return
        for index, length in enumerate(columns.lengths):
            rest = len(columns.columns) - (length or 0)
            if rest and columns.silent[index] and not columns.is_cut[index]:  # a cut row has no positions left
                self._fill_tail(index, [column[index] for column in columns.columns], rest)

    def _fill_tail(self, index: int, said: list[int], rest: int) -> None:
        text, padding = said[: len(said) - rest], said[len(said) - rest :]
        row, target = self._inputs[index], self._engine.target
        with self._lock:
            logits = tail(target, [*row.token_ids, *text], padding, self._rows[index].offset)
        sampler = Sampler(
            self._params[index],
            vocab_size=target.vocab_size,
            eos_token_ids=self._engine.eos_token_ids,
            prompt_ids=row.token_ids,
            history_ids=row.shown_ids,
            device=target.device,
        )
        sampler.extend(text)
        for kept in (self._columns.logits, self._columns.scores):
            if kept is self._columns.scores and kept:
                logits = scores(logits, [sampler] * rest, [padding[:count] for count in range(rest)])
            for column, value in zip(kept[len(text) :], logits, strict=False):
                column[index] = value


@torch.inference_mode()
def tail(target: CausalLM, text: list[int], padding: list[int], offset: int = 0) -> torch.Tensor:
    """Compute the logits after a text, and after each token of the padding except the last.

    Args:
      target: model to run.
      text: prompt and output of a row.
      padding: P tokens after the text.
      offset: difference between positions and token counts.

    Returns: float32 (P, V).
    """
    cache = target.new_cache(1, capacity=len(text) + len(padding))
    cache.offsets[0] = offset
    chain = [*text, *padding[:-1]]
    parts = []
    for start in range(0, len(chain), TAIL_CHUNK):
        chunk = chain[start : start + TAIL_CHUNK]
        wanted = max(0, len(text) - 1 - start)
        logits = target.forward(Nodes.from_chains([chunk]), cache, keep=slice(min(wanted, len(chunk)), len(chunk)))
        cache.commit([range(len(chunk))])
        parts.append(logits[0].float())
    return torch.cat(parts)
