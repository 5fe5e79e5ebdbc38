"""What a head of EAGLE knows of every row: an entry per committed token, in a cache of its own, and what follows."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.drafters.parts.eagle_native import NativeRows, native_head
from foretoken.drafters.parts.rows import CachedRows, Frontier, Place, frontier_nodes, spans
from foretoken.engine.drafter import Features, OwnCache, PromptChunk, Requirements, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch

    import foretoken.heads.layers as layers
    import foretoken.model.cache.ragged as ragged
    import foretoken.model.masks as masks
    import foretoken.model.nodes as nodes_of
    from foretoken.drafters.parts.draft import GrowingDraft
    from foretoken.heads.eagle import EagleHead
    from foretoken.heads.vocabulary import DraftVocabulary
    from foretoken.model.lm import CausalLM
else:
    torch = Lazy("torch")
    layers = Lazy("foretoken.heads.layers")
    ragged = Lazy("foretoken.model.cache.ragged")
    masks = Lazy("foretoken.model.masks")
    nodes_of = Lazy("foretoken.model.nodes")

MOST_OWED = 32
"""Committed tokens of a row whose entries are made later, with the next draft."""


@dataclass(frozen=True)
class EagleMemory:
    """The beginning of a text in a head's cache, in copies of its own.

    Args:
      head: that wrote it.
      length: entries; entry t is made of tokens t and t + 1.
    """

    head: EagleHead
    states: ragged.RowStates
    length: int


class EagleRows:
    """Rows of a head's cache. Between steps every row has as many entries as the target has committed tokens.

    Entry t is made of what the target computed after token t, and of token t + 1: what a head itself has predicted
    never stays. Drafted nodes are fed behind the entries while a draft grows, and forgotten. Where the head runs in the
    library's own kernels, entries of steps are made as late as they are needed: with the next draft.

    Args:
      head: on the device of the target, in its dtype.
      target: whose embedding is read, and whose output layer where the head has none.
      output: of some tokens alone, instead of the target's.
      vocabulary: of the output layer; None for all of the target's tokens.
    """

    def __init__(
        self,
        head: EagleHead,
        target: CausalLM,
        output: torch.nn.Module | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.head = head
        self._own_output = head.lm_head if head.lm_head is not None else output
        self._target = target
        self.cache = ragged.KVCache(head.shape.num_layers, device=target.device)
        self.rows = CachedRows(self.cache)
        self._masks = masks.Masks((masks.FULL,), None, head.dtype, target.device, is_additive=True)
        self._last: dict[int, torch.Tensor] = {}  # (H,) by row: the output of its last entry
        self._owed: dict[int, tuple[Sequence, int, list[torch.Tensor]]] = {}  # rows, first tokens, streams
        own = native_head(head, target, self._output_layer)
        is_alone = head.dtype == torch.float32  # its modules would keep keys in another dtype than the kernels
        self.native = None if own is None else NativeRows(own, self.cache, vocabulary, is_alone=is_alone)

    @property
    def requires(self) -> Requirements:
        """What the head reads of the target."""
        shape = self.head.shape
        return Requirements(last_hidden=shape.reads_last_hidden, layer_inputs=shape.layer_inputs)

    def __contains__(self, row: Sequence) -> bool:
        """Whether there is anything to draft from: a prompt of one token has no entry."""
        return row.id in self._last or row.id in self._owed

    def own_caches(self) -> list[OwnCache]:
        """Its cache, which grows with the text."""
        shape = self.head.shape
        dtype = self.head.dtype if self.native is None else torch.bfloat16
        return [OwnCache(self.cache, shape.num_layers * shape.layer.kv_numbers * dtype.itemsize)]

    # -- rows --------------------------------------------------------------------------------------------------

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        """Take over entries of an earlier row; that of the last shared token knows what followed there, not here."""
        if not (isinstance(memory, EagleMemory) and memory.head is self.head):
            return 0
        length = max(0, min(memory.length, num_tokens - 1))
        if length:
            place = self.rows.enter(row.id)
            self.cache.load(place.slot, memory.states, length)
            place.trunk = length
        return length

    def read(self, rows: Seq[Sequence], chunks: Seq[PromptChunk]) -> None:
        """Take in chunks of prompts."""
        streams = [self._streams(chunk.features, chunk.num_tokens) for chunk in chunks]
        self._take_in(rows, streams, [chunk.start for chunk in chunks])

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        """Take in what steps have committed: the token that was pending, and all that was emitted but the last."""
        streams = [self._streams(result.committed, len(result.emitted)) for result in results]
        starts = [len(row.token_ids) - 1 - len(result.emitted) for row, result in zip(rows, results, strict=True)]
        if self.native is None:
            self._take_in(rows, streams, starts)
        else:
            self._owe(rows, streams, starts)
        if self.head.expectation is not None:
            for result in results:
                self.head.expectation.add(result.tree.num_draft_tokens, result.num_accepted)

    def _owe(self, rows: Seq[Sequence], streams: Seq[torch.Tensor], starts: Seq[int]) -> None:
        """Make the entries of these tokens later."""
        for row, stream, start in zip(rows, streams, starts, strict=True):
            _, first, parts = self._owed.setdefault(row.id, (row, start, []))
            parts.append(
                stream.clone() if len(self.head.shape.streams) == 1 else stream
            )  # one is a view of the forward
            if start + len(stream) - first >= MOST_OWED:
                self.settle([row])

    def settle(self, rows: Iterable[Sequence]) -> None:
        """Make all entries of rows that are still to be made."""
        owed = [self._owed.pop(row.id) for row in rows if row.id in self._owed]
        if owed:
            streams = [parts[0] if len(parts) == 1 else torch.cat(parts) for _, _, parts in owed]
            self._take_in([row for row, _, _ in owed], streams, [start for _, start, _ in owed])

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None:
        self.settle([row])
        for copy in copies:
            if row.id in self.rows:
                self.rows.fork(row.id, copy.id)
            if row.id in self._last:
                self._last[copy.id] = self._last[row.id]

    def keep(self, row: Sequence) -> EagleMemory | None:
        if row.id not in self.rows:
            return None
        self.settle([row])
        place = self.rows[row.id]
        return EagleMemory(self.head, self.cache.export(place.slot, place.trunk), place.trunk)

    def forget(self, rows: Seq[Sequence]) -> None:
        self.rows.remove(row.id for row in rows)
        for row in rows:
            self._last.pop(row.id, None)
            self._owed.pop(row.id, None)

    def _streams(self, features: Features, num_nodes: int) -> torch.Tensor:
        """What the head reads of the first nodes, side by side: (n, streams * H of the target)."""
        shape, nodes = self.head.shape, range(num_nodes)
        parts = [
            features.last_hidden(nodes) if layer == shape.num_layers_of_target else features.layer_input(layer, nodes)
            for layer in shape.streams
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _take_in(self, rows: Seq[Sequence], streams: Seq[torch.Tensor], starts: Seq[int]) -> None:
        """Make entries of the next committed tokens of rows, side by side where they lie together."""
        given = {}
        for row, stream, start in zip(rows, streams, starts, strict=True):
            place = self.rows.enter(row.id)
            self.cache.rollback([start], place.slot)
            place.trunk = start + len(stream)
            given[place.slot] = row, row.token_ids[start + 1 : start + 1 + len(stream)], stream
        for slots in spans(given):
            chains = [given[slot][1] if slot in given else [] for slot in slots]
            if self.native is not None and self.native.takes(sum(map(len, chains))):
                outputs = self.native.take_in(slots, chains, [given[slot][2] for slot in slots if slot in given])
                for slot, output in zip(slots, outputs, strict=True):
                    if output is not None:
                        self._last[given[slot][0].id] = output
                continue
            nodes = nodes_of.Nodes.from_chains(chains)
            width = len(self.head.shape.streams) * self.head.shape.target_size
            wide = torch.zeros(len(slots), nodes.width, width, dtype=self.head.dtype, device=self._target.device)
            for i, slot in enumerate(slots):
                if slot in given:
                    wide[i, : nodes.counts[i]] = given[slot][2]
            wide_outputs = self._run(nodes, wide, slots.start, is_true=True)
            self.cache.commit([range(count) for count in nodes.counts], slots.start)
            for i, slot in enumerate(slots):
                if slot in given:
                    self._last[given[slot][0].id] = wide_outputs[i, nodes.counts[i] - 1].clone()

    # -- drafts ------------------------------------------------------------------------------------------------

    def begin(self, rows: Seq[Sequence]) -> tuple[list[Place], torch.Tensor]:
        """Bring rows to the front of the cache; their places, and the outputs of their last entries (B, 1, H)."""
        self.settle(rows)
        places = self.rows.align([row.id for row in rows])
        dtype = self.head.dtype if self.native is None else torch.float32
        return places, torch.stack([self._last[row.id].to(dtype) for row in rows])[:, None]

    def grow(
        self, draft: GrowingDraft, least_mass: float, sharpness: float
    ) -> tuple[list[int], list[int], list[float]]:
        """The draft of a greedy row in one call of the library's own kernels: see `NativeHead.grow`."""
        assert self.native is not None
        row = draft.row
        place, owed = self.rows.get(row.id), self._owed.get(row.id)
        if owed is None or place is None or place.trunk != owed[1]:
            self.settle([row])
            return self.native.grow(self.rows[row.id], draft, self._last[row.id].float(), None, least_mass, sharpness)
        _, start, parts = self._owed.pop(row.id)
        streams = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._last[row.id] = last = torch.empty(self.head.shape.layer.hidden_size)
        tokens = row.token_ids[start + 1 : start + 1 + len(streams)]
        return self.native.grow(place, draft, last, (tokens, streams), least_mass, sharpness)

    def feed(
        self, drafts: Seq[Frontier], places: Seq[Place], features: torch.Tensor, *, are_chains: bool
    ) -> torch.Tensor:
        """Run the frontier of every draft behind what was fed before, with the outputs of their parents (B, F, H)."""
        if self.native is not None and self.native.takes(features.shape[0] * features.shape[1]):
            outputs = self.native.feed(drafts, places, features)
            self.cache.commit([range(features.shape[1])] * len(drafts))
            return outputs
        nodes = frontier_nodes(self.cache, drafts, places, are_chains=are_chains)
        outputs = self._run(nodes, features.to(self.head.dtype), 0, is_true=False)
        self.cache.commit([range(nodes.width)] * len(drafts))
        return outputs

    def end(self, places: Seq[Place]) -> None:
        """Forget what was fed of drafts."""
        self.cache.rollback([place.trunk for place in places])
        for place in places:
            place.offset_of = {}

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V_d)."""
        if self.native is not None and self.native.takes(outputs.shape[:-1].numel()):
            return self.native.head.logits(outputs)
        with torch.inference_mode():
            found: torch.Tensor = self._output_layer(self.head.before_output(outputs.to(self.head.dtype)))
        return found

    @property
    def _output_layer(self) -> torch.nn.Module:
        own = self._own_output
        layer: torch.nn.Module = self._target.shadow.get_output_embeddings() if own is None else own
        return layer

    def _run(self, nodes: nodes_of.Nodes, given: torch.Tensor, first_row: int, *, is_true: bool) -> torch.Tensor:
        """Run nodes behind the committed columns of neighbouring rows.

        Args:
          given: (B, N, ...), streams of the target where ``is_true``, else features that the head predicted.
        Returns: (B, N, H); of padding anything.
        """
        with torch.inference_mode():
            return self._outputs(nodes, given, first_row, is_true)

    def _outputs(self, nodes: nodes_of.Nodes, given: torch.Tensor, first_row: int, is_true: bool) -> torch.Tensor:
        num_rows, width = nodes.tokens.shape
        device = self._target.device
        lengths = self.cache.row_lengths(first_row, num_rows)
        starts = torch.tensor([length - nodes.num_fed for length in lengths], device=device)[:, None]
        positions = starts + nodes.depths.to(device)  # (B, S + N)
        is_padded = num_rows > 1 and nodes.num_real < num_rows * width
        flat = nodes_of.FlatNodes(nodes.counts, width, device) if is_padded else None
        columns = self.cache.open(first_row, num_rows, width, None, flat)
        mask = None if nodes.is_one_token else self._masks.formatted(self._masks.visible(nodes, starts, columns))
        tokens, own = nodes.tokens.to(device), positions[:, nodes.num_fed :]
        # what is not finite would stay in the cache behind the columns that count, where 0 * NaN is NaN
        given = torch.nan_to_num(given)
        if flat is not None:
            tokens, own, given = (flat.listed(values)[None] for values in (tokens, own, given))
        placed = layers.Placed(*self.head.place(own), mask, self.cache, flat)
        features = self.head.features(given) if is_true else given
        outputs = self.head(self._embedded(tokens), features, placed)
        return outputs if flat is None else flat.spread(outputs[0])

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.head.embed_tokens
        table = self._target.shadow.get_input_embeddings() if own is None else own
        return torch.nn.functional.embedding(tokens, table.weight)
