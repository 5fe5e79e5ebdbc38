"""The interface of drafters: four verbs over the rows of a batch."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from foretoken.engine.sequence import Sequence
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM


@dataclass(frozen=True)
class Requirements:
    """Features that the target must expose to a drafter, per committed token or, in decode steps, per draft node.

    Args:
      last_hidden: the input of the output embedding, after the final norm: (num_tokens, H).
      layer_inputs: indices of decoder layers whose inputs are wanted: each (num_tokens, H).
      top_k: number of the target's most likely next tokens (of the raw logits): (num_tokens, k) ids, best first. Of
        decode steps only, unless ``prompt_top_k``: over a prompt they cost the output embedding for every token.
      prompt_top_k: of the prompt, too; only of its last tokens where the keys and values of the first were there.
      choices: the target's own token at every node, accepted or not: what decoding would emit after that node's path,
        by the argmax or by the keyed noise of the row. Of decode steps only.
      all_nodes: of decode steps, features have one entry per node of the draft instead of one per accepted node.
    """

    last_hidden: bool = False
    layer_inputs: tuple[int, ...] = ()
    top_k: int = 0
    prompt_top_k: bool = False
    choices: bool = False
    all_nodes: bool = False

    def __bool__(self) -> bool:
        return self.last_hidden or bool(self.layer_inputs) or self.top_k > 0 or self.choices

    @property
    def of_prompt(self) -> Requirements:
        """The requirements that apply to the prompt."""
        return replace(self, top_k=self.top_k if self.prompt_top_k else 0, choices=False)


@dataclass(frozen=True)
class Features:
    """The features that a drafter asked for, one entry per token along the accepted path (or the prefilled prompt).

    With ``Requirements.all_nodes`` a decode step has one entry per node of the draft, in its order. ``choices``
    always does; -1 where the target has no usable distribution.
    """

    last_hidden: torch.Tensor | None = None
    layer_inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    top_ids: torch.Tensor | None = None
    choices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step for one row.

    Args:
      tree: the draft that was verified.
      path: accepted nodes, root first; ``len(path) - 1`` drafted tokens were accepted.
      emitted: tokens that were appended to the sequence: the accepted ones and the bonus, cut where it finished.
      features: one row per node of ``path``, or per node of ``tree``; only what ``Drafter.requires`` names.
    """

    tree: DraftTree
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    features: Features = Features()

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1


class Budget(int):
    """How much may be drafted for one row in one step. As a number it is the depth.

    Args:
      depth: tokens on one path, the pending one not counted; 0 for no draft.
      nodes: of the whole draft, root included.
      chains_only: whether only the continuation of first children will be verified.
    """

    nodes: int
    chains_only: bool

    def __new__(cls, depth: int, nodes: int = sys.maxsize, chains_only: bool = False) -> Self:
        self = super().__new__(cls, depth)
        self.nodes, self.chains_only = nodes, chains_only
        return self

    def __repr__(self) -> str:
        return f"Budget(depth={self.depth}, nodes={self.nodes}, chains_only={self.chains_only})"

    @property
    def depth(self) -> int:
        """Tokens on one path."""
        return int(self)

    @classmethod
    def of(cls, budget: int) -> Budget:
        """The budget itself, or one that limits the depth alone."""
        return budget if isinstance(budget, Budget) else cls(budget)

    def width(self, num_branches: int) -> int:
        """How many of the wanted siblings are worth drafting."""
        return 1 if self.chains_only else num_branches

    def max_nodes(self, limit: int | None = None) -> int:
        """Nodes of the draft, within a limit of the drafter's own."""
        return self.nodes if limit is None else min(self.nodes, limit)

    def cut(self, tree: DraftTree) -> DraftTree:
        """Cut a draft to the budget; if it has too many nodes, the first ones stay."""
        tree = (tree.main_chain() if self.chains_only else tree).cut(self.depth)
        return tree if len(tree) <= self.nodes else tree.restricted(range(max(1, self.nodes)))


class Drafter(ABC):
    """Proposes continuations. The output of the engine does not depend on it, only the speed does.

    A row is a `Sequence`; ``row.token_ids`` ends with the pending token. The engine calls ``start`` once for a row
    after its prompt is in the target's cache, then ``propose`` and ``observe`` alternately, with any subset of the
    started rows in any order, and ``forget`` when the row has finished. State of a row is keyed by ``row.id``.
    """

    name: str
    requires: Requirements = Requirements()

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        """Called once, by the engine that will run this drafter, for those that draft with the target itself.

        Whenever the engine calls ``propose``, ``rows[i]`` is row i of ``cache``, which holds all of its tokens but the
        pending one. A drafter may write after the committed columns, and must leave ``cache.lengths`` as they were.
        """

    def start(self, rows: Seq[Sequence], features: Seq[Features]) -> None:
        """Take in new rows. ``features`` cover every prompt token but the last."""

    @abstractmethod
    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        """One draft per row within its budget, whose depth may be 0; its root is ``row.token_ids[-1]``.

        The engine cuts what is deeper, wider or larger than allowed; a drafter that looks at its budget wastes no work.
        """

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        """Learn from a step. ``row.token_ids`` already holds the emitted tokens."""

    def retain(self, rows: Seq[Sequence], limit: int) -> None:
        """Keep what is known of rows that are about to be forgotten, for prompts that begin like them.

        Called by engines that do so themselves; ``limit`` is how many rows they keep. Only drafters with a cache of
        their own have something to keep.
        """

    def forget(self, rows: Seq[Sequence]) -> None:
        """Drop the state of rows that have finished, normally or not."""


class ContextDrafter(Drafter):
    """A drafter that looks at one row at a time; batching is inherited."""

    @abstractmethod
    def propose_row(self, row: Sequence, budget: Budget) -> DraftTree:
        """A draft for one row within its budget, of depth 1 or more."""

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        return [
            self.propose_row(row, Budget.of(budget)) if budget > 0 else DraftTree.root(row.token_ids[-1], self.name)
            for row, budget in zip(rows, budgets, strict=True)
        ]
