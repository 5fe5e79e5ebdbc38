"""Hydra: heads that see the tokens drafted before theirs, so that every path of a tree is of one piece."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.method import Method
from foretoken.drafters.heads.options import HeadOptions
from foretoken.drafters.parts.head_loading import load_head
from foretoken.drafters.parts.head_states import LastStates, PrefixStates, RowContexts, last_hidden
from foretoken.drafters.parts.ranked import Pick, RankedGrowth
from foretoken.drafters.parts.reduced_output import chosen_vocabulary, rows_of_output
from foretoken.drafters.parts.states_drafter import StatesDrafter
from foretoken.engine.drafter import Budget, Features, Requirements
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.heads.names import has_prefix, is_hydra
from foretoken.lazy import Lazy
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch

    import foretoken.heads.hydra as hydra
    import foretoken.heads.hydra_layout as layout
    import foretoken.heads.layers as layers
    from foretoken.config.contents import Contents
    from foretoken.drafters.context import DrafterContext
    from foretoken.heads.checkpoint import Checkpoint
    from foretoken.heads.hydra import HydraHeads
    from foretoken.heads.medusa import OutputLayer
    from foretoken.heads.vocabulary import DraftVocabulary
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM
else:
    torch = Lazy("torch")
    hydra = Lazy("foretoken.heads.hydra")
    layout = Lazy("foretoken.heads.hydra_layout")
    layers = Lazy("foretoken.heads.layers")

USUAL_ACCURACIES = [
    [share * scale for share in (0.62, 0.12, 0.06, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008)]
    for scale in (1.0, 0.95, 0.9, 0.85, 0.8)
]
"""How often the candidate of each rank is right where what stands before it is, by depth: assumed, since no such table
was published."""


PUBLISHED = {
    (4096, 32, 32000): ("ankner/hydra-vicuna-7b-v1.3",),
    (5120, 40, 32000): ("ankner/hydra-vicuna-13b-v1.3",),
    (6656, 60, 32000): ("ankner/hydra-vicuna-33b-v1.3",),
}
"""(hidden size, layers, vocabulary) of targets -> hub ids of heads for one of this size; others do not fit."""


@dataclass(frozen=True, kw_only=True)
class HydraOptions(HeadOptions):
    """Keys of drafting with Hydra's heads."""

    method: ClassVar[str] = "hydra"


class HydraDrafter(StatesDrafter[RowContexts]):
    """A static tree from heads that are each given the path that they continue.

    Source: Hydra (Ankner et al. 2024, arXiv:2402.05109), with its prefix layer where the heads have one (Hydra++).
    Deviations: as for Medusa, paths are followed from parent to child; under sampling the candidates are drawn with the
    target's own noise; the prefix layer has a cache of its own.

    Args:
      heads: see `HydraHeads`; on the device of the target.
      num_target_layers: of the target, for heads that read an earlier hidden state than the last one.
      growth: arguments of `RankedGrowth`.

    Exactness: lossless for any heads, but for acceptance="typical".
    Randomness: keyed, see ``acceptance`` of `RankedGrowth`; none when greedy.
    Cost: one call of a head per level, for the nodes of all rows together; with a prefix layer, that layer once over
    all tokens, and its keys and values.
    """

    def __init__(self, heads: HydraHeads, num_target_layers: int, **growth: Any) -> None:
        self.name = kind_of(heads)
        growth["max_depth"] = min(growth["max_depth"], heads.num_heads)
        self.heads = heads
        self.growth = RankedGrowth(vocabulary=heads.vocabulary, **growth)
        take = last_hidden
        self.requires = Requirements(last_hidden=True)
        if heads.shape.offset:
            layer = num_target_layers - heads.shape.offset
            self.requires = Requirements(layer_inputs=(layer,))
            take = partial(_layer_input, layer)
        self.states: RowContexts = (
            LastStates(take) if heads.prefix is None else PrefixStates(heads.prefix, take, heads.device)
        )
        self._embed: Any = None
        self._output: OutputLayer | None = None
        self._inputs: torch.Tensor | None = None  # (M, (depth + 1) H) of the last level, and whose they are
        self._place: dict[tuple[int, int], int] = {}

    def along(self, depth: int, states: torch.Tensor, token_ids: torch.Tensor, first: int) -> torch.Tensor:
        """What head ``depth`` says along a text that is known, given the tokens that stand before its guesses.

        Args:
          states: (T, H), what heads read of the target after the tokens.
          token_ids: (T,) of these tokens.
          first: place from which on it is asked.

        Returns: logits (T - 2 - depth - first, V); row i guesses token first + i + 2 + depth.
        """
        contexts, embedded = self.heads.contexts(states)[first:-1], self._embed(token_ids)[first:-1]
        return self.heads.along(depth, contexts, embedded, self._output)

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        self.growth.takes_trees = target.supports_trees
        self._embed = target.shadow.get_input_embeddings()
        self._output = target.shadow.get_output_embeddings()
        if self.heads.needs_output_layer and self.heads.vocabulary is not None:
            self._output = rows_of_output(target.shadow.get_output_embeddings(), self.heads.vocabulary)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        drafts = [self.growth.begin(row, budget) for row, budget in self.within(rows, budgets)]
        growing = [draft for draft in drafts if draft.depth > 0]
        if growing:
            self._inputs = self.states.of([draft.row for draft in growing])
            self._place = {(i, -1): i for i in range(len(growing))}
            self.growth.fill(growing, self)
            self._inputs = None
        return [draft.tree(self.name) for draft in drafts]

    def level(self, depth: int, picks: Seq[Pick]) -> torch.Tensor:
        """What head ``depth`` says after every node, given the path that leads there."""
        assert self._inputs is not None
        above = [self._place[pick.index, pick.draft.shape.parents[pick.node]] for pick in picks]
        tokens = torch.tensor([pick.draft.tokens[pick.node] for pick in picks], device=self._inputs.device)
        self._inputs = torch.cat([self._inputs[above], self._embed(tokens)], dim=-1)
        self._place = {(pick.index, pick.node): i for i, pick in enumerate(picks)}
        return self.heads.logits(depth, self._inputs, self._output)


