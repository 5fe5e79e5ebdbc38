"""Conversion of transformers' logits processors to the sampling parameters of a row.

Processors that the engine's own sampler computes exactly as transformers does, and much faster, become fields of
`SamplingParams`. These processors are the first ones of the list that follow the sampler's order, and temperature and
truncation at the end of the list. Processors between them run unchanged, with the arguments that transformers would
pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.generation import logits_process as hf

from foredraft.config.sampling import MIN_TEMPERATURE, SamplingParams
from foredraft.hf.rows import InputRow
from foredraft.sampling.processors import checked_scores

Fields = dict[str, Any]
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RowPlace:
    """Position of a row in its call.

    Args:
      index: index of the row in the batch.
      num_rows: number of rows in the batch that transformers would pass to a processor.
      row: tokens of the row.
      eos_token_ids: tokens that end the row.
      device: device of the arguments that processors expect.
    """

    index: int
    num_rows: int
    row: InputRow
    eos_token_ids: frozenset[int]
    device: torch.device


def sampling_fields(processors: Sequence[Processor], do_sample: bool, place: RowPlace) -> Fields:
    """Return the fields of `SamplingParams` that are equivalent to the list.

    Exactness: the values are those of transformers; see `foredraft.sampling.distribution`.
    """
    begin, fields = _beginning(processors, place)
    end = len(processors)
    if do_sample:
        end, warping = _end(processors, begin)
        fields |= {"temperature": 1.0, **warping}
    else:
        fields["temperature"] = 0.0
    if begin < end:
        fields["logits_processors"] = (PaddedView(processors[begin:end], place),)
    return fields


def is_shared(params: SamplingParams) -> bool:
    """Whether one row's parameters are valid for all rows with the same prompt."""
    return not params.logits_processors


# -- the sampler's own processors ------------------------------------------------------------------------------------


def _beginning(processors: Sequence[Processor], place: RowPlace) -> tuple[int, Fields]:
    """Return how many processors at the front of the list the sampler replaces, and the fields that replace them."""
    fields: Fields = {}
    last = -1
    for index, processor in enumerate(processors):
        order, read = _FIRST.get(type(processor), (0, None))
        values = None if read is None or order < last or (order == last < _LENGTHS) else read(processor, place)
        if values is None:
            return index, fields
        values["min_tokens"] = max(values.get("min_tokens", 0), fields.get("min_tokens", 0))
        fields |= values
        last = order
    return len(processors), fields


def _biases(processor: Any, place: RowPlace) -> Fields | None:
    bias = processor.sequence_bias
    is_plain = all(len(ids) == 1 and (math.isfinite(value) or value == -math.inf) for ids, value in bias.items())
    return {"logit_bias": {int(ids[0]): float(value) for ids, value in bias.items()}} if is_plain else None


def _repetition(processor: Any, place: RowPlace) -> Fields | None:
    # The sampler counts only tokens that the model sees, so the penalty is equivalent only if the rest is ignored.
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, torch.Tensor):
        ignored = int(ignored[place.index])
    hidden = len(place.row.shown_ids) - len(place.row.token_ids)
    same = not place.row.has_holes and (ignored or 0) == hidden
    return {"repetition_penalty": float(processor.penalty)} if same else None


def _ngrams(processor: Any, place: RowPlace) -> Fields | None:
    return {"no_repeat_ngram_size": int(processor.ngram_size)}


def _bad_words(processor: Any, place: RowPlace) -> Fields | None:
    words = [tuple(int(token) for token in ids) for ids in processor.sequence_bias if len(ids)]  # empty: bans nothing
    if not words:
        return {}
    if any(len(ids) == 1 and ids[0] in place.eos_token_ids for ids in words):
        return None
    return {"bad_words_ids": words}


def _min_length(processor: Any, place: RowPlace) -> Fields | None:
    return _least(processor, processor.min_length - len(place.row.shown_ids), place)


def _min_new_tokens(processor: Any, place: RowPlace) -> Fields | None:
    skipped = processor.prompt_length_to_skip - len(place.row.shown_ids)
    return _least(processor, processor.min_new_tokens + skipped, place)


def _least(processor: Any, count: int, place: RowPlace) -> Fields | None:
    banned = frozenset(processor.eos_token_id.tolist())
    return {"min_tokens": max(0, count)} if banned == place.eos_token_ids else None


_LENGTHS = 4
_FIRST: dict[type, tuple[int, Callable[[Any, RowPlace], Fields | None]]] = {
    hf.SequenceBiasLogitsProcessor: (0, _biases),
    hf.RepetitionPenaltyLogitsProcessor: (1, _repetition),
    hf.NoRepeatNGramLogitsProcessor: (2, _ngrams),
    hf.NoBadWordsLogitsProcessor: (3, _bad_words),
    hf.MinLengthLogitsProcessor: (_LENGTHS, _min_length),
    hf.MinNewTokensLengthLogitsProcessor: (_LENGTHS, _min_new_tokens),
}
"""Replaceable processors by exact type, since a subclass may do anything. The numbers are the sampler's order."""


