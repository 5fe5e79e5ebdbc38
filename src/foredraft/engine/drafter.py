"""The interface of drafters: their needs, and three methods (start, propose, observe) over the rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from foredraft.engine.features import NO_FEATURES, Features
from foredraft.engine.row import Row
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.tree import DraftPlan, DraftSize, DraftTree

__all__ = [
    "NO_FEATURES",
    "ContextDrafter",
    "DraftCache",
    "DraftSize",
    "Drafter",
    "DrafterFacts",
    "Features",
    "Needs",
    "PromptChunk",
    "StepResult",
    "WrappingDrafter",
    "own_result",
]


@dataclass(frozen=True)
class DraftCache:
    """Keys and values that a drafter keeps beside the target's. Row i of a draft cache is row i of the target's cache.

    The engine adds, moves, copies and removes rows (`CacheGroup`). The drafter fills them and sets their lengths.

    Args:
      cache: cache of all rows; rows that the drafter does not serve have length 0.
      column_bytes: function that returns the memory of one column of one row, in bytes.
      most_columns: maximum number of columns per row, for a cache that does not grow with the row; None if it grows.
      writer: function that returns an identity of the code and weights that computed the columns, weight version
        included. Prompts that begin like an earlier one reuse its columns only if the identities are equal. None if
        columns are never reused.
      lag: number of following tokens on which a column depends, for columns made from the target's features of prompts.
        The target reads a reused prompt again from the end of such columns. None for columns that the drafter makes
        from tokens alone.
    """

    cache: KVCache
    column_bytes: Callable[[], int]
    most_columns: int | None = None
    writer: Callable[[], object] | None = None
    lag: int | None = None


@dataclass(frozen=True)
class Needs:
    """Outputs of the target that a drafter needs in addition to the logits, and the drafter's own caches.

    Args:
      last_hidden: True for the input of the output embedding, after the final norm, in prompts and in decode steps.
      layer_inputs: indices of decoder layers whose inputs are needed, in prompts and in decode steps.
      prompt_logits: True for logits of prompts, which cost the output embedding for every token.
      prompts: True to receive prompts chunk by chunk, with or without features.
      partial_prompts: True if the end of a prompt is enough when an earlier row has left its beginning in the cache. If
        False, the target reads the whole prompt again, except for the part that the state of the earlier row covers
        (`RowState.cut`).
      choices: True if the drafter will use the target's own choices at all nodes. They are then computed once for both
        the acceptance rule and the drafter.
      caches: caches of the drafter, kept beside the target's.
    """

    last_hidden: bool = False
    layer_inputs: tuple[int, ...] = ()
    prompt_logits: bool = False
    prompts: bool = False
    partial_prompts: bool = False
    choices: bool = False
    caches: tuple[DraftCache, ...] = ()

    @property
    def reads_prompts(self) -> bool:
        """True if the drafter receives prompts chunk by chunk."""
        return self.prompts or self.last_hidden or bool(self.layer_inputs) or self.prompt_logits

    @classmethod
    def all_of(cls, several: Iterable[Needs]) -> Needs:
        """Combine the needs of several drafters."""
        several = list(several)
        return cls(
            last_hidden=any(needs.last_hidden for needs in several),
            layer_inputs=tuple(sorted({layer for needs in several for layer in needs.layer_inputs})),
            prompt_logits=any(needs.prompt_logits for needs in several),
            prompts=any(needs.prompts for needs in several),
            partial_prompts=all(needs.partial_prompts for needs in several if needs.reads_prompts),
            choices=any(needs.choices for needs in several),
            caches=tuple(cache for needs in several for cache in needs.caches),
        )


@dataclass(frozen=True)
class DrafterFacts:
    """Properties of a drafter that are known before it drafts.

    Args:
      name: name in statistics and messages, and source of the nodes that it proposes.
      is_free: True if drafts cost almost nothing, because the drafter needs neither a model nor forward passes.
      drafts_from_text: True if the drafter uses only the tokens of rows, so that it can be tried on existing texts.
      is_shared: True if a draft for one request may contain tokens from other requests. Such a drafter does not serve
        requests with a salt.
      usual_acceptance: typical share of drafted tokens that are accepted after accepted ones, if it is similar for all
        texts. A governor starts with this share.
      validated_acceptance: share of drafts whose first token the target accepted when the head was validated, by the
        name of the mode that drafts.
      arms: titles of the drafter's modes, if measured time should choose among several.
      arm: index of the mode that is used if none is chosen (`DraftSize.arm`).
    """

    name: str = ""
    is_free: bool = False
    drafts_from_text: bool = False
    is_shared: bool = False
    usual_acceptance: float | None = None
    validated_acceptance: Mapping[str, float] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    arm: int = 0

    def title(self, size: DraftSize) -> str:
        """Return the name of the mode that a size selects, or the name of the drafter."""
        return self.arms[size.arm] if size.arm is not None and self.arms else self.name


@dataclass(frozen=True)
class PromptChunk:
    """Part of a prompt that the target has just read.

    Args:
      start: index in the row of the first token of the chunk.
      num_tokens: number of tokens; node i of the features is token ``start + i``.
      features: the features named in the drafter's needs.
      is_last: True if the prompt, all but its last token, is now in the target's cache. The last chunk is empty.
    """

    start: int
    num_tokens: int
    features: Features = NO_FEATURES
    is_last: bool = False

    @classmethod
    def end_of(cls, row: Row) -> PromptChunk:
        """Make the last chunk of a row."""
        return cls(len(row.token_ids) - 1, 0, is_last=True)


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step for one row.

    Args:
      tree: the draft that was verified.
      path: accepted nodes, root first; ``len(path) - 1`` drafted tokens were accepted.
      emitted: tokens that were appended to the row: the accepted tokens and the bonus, cut where the row finished.
      features: features by node of the tree.
      text_features: features of the committed tokens of any drafter; entry i belongs to the token before
        ``emitted[i]``. None if these are the nodes of ``path``.
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
        """Features of the committed tokens: the pending one and the accepted ones, ``len(emitted)`` in all."""
        return self.features.at(self.path) if self.text_features is None else self.text_features


def own_result(tree: DraftTree, result: StepResult) -> StepResult:
    """Convert the outcome of a step to the proposal of one drafter that contributed to the verified tree."""
    if len(tree.tokens) == 1:
        return StepResult(tree, (0,), result.emitted, result.features.at((0,)), result.committed)
    places = {0: 0}  # node of the part's tree -> node of the tree that was verified
    for node in range(1, len(tree.tokens)):
        above = places.get(tree.parents[node])
        place = None if above is None else result.tree.child(above, tree.tokens[node])
        if place is not None:
            places[node] = place
    own = tree.restricted(list(places))
    verified = list(places.values())  # node i of ``own`` -> node of the tree that was verified
    accepted = set(result.path)
    path = tuple(node for node, place in enumerate(verified) if place in accepted)
    return StepResult(own, path, result.emitted, result.features.at(verified), result.committed)


class Drafter(ABC):
    """Proposes continuations. Drafters affect only the speed of the engine, never its output.

    A row is a `Row`; ``row.token_ids`` ends with the pending token. A drafter keeps its state of a row in
    ``row.state[self]``: any object, made in ``start``, that ends with the row. A `RowState` can also be copied for
    another sample of a prompt, and cut for a prompt that begins with the same tokens.

    Order of calls for a row: if the drafter reads prompts, ``start`` is called for each chunk. It is called once more,
    with an empty chunk, when the prompt is in the target's cache. A copied or cut state is in ``row.state`` before
    that. After ``start``, ``propose`` and ``observe`` alternate, for any subset of the started rows in any order.
    """

    facts: DrafterFacts = DrafterFacts()

    @property
    def name(self) -> str:
        """Name of the drafter."""
        return self.facts.name

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        """Return the needs of the drafter; called once, by the engine that will run it.

        A drafter that drafts with the target itself keeps both arguments. Row ``row.slot`` of ``cache`` contains all
        tokens of a row except the pending one. A drafter may write after the committed columns. The drafter must leave
        ``cache.lengths`` unchanged and all values finite (`KVCache.erase`), because 0 * NaN is NaN in masked columns,
        too.
        """
        return Needs()

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        """Process the next chunk of the prompt of each row, in order, without gaps. Decoding begins after the last.

        A drafter that does not read prompts receives last chunks only.
        """

    @abstractmethod
    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        """Return one draft per row, within the draft size of the row; its depth may be 0.

        The root of a draft is ``row.token_ids[-1]``.

        The engine cuts drafts that are deeper, wider or larger than allowed. A drafter that respects its budget wastes
        no work.
        """

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Learn from a step of rows that go on. ``row.token_ids`` already contains the emitted tokens."""


