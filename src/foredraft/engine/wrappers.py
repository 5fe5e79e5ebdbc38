"""What an engine puts around its drafter: a guard, by which a fault ends the drafts of the rows of a call alone, and
beside it the drafts that requests bring along: what they predict, and what a grammar forces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from foredraft.config.keywords import has_items, whole_number
from foredraft.engine.budget import CAUSES, DraftSize
from foredraft.engine.drafter import (
    Drafter,
    OwnCache,
    PromptChunk,
    Requirements,
    StepResult,
    WrappingDrafter,
    own_result,
)
from foredraft.engine.prediction import PREDICTION
from foredraft.errors import ConfigError, ProbabilityError, TreeError, described, is_fatal
from foredraft.sampling.precision import double_device
from foredraft.tree import DraftPlan, DraftTree

if TYPE_CHECKING:
    from foredraft.config.acceptance import AcceptanceRule
    from foredraft.engine.row import Row
    from foredraft.model.cache.ragged import KVCache
    from foredraft.model.lm import CausalLM

logger = logging.getLogger("foredraft")

T = TypeVar("T")


class GuardedDrafter(WrappingDrafter):
    """A drafter whose drafts fit their rows, and whose exceptions end its drafting for the rows of the call alone.

    These rows are forgotten by the drafter, the lengths of the target's cache are put back, and the rows go on
    decoding plainly. A draft that does not fit its row counts as an exception of this row alone. The first fault is
    told in a warning; `RowStats.drafter_error` has that of each row.

    A drafter that drafts in the target's cache must be shown its rows from the first one on, so the engine keeps rows
    without drafts behind the others (`Scheduler.to_decode`).

    Args:
      drafter: to be guarded. An exception when it is made into a part of the engine, or bound, is raised: the set-up is
        wrong then.
      contains_faults: whether exceptions stay here; else they are raised.
      reads_laws: whether the acceptance rule reads the distributions that drafts were sampled from.

    Raises: ConfigError for a drafter without a name, or with requirements that no forward can meet.
    Exactness: as of the drafter; a draft that never comes is the empty draft.
    """

    def __init__(self, drafter: Drafter, *, contains_faults: bool, reads_laws: bool = False) -> None:
        name, requires = getattr(drafter, "name", None), getattr(drafter, "requires", None)
        if not isinstance(drafter, Drafter) or not isinstance(name, str) or not isinstance(requires, Requirements):
            raise ConfigError(
                f"{type(drafter).__name__} cannot be a drafter: its name is {name!r} and its requires "
                f"{type(requires).__name__}; derive from Drafter, and give it a name and Requirements"
            )
        super().__init__([drafter])
        self.name = drafter.name
        self._drafter = drafter
        self._observes = drafter.observes
        self._contains_faults = contains_faults
        self._reads_laws = reads_laws
        self._has_warned = False
        self._arm: int | None = None
        self._drafts_in_cache = type(drafter).bind is not Drafter.bind

    @property
    def observes(self) -> bool:
        return self._observes

    @property
    def is_shared(self) -> bool:
        """As of the drafter; where that fails, no row with a salt is drafted for."""
        return self._try([], lambda: super(GuardedDrafter, self).is_shared, True)

    def choose_arm(self, arm: int) -> None:
        """Draft in this way from the next proposal on, whose rows a fault then concerns."""
        self._arm = arm

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        layers = self.requires.layer_inputs
        if any(not 0 <= layer < target.num_layers for layer in layers):
            raise ConfigError(
                f"drafter {self.name!r} requires the inputs of layers {layers}; {target.name} has layers "
                f"0..{target.num_layers - 1}"
            )
        self._cache = cache
        self._vocab_size, self._device = target.vocab_size, double_device(target.device)  # of distributions
        self._num_embeddings = target.num_embeddings
        super().bind(target, cache)

    def own_caches(self) -> list[OwnCache]:
        none: list[OwnCache] = []
        return self._try([], self._checked_caches, none)

    def _checked_caches(self) -> list[OwnCache]:
        found = super().own_caches()
        for own in found:
            if not isinstance(own, OwnCache):
                raise TypeError(
                    f"own_caches returned a {type(own).__name__} in its list; it must hold OwnCache objects"
                )
        return found

    def recall(self, row: Row, memory: object, num_tokens: int) -> int:
        if not row.has_drafter:
            return num_tokens
        return self._try([row], partial(self._recalled, row, memory, num_tokens), num_tokens)

    def read(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        self._tell(super().read, rows, chunks)

    def start(self, rows: Sequence[Row]) -> None:
        self._tell(super().start, rows)

    def fork(self, row: Row, copies: Sequence[Row]) -> None:
        if row.stats.drafter_error:
            self._give_up(copies, row.stats.drafter_error)
        elif row.is_plain:
            for copy in copies:
                copy.is_plain = True
        else:
            self._try([row, *copies], partial(self._drafter.fork, row, copies), None)

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        asked = self._with_drafts(rows)
        none: list[Any] = []
        of_rows, of_budgets = _at(asked, rows, budgets)
        drafts = self._try(of_rows, partial(self._proposed, of_rows, of_budgets), none) if asked else none
        if asked and not drafts and self._drafts_in_cache:  # what it has written may not be finite
            for slot, length in enumerate(self._cache.lengths):
                self._cache.erase(slot, length)
        fitting = dict(zip(asked, drafts, strict=False))
        return [self._fitting(row, place, fitting.get(place)) for place, row in enumerate(rows)]

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        self._tell(self._drafter.observe, rows, results)

    def keep(self, row: Row) -> object:
        return self._try([row], partial(self._drafter.keep, row), None) if row.has_drafter else None

    def forget(self, rows: Sequence[Row]) -> None:
        self._tell(super().forget, rows)

    # -- faults ------------------------------------------------------------------------------------------------

    def _with_drafts(self, rows: Sequence[Row]) -> list[int]:
        """Places of the rows that the drafter is told of."""
        return [i for i, row in enumerate(rows) if row.has_drafter]

    def _tell(self, verb: Callable[..., None], rows: Sequence[Row], *others: Sequence[Any]) -> None:
        """Call a verb for the rows that have drafts, with their entries of other lists."""
        with_drafts = self._with_drafts(rows)
        if with_drafts:
            of_rows, *of_others = _at(with_drafts, rows, *others)
            self._try(of_rows, partial(verb, of_rows, *of_others), None)

    def _try(self, rows: Sequence[Row], call: Callable[[], T], otherwise: T) -> T:
        lengths = list(self._cache.lengths)
        try:
            result = call()
            if self._cache.lengths != lengths:
                raise TreeError(f"the drafter left {self._cache.lengths} tokens per row in the cache, not {lengths}")
            return result
        except BaseException as fault:
            self._cache.lengths[:] = lengths
            self._contain(rows, fault)
            return otherwise

    def _contain(self, rows: Sequence[Row], fault: BaseException) -> None:
        if is_fatal(fault) or not self._contains_faults:
            raise fault
        self._give_up(rows, described(fault))

    def _give_up(self, rows: Sequence[Row], reason: str) -> None:
        for row in rows:
            row.stats.drafter_error = row.stats.drafter_error or reason
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "drafter %r has failed (%s); the %d rows that it was drafting for go on without drafts, with the same "
                "tokens. Further faults are counted in metrics and not told.",
                self.name,
                reason,
                len(rows),
            )
        try:
            self._drafter.forget(rows)
        except BaseException as fault:
            if is_fatal(fault):
                raise
            logger.debug("drafter %r could not forget rows after a fault: %s", self.name, described(fault))

    def _recalled(self, row: Row, memory: object, num_tokens: int) -> int:
        """Number of tokens of a prompt that need not be read, of those that there are."""
        known = self._drafter.recall(row, memory, num_tokens)
        try:
            number = whole_number(known)
        except TypeError:
            number = -1
        if not 0 <= number <= num_tokens:
            raise ConfigError(
                f"recall returned {known!r} of {num_tokens} tokens; give a number of tokens, 0..{num_tokens}"
            )
        return number

    def _proposed(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[Any]:
        """Something for each of the rows."""
        if self._arm is not None:
            self._drafter.choose_arm(self._arm)
            self._arm = None
        drafts = self._drafter.propose(rows, budgets)
        if not has_items(drafts):
            raise TreeError(f"propose returned {type(drafts).__name__}; give a list of DraftTree, one for each row")
        drafts = list(drafts)
        if len(drafts) != len(rows):
            raise TreeError(f"{len(drafts)} drafts for {len(rows)} rows")
        return drafts

    def _fitting(self, row: Row, place: int, draft: Any) -> DraftTree:
        """The draft of a row where it fits, else the empty one."""
        if not row.has_drafter:
            return DraftTree.root(row.pending)
        try:
            return self._checked(row, draft)
        except BaseException as fault:
            self._contain([row], fault)
            if self._drafts_in_cache:
                self._cache.erase(place, self._cache.lengths[place])
            return DraftTree.root(row.pending)

    def _checked(self, row: Row, tree: Any) -> DraftTree:
        """The draft, which begins with the pending token and has tokens that the target can read.

        Raises: TreeError, ProbabilityError.
        """
        if not isinstance(tree, DraftTree):
            raise TreeError(f"propose returned {type(tree).__name__} for a row; give a DraftTree")
        tokens = tree.tokens
        if tokens[0] != row.pending:
            raise TreeError(f"the draft starts with token {tokens[0]}, but {row.pending} is pending")
        if min(tokens) < 0 or max(tokens) >= self._num_embeddings:
            outside = next(token for token in tokens if not 0 <= token < self._num_embeddings)
            raise TreeError(f"the draft holds token {outside}, outside the vocabulary, 0..{self._num_embeddings - 1}")
        if tree.plan is not None and not (
            isinstance(tree.plan, DraftPlan) and isinstance(tree.plan.gamma, int) and tree.plan.cause in CAUSES
        ):
            raise TreeError(f"the plan of the draft is {tree.plan!r}; give a DraftPlan of a length and a known cause")
        if self._reads_laws and tree.probs is not None:
            self._check_law(tree, tree.probs, is_sampled=not row.law.is_greedy)
        return tree

    def _check_law(self, tree: DraftTree, probs: torch.Tensor, *, is_sampled: bool) -> None:
        is_table = isinstance(probs, torch.Tensor) and probs.is_floating_point() and probs.device == self._device
        if not is_table or probs.shape[1] != self._vocab_size:
            kind = f"{probs.dtype} {tuple(probs.shape)}" if isinstance(probs, torch.Tensor) else type(probs).__name__
            raise TreeError(
                f"draft probabilities are {kind}; give floats over the vocabulary, (M, {self._vocab_size}), on "
                f"{self._device}"
            )
        if not is_sampled or len(tree) == 1:
            return
        parents, tokens = list(tree.parents[1:]), list(tree.tokens[1:])
        totals, drawn = probs[sorted({*parents})].sum(-1), probs[parents, tokens]
        if not bool((totals - 1.0).abs().amax() <= ROUNDING) or not bool(drawn.amin() > 0.0):
            raise ProbabilityError(
                f"draft probabilities of nodes with children add up to {totals.tolist()}, and those of the drafted "
                f"tokens are {drawn.tolist()}; give the distributions that the tokens were drawn from, after "
                "temperature, top-k, top-p and any restriction, or none for a deterministic draft"
            )


ROUNDING = 0.01
"""Distance of the total of a distribution from 1: eight bits of a bfloat16, and a little more."""


def _at(places: Sequence[int], *lists: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """The entries of lists at some places, without a copy where these are all."""
    if len(places) == len(lists[0]):
        return lists
    return tuple([entries[i] for i in places] for entries in lists)


GRAMMAR = "grammar"
"""Name of what proposed tokens that the grammar forces."""

GUESSED = "grammar_guess"
"""Name of what proposed tokens that came of the same choice of the grammar before, and what those force."""

MOST_FORCED, LEAST_FORCED = 16, 4
"""Forced tokens of a row that runs alone, and of one among many. More hardly help it, and the others wait for them."""

EXPECTED = 0.9
"""Chance of a predicted token after right ones, where the drafter says those of its own."""


class JoiningDrafter(WrappingDrafter):
    """A drafter, and beside it what rows draft by themselves (`SamplingParams.prediction`).

    Both are one tree, in which the drafter's nodes come last; where rules look at the distributions that drafts are
    from, or only chains are verified, what the row drafts takes the place of the drafter's. Nodes that the grammar of a
    row does not allow are left out, but for drafts that are samples, which must not be chosen from. So are tokens of
    the prompt that the target reads and never returns. The drafter sees the outcome of its own proposals.

    Args:
      drafter: of all rows.
      rule: how drafts are accepted.

    Exactness: as of the drafter; what a row drafts depends on its text alone.
    """

    def __init__(self, drafter: Drafter, rule: AcceptanceRule) -> None:
        super().__init__([drafter])
        self.name = drafter.name
        self._drafter = drafter
        self._rule = rule
        self._vocab_size: int | None = None  # of a target that reads more tokens than it returns
        self._proposed: dict[int, DraftTree] = {}  # by the drafter, for rows whose drafts were changed

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        self._vocab_size = target.vocab_size if target.vocab_size < target.num_embeddings else None
        super().bind(target, cache)

    def recall(self, row: Row, memory: object, num_tokens: int) -> int:
        return self._drafter.recall(row, memory, num_tokens)

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        trees = list(self._drafter.propose(rows, budgets))
        for place, (row, tree, budget) in enumerate(zip(rows, trees, budgets, strict=True)):
            matching = row.law.matching
            if row.prediction is None and matching is None and self._vocab_size is None:
                continue
            self._proposed[row.id] = tree
            if row.prediction is not None and (predicted := row.prediction.draft(row.token_ids, budget)):
                tree = self._joined(predicted, tree, budget)
            if self._vocab_size is not None:
                tree = tree.below(self._vocab_size)
            trees[place] = matching.legal(tree) if matching is not None and tree.probs is None else tree
        return trees

    def _joined(self, predicted: Sequence[int], tree: DraftTree, budget: DraftSize) -> DraftTree:
        chain = DraftTree.chain(tree.tokens[0], predicted, source=PREDICTION)
        if len(tree) == 1 or budget.chains_only or not self._rule.keeps_tokens:
            return chain.planned(tree.plan)
        if tree.scores is not None:
            chain = replace(chain, scores=tuple(EXPECTED**depth for depth in range(len(chain))))
        return chain.joined(tree, budget.nodes)

    @property
    def observes(self) -> bool:
        return self._drafter.observes

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        if not self._drafter.observes:
            return
        self._drafter.observe(
            rows,
            [
                own_result(self._proposed[row.id], result) if row.id in self._proposed else result
                for row, result in zip(rows, results, strict=True)
            ],
        )

    def keep(self, row: Row) -> object:
        return self._drafter.keep(row)

    def forget(self, rows: Sequence[Row]) -> None:
        super().forget(rows)
        for row in rows:
            self._proposed.pop(row.id, None)


def with_forced(row: Row, tree: DraftTree, budget: DraftSize, rule: AcceptanceRule, num_rows: int = 1) -> DraftTree:
    """A draft with the tokens that the grammar of its row forces: they are right, whatever is measured of drafts.

    Beyond them come a few that the grammar's choices led to before, where a row has seen that these are mostly right.

    Args:
      tree: legal already, so that it goes along with what is forced as far as it reaches.
      budget: that the row has, before a governor's decision.
      num_rows: rows of the step.
    """
    matching = row.law.matching
    if matching is None or not budget.depth:
        return tree
    most = max(MOST_FORCED // num_rows, LEAST_FORCED)
    forced = matching.forced(min(budget.depth, most))
    may_guess = rule.keeps_tokens and (len(tree) == 1 or not budget.chains_only)
    guessed = matching.guessed(min(budget.depth, MOST_FORCED), forced) if may_guess else ()
    if not forced and not guessed:
        return tree
    chain = DraftTree.chain(tree.tokens[0], (*forced, *guessed), source=GRAMMAR)
    if guessed:
        chain = replace(chain, sources=(GRAMMAR,) * (len(forced) + 1) + (GUESSED,) * len(guessed))
    if tree.scores is not None:
        chances = [EXPECTED**place for place in range(1, len(guessed) + 1)]
        chain = replace(chain, scores=(1.0,) * (len(forced) + 1) + tuple(chances))
    chain = budget.cut(chain)
    return chain.joined(tree, budget.nodes) if rule.keeps_tokens else chain.planned(tree.plan)
