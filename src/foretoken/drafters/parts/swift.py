"""Looking for a layer set while decoding: SWIFT."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from typing import Any

import torch

from foretoken.drafters.parts.layer_set import LayerSet, run_once
from foretoken.drafters.selfdraft.layer_skip import LayerSkipDrafter
from foretoken.engine.cache import KVCache
from foretoken.engine.model import CausalLM, Nodes
from foretoken.engine.sampling import argmax, choose
from foretoken.engine.sequence import Sequence
from foretoken.engine.sublayers import SkippableLayers
from foretoken.engine.tree import DraftTree
from foretoken.errors import ConfigError

Sublayer = tuple[str, int]
"""Kind, "attention" or "mlp", and the index of the layer."""

SKIP_RATIO = 0.45
NUM_SCORED = 32
PROPOSAL_INTERVAL = 25
GOOD_ENOUGH = 0.95
MAX_TRIALS = 1000
PATIENCE = 300


class SwiftSearch:
    """Which set to try next, which is the best, and when to stop. The number of sublayers left out never changes.

    Source: SWIFT (Xia et al. 2024, arXiv:2410.06916) and its published program: first and last layer stay, 0.45 of the
    other sublayers are left out, every other layer to begin with; a candidate exchanges one sublayer of the best set;
    every 25th comes from Bayesian optimisation. Deviations: before a candidate replaces the best set, that is scored
    again on the same tokens, since easy tokens (a text that repeats itself) let any set look good: on zoo:tiny the
    published rule, which compares with an earlier score, ended at sets that were worse than its start.
    The proposals are those of Optuna's tree-structured Parzen estimator where it is installed, else every candidate is
    an exchange.

    Args:
      num_layers: of the model.
      start: set to begin with, whose size is kept; None for the published one.
      seed: of exchanges and proposals.

    Raises: ConfigError for fewer than three layers, and for a start that leaves out nothing or everything.
    Randomness: ``seed``.
    """

    def __init__(self, num_layers: int, start: LayerSet | None = None, seed: int = 0) -> None:
        if num_layers < 3:
            raise ConfigError(
                f"layer_search='swift' keeps the first and the last layer, and the model has {num_layers}; give a set"
            )
        self._num_layers = num_layers
        self._free: list[Sublayer] = [(kind, i) for kind in ("attention", "mlp") for i in range(1, num_layers - 1)]
        if start is not None and not 0 < len(self._members(start)) < len(self._free):
            raise ConfigError(
                "layer_search='swift' needs a set to begin with that leaves out some sublayers, not all, between the "
                "first and the last layer; correct it, or give none"
            )
        self._best = frozenset(self._first()) if start is None else self._members(start)
        self._best_score = -1.0
        self._random = random.Random(seed)
        self._proposals = _Proposals(self._free, seed) if find_spec("optuna") else None
        self.num_trials = 0
        self._num_stale = 0

    def _first(self) -> list[Sublayer]:
        """Every other layer, and as many sublayers as the ratio allows: 4 of 8 of six layers."""
        size = max(1, round(SKIP_RATIO * len(self._free)))
        in_turn = [(kind, i) for i in range(1, self._num_layers - 1, 2) for kind in ("attention", "mlp")]
        return [*in_turn, *(sublayer for sublayer in self._free if sublayer not in in_turn)][:size]

    def _members(self, layer_set: LayerSet) -> frozenset[Sublayer]:
        named = {("attention", i) for i in layer_set.attention} | {("mlp", i) for i in layer_set.mlp}
        return frozenset(named & set(self._free))

    @property
    def best(self) -> LayerSet:
        return self._as_set(self._best)

    @property
    def best_score(self) -> float:
        """Share of tokens that the best set has predicted; below 0 before the first trial."""
        return self._best_score

    @property
    def is_over(self) -> bool:
        return self._best_score > GOOD_ENOUGH or self._num_stale >= PATIENCE or self.num_trials >= MAX_TRIALS

    def candidate(self) -> LayerSet:
        """The next set to be scored; the start comes first."""
        if self.num_trials == 0:
            self._tried = self._best
        elif self._proposals is not None and self.num_trials % PROPOSAL_INTERVAL == 0:
            self._tried = self._proposals.next(len(self._best))
        else:
            self._tried = self._exchanged()
        return self._as_set(self._tried)

    def _exchanged(self) -> frozenset[Sublayer]:
        left_out = sorted(self._best)
        remaining = [sublayer for sublayer in self._free if sublayer not in self._best]
        return self._best - {self._random.choice(left_out)} | {self._random.choice(remaining)}

    def tell(self, score: float, score_again: Callable[[LayerSet], float] | None = None) -> None:
        """What share of the tokens the candidate predicted.

        Args:
          score_again: scores the best set so far on the same tokens. A candidate has to beat it there.
        """
        if score > self._best_score and self.num_trials and score_again is not None:
            self._best_score = score_again(self.best)
        self.num_trials += 1
        if self._proposals is not None:
            self._proposals.tell(self._tried, score)
        if score > self._best_score:
            self._best, self._best_score, self._num_stale = self._tried, score, 0
        else:
            self._num_stale += 1

    def _as_set(self, sublayers: frozenset[Sublayer]) -> LayerSet:
        kinds = {kind: tuple(sorted(i for k, i in sublayers if k == kind)) for kind in ("attention", "mlp")}
        return LayerSet(kinds["attention"], kinds["mlp"], self._num_layers)


class _Proposals:
    """Bayesian proposals of sets of one size: the sublayers with the largest of one number each."""

    def __init__(self, free: list[Sublayer], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        self._free = free
        self._names = [f"{kind}.{index}" for kind, index in free]
        self._range = optuna.distributions.FloatDistribution(0.0, 1.0)
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))

    def next(self, size: int) -> frozenset[Sublayer]:
        trial = self._study.ask(dict.fromkeys(self._names, self._range))
        order = sorted(range(len(self._free)), key=lambda i: -trial.params[self._names[i]])
        return frozenset(self._free[i] for i in order[:size])

    def tell(self, sublayers: frozenset[Sublayer], score: float) -> None:
        params = {name: float(sublayer in sublayers) for name, sublayer in zip(self._names, self._free, strict=True)}
        distributions = dict.fromkeys(self._names, self._range)
        trial = self._optuna.trial.create_trial(params=params, distributions=distributions, value=score)
        self._study.add_trial(trial)


class SwiftDrafter(LayerSkipDrafter):
    """`LayerSkipDrafter` that improves its set while it drafts, without data and without a search beforehand.

    As long as the search lasts, every step scores one candidate by one forward of it over the latest generated tokens
    of a row, all at once, in the target's own cache; the columns it writes over are saved and put back. A candidate
    that seems better costs a second forward, of the set it would replace. The score is
    the share of tokens that the candidate would have drafted: its argmax, and of sampled rows its choice by the row's
    own noise. The set outlives the requests; of their text it keeps nothing else.

    Source: see `SwiftSearch`. Deviations from the published program: nothing is cloned but the columns at stake; drafts
    follow length policy and branches of the config instead of a fixed comb of siblings.

    Args:
      start: set to begin with; None for the published one.
      num_scored: tokens that a candidate is scored on.
      seed: of the search.
      options: see `SelfDrafter`.

    Exactness, randomness: as of `SelfDrafter`; the search draws from ``seed``.
    """

    def __init__(
        self, start: LayerSet | None = None, *, num_scored: int = NUM_SCORED, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(start or LayerSet(), **options)
        self._start = start
        self._num_scored = num_scored
        self._seed = seed
        self.search: SwiftSearch | None = None
        self.num_scoring_passes = 0

    def _variant(self, target: CausalLM) -> CausalLM:
        if self._start is not None:
            self._start.check(target.num_layers, target.name)
        self.search = SwiftSearch(target.num_layers, self._start, self._seed)

        def edit(variant: CausalLM, _: Any) -> None:
            self._layers = SkippableLayers(variant.layers, lambda: run_once(variant))

        variant = target.variant("some sublayers left out", edit)
        self._use(self.search.best)
        return variant

    def _use(self, layer_set: LayerSet) -> None:
        self.layer_set = layer_set
        self._layers.leave_out(layer_set.attention, layer_set.mlp)

    def propose(self, rows: Seq[Sequence], budgets: Seq[int]) -> list[DraftTree]:
        if self.search is not None and not self.search.is_over:
            self._try_one(self.search, rows)
        return super().propose(rows, budgets)

    def _try_one(self, search: SwiftSearch, rows: Seq[Sequence]) -> None:
        """Score a candidate on one of the rows that have generated enough, in turn."""
        ready = [slot for slot, row in enumerate(rows) if row.num_output_tokens > self._num_scored]
        if not ready:
            return
        slot = ready[self.num_scoring_passes % len(ready)]

        def score_again(layer_set: LayerSet) -> float:
            self._layers.leave_out(layer_set.attention, layer_set.mlp)
            return self._score(rows[slot], self._cache, slot)

        candidate = search.candidate()
        self._layers.leave_out(candidate.attention, candidate.mlp)
        try:
            search.tell(self._score(rows[slot], self._cache, slot), score_again)
        finally:
            self._use(search.best)

    def _score(self, row: Sequence, cache: KVCache, slot: int) -> float:
        """Share of the latest tokens that the variant would have drafted, each behind the true text.

        Of 40 tokens, the last pending, and C = 32: columns 7..38 are written over by tokens 7..38, whose successors
        8..39 are compared.
        """
        first = cache.lengths[slot] - self._num_scored
        fed, true = row.token_ids[first:-1], row.token_ids[first + 1 :]
        self.num_scoring_passes += 1
        with cache.kept(slot, first, cache.lengths[slot]):
            logits = self._fit(self.model.forward(Nodes.from_chains([fed]), cache, first_row=slot)[0])
        if row.law.is_greedy:
            found = argmax(logits)
        else:
            size = len(true)
            found = choose(logits, [row.law] * size, [()] * size, list(range(first + 1, first + 1 + size)))
        num_right: int = (found == torch.tensor(true, device=found.device)).sum().item()  # type: ignore[assignment]
        return num_right / len(true)
