"""Looking for a layer set while decoding: SWIFT."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from foretoken.drafters.parts.layer_set import LayerSet
from foretoken.errors import ConfigError

Sublayer = tuple[str, int]
"""Kind, "attention" or "mlp", and the index of the layer."""

FEWEST_LAYERS = 3
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

    Attributes:
      best_score: share of tokens that the best set has predicted; below 0 before the first trial.

    Raises: ConfigError for fewer than three layers, and for a start that leaves out nothing or everything.
    Randomness: ``seed``.
    """

    def __init__(self, num_layers: int, start: LayerSet | None = None, seed: int = 0) -> None:
        if num_layers < FEWEST_LAYERS:
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
        self.best_score = -1.0
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
    def is_over(self) -> bool:
        return self.best_score > GOOD_ENOUGH or self._num_stale >= PATIENCE or self.num_trials >= MAX_TRIALS

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
        """The share of the tokens that the candidate predicted.

        Args:
          score_again: scores the best set so far on the same tokens. A candidate has to beat it there.
        """
        if score > self.best_score and self.num_trials and score_again is not None:
            self.best_score = score_again(self.best)
        self.num_trials += 1
        if self._proposals is not None:
            self._proposals.tell(self._tried, score)
        if score > self.best_score:
            self._best, self.best_score, self._num_stale = self._tried, score, 0
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
