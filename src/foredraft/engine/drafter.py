"""The interface of drafters: a few verbs over the rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from foredraft.engine.budget import DraftSize
from foredraft.engine.features import NO_FEATURES, Features
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.engine.row import Row
    from foredraft.model.cache.ragged import KVCache
    from foredraft.model.lm import CausalLM

__all__ = [
    "NO_FEATURES",
    "ContextDrafter",
    "DraftSize",
    "Drafter",
    "Features",
    "OwnCache",
    "PromptChunk",
    "Requirements",
    "StepResult",
    "WrappingDrafter",
    "own_result",
]


@dataclass(frozen=True)
class Requirements:
    """The outputs of the target's forwards that a drafter wants beside the logits, which decode steps have anyway.

    Args:
      last_hidden: the input of the output embedding, after the final norm; of prompts and of decode steps.
      layer_inputs: indices of decoder layers whose inputs are wanted; of both, too.
      prompt_logits: of prompts: they cost the output embedding for every token.
      prompts: to be shown prompts chunk by chunk, whether features of them are wanted or not.
      choices: that the target's own choices at all nodes will be asked for, so that they are made once for the
        acceptance rule and the drafter.
    """

    last_hidden: bool = False
    layer_inputs: tuple[int, ...] = ()
    prompt_logits: bool = False
    prompts: bool = False
    choices: bool = False

    @property
    def reads_prompts(self) -> bool:
        """Whether prompts are to be shown chunk by chunk."""
        return self.prompts or self.last_hidden or bool(self.layer_inputs) or self.prompt_logits

    @classmethod
    def all_of(cls, several: Iterable[Requirements]) -> Requirements:
        """The requirements of several drafters as one."""
        several = list(several)
        return cls(
            last_hidden=any(requires.last_hidden for requires in several),
            layer_inputs=tuple(sorted({layer for requires in several for layer in requires.layer_inputs})),
            prompt_logits=any(requires.prompt_logits for requires in several),
            prompts=any(requires.prompts for requires in several),
            choices=any(requires.choices for requires in several),
        )


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


def own_result(tree: DraftTree, result: StepResult) -> StepResult:
    """The outcome of a step for the proposal of one part."""
    if len(tree) == 1:
        return StepResult(tree, (0,), result.emitted, result.features.at((0,)), result.committed)
    places = {0: 0}  # node of the part's tree -> node of the tree that was verified
    for node in range(1, len(tree)):
        above = places.get(tree.parents[node])
        place = None if above is None else result.tree.child(above, tree.tokens[node])
        if place is not None:
            places[node] = place
    own = tree.restricted(list(places))
    verified = list(places.values())  # of node i of ``own``
    accepted = set(result.path)
    path = tuple(node for node, place in enumerate(verified) if place in accepted)
    return StepResult(own, path, result.emitted, result.features.at(verified), result.committed)


@dataclass(frozen=True)
class OwnCache:
    """Keys and values that a drafter keeps beside the target's.

    Args:
      cache: of all its rows.
      column_bytes: memory of one column of one row.
      most_columns: of a row, however long its text is, of caches that do not grow with it; None for those that do.
    """

    cache: KVCache
    column_bytes: int
    most_columns: int | None = None


class Drafter(ABC):
    """Proposes continuations. The output of the engine does not depend on it, only the speed does.

    A row is a `Row`; ``row.token_ids`` ends with the pending token. State of a row is keyed by ``row.id``. The
    life of a row: ``recall`` if an earlier row has left the beginning of its prompt, ``read`` for every chunk of the
    rest (of drafters that want features of prompts), ``start`` (or ``fork``, for another sample of a prompt) when the
    prompt is in the target's cache; then ``propose`` and ``observe`` alternately, with any subset of the started rows
    in any order; ``keep`` and ``forget`` when the row has finished, which may be before it has started.
    """

    name: str
    requires: Requirements = Requirements()
    usual_acceptance: float | None = None
    """Share of drafted tokens that are right after right ones, where all texts are alike: a governor begins with it."""
    validated_acceptance: Mapping[str, float] = MappingProxyType({})
    """Share of drafts whose first token the target took when heads were validated, by the name of what drafts."""
    drafts_from_text: bool = False
    """Whether it looks at nothing but the tokens of rows: then it can be tried along texts that are there already."""

    @property
    def is_shared(self) -> bool:
        """Whether a request may be drafted for by what others have said: not where it has a salt (`Row`)."""
        return False

    is_free: bool = False
    """Whether its drafts cost next to nothing: it needs neither a model nor forwards."""
    arms: tuple[str, ...] = ()
    """Titles of the ways in which it can draft, where measured time is to choose among several."""
    arm: int = 0
    """Which of them it drafts in where nobody chooses."""

    def choose_arm(self, arm: int) -> None:
        """Draft in this way from now on."""

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        """Called once, by the engine that will run this drafter, for those that draft with the target itself.

        Whenever the engine calls ``propose``, ``rows[i]`` is row i of ``cache``, which holds all of its tokens but the
        pending one. A drafter may write after the committed columns, and must leave ``cache.lengths`` as they were, and
        nothing that is not finite (`KVCache.erase`): 0 * NaN is NaN, in masked columns, too.
        """

    def own_caches(self) -> Sequence[OwnCache]:
        """The caches that it keeps beside the target's, to be counted in plans of memory; asked once it is bound."""
        return ()

    def recall(self, row: Row, memory: object, num_tokens: int) -> int:
        """Take over what ``keep`` has left of a row whose first ``num_tokens`` tokens are those of this prompt.

        Args:
          memory: None where nothing was kept, or by a drafter of another kind.
        Returns: how many of these tokens this drafter need not ``read``; the target reads the others again.
        """
        return 0 if self.requires.reads_prompts else num_tokens

    def read(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        """Take in the next part of prompts, in order and without gaps; of drafters that want features of prompts."""

    def start(self, rows: Sequence[Row]) -> None:
        """Take in rows whose prompts, all but the last token, are in the target's cache."""

    def fork(self, row: Row, copies: Sequence[Row]) -> None:
        """Take in further samples of the prompt of ``row``, which has just started."""
        self.start(copies)

    @abstractmethod
    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        """One draft per row within its budget, whose depth may be 0; its root is ``row.token_ids[-1]``.

        The engine cuts what is deeper, wider or larger than allowed; a drafter that looks at its budget wastes no work.
        """

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Learn from a step. ``row.token_ids`` already holds the emitted tokens."""

    @property
    def observes(self) -> bool:
        """Whether it is to be told of steps: where it does something then."""
        return getattr(self.observe, "__func__", None) is not Drafter.observe

    def keep(self, row: Row) -> object:
        """Memory of a row that is about to be forgotten, for prompts that begin like it; None for nothing.

        Called by engines that keep the cache of such rows, too, and hand both out together.
        """
        return None

    def forget(self, rows: Sequence[Row]) -> None:
        """Drop the state of rows that have finished, normally or not, some of them before they had started."""


class ContextDrafter(Drafter):
    """A drafter that looks at one row at a time; batching is inherited."""

    @abstractmethod
    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        """A draft for one row within its budget, of depth 1 or more."""

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        return [
            self.propose_row(row, DraftSize.of(budget)) if budget > 0 else DraftTree.root(row.token_ids[-1], self.name)
            for row, budget in zip(rows, budgets, strict=True)
        ]


class WrappingDrafter(Drafter):
    """Drafts with other drafters: what the engine tells it of rows it tells all of them, in order.

    Args:
      parts: the other drafters.
    """

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = tuple(parts)
        self.requires = Requirements.all_of(part.requires for part in parts)
        self.drafts_from_text = all(part.drafts_from_text for part in parts)
        self.validated_acceptance = {name: it for part in parts for name, it in part.validated_acceptance.items()}

    @property
    def is_shared(self) -> bool:
        return any(part.is_shared for part in self.parts)

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        for part in self.parts:
            part.bind(target, cache)

    def own_caches(self) -> list[OwnCache]:
        return [own for part in self.parts for own in part.own_caches()]

    def read(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        for part in self.parts:
            if part.requires.reads_prompts:
                part.read(rows, chunks)

    def start(self, rows: Sequence[Row]) -> None:
        for part in self.parts:
            part.start(rows)

    def fork(self, row: Row, copies: Sequence[Row]) -> None:
        for part in self.parts:
            part.fork(row, copies)

    def forget(self, rows: Sequence[Row]) -> None:
        for part in self.parts:
            part.forget(rows)
