"""Texts of a forward of training side by side, and where in them drafts begin."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretoken.train.examples import Example


@dataclass(frozen=True)
class Texts:
    """Texts side by side, where drafts of them begin, and what they go on with.

    Entry t of a text knows what the target has computed after token t; a draft from it follows token t + 1, and its
    token at depth k, counted from 0, is token t + 2 + k of the text. The A drafts of a text begin at one entry after
    the other, the first at that of the last token but one of the prompt; fewer are filled up with more of the last.

    Args:
      token_ids: int64 (B, T), filled up with 0.
      lengths: int64 (B,), tokens of the texts.
      entries: int64 (B, A), from which drafts begin.
      places: by depth int64 (M_k,): which of the B x A drafts have a token of the text at that depth; maybe none.
      laws: by depth int64 (M_k,): the draft of `places[0]` after whose pending token the target says the law of that
        depth; 3 drafts and 2 of them deeper give 0 1 2, and 1 2.
      tokens: by depth int64 (M_k,), of the texts.
    """

    token_ids: Tensor
    lengths: Tensor
    entries: Tensor
    places: tuple[Tensor, ...]
    laws: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]

    @classmethod
    def of(cls, examples: Seq[Example], depths: int, device: torch.device) -> Texts | None:
        """None where no text has a token to draft."""
        first = torch.tensor([max(0, example.prompt_length - 2) for example in examples])
        lengths = torch.tensor([len(example.token_ids) for example in examples])
        counts = (lengths - 2 - first).clamp(min=0)
        longest = int(counts.max())
        if longest == 0:
            return None
        token_ids = pad_sequence([torch.tensor(example.token_ids) for example in examples], batch_first=True)
        drafts = torch.arange(longest)
        entries = (first[:, None] + drafts).minimum(lengths[:, None] - 3).clamp(min=0)
        before = counts.cumsum(0) - counts
        places, laws, tokens = [], [], []
        for depth in range(depths):
            rows, columns = (drafts < counts[:, None] - depth).nonzero(as_tuple=True)
            places.append((rows * longest + columns).to(device))
            laws.append((before[rows] + columns + depth).to(device))
            tokens.append(token_ids[rows, first[rows] + columns + 2 + depth].to(device))
        return cls(
            token_ids.to(device), lengths.to(device), entries.to(device), tuple(places), tuple(laws), tuple(tokens)
        )

    @property
    def counts(self) -> list[int]:
        """How many drafts have a token at each depth."""
        return [len(places) for places in self.places]

    def noise(self, like: Tensor, widest: Tensor) -> Tensor:
        """Uniform noise in the shape of states (B, T, H), between plus and minus a number of each text, (B,)."""
        return (2 * torch.rand_like(like) - 1) * widest[:, None, None].to(like.dtype)

    def after(self, states: Tensor, distance: int = 0) -> Tensor:
        """(B, T, H) -> (B x A, H): of every draft the state so many tokens behind its entry; where a text has none
        there, any."""
        rows = torch.arange(len(self.entries), device=states.device)[:, None]
        return states[rows, (self.entries + distance).clamp(max=states.shape[1] - 1)].flatten(0, 1)
