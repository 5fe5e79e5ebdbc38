"""The drafts of an engine: those of its drafter, and those of requests (predictions, tokens forced by a grammar).

If the drafter fails in a call, only the rows of that call lose their drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from foredraft.beginnings import bytes_of
from foredraft.config.keywords import has_items, shown, whole_number
from foredraft.engine.acceptance_model import GRAMMAR, GUESSED, PREDICTION, scored
from foredraft.engine.drafter import (
    DraftCache,
    Drafter,
    DrafterFacts,
    Needs,
    PromptChunk,
    StepResult,
    leaves_of,
    listens,
    own_result,
)
from foredraft.engine.row import Prediction, RowState
from foredraft.engine.stats import CAUSES, Limits
from foredraft.errors import ConfigError, TreeError, error_with_type, is_fatal
from foredraft.sampling.precision import double_device
from foredraft.tree import DraftPlan, DraftSize, DraftTree

if TYPE_CHECKING:
    from foredraft.config.acceptance import AcceptanceRule
    from foredraft.engine.row import Row
    from foredraft.model.cache.ragged import KVCache, RowStates
    from foredraft.model.lm import CausalLM
    from foredraft.structured.matching import Matching

logger = logging.getLogger("foredraft")

T = TypeVar("T")

MOST_FORCED, LEAST_FORCED = 16, 4
"""Maximum number of forced tokens for a row that runs alone, and for one among many. More tokens gain little for the
row, and make the other rows wait."""

GUESS = 0.9
"""Prior probability that a guess is right after right ones. With 200 random schemas, 0.98 were right at temperature 0,
and 0.71 at temperature 1.
"""

LEAST_GUESSED = 0.7
"""Smallest probability that a guess and those before it are right, for it to be drafted. Where nodes cost most (32 rows
on two cores), drafts of which half were right only broke even.
"""

LEAST_PREDICTED = 1 / 3
"""Smallest acceptance probability of a predicted token that is drafted. By the rule of succession, a drafted prediction
is therefore twice as long as the latest agreement.
"""


class Drafts:
    """Calls a drafter, and adds the drafts that rows have themselves (`SamplingParams.prediction`, grammars).

    After a fault, the rows of that call lose their drafter state, and the lengths of the target's cache are restored.
    The rows continue without drafts. A draft that does not fit its row counts as a fault of this row alone. The first
    fault is logged as a warning. `RowStats.drafter_error` contains the fault of each row.

    A prediction and the drafter's draft are merged into one tree, in which the drafter's nodes come last. If the rule
    uses draft distributions, or only chains can be verified, the row's own draft replaces the drafter's. Nodes that the
    grammar of a row does not allow are removed. Drafts that are samples must stay complete, so nothing is removed from
    them. Tokens that the target can read and never returns are removed, too. A drafter observes the outcome of its own
    proposals.

    Args:
      drafter: the drafter. An exception in the set-up of the drafter is always raised.
      target: the model.
      cache: cache of the target.
      rule: acceptance rule.
      contains_faults: True to contain exceptions of the drafter; else they are raised.

    Attributes:
      needs: needs of the drafter.
      facts: facts of the drafter.
      observes: True if the drafter overrides ``observe``.

    Raises: ConfigError for a drafter without a name, or with needs that no forward pass can meet.
    Exactness: as for the drafter. A draft that fails becomes the empty draft. A row's own draft depends on its tokens
    only.
    """

    def __init__(
        self, drafter: Drafter, target: CausalLM, cache: KVCache, rule: AcceptanceRule, *, contains_faults: bool
    ) -> None:
        if not isinstance(drafter, Drafter) or not isinstance(drafter.facts, DrafterFacts):
            raise ConfigError(f"{type(drafter).__name__} cannot be a drafter; derive from Drafter, and give it facts")
        name: object = drafter.name
        needs: object = drafter.needs(target, cache)
        if not isinstance(name, str) or not name or not isinstance(needs, Needs):
            raise ConfigError(
                f"{type(drafter).__name__} cannot be a drafter: its name is {name!r} and its needs "
                f"{type(needs).__name__}; give it DrafterFacts with a name, and return Needs"
            )
        if any(not 0 <= layer < target.num_layers for layer in needs.layer_inputs):
            raise ConfigError(
                f"drafter {name!r} needs the inputs of layers {needs.layer_inputs}; {target.name} has layers "
                f"0..{target.num_layers - 1}"
            )
        if not isinstance(needs.caches, tuple) or not all(isinstance(each, DraftCache) for each in needs.caches):
            raise ConfigError(f"drafter {name!r} needs caches {needs.caches!r}; each must be a DraftCache")
        self.name, self.needs, self.facts, self.observes = name, needs, drafter.facts, listens(drafter)
        for own in needs.caches:
            own.cache.clear()  # left over from an earlier engine
        self._drafter = drafter
        self._leaves = leaves_of(drafter, needs)
        self._cache = cache
        self._rule = rule
        self._contains_faults = contains_faults
        self._has_warned = False
        self._vocab_size, self._num_embeddings = target.vocab_size, target.num_embeddings
        self._device = double_device(target.device)  # for distributions

    # -- the verbs ---------------------------------------------------------------------------------------------

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        """Show chunks of prompts to the drafter; decoding begins after the last chunk of a row."""
        drafted_for = [(row, chunk) for row, chunk in zip(rows, chunks, strict=True) if not row.is_plain]
        if drafted_for:
            of_rows = [row for row, _ in drafted_for]
            self._try(of_rows, partial(self._drafter.start, of_rows, [chunk for _, chunk in drafted_for]), None)

    def fork(self, row: Row, copies: Sequence[Row]) -> None:
        """Start further samples of the prompt of a row that has just started."""
        if row.stats.drafter_error:
            self._give_up(copies, row.stats.drafter_error)
        elif row.is_plain:
            for copy in copies:
                copy.is_plain = True
        else:
            self._try([row, *copies], partial(self._forked, row, copies), None)

    def _forked(self, row: Row, copies: Sequence[Row]) -> None:
        for copy in copies:
            for part, state in row.state.items():
                if isinstance(state, RowState) and (own := state.copied()) is not None:
                    if not isinstance(own, RowState):
                        raise TypeError(f"copied returned {shown(own)}; return a RowState, or None to start afresh")
                    copy.state[part] = own
        self._drafter.start(copies, [PromptChunk.end_of(copy) for copy in copies])

    def propose(self, rows: Sequence[Row], sizes: Sequence[DraftSize], limits: Sequence[Limits]) -> list[DraftTree]:
        """Return one draft per row: the drafter's, up to its size, and the row's own, up to its limit."""
        asked, of_sizes = [], []
        for row, size in zip(rows, sizes, strict=True):
            if not row.is_plain:
                asked.append(row)
                of_sizes.append(size)
        none: list[Any] = []
        drafts = self._try(asked, partial(self._proposed, asked, of_sizes), none) if asked else none
        if asked and not drafts:  # values that the drafter has written may not be finite
            for slot, length in enumerate(self._cache.lengths):
                self._cache.erase(slot, length)
        proposed = iter(drafts)
        reads_less = self._vocab_size < self._num_embeddings
        trees = []
        for row, size, limit in zip(rows, sizes, limits, strict=True):
            draft = DraftTree.root(row.token_ids[-1]) if row.is_plain else self._fitting(row, next(proposed))
            cut = tree = draft if len(draft.tokens) == 1 else size.cut(draft)
            if row.drafts_itself or reads_less:
                row.state[self] = cut
                tree = self._with_own(row, cut, limit.budget, len(rows))
            is_empty = len(tree.tokens) == 1
            if is_empty or cut is not draft:
                row.stats.count_cuts(limit, size, draft, cut, is_empty=is_empty, is_plain=row.is_plain)
            trees.append(tree)
        return trees

    def none(self, rows: Sequence[Row]) -> list[DraftTree]:
        """Return empty drafts for rows without the drafter, unless they have drafts of their request."""
        for row in rows:
            row.stats.num_undrafted_steps["fault" if row.stats.drafter_error else "governor"] += 1
        return [DraftTree.root(row.token_ids[-1]) for row in rows]

    def _with_own(self, row: Row, tree: DraftTree, limit: DraftSize, num_rows: int) -> DraftTree:
        """Return a draft without impossible tokens, extended by the row's prediction and by forced tokens."""
        matching = row.sampler.matching
        if row.prediction is not None and (predicted := _predicted(row, row.prediction, limit.depth)):
            tree = self._joined(limit.cut(predicted), tree, limit)
        if self._vocab_size < self._num_embeddings:
            tree = tree.below(self._vocab_size)
        if matching is None:
            return tree
        if tree.probs is None:
            tree = matching.legal(tree)
        may_guess = self._rule.keeps_tokens and (len(tree.tokens) == 1 or not limit.chains_only)
        forced = _forced(row, matching, limit.depth, num_rows, may_guess=may_guess)
        return self._joined(limit.cut(forced), tree, limit) if len(forced) > 1 else tree

    def _joined(self, chain: DraftTree, tree: DraftTree, limit: DraftSize) -> DraftTree:
        """Return the row's own draft, followed by the drafter's nodes if rule and model allow both."""
        if not self._rule.keeps_tokens or limit.chains_only:
            return chain.planned(tree.plan)
        return chain.joined(scored(tree), limit.nodes)

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        """Report a step to the drafter, as if it had proposed only the verified part of its draft.

        No row may be plain.
        """
        own = []
        for row, result in zip(rows, results, strict=True):
            own.append(own_result(row.state[self], result) if self in row.state else result)
        self._try(rows, partial(self._drafter.observe, rows, own), None)

    # -- drafter state of rows -------------------------------------------------------------------------------------

    def end(self, rows: Sequence[Row], *, is_kept: bool = False) -> None:
        """Call `RowState.ended` for the state of rows that have ended."""
        for row in rows:
            if not row.is_plain:
                self._try([row], partial(self._ended, row, is_kept), None)

    def _ended(self, row: Row, is_kept: bool) -> None:
        for state in list(row.state.values()):
            if isinstance(state, RowState):
                state.ended(row, is_kept=is_kept)

    def drop(self, rows: Sequence[Row]) -> None:
        """Drop the drafter state of rows that go on without the drafter."""
        for row in rows:
            row.state = {}
            if row.slot >= 0:
                for own in self.needs.caches:
                    own.cache.lengths[row.slot] = own.cache.offsets[row.slot] = 0
                    own.cache.erase(row.slot)

    def kept(self, row: Row) -> object:
        """Return the drafter state of a row for prompts that begin with the same tokens; None if there is none."""
        return None if row.is_plain else self._try([row], partial(self._known_of, row), None)

    def _known_of(self, row: Row) -> Kept | None:
        num_tokens, slot = len(row.token_ids) - 1, row.slot
        states = {part: state for part, state in row.state.items() if isinstance(state, RowState)}
        cut = {part: _cut(state, num_tokens) for part, state in states.items()}
        columns = [
            None
            if own.writer is None or not own.cache.lengths[slot]
            else KeptColumns(own.writer(), own.cache.export(slot, own.cache.lengths[slot]), own.cache.lengths[slot])
            for own in self.needs.caches
        ]
        kept = Kept({part: found[0] for part, found in cut.items() if found is not None}, columns)
        return kept if kept.states or any(each is not None for each in columns) else None

    def known(self, row: Row, memory: object, num_tokens: int) -> int:
        """Reuse the drafter state of an earlier row whose first ``num_tokens`` tokens equal those of this prompt.

        Args:
          memory: result of `kept`, or None.
        Returns: number of the tokens that the drafter need not read. The target reads the other tokens again.
        """
        if row.is_plain:
            return num_tokens
        return self._try([row], partial(self._taken_over, row, memory, num_tokens), num_tokens)

    def _taken_over(self, row: Row, memory: object, num_tokens: int) -> int:
        kept = memory if isinstance(memory, Kept) else Kept()
        pairs = [
            (own, found if found is not None and own.writer is not None and found.writer == own.writer() else None)
            for own, found in zip(self.needs.caches, kept.columns or [None] * len(self.needs.caches), strict=True)
        ]
        count = num_tokens
        for own, found in pairs:
            if own.lag is not None:
                count = min(count, num_tokens - own.lag, 0 if found is None else found.length)
        if any(needs.last_hidden or needs.layer_inputs for _, needs in self._leaves):
            count = min(count, len(row.token_ids) - 2)  # heads draft from the features of the last prompt token
        count = max(count, 0)
        while (fewer := min([count, *self._covered(kept, count)])) < count:
            count = fewer
        found_states = {part: _cut(state, count) for part, state in kept.states.items()}
        row.state = {part: found[0] for part, found in found_states.items() if found is not None}
        for own, found in pairs:
            if found is not None:
                own.cache.load(row.slot, found.states, min(count, found.length))
        return count

    def _covered(self, kept: Kept, num_tokens: int) -> list[int]:
        """For each drafter that needs whole prompts, return the number of tokens that its state covers."""
        covered = []
        for leaf, needs in self._leaves:
            if needs.reads_prompts and not needs.partial_prompts:
                found = _cut(kept.states[leaf], num_tokens) if leaf in kept.states else None
                covered.append(0 if found is None else found[1])
        return covered

    # -- faults ------------------------------------------------------------------------------------------------

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
        self._give_up(rows, error_with_type(fault))

    def _give_up(self, rows: Sequence[Row], reason: str) -> None:
        for row in rows:
            row.stats.drafter_error, row.is_plain = row.stats.drafter_error or reason, True
        self.drop(rows)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "drafter %r has failed (%s); its %d rows go on without drafts and with the same tokens. "
                "Further faults are counted in the metrics and not logged.",
                self.name,
                reason,
                len(rows),
            )

    def _proposed(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[Any]:
        """Call the drafter and check that it returns one item per row."""
        proposed: Any = self._drafter.propose(rows, budgets)
        if type(proposed) is not list and not has_items(proposed):
            raise TreeError(f"propose returned {type(proposed).__name__}; return a list of DraftTree, one for each row")
        drafts = list(proposed)
        if len(drafts) != len(rows):
            raise TreeError(f"propose returned {len(drafts)} drafts for {len(rows)} rows; return one for each row")
        return drafts

    def _fitting(self, row: Row, draft: Any) -> DraftTree:
        """Return the draft of a row if it is valid, else the empty draft."""
        try:
            self._check(row, draft)
        except BaseException as fault:
            self._contain([row], fault)
            self._cache.erase(row.slot, self._cache.lengths[row.slot])
            return DraftTree.root(row.token_ids[-1])
        checked: DraftTree = draft
        return checked

    def _check(self, row: Row, tree: Any) -> None:
        """Check that a draft begins with the pending token and has tokens that the target can read.

        Raises: TreeError.
        """
        if not isinstance(tree, DraftTree):
            raise TreeError(f"propose returned {type(tree).__name__} for a row; return a DraftTree")
        tokens, pending = tree.tokens, row.token_ids[-1]
        if tokens[0] != pending:
            raise TreeError(f"the draft starts with token {tokens[0]}, but {pending} is pending")
        if min(tokens) < 0 or max(tokens) >= self._num_embeddings:
            outside = next(token for token in tokens if not 0 <= token < self._num_embeddings)
            raise TreeError(f"the draft contains token {outside}, not in the vocabulary, 0..{self._num_embeddings - 1}")
        if tree.plan is not None and not (
            isinstance(tree.plan, DraftPlan) and isinstance(tree.plan.gamma, int) and tree.plan.cause in CAUSES
        ):
            raise TreeError(f"the plan of the draft is {tree.plan!r}; give a DraftPlan with a length and a known cause")
        if self._rule.needs_probs and tree.probs is not None:
            self._check_probs(tree, tree.probs, is_sampled=not row.sampler.is_greedy)

    def _check_probs(self, tree: DraftTree, probs: torch.Tensor, *, is_sampled: bool) -> None:
        is_table = isinstance(probs, torch.Tensor) and probs.is_floating_point() and probs.device == self._device
        if not is_table or probs.shape[1] != self._vocab_size:
            kind = f"{probs.dtype} {tuple(probs.shape)}" if isinstance(probs, torch.Tensor) else type(probs).__name__
            raise TreeError(
                f"draft probabilities are {kind}; give floats over the vocabulary, (M, {self._vocab_size}), on "
                f"{self._device}"
            )
        if not is_sampled or len(tree.tokens) == 1:
            return
        parents, tokens = list(tree.parents[1:]), list(tree.tokens[1:])
        totals, drawn = probs[sorted({*parents})].sum(-1), probs[parents, tokens]
        if not bool((totals - 1.0).abs().amax() <= ROUNDING) or not bool(drawn.amin() > 0.0):
            raise TreeError(
                f"draft probabilities of nodes with children add up to {totals.tolist()}, and the drafted tokens "
                f"have the probabilities {drawn.tolist()}; give the distributions that the tokens were drawn from, "
                "after temperature, top-k, top-p and any restriction, or no probabilities for a deterministic draft"
            )


def _cut(state: RowState, num_tokens: int) -> tuple[RowState, int] | None:
    """Return the state after at most ``num_tokens`` tokens, and the exact number of tokens it covers; None if there is
    none.

    Raises: TypeError, ConfigError if ``state.cut`` returns anything else.
    """
    found: object = state.cut(num_tokens)
    if found is None:
        return None
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], RowState):
        raise TypeError(f"cut returned {shown(found)}; give a RowState and a number of tokens, or None")
    try:
        number = whole_number(found[1])
    except TypeError:
        number = -1
    if not 0 <= number <= num_tokens:
        raise ConfigError(f"cut returned {found[1]!r} of {num_tokens} tokens; give a number of tokens, 0..{num_tokens}")
    return found[0], number