def listens(drafter: Drafter) -> bool:
    """Return whether a drafter overrides ``observe``."""
    return getattr(drafter.observe, "__func__", None) is not Drafter.observe


class ContextDrafter(Drafter):
    """A drafter that drafts for one row at a time; this base class does the batching."""

    _plan: DraftPlan | None = None  # of the current row, if the drafter has a length policy

    @abstractmethod
    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        """Return a draft for one row, within its draft size, which has a depth of 1 or more."""

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        trees = []
        for row, budget in zip(rows, budgets, strict=True):
            if budget > 0:
                self._plan = None
                trees.append(self.propose_row(row, DraftSize.of(budget)).planned(self._plan))
            else:
                trees.append(DraftTree.root(row.token_ids[-1], self.name))
        return trees


class WrappingDrafter(Drafter):
    """A drafter that combines other drafters. Every call of the engine is passed to all of them, in order.

    Args:
      parts: the other drafters.

    Attributes:
      leaves: innermost drafters with their needs, available once the engine has called ``needs``.
    """

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = tuple(parts)
        self.leaves: list[tuple[Drafter, Needs]] = []
        self._needs: list[Needs] = []
        facts = [part.facts for part in parts]
        self.facts = DrafterFacts(
            self.facts.name,
            drafts_from_text=all(one.drafts_from_text for one in facts),
            is_shared=any(one.is_shared for one in facts),
            validated_acceptance={name: share for one in facts for name, share in one.validated_acceptance.items()},
        )

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        self._needs = [part.needs(target, cache) for part in self.parts]
        self.leaves = [
            leaf for part, needs in zip(self.parts, self._needs, strict=True) for leaf in leaves_of(part, needs)
        ]
        return Needs.all_of(self._needs)

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        last = [place for place, chunk in enumerate(chunks) if chunk.is_last]
        for part, needs in zip(self.parts, self._needs, strict=True):
            if needs.reads_prompts or len(last) == len(rows):
                part.start(rows, chunks)
            elif last:
                part.start([rows[place] for place in last], [chunks[place] for place in last])


def leaves_of(drafter: Drafter, needs: Needs) -> list[tuple[Drafter, Needs]]:
    """List the innermost drafters of a drafter, which may be the drafter itself, with their needs."""
    return drafter.leaves if isinstance(drafter, WrappingDrafter) else [(drafter, needs)]
