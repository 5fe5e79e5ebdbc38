"""The contract of drafters: what they need, and three verbs over the rows of a batch."""

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
    """Keys and values that a drafter keeps beside the target's. Row i of it is row i of the target's cache.

    The engine adds, moves, copies and removes rows (`CacheGroup`); the drafter feeds them and says how long they are.

    Args:
      cache: of all rows; those that the drafter does not serve have length 0.
      column_bytes: measures the memory of one column of one row.
      most_columns: of a row, however long its text is, of caches that do not grow with it; None for those that do.
      writer: what has computed the columns, the version of its weights included: prompts that begin like an earlier
        one take over its columns where the writer is the same. None where they never do.
      lag: of columns that are made of what the target computes of prompts, how many tokens after its own one a column
        depends on; prompts are read again from where such columns end. None for columns that the drafter makes of the
        text alone.
    """

    cache: KVCache
    column_bytes: Callable[[], int]
    most_columns: int | None = None
    writer: Callable[[], object] | None = None
    lag: int | None = None


@dataclass(frozen=True)
class Needs:
    """What a drafter needs of the engine: outputs of the target beside the logits, and caches of its own.

    Args:
      last_hidden: the input of the output embedding, after the final norm; of prompts and of decode steps.
      layer_inputs: indices of decoder layers whose inputs are wanted; of both, too.
      prompt_logits: of prompts: they cost the output embedding for every token.
      prompts: to be shown prompts chunk by chunk, whether features of them are wanted or not.
      partial_prompts: that the end of a prompt is enough, where an earlier row has left its beginning. Otherwise the
        whole prompt is read again, but for what the state of the earlier row covers (`RowState.cut`).
      choices: that the target's own choices at all nodes will be asked for, so that they are made once for the
        acceptance rule and the drafter.
      caches: kept beside the target's.
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
        """Whether prompts are to be shown chunk by chunk."""
        return self.prompts or self.last_hidden or bool(self.layer_inputs) or self.prompt_logits

    @classmethod
    def all_of(cls, several: Iterable[Needs]) -> Needs:
        """The needs of several drafters as one."""
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
    """What is known of a drafter before it drafts.

    Args:
      name: in statistics and messages, and of the nodes that it proposes.
      is_free: its drafts cost next to nothing: it needs neither a model nor forwards.
      drafts_from_text: it looks at nothing but the tokens of rows: then it can be tried along texts that are there.
      is_shared: a request may be drafted for by what others have said: it does not draft for those with a salt.
      usual_acceptance: share of drafted tokens that are right after right ones, where all texts are alike: a governor
        begins with it.
      validated_acceptance: share of drafts whose first token the target took when heads were validated, by the name of
        what drafts.
      arms: titles of the ways in which it can draft, where measured time is to choose among several.
      arm: number of the way in which it drafts where nobody chooses (`DraftSize.arm`).
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
        """Name of what drafts by a size: the way that it names, or the drafter."""
        return self.arms[size.arm] if size.arm is not None and self.arms else self.name


@dataclass(frozen=True)
class PromptChunk:
    """Part of a prompt that the target has just read.

    Args:
      start: index in the row of its first token.
      num_tokens: how many tokens it has; node i of the features is token ``start + i``.
      features: what the drafter's needs name.
      is_last: whether the prompt, all but its last token, is in the target's cache now. That chunk is empty.
    """

    start: int
    num_tokens: int
    features: Features = NO_FEATURES
    is_last: bool = False

    @classmethod
    def end_of(cls, row: Row) -> PromptChunk:
        """The last chunk of a row."""
        return cls(len(row.token_ids) - 1, 0, is_last=True)


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
    if len(tree.tokens) == 1:
        return StepResult(tree, (0,), result.emitted, result.features.at((0,)), result.committed)
    places = {0: 0}  # node of the part's tree -> node of the tree that was verified
    for node in range(1, len(tree.tokens)):
        above = places.get(tree.parents[node])
        place = None if above is None else result.tree.child(above, tree.tokens[node])
        if place is not None:
            places[node] = place
    own = tree.restricted(list(places))
    verified = list(places.values())  # of node i of ``own``
    accepted = set(result.path)
    path = tuple(node for node, place in enumerate(verified) if place in accepted)
    return StepResult(own, path, result.emitted, result.features.at(verified), result.committed)


class Drafter(ABC):
    """Proposes continuations. The output of the engine does not depend on it, only the speed does.

    A row is a `Row`; ``row.token_ids`` ends with the pending token. What a drafter knows of a row is
    ``row.state[self]``: any object, made in ``start``, which ends with the row. A `RowState` may say more: how it is
    copied for another sample of a prompt, and cut for a prompt that begins alike.

    The life of a row: ``start``, chunk by chunk where the drafter reads prompts, and once more with an empty chunk when
    the prompt is in the target's cache (with what was copied or cut in ``row.state`` already); then ``propose`` and
    ``observe`` alternately, with any subset of the started rows in any order.
    """

    facts: DrafterFacts = DrafterFacts()

    @property
    def name(self) -> str:
        """Its name."""
        return self.facts.name

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        """What it needs; called once, by the engine that will run it.

        Those that draft with the target itself take both along: row ``row.slot`` of ``cache`` holds all tokens of a
        row but the pending one. A drafter may write after the committed columns, and must leave ``cache.lengths`` as
        they were, and nothing that is not finite (`KVCache.erase`): 0 * NaN is NaN, in masked columns, too.
        """
        return Needs()

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        """Take in the next chunk of the prompt of each row, in order and without gaps; a row begins with its last one.

        Drafters that do not read prompts are given last chunks alone.
        """

    @abstractmethod
    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        """One draft per row within its budget, whose depth may be 0; its root is ``row.token_ids[-1]``.

        The engine cuts what is deeper, wider or larger than allowed; a drafter that looks at its budget wastes no work.
        """

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Learn from a step of rows that go on. ``row.token_ids`` already holds the emitted tokens."""


def listens(drafter: Drafter) -> bool:
    """Whether a drafter does anything when it is told of steps."""
    return getattr(drafter.observe, "__func__", None) is not Drafter.observe


class ContextDrafter(Drafter):
    """A drafter that looks at one row at a time; batching is inherited."""

    _plan: DraftPlan | None = None  # of the row that is drafted for, where a length policy has one

    @abstractmethod
    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        """A draft for one row within its budget, of depth 1 or more."""

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
    """Drafts with other drafters: what the engine tells it of rows it tells all of them, in order.

    Args:
      parts: the other drafters.

    Attributes:
      leaves: those that wrap nothing, with what they need, once the engine has asked for that.
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
    """The drafters in a drafter that wrap nothing, or itself, with what each of them needs."""
    return drafter.leaves if isinstance(drafter, WrappingDrafter) else [(drafter, needs)]
