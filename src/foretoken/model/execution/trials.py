"""Forwards that show at which shapes a row keeps its bits: of attention alone, and of the first layers of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from foretoken.model.cache.ragged import KVCache
from foretoken.model.execution.attention import grouped_sdpa
from foretoken.model.nodes import Nodes
from foretoken.model.partial import first_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.model.execution.kernels import Bucket
    from foretoken.model.lm import CausalLM

VIEW_MULTIPLES = (64, 256, 512)
"""Attention runs over a multiple of this many columns; steps of 64 were seen to change bits in float32."""

LENGTHS = (37, 700)
"""Contexts at which the model is tried: within the first block of columns, and past it."""

QUERY_BLOCK = 32
"""torch's attention for CPUs takes queries in blocks of this size. A block of one query is multiplied as a vector, in
another order, which shows in bfloat16 once in thousands of numbers: too seldom to be measured, so it is avoided."""

ATTENTION_LENGTHS = (37, 300, 700)
"""Contexts at which attention alone is tried. At 300 a view of 320 columns was seen to give other bits than 512."""

PREFILL_MULTIPLE = 8
"""Chunks of prompts are padded to a multiple of this many tokens, so that several prompts have one length."""

MIN_SAMPLES = 1024
"""Attention alone is tried on at least this many values per node: few reveal a different order of summation."""

MAX_TRIED_LAYERS = 4
"""Deeper models are tried by their first layers, more where a kind of attention comes later: kernels are the same."""


# -- attention alone --------------------------------------------------------------------------------------------------


def leaves_one_query(num_nodes: int, group_size: int) -> bool:
    """Whether the last block of queries holds one."""
    return num_nodes * group_size % QUERY_BLOCK == 1


def node_range(
    dtype: torch.dtype, num_heads: int, group_size: int, sizes: tuple[int, int], max_nodes: int, multiple: int
) -> tuple[int, int] | None:
    """The widest range of numbers of nodes in which attention gives a node the same bits, whatever the view; None
    for no range.

    Scores are small differences of large products here, and values cancel: another order of any sum shows.
    """
    attend = _Attention(dtype, num_heads, group_size, sizes, max_nodes, multiple)
    counts = [count for count in range(1, max_nodes + 1) if not leaves_one_query(count, group_size)]
    best: tuple[int, int] | None = None
    low, first = 0, list[torch.Tensor]()
    for high in counts:
        output = attend(high)
        if output is None:
            first = []
            continue
        if not first or not _begins_with(output, first):
            low, first = high, output
        if best is None or high - low > best[1] - best[0] or (high == low and best[0] == best[1]):
            best = (low, high)
    return best


def _begins_with(outputs: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> bool:
    """Whether the first nodes, (B, N, H, D) of every context, are these."""
    return all(torch.equal(part[:, : begin.shape[1]], begin) for part, begin in zip(outputs, first, strict=True))


class _Attention:
    """Attention over keys and values of several contexts that show the order of sums."""

    def __init__(
        self,
        dtype: torch.dtype,
        num_heads: int,
        group_size: int,
        sizes: tuple[int, int],
        max_nodes: int,
        multiple: int,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self._multiple, self._max_nodes = multiple, max_nodes
        columns = max(self._views(ATTENTION_LENGTHS[-1] + max_nodes))
        num_rows = max(1, MIN_SAMPLES // (num_heads * sizes[1]))

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        half = -(-sizes[0] // 2)
        large = 64 * draw(num_rows, num_heads, columns, half)
        keys = torch.cat([large, large + 0.5 * draw(*large.shape).round()], -1)[..., : sizes[0]]
        large = 64 * draw(num_rows, num_heads * group_size, max_nodes, half)
        queries = torch.cat([large, -large], -1)[..., : sizes[0]]
        values = draw(num_rows, num_heads, columns, sizes[1])
        values[:, :, 1::2] = -values[:, :, : columns - 1 : 2]
        self._queries, self._keys, self._values = (part.to(dtype) for part in (queries, keys, values))

    def _views(self, length: int) -> list[int]:
        """Numbers of columns that hold this many: the fewest, one multiple more, an odd and an even number of 256."""
        fewest = -(-length // self._multiple) * self._multiple
        blocks = -(-length // 256)
        others = [256 * (blocks + (blocks % 2 == 0)), 256 * (blocks + blocks % 2)]
        return [fewest, fewest + self._multiple, *(view for view in others if view % self._multiple == 0)]

    def __call__(self, num_nodes: int) -> list[torch.Tensor] | None:
        """(B, N, H, D) for every context; None where a view gives other bits."""
        found = []
        for length in ATTENTION_LENGTHS:
            one, *others = (self._over(length, num_nodes, view) for view in self._views(length + self._max_nodes))
            if not all(torch.equal(one, other) for other in others):
                return None
            found.append(one)
        return found

    def _over(self, length: int, num_nodes: int, columns: int) -> torch.Tensor:
        """Attention of the first nodes after ``length`` columns, in a view of ``columns`` columns."""
        sees = torch.arange(columns) <= length + torch.arange(num_nodes)[:, None]
        mask = torch.zeros(sees.shape, dtype=self._queries.dtype)
        mask.masked_fill_(~sees, torch.finfo(mask.dtype).min)
        output, _ = grouped_sdpa(
            nn.Identity(),
            self._queries[:, :, :num_nodes],
            self._keys[:, :, :columns],
            self._values[:, :, :columns],
            mask[None, None],
            scaling=0.02,
        )
        return output


# -- the first layers of a model --------------------------------------------------------------------------------------


class ModelTrial:
    """Forwards over caches of random content, by the first layers of a model. They are not counted."""

    def __init__(self, lm: CausalLM) -> None:
        self._lm = first_layers(lm, MAX_TRIED_LAYERS)
        cache = self._lm.new_cache(1)
        self._lm.forward(Nodes.from_chains([[0]]), cache)
        cache.commit([[0]])
        self._states = cache.export(0, 1)  # for its shapes

    @property
    def model(self) -> PreTrainedModel:
        """The layers that are tried."""
        return self._lm.shadow

    @property
    def group_size(self) -> int:
        """Query heads per key head where attention folds them into queries, else 1."""
        if not self._lm.execution.uses_grouped_attention:
            return 1
        heads = {pair[0].shape[0] for pair in self._states if pair is not None}
        return int(self._lm.config.num_attention_heads) // min(heads)

    def candidates(self, max_nodes: int) -> Iterator[tuple[tuple[int, int], int]]:
        """Ranges of numbers of nodes, and multiples of columns, worth trying on the model.

        What our own attention function keeps can be seen at once and closely. Of others nothing is known; then only
        one number of nodes is worth trying.
        """
        for multiple in VIEW_MULTIPLES:
            if not self._lm.execution.uses_grouped_attention:
                yield (max_nodes, max_nodes), multiple
                continue
            shapes = {tuple(part.shape[::2] for part in pair) for pair in self._states if pair is not None}
            group = self._lm.config.num_attention_heads
            ranges = [
                node_range(self._lm.dtype, heads, group // heads, sizes, max_nodes, multiple)
                for (heads, size), (_, value_size) in shapes
                for sizes in [(size, value_size)]
            ]
            if None in ranges:
                continue
            low, high = max(found[0] for found in ranges if found), min(found[1] for found in ranges if found)
            if low <= high:
                yield (low, high), multiple

    def keeps_bits(self, bucket: Bucket) -> bool:
        """Whether nodes have equal logits at all kinds of shapes that this bucket allows."""
        room = (self._lm.context_length or 2 * LENGTHS[-1]) - bucket.max_nodes
        lengths = [length for length in LENGTHS if length < room] or [max(1, room // 2)]
        drafts = [self._draft(bucket, length) for length in lengths]
        alone = [
            self._logits(bucket, self._cache([length]), [draft])[0]
            for length, draft in zip(lengths, drafts, strict=True)
        ]
        parts = list(_parts(bucket.max_nodes))
        if not all(
            self._keeps_in_parts(bucket, length, draft, logits, sizes)
            for length, draft, logits in zip(lengths, drafts, alone, strict=True)
            for sizes in parts
        ):
            return False
        for sizes in ((bucket.max_nodes,) * len(drafts), (1, bucket.max_nodes), (bucket.max_nodes, 1)):
            shorter = [draft[:size] for draft, size in zip(drafts, sizes, strict=False)]
            together = self._logits(bucket, self._cache(lengths), shorter)
            own = [logits[: len(draft)] for logits, draft in zip(alone, shorter, strict=False)]
            if not all(map(torch.equal, own, together)):
                return False
        return True

    def keeps_prompts_apart(self, rows: tuple[int, int]) -> bool:
        """Whether prompts leave the same bits alone and beside others; ``rows`` as in `Bucket.prefill_rows`."""
        width = min(5 * PREFILL_MULTIPLE, self._lm.context_length or sys.maxsize)
        prompts = [self._tokens(max(1, width - seed % PREFILL_MULTIPLE), seed) for seed in range(rows[1] // width + 1)]
        together = self._prefilled(prompts, rows)
        return all(
            torch.equal(states, own)
            for row, prompt in enumerate(prompts)
            for pair, other in zip(
                together.export(row, len(prompt)),
                self._prefilled([prompt], rows).export(0, len(prompt)),
                strict=True,
            )
            if pair is not None and other is not None
            for states, own in zip(pair, other, strict=True)
        )

    def _prefilled(self, prompts: Sequence[list[int]], rows: tuple[int, int]) -> KVCache:
        """A cache that holds these prompts, padded to one length."""
        cache = self._lm.new_cache(len(prompts))
        width = -(-max(map(len, prompts)) // PREFILL_MULTIPLE) * PREFILL_MULTIPLE
        self._lm.forward(Nodes.from_chains(prompts, width), cache, keep=slice(0, 0), rows_per_call=rows)
        cache.commit([range(len(prompt)) for prompt in prompts])
        return cache

    def _tokens(self, count: int, seed: int) -> list[int]:
        """Random tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self._lm.vocab_size, (count,), generator=generator).tolist()

    def _draft(self, bucket: Bucket, seed: int) -> list[int]:
        """The longest draft of the bucket, of random tokens."""
        return self._tokens(bucket.max_nodes, seed)

    def _cache(self, lengths: Sequence[int]) -> KVCache:
        """One row of each length; what a row holds depends on its length alone."""
        cache = self._lm.new_cache(len(lengths))
        for row, length in enumerate(lengths):
            generator = torch.Generator().manual_seed(length)
            pairs = tuple(
                None if pair is None else tuple(_random_like(states, length, generator) for states in pair)
                for pair in self._states
            )
            cache.load(row, pairs, length)  # type: ignore[arg-type]
        return cache

    def _keeps_in_parts(
        self, bucket: Bucket, length: int, draft: list[int], logits: torch.Tensor, sizes: Sequence[int]
    ) -> bool:
        """Whether a draft has the same logits when it is fed in parts, each committed before the next."""
        cache, fed = self._cache([length]), 0
        for size in sizes:
            more_columns = bucket.view_multiple * (fed % 2)
            (got,) = self._logits(bucket, cache, [draft[fed : fed + size]], more_columns)
            if not torch.equal(got, logits[fed : fed + size]):
                return False
            cache.commit([range(size)])
            fed += size
        return True

    def _logits(
        self, bucket: Bucket, cache: KVCache, drafts: Sequence[list[int]], more_columns: int = 0
    ) -> list[torch.Tensor]:
        """(N, V) for the draft of every row; the view is longer than needed by ``more_columns``."""
        width = bucket.width(len(drafts), max(map(len, drafts)))
        view = bucket.view_length(max(cache.lengths) + width) + more_columns
        logits = self._lm.forward(Nodes.from_chains(drafts, width), cache, view_length=view, bucket=bucket)
        return [logits[row, : len(draft)].clone() for row, draft in enumerate(drafts)]


def _parts(total: int) -> Iterator[list[int]]:
    """Ways of cutting a draft up: 16 -> (1, 2, 3, 4, 5, 1), (7, 9), (13, 3)."""
    sizes = list(range(1, total + 1))
    while sum(sizes) > total:
        sizes.pop()
    yield [*sizes, *([total - sum(sizes)] if sum(sizes) < total else [])]
    for first in {total * 4 // 9, total * 5 // 6} - {0, total}:
        yield [first, total - first]


def _random_like(states: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    """(heads, length, head_dim) in the dtype of ``states``."""
    return torch.randn(states.shape[0], length, states.shape[2], generator=generator).to(states)