def _end(processors: Sequence[Processor], begin: int) -> tuple[int, Fields]:
    """Return the index at which the final temperature and truncation processors begin, and their fields."""
    fields: Fields = {}
    end, last = len(processors), len(_LAST)
    while end > begin:
        order, read = _LAST.get(type(processors[end - 1]), (last, None))
        values = None if read is None or order >= last else read(processors[end - 1])
        if values is None:
            break
        fields |= values
        end, last = end - 1, order
    return end, fields


def _temperature(warper: Any) -> Fields | None:
    return {"temperature": float(warper.temperature)} if warper.temperature >= MIN_TEMPERATURE else None


def _top_k(warper: Any) -> Fields | None:
    return {"top_k": int(warper.top_k)} if warper.filter_value == -math.inf else None


def _top_p(warper: Any) -> Fields | None:
    return {"top_p": warper.top_p} if _truncates_plainly(warper) and 0.0 < warper.top_p <= 1.0 else None


def _min_p(warper: Any) -> Fields | None:
    return {"min_p": float(warper.min_p)} if _truncates_plainly(warper) else None


def _typical_p(warper: Any) -> Fields | None:
    return {"typical_p": warper.mass} if _truncates_plainly(warper) else None


def _truncates_plainly(warper: Any) -> bool:
    return bool(warper.filter_value == -math.inf and warper.min_tokens_to_keep == 1)


_LAST: dict[type, tuple[int, Callable[[Any], Fields | None]]] = {
    hf.TemperatureLogitsWarper: (0, _temperature),
    hf.TopKLogitsWarper: (1, _top_k),
    hf.TopPLogitsWarper: (2, _top_p),
    hf.MinPLogitsWarper: (3, _min_p),
    hf.TypicalLogitsWarper: (4, _typical_p),
}

# -- all others --------------------------------------------------------------------------------------------------

_ROW_BY_ROW = frozenset(
    {
        hf.SequenceBiasLogitsProcessor,
        hf.NoBadWordsLogitsProcessor,
        hf.NoRepeatNGramLogitsProcessor,
        hf.MinLengthLogitsProcessor,
        hf.MinNewTokensLengthLogitsProcessor,
        hf.ForcedBOSTokenLogitsProcessor,
        hf.ForcedEOSTokenLogitsProcessor,
        hf.InfNanRemoveLogitsProcessor,
        hf.ExponentialDecayLengthPenalty,
        hf.SuppressTokensLogitsProcessor,
        hf.SuppressTokensAtBeginLogitsProcessor,
        hf.TemperatureLogitsWarper,
        hf.TopHLogitsWarper,
        hf.TopKLogitsWarper,
        hf.TopPLogitsWarper,
        hf.MinPLogitsWarper,
        hf.TypicalLogitsWarper,
        hf.EpsilonLogitsWarper,
        hf.EtaLogitsWarper,
        hf.WatermarkLogitsProcessor,
        hf.LogitNormalization,
    }
)
"""Processors that treat all rows alike, whatever their index."""


class PaddedView:
    """Processors of one row, called with the arguments of transformers: padded text, ordinary tensors, the row's index.

    A processor that may treat rows differently is called with as many rows as the batch has. All rows of such a call
    are copies of this row, and the result at the row's own index is used.

    Args:
      processors: processors in the order in which they are applied.
      place: position of the row.
    """

    def __init__(self, processors: Sequence[Processor], place: RowPlace) -> None:
        self._processors = [_of_one_row(processor, place.index) for processor in processors]
        self._place = place

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Apply the processors to b prefixes of the row: (b, T) and (b, V) -> float32 (b, V)."""
        home = scores.device
        with torch.inference_mode(False), torch.no_grad():
            input_ids, scores = input_ids.to(self._place.device, copy=True), scores.to(self._place.device, copy=True)
            for processor, tells_rows_apart in self._processors:
                run = partial(self._at_place, processor) if tells_rows_apart else processor
                scores = checked_scores(processor, run(input_ids, scores), scores.shape)
            return scores.to(home)

    def _at_place(self, processor: Processor, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        index, num_rows = self._place.index, self._place.num_rows
        answers = []
        for ids, row in zip(input_ids, scores, strict=True):
            copies = row.repeat(num_rows, 1)
            answer = processor(ids.repeat(num_rows, 1), copies)
            answers.append(checked_scores(processor, answer, copies.shape)[index])
        return torch.stack(answers)


def _of_one_row(processor: Any, index: int) -> tuple[Processor, bool]:
    """Return the processor, and whether it may treat rows differently."""
    if type(processor) is hf.PrefixConstrainedLogitsProcessor:
        return _prefix_constrained(processor, index), False
    return processor, type(processor) not in _ROW_BY_ROW


def _prefix_constrained(processor: Any, index: int) -> Processor:
    """Return a processor that calls the user's function with this row's index only."""
    allowed = processor._prefix_allowed_tokens_fn
    constrained: Processor = hf.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(index, sent), 1)
    return constrained
