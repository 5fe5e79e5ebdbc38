"""Prompt lookup as the survey's listing has it: candidates for a text from the text itself."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.classic.request import check_least
from foretoken.drafters.parts.suffix_index import SuffixIndex
from foretoken.errors import ShapeError


class PromptLookupCandidateGenerator:
    """What followed the last tokens of a text where they stood before: the longest n-gram, at its earliest place.

    Source: prompt lookup decoding (Saxena 2023), as in transformers.

    Args:
      num_output_tokens: most tokens of a candidate.
      max_matching_ngram_size: tokens of the longest n-gram; shorter ones are tried down to one.
      max_length: places of a text from which on nothing is copied.
      match: "earliest", or "latest", which is right more often where a text repeats itself with changes.

    Raises: ConfigError for a number below 1, or another word.
    """

    def __init__(
        self,
        num_output_tokens: int = 10,
        max_matching_ngram_size: int = 2,
        max_length: int = 1 << 30,
        *,
        match: str = "earliest",
    ) -> None:
        for name, value in (
            ("num_output_tokens", num_output_tokens),
            ("max_matching_ngram_size", max_matching_ngram_size),
            ("max_length", max_length),
        ):
            check_least(name, value, 1)
        self.num_output_tokens, self.max_length = num_output_tokens, max_length
        self.max_matching_ngram_size, self.match = max_matching_ngram_size, match
        self._new_index()

    def _new_index(self) -> SuffixIndex:
        return SuffixIndex(range(1, self.max_matching_ngram_size + 1), match=self.match)

    def get_candidates(self, input_ids: Tensor) -> tuple[Tensor, None]:
        """A text (1, T) with the candidate behind it, (1, T + k); the text itself where nothing matches.

        The second value stands for logits, of which there are none.
        Raises: ShapeError for more than one text.
        """
        if input_ids.ndim != 2 or len(input_ids) != 1:
            raise ShapeError(f"input_ids have shape {tuple(input_ids.shape)}; want one text, (1, T)")
        tokens = input_ids[0].tolist()
        index = self._new_index()
        index.extend(tokens)
        limit = min(len(tokens), self.max_length)
        start = next((end for end in index.occurrences(tokens) if end < limit), limit)
        chosen = tokens[start : min(start + self.num_output_tokens, limit)]
        return torch.cat([input_ids, input_ids.new_tensor([chosen])], dim=1) if chosen else input_ids, None