ROUNDING = 0.01
"""Largest deviation of the total of a distribution from 1: the rounding of bfloat16 (eight bits), with a margin."""


@dataclass(frozen=True)
class KeptColumns:
    """Copies of the first columns of a row in a drafter's cache, for prompts that begin with the same tokens."""

    writer: object
    states: RowStates
    length: int


@dataclass(frozen=True)
class Kept:
    """Drafter state of a row, for prompts that begin with the same tokens.

    Args:
      states: state by part.
      columns: columns of every cache of the drafter; None for a cache without columns.
    """

    states: dict[Any, RowState] = field(default_factory=dict)
    columns: Sequence[KeptColumns | None] = ()

    @property
    def num_bytes(self) -> int:
        """Memory of the columns, in bytes."""
        return sum(bytes_of(each.states) for each in self.columns if each is not None)


def _predicted(row: Row, prediction: Prediction, depth: int) -> DraftTree | None:
    """Return the draft of a prediction, as far as it is likely enough.

    The prior chance that the next predicted token is right after n matching ones follows Laplace's rule of succession.
    The acceptance model replaces this estimate when it has measurements.
    """
    tokens = prediction.draft(row.token_ids, depth)
    if not tokens:
        return None
    agreed = prediction.agreed
    scores = tuple([(agreed + 1) / (agreed + place + 1) for place in range(len(tokens) + 1)])
    chain = replace(DraftTree.chain(row.pending, tokens, source=PREDICTION), scores=scores)
    chances = row.acceptance.chances(chain, row)
    return chain.restricted(range(sum([chance >= LEAST_PREDICTED for chance in chances])))


