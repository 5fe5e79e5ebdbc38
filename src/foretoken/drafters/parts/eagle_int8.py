"""Rows of a head of EAGLE that runs in the library's own kernels: what is fed, and where in its cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.drafters.parts.rows import CachedRow, frontier_nodes
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    import foretoken.heads.int8 as int8
    import foretoken.model.nodes as nodes_of
    import foretoken.native.library as kernels_of
    from foretoken.drafters.parts.draft import GrowingDraft
    from foretoken.heads.eagle import EagleHead
    from foretoken.heads.vocabulary import DraftVocabulary
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM
else:
    torch = Lazy("torch")
    int8 = Lazy("foretoken.heads.int8")
    kernels_of = Lazy("foretoken.native.library")
    nodes_of = Lazy("foretoken.model.nodes")

MOST_GROWN = 2
"""Rows that are grown one after the other: more are fed together, level by level."""


def int8_head(head: EagleHead, target: CausalLM, output: torch.nn.Module) -> int8.Int8Head | None:
    """The head as the kernels run it; None where it runs as a module.

    Heads that were made in memory run as modules, since their weights may still change; so do those of eager targets.
    """
    if target.execution.kind == "eager" or not int8.is_frozen(head) or target.device.type != "cpu":
        return None
    own = head.embed_tokens
    table = (target.shadow.get_input_embeddings() if own is None else own).weight.detach()
    kernels = kernels_of.library()
    if kernels is None or int8.why_not(head, table, kernels) is not None or not int8.is_plain(output):
        return None
    return int8.Int8Head(head, table, int8.dense(output), kernels)


class Int8Rows:
    """Feeds rows of a cache to a head in the kernels.

    Args:
      head: see `Int8Head`.
      cache: of the head, of one layer.
      vocabulary: of its output layer; None for all tokens.
      is_alone: whether no module runs beside it, however many nodes there are.
    """

    def __init__(
        self, head: int8.Int8Head, cache: KVCache, vocabulary: DraftVocabulary | None, *, is_alone: bool = False
    ) -> None:
        self.head = head
        self._cache = cache
        self._is_alone = is_alone
        is_full = vocabulary is None or vocabulary.is_full
        self._names = None if vocabulary is None or is_full else vocabulary.target_ids.contiguous()

    def takes(self, num_nodes: int) -> bool:
        """Whether a call of so many nodes is for the kernels."""
        return num_nodes > 0 and (self._is_alone or num_nodes <= int8.MOST_NODES)

    def take_in(self, slots: range, chains: Seq[Seq[int]], streams: Seq[torch.Tensor]) -> list[torch.Tensor | None]:
        """Make and commit entries of the next tokens of neighbouring rows.

        Args:
          chains: by row, tokens; none of rows that lie between.
          streams: (n, streams * H of the target), of the rows that have tokens.

        Returns: by row the output (H,) of its last entry; None of rows without tokens.
        """
        width = max(1, int8.MOST_NODES // len(slots)) if self._is_alone else max(map(len, chains))
        given = iter(streams)
        of_rows = [next(given) if chain else None for chain in chains]
        last: dict[int, torch.Tensor] = {}
        for start in range(0, max(map(len, chains)), width):
            parts = [chain[start : start + width] for chain in chains]
            wide = [stream[start : start + width] for stream in of_rows if stream is not None]
            outputs = self._entries(slots, parts, wide[0] if len(wide) == 1 else torch.cat(wide))
            end = 0
            for row, part in enumerate(parts):
                end += len(part)
                if part:
                    last[row] = outputs[end - 1]
        return [last.get(row) for row in range(len(chains))]

    def _entries(self, slots: range, chains: Seq[Seq[int]], streams: torch.Tensor) -> torch.Tensor:
        """Make entries in one call; their outputs (n, H)."""
        keys, values = self._buffers(slots.start, len(slots), max(map(len, chains)))
        lengths = self._cache.row_lengths(slots.start, len(slots))
        outputs = self.head.feed(nodes_of.Nodes.from_chains(chains), lengths, keys, values, streams, is_true=True)
        self._cache.commit([range(len(chain)) for chain in chains], slots.start)
        return outputs

    def feed(
        self, drafts: Seq[GrowingDraft], places: Seq[CachedRow], features: torch.Tensor, width: int
    ) -> torch.Tensor:
        """Run the frontiers of drafts behind what was fed before, draft i in row i: (M, H) -> (M, H) in float32."""
        keys, values = self._buffers(0, len(drafts), width)
        nodes = frontier_nodes(self._cache, drafts, places, are_chains=False)
        lengths = self._cache.row_lengths(0, len(drafts))
        return self.head.feed(nodes, lengths, keys, values, features, is_true=False)

    def grow(
        self,
        place: CachedRow,
        draft: GrowingDraft,
        last: torch.Tensor,
        owed: tuple[Seq[int], torch.Tensor] | None,
        least_mass: float,
        sharpness: float,
    ) -> tuple[list[int], list[int], list[float]]:
        """The tokens, parents and logarithmic scores of a draft that begins after the last entry of a row.

        Args:
          last: (H,) in float32, the output of the last entry; written where that is owed.
          owed: tokens and streams of entries that are made first.
          least_mass, sharpness: see `Growth`.
        """
        count = 0 if owed is None else len(owed[0])
        keys, values = self._buffers(place.slot, 1, count + (draft.cap - 1) * draft.beam_width)
        grown = self.head.grow(
            place.trunk + count,
            draft.row.pending,
            last,
            keys,
            values,
            self._names,
            owed=owed,
            depth=draft.cap,
            branches=draft.num_branches,
            beam=draft.beam_width,
            most=draft.max_nodes,
            power=sharpness,
            least_mass=least_mass,
            least=draft.least,
        )
        self._cache.commit([range(count)], place.slot)
        place.trunk += count
        return grown

    def _buffers(self, first_row: int, num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of neighbouring rows, with room for so many more columns."""
        self._cache.open(first_row, num_rows, max(width, 1))
        (layer,) = self._cache.layers
        if not layer.is_initialized:
            blank = torch.zeros(1, self.head.num_kv_heads, 1, self.head.head_dim, dtype=torch.bfloat16)
            layer.lazy_initialization(blank, blank)
        rows = slice(first_row, first_row + num_rows)
        return layer.keys[rows], layer.values[rows]
