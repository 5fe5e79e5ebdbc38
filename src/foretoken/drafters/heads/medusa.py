"""Medusa: heads that each guess one of the next tokens from the target's last hidden state; a tree of guesses."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.method import Method
from foretoken.drafters.heads.options import HeadOptions
from foretoken.drafters.parts.head_loading import load_head
from foretoken.drafters.parts.head_states import LastStates, last_hidden
from foretoken.drafters.parts.ranked import RankedGrowth
from foretoken.drafters.parts.reduced_output import chosen_vocabulary, rows_of_output
from foretoken.drafters.parts.states_drafter import StatesDrafter
from foretoken.engine.drafter import Budget, Requirements
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.heads.names import is_medusa
from foretoken.lazy import Lazy
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch

    import foretoken.heads.medusa as medusa
    import foretoken.heads.medusa_layout as layout
    from foretoken.config.contents import Contents
    from foretoken.drafters.context import DrafterContext
    from foretoken.heads.checkpoint import Checkpoint
    from foretoken.heads.medusa import MedusaHeads, OutputLayer
    from foretoken.heads.vocabulary import DraftVocabulary
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM
else:
    torch = Lazy("torch")
    medusa = Lazy("foretoken.heads.medusa")
    layout = Lazy("foretoken.heads.medusa_layout")

USUAL_ACCURACIES = [
    [0.56, 0.11, 0.05, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008],
    [0.32, 0.09, 0.05, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008],
    [0.20, 0.07, 0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.008, 0.007],
    [0.15, 0.06, 0.035, 0.025, 0.02, 0.015, 0.012, 0.01, 0.008, 0.007],
    [0.12, 0.05, 0.03, 0.02, 0.018, 0.015, 0.012, 0.01, 0.008, 0.007],
]
"""How often the candidate of each rank is right, by head. First ranks and the sum of the first five of head 0 are those
of the published training log of Medusa v0.1 (Vicuna-7B); the others are assumed to fall off alike."""


PUBLISHED = {
    (4096, 32, 32000): ("FasterDecoding/medusa-vicuna-7b-v1.3",),
    (5120, 40, 32000): ("FasterDecoding/medusa-vicuna-13b-v1.3",),
    (6656, 60, 32000): ("FasterDecoding/medusa-vicuna-33b-v1.3",),
}
"""(hidden size, layers, vocabulary) of targets -> hub ids of heads for one of this size; others do not fit."""


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HeadOptions):
    """Keys of drafting with Medusa's heads."""

    method: ClassVar[str] = "medusa"


class MedusaDrafter(StatesDrafter[LastStates]):
    """A static tree from heads that do not see one another: all nodes of a level have the same candidates.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774). Deviations: heads run on the last accepted node alone, not on
    all nodes of the tree; paths are followed from parent to child, without padding; under sampling the candidates are
    drawn with the target's own noise, which keeps the target's law and tokens.

    Args:
      heads: see `MedusaHeads`; on the device of the target.
      growth: arguments of `RankedGrowth`.

    Exactness: lossless for any heads, but for acceptance="typical".
    Randomness: keyed, see ``acceptance`` of `RankedGrowth`; none when greedy.
    Cost: one pass over the heads that the tree is deep, for all rows together; no cache.
    """

    name = "medusa"
    requires = Requirements(last_hidden=True)

    def __init__(self, heads: MedusaHeads, **growth: Any) -> None:
        growth["max_depth"] = min(growth["max_depth"], heads.num_heads)
        self.heads = heads
        self.growth = RankedGrowth(vocabulary=heads.vocabulary, **growth)
        self.states = LastStates(last_hidden)
        self._output: OutputLayer | None = None

    def along(self, depth: int, states: torch.Tensor, token_ids: torch.Tensor, first: int) -> torch.Tensor:
        """What head ``depth`` says along a text that is known.

        Args:
          states: (T, H), what heads read of the target after the tokens.
          token_ids: (T,) of these tokens.
          first: place from which on it is asked.

        Returns: logits (T - 2 - depth - first, V); row i guesses token first + i + 2 + depth.
        """
        return self.heads.logits(depth, states[first : len(states) - 2 - depth], self._output)

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        self.growth.takes_trees = target.supports_trees
        self._output = target.shadow.get_output_embeddings()
        if self.heads.needs_output_layer and self.heads.vocabulary is not None:
            self._output = rows_of_output(target.shadow.get_output_embeddings(), self.heads.vocabulary)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        drafts = [self.growth.begin(row, budget) for row, budget in self.within(rows, budgets)]
        growing = [draft for draft in drafts if draft.depth > 0]
        if growing:
            hidden = self.states.of([draft.row for draft in growing])
            logits = self.heads(hidden, max(draft.depth for draft in growing), self._output)
            self.growth.fill_at_once(growing, logits)
        return [draft.tree(self.name) for draft in drafts]


def build(options: MedusaOptions, context: DrafterContext) -> MedusaDrafter:
    """Drafts with the heads that the config names."""
    target = context.target
    context.check_trees(options.method)
    size = int(target.config.hidden_size)

    def read(found: Checkpoint) -> tuple[MedusaHeads, Seq[str]]:
        return layout.read_medusa(found, size, target.vocab_size)

    known = PUBLISHED.get((size, target.num_layers, target.vocab_size), ())
    heads = load_head(options, context, medusa.MedusaHeads, read, known)
    vocabulary = chosen_vocabulary(options, context)
    if vocabulary is not None:
        heads = _reduced(heads, vocabulary, context)
    tree = options.tree(target, USUAL_ACCURACIES, heads.num_heads)
    return MedusaDrafter(heads, **options.growth(tree, target))


def _reduced(heads: MedusaHeads, vocabulary: DraftVocabulary, context: DrafterContext) -> MedusaHeads:
    """The heads with output layers for some tokens alone, made once.

    Raises: ConfigError for heads that have chosen their tokens already.
    """
    if heads.vocabulary is not None:
        raise ConfigError(f"these heads know {len(heads.vocabulary)} tokens only; leave draft_vocabulary out")
    key = ("reduced", id(heads), tuple(vocabulary.target_ids.tolist()))
    return context.keep(key, lambda: heads.reduced(vocabulary, lambda layer: rows_of_output(layer, vocabulary)))


def recognizes(contents: Contents) -> bool:
    """Whether these are Medusa's heads, alone or inside of a model that was trained with them."""
    return is_medusa(contents.config, contents.names)


METHOD = Method(
    MedusaOptions, build, summary="with heads that each guess one of the next tokens", recognizes=recognizes
)