def _forced(row: Row, matching: Matching, depth: int, num_rows: int, *, may_guess: bool) -> DraftTree:
    """Return a draft of the tokens that a grammar forces, and of guesses at its choices if these are mostly right.

    The first guess that is not likely enough is not drafted, but shown to the acceptance model. Forced tokens are
    always right, whatever acceptance is measured.

    Args:
      num_rows: number of rows of the step.
    """
    forced = matching.forced(min(depth, max(MOST_FORCED // num_rows, LEAST_FORCED)))
    tokens, sources, scores = list(forced), [GRAMMAR] * (len(forced) + 1), [1.0] * (len(forced) + 1)
    chance = 1.0
    for place, (token, is_guess) in enumerate(matching.guessed(min(depth, MOST_FORCED), forced) if may_guess else ()):
        if is_guess:
            chance *= row.acceptance.rate(GUESSED, len(forced) + place + 1, GUESS, row)
        tokens.append(token)
        sources.append(GUESSED if is_guess else GRAMMAR)
        scores.append(scores[-1] * (GUESS if is_guess else 1.0))
        if chance < LEAST_GUESSED:
            break
    chain = DraftTree.chain(row.pending, tokens, source=GRAMMAR)
    chain = replace(chain, sources=tuple(sources), scores=tuple(scores))
    if chance >= LEAST_GUESSED:
        return chain
    row.acceptance.proposed(row, chain, GUESSED)  # so that guessing can resume once it would be right
    return chain.cut(len(tokens) - 1)