def _layer_input(layer: int, features: Features, nodes: Seq[int]) -> torch.Tensor:
    return features.layer_input(layer, nodes)


def kind_of(heads: HydraHeads) -> str:
    """The method of such heads."""
    return "hydra" if heads.prefix is None else "hydra++"


def build(options: HydraOptions, context: DrafterContext) -> HydraDrafter:
    """Drafts with the heads that the config names.

    Raises: ConfigError for heads with a prefix layer where the method is Hydra, and without one where it is Hydra++.
    """
    target = context.target
    context.check_trees(options.method)
    size, layer = int(target.config.hidden_size), layers.LayerShape.of(target.config)

    def read(found: Checkpoint) -> tuple[HydraHeads, Seq[str]]:
        return layout.read_hydra(found, size, target.vocab_size, layer)

    known = PUBLISHED.get((size, target.num_layers, target.vocab_size), ())
    heads = load_head(options, context, hydra.HydraHeads, read, known if options.method == "hydra++" else ())
    if kind_of(heads) != options.method:
        raise ConfigError(f"these are heads of {kind_of(heads)!r}, not of {options.method!r}; name that as the method")
    vocabulary = chosen_vocabulary(options, context)
    if vocabulary is not None:
        heads = _reduced(heads, vocabulary, context)
    tree = options.tree(target, USUAL_ACCURACIES, heads.num_heads)
    return HydraDrafter(heads, target.num_layers, **options.growth(tree, target))


def _reduced(heads: HydraHeads, vocabulary: DraftVocabulary, context: DrafterContext) -> HydraHeads:
    """The heads with output layers for some tokens alone, made once.

    Raises: ConfigError for heads that have chosen their tokens already.
    """
    if heads.vocabulary is not None:
        raise ConfigError(f"these heads know {len(heads.vocabulary)} tokens only; leave draft_vocabulary out")
    key = ("reduced", id(heads), tuple(vocabulary.target_ids.tolist()))
    return context.keep(key, lambda: heads.reduced(vocabulary, lambda layer: rows_of_output(layer, vocabulary)))


def recognizes(contents: Contents) -> bool:
    """Whether these are heads of Hydra, without a prefix layer."""
    return is_hydra(contents.config, contents.names) and not has_prefix(contents.config, contents.names)


METHOD = Method(
    HydraOptions,
    build,
    summary="with heads that see the tokens drafted before theirs",
    recognizes=recognizes,
)
