"""The interface of drafters: a few verbs over the rows of a batch."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from foretoken.errors import ConfigError
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from foretoken.engine.sequence import Sequence
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM


@dataclass(frozen=True)
class Requirements:
    """What a drafter wants of the target's forwards beside the logits, which decode steps have anyway.

    Args:
      last_hidden: the input of the output embedding, after the final norm; of prompts and of decode steps.
      layer_inputs: indices of decoder layers whose inputs are wanted; of both, too.
      prompt_logits: of prompts: they cost the output embedding for every token.
      choices: that the target's own choices at all nodes will be asked for, so that they are made once for the
        acceptance rule and the drafter.
    """

    last_hidden: bool = False
    layer_inputs: tuple[int, ...] = ()
    prompt_logits: bool = False
    choices: bool = False

    @property
    def reads_prompts(self) -> bool:
        """Whether features of prompts are wanted."""
        return self.last_hidden or bool(self.layer_inputs) or self.prompt_logits

    @classmethod
    def all_of(cls, several: Iterable[Requirements]) -> Requirements:
        """The requirements of several drafters as one."""
        several = list(several)
        return cls(
            last_hidden=any(requires.last_hidden for requires in several),
            layer_inputs=tuple(sorted({layer for requires in several for layer in requires.layer_inputs})),
            prompt_logits=any(requires.prompt_logits for requires in several),
            choices=any(requires.choices for requires in several),
        )


class Features:
    """What the target has computed at the nodes of one row: of a draft, or of a chunk of a prompt.

    This base has nothing. Features hold what a forward has left in memory: ask for them while the call they were
    handed to runs, and keep copies of what is to last.

    Raises: ConfigError for what ``Drafter.requires`` does not name.
    """

    def last_hidden(self, nodes: Seq[int]) -> torch.Tensor:
        """The input of the output embedding at these nodes: (len(nodes), H)."""
        raise _not_required("last_hidden")

    def layer_input(self, layer: int, nodes: Seq[int]) -> torch.Tensor:
        """The input of a decoder layer at these nodes: (len(nodes), H)."""
        raise _not_required("layer_inputs")

    def top_ids(self, k: int, nodes: Seq[int]) -> torch.Tensor:
        """The likeliest next tokens after these nodes by the raw logits, best first: int64 (len(nodes), k or V)."""
        raise _not_required("prompt_logits")

    @property
    def choices(self) -> tuple[int, ...]:
        """The target's own token after every node, accepted or not; -1 where it has no usable distribution.

        It is what decoding would emit after that node's path, by the argmax or by the keyed noise of the row.
        """
        raise _not_required("choices")

    def at(self, nodes: Seq[int]) -> Features:
        """Features whose node i is ``nodes[i]`` here."""
        return _FeaturesAt(self, nodes)


NO_FEATURES = Features()


class _FeaturesAt(Features):
    """Features under other numbers."""

    def __init__(self, features: Features, nodes: Seq[int]) -> None:
        self._features = features
        self._nodes = nodes

    def last_hidden(self, nodes: Seq[int]) -> torch.Tensor:
        return self._features.last_hidden([self._nodes[node] for node in nodes])

    def layer_input(self, layer: int, nodes: Seq[int]) -> torch.Tensor:
        return self._features.layer_input(layer, [self._nodes[node] for node in nodes])

    def top_ids(self, k: int, nodes: Seq[int]) -> torch.Tensor:
        return self._features.top_ids(k, [self._nodes[node] for node in nodes])

    @property
    def choices(self) -> tuple[int, ...]:
        choices = self._features.choices
        return tuple(choices[node] for node in self._nodes)


def _not_required(name: str) -> ConfigError:
    return ConfigError(f"a drafter asked for features that were not computed; let its `requires` name {name}")


@dataclass(frozen=True)
class PromptChunk:
    """Part of a prompt that the target has just read.

    Args:
      start: index in the row of its first token.
      num_tokens: how many tokens it has; node i of the features is token ``start + i``.
      features: what the drafter's requirements name.
    """

    start: int
    num_tokens: int
    features: Features


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step for one row.

    Args:
      tree: the draft that was verified.
      path: accepted nodes, root first; ``len(path) - 1`` drafted tokens were accepted.
      emitted: tokens that were appended to the sequence: the accepted ones and the bonus, cut where it finished.
      features: by node of the tree.
      text_features: of the tokens that were committed, whoever proposed them; entry i is that after which
        ``emitted[i]`` came. None where these are the nodes of ``path``.
    """

    tree: DraftTree
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    features: Features = NO_FEATURES
    text_features: Features | None = None

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1

    @property
    def committed(self) -> Features:
        """Features of the committed tokens: of the pending one, and of the accepted ones, ``len(emitted)`` in all."""
        return self.features.at(self.path) if self.text_features is None else self.text_features


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

    A row is a `Sequence`; ``row.token_ids`` ends with the pending token. State of a row is keyed by ``row.id``. The
    life of a row: ``recall`` if an earlier row has left the beginning of its prompt, ``read`` for every chunk of the
    rest (of drafters that want features of prompts), ``start`` (or ``fork``, for another sample of a prompt) when the
    prompt is in the target's cache; then ``propose`` and ``observe`` alternately, with any subset of the started rows
    in any order; ``keep`` and ``forget`` when the row has finished, which may be before it has started.
    """

    name: str
    requires: Requirements = Requirements()

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        """Called once, by the engine that will run this drafter, for those that draft with the target itself.

        Whenever the engine calls ``propose``, ``rows[i]`` is row i of ``cache``, which holds all of its tokens but the
        pending one. A drafter may write after the committed columns, and must leave ``cache.lengths`` as they were.
        """

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        """Take over what ``keep`` has left of a row whose first ``num_tokens`` tokens are those of this prompt.

        Args:
          memory: None where nothing was kept, or by a drafter of another kind.
        Returns: how many of these tokens this drafter need not ``read``; the target reads the others again.
        """
        return 0 if self.requires.reads_prompts else num_tokens

    def read(self, rows: Seq[Sequence], chunks: Seq[PromptChunk]) -> None:
        """Take in the next part of prompts, in order and without gaps; of drafters that want features of prompts."""

    def start(self, rows: Seq[Sequence]) -> None:
        """Take in rows whose prompts, all but the last token, are in the target's cache."""

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None:
        """Take in further samples of the prompt of ``row``, which has just started."""
        self.start(copies)

    @abstractmethod
    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        """One draft per row within its budget, whose depth may be 0; its root is ``row.token_ids[-1]``.

        The engine cuts what is deeper, wider or larger than allowed; a drafter that looks at its budget wastes no work.
        """

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        """Learn from a step. ``row.token_ids`` already holds the emitted tokens."""

    def keep(self, row: Sequence) -> object:
        """What is known of a row that is about to be forgotten, for prompts that begin like it; None for nothing.

        Called by engines that keep the cache of such rows, too, and hand both out together.
        """
        return None

    def forget(self, rows: Seq[Sequence]) -> None:
        """Drop the state of rows that have finished, normally or not, some of them before they had started."""


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
