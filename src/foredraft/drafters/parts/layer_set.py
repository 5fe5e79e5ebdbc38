"""Sets of skipped layers, cheaper forms of a model (with skipped layers, 4-bit weights, or both), and the SWIFT
search.

SWIFT finds layers to skip while decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from foredraft.errors import ConfigError
from foredraft.folders import keep_json, read_own_json
from foredraft.methods.selfdraft import LayerSetOptions, LayerSkipOptions
from foredraft.model import sublayers
from foredraft.model.execution.rounding import quantize_linears
from foredraft.model.lm import CausalLM, Nodes

FORMAT = "foredraft-layer-set"


@dataclass(frozen=True)
class LayerSet:
    """Residual branches that are skipped while drafting.

    Args:
      attention, mlp: indices of the layers, ascending.
      num_layers: number of layers of the model that the set is for; None for any.
      details: information on the origin of the set, kept unchanged.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    num_layers: int | None = None
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def given(cls, options: LayerSetOptions, num_layers: int) -> LayerSet | None:
        """Return the set that the options give for a model of ``num_layers`` layers, or None if they give none."""
        if isinstance(options, LayerSkipOptions) and options.exit_layer is not None:
            return cls.exit_at(options.exit_layer, num_layers)
        if options.layer_set is not None:
            return cls.load(options.layer_set)
        if options.num_ways:
            return cls(options.skipped_attention or (), options.skipped_mlp or ())
        return None

    @classmethod
    def exit_at(cls, layer: int, num_layers: int) -> LayerSet:
        """Return the set of all layers from ``layer`` on, for early exit: the first ``layer`` layers and the output
        layer draft.

        Raises: ConfigError unless 1 <= layer < num_layers.
        """
        if not 1 <= layer < num_layers:
            raise ConfigError(
                f"exit_layer is {layer}; the model has {num_layers} layers, so it must be in 1..{num_layers - 1}"
            )
        rest = tuple(range(layer, num_layers))
        return cls(rest, rest, num_layers)

    @classmethod
    def load(cls, path: str | Path) -> LayerSet:
        """Read a file that ``save`` or ``foredraft tune layer-skip`` wrote.

        Raises: ConfigError for a missing file or one of another kind.
        """
        path = Path(path).expanduser()
        content = read_own_json(path, FORMAT, "layer set", "foredraft tune layer-skip")
        try:
            return cls(
                _layers(content, "skipped_attention"),
                _layers(content, "skipped_mlp"),
                _whole(content["num_layers"], "num_layers"),
                dict(content.get("details") or {}),
            )
        except KeyError as error:
            raise ConfigError(
                f"the layer set {path} has no entry {error}; make a new one with foredraft tune layer-skip"
            ) from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a layer set: {error}; make one with foredraft tune layer-skip") from None

    def save(self, path: str | Path) -> None:
        """Write the set to a JSON file."""
        content = {
            "format": FORMAT,
            "num_layers": self.num_layers,
            "skipped_attention": list(self.attention),
            "skipped_mlp": list(self.mlp),
            "details": self.details,
        }
        keep_json(Path(path), content)

    def check(self, num_layers: int, model_name: str) -> None:
        """Check that the set fits a model.

        Raises: ConfigError if the set is for another number of layers, or names a layer that the model does not have.
        """
        if self.num_layers is not None and self.num_layers != num_layers:
            raise ConfigError(
                f"the layer set is for a model of {self.num_layers} layers, and {model_name} has {num_layers}; make "
                "one for this model with foredraft tune layer-skip"
            )
        for kind, indices in (("skipped_attention", self.attention), ("skipped_mlp", self.mlp)):
            missing = [index for index in indices if not 0 <= index < num_layers]
            if missing:
                raise ConfigError(
                    f"{kind} contains the layers {missing}, and {model_name} has 0..{num_layers - 1}; remove them"
                )

    def __len__(self) -> int:
        """Return the number of skipped sublayers."""
        return len(self.attention) + len(self.mlp)


def _layers(content: dict[str, Any], key: str) -> tuple[int, ...]:
    """Read a list of layers.

    Raises: KeyError if it is missing; TypeError for anything but a list of whole numbers.
    """
    if not isinstance(content[key], list):
        raise TypeError(f"{key} is {content[key]!r}, not a list of layers")
    return tuple(sorted({_whole(layer, key) for layer in content[key]}))


def _whole(value: object, key: str) -> int:
    """Return a whole number.

    Raises: TypeError for other values, which int() would truncate.
    """
    if type(value) is not int:
        raise TypeError(f"{key} has {value!r}, not a whole number")
    return value


def skipping(target: CausalLM, layer_set: LayerSet) -> CausalLM:
    """Make a variant of the target that skips these sublayers.

    Raises: ConfigError for layers that the target does not have; UnsupportedModelError for layers of an unsupported
    structure.
    """
    layer_set.check(target.num_layers, target.name)

    return target.variant(f"without {len(layer_set)} sublayers", lambda variant, _: leave_out(variant, layer_set))


def quantized(target: CausalLM, group_size: int, layer_set: LayerSet, *, with_head: bool = False) -> CausalLM:
    """Make a variant of the target with 4-bit weights that skips some sublayers.

    Raises: ConfigError if no linear layer of the target can be quantised in groups of this size.
    """
    layer_set.check(target.num_layers, target.name)

    def edit(variant: CausalLM, model: PreTrainedModel) -> None:
        quantize_linears(model, group_size, with_head=with_head)
        if len(layer_set):
            leave_out(variant, layer_set)

    return target.variant("4-bit", edit)


def leave_out(variant: CausalLM, layer_set: LayerSet) -> None:
    """Skip these sublayers in a variant that is being made."""
    sublayers.SkippableLayers(variant.layers, lambda: run_once(variant)).leave_out(layer_set.attention, layer_set.mlp)


def run_once(model: CausalLM) -> None:
    """Run one forward pass over one token, in a separate cache."""
    model.forward(Nodes.from_chains([[0]]), model.new_cache(1, capacity=8))


Sublayer = tuple[str, int]
"""Sublayer as its kind, "attention" or "mlp", and the index of its layer."""

FEWEST_LAYERS = 3
SKIP_RATIO = 0.45
NUM_SCORED = 32
PROPOSAL_INTERVAL = 25
GOOD_ENOUGH = 0.95
MAX_TRIALS = 1000
PATIENCE = 300


class SwiftSearch:
    """Search for the best set of skipped sublayers, with a fixed number of them.

    Source: SWIFT (Xia et al. 2024, arXiv:2410.06916) and its published program. The first and last layers are kept, and
      0.45 of the other sublayers are skipped, at first in every other layer. A candidate exchanges one sublayer of the
      best set, and every 25th candidate comes from Bayesian optimisation. Deviation: before a candidate replaces the
      best set, the best set is scored again on the same tokens, because easy tokens (repetitive text) make every set
      look good. With the published rule, which compares with an earlier score, the search on zoo:tiny ended at sets
      that were
    worse than its start. Bayesian proposals come from Optuna's tree-structured Parzen estimator if Optuna is
    installed; otherwise every candidate is an exchange.

    Args:
      num_layers: number of layers of the model.
      start: first set, which also fixes the number of skipped layers; None for the published set.
      seed: seed of exchanges and proposals.

    Attributes:
      best_score: share of tokens that the best set has predicted; below 0 before the first trial.

    Raises: ConfigError for fewer than three layers, and for a start that skips no sublayer or all of them.
    Randomness: ``seed``.
    """

    def __init__(self, num_layers: int, start: LayerSet | None = None, seed: int = 0) -> None:
        if num_layers < FEWEST_LAYERS:
            raise ConfigError(
                f"layer_search='swift' keeps the first and the last layer, and the model has only {num_layers} layers; "
                "leave layer_search out, and give the layers to skip"
            )
        self._num_layers = num_layers
        self._free: list[Sublayer] = [(kind, i) for kind in ("attention", "mlp") for i in range(1, num_layers - 1)]
        if start is not None and not 0 < len(self._members(start)) < len(self._free):
            raise ConfigError(
                "layer_search='swift' needs a first set that skips some but not all sublayers between the first and "
                "the last layer; correct the given set, or leave it out"
            )
        self._best = frozenset(self._first()) if start is None else self._members(start)
        self.best_score = -1.0
        self._random = random.Random(seed)
        self._names = [f"{kind}.{index}" for kind, index in self._free]
        self._study: Any = None  # for Bayesian proposals
        if find_spec("optuna"):
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
            self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        self.num_trials = 0
        self._num_stale = 0

    def _first(self) -> list[Sublayer]:
        """Return every other layer, up to the skip ratio: 4 of 8 sublayers for six layers."""
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
        """Return the next set to score; the first one is the start."""
        if self.num_trials == 0:
            self._tried = self._best
        elif self._study is not None and self.num_trials % PROPOSAL_INTERVAL == 0:
            self._tried = self._proposed()
        else:
            self._tried = self._exchanged()
        return self._as_set(self._tried)

    def _exchanged(self) -> frozenset[Sublayer]:
        left_out = sorted(self._best)
        remaining = [sublayer for sublayer in self._free if sublayer not in self._best]
        return self._best - {self._random.choice(left_out)} | {self._random.choice(remaining)}

    def _proposed(self) -> frozenset[Sublayer]:
        """Return a set from Bayesian optimisation: the sublayers with the largest proposed numbers."""
        import optuna

        drawn = self._study.ask(dict.fromkeys(self._names, optuna.distributions.FloatDistribution(0.0, 1.0))).params
        order = sorted(range(len(self._free)), key=lambda i: -drawn[self._names[i]])
        return frozenset(self._free[i] for i in order[: len(self._best)])

    def _trial(self, score: float) -> Any:
        """Return the candidate and its score as a trial of Bayesian optimisation."""
        import optuna

        params = {name: float(each in self._tried) for name, each in zip(self._names, self._free, strict=True)}
        distributions: Any = dict.fromkeys(self._names, optuna.distributions.FloatDistribution(0.0, 1.0))
        return optuna.trial.create_trial(params=params, distributions=distributions, value=score)

    def tell(self, score: float, score_again: Callable[[LayerSet], float] | None = None) -> None:
        """Record the score of the candidate, the share of tokens that it predicted.

        Args:
          score: score of the candidate.
          score_again: function that scores the current best set on the same tokens. The candidate must score higher
            than that.
        """
        if score > self.best_score and self.num_trials and score_again is not None:
            self.best_score = score_again(self.best)
        self.num_trials += 1
        if self._study is not None:
            self._study.add_trial(self._trial(score))
        if score > self.best_score:
            self._best, self.best_score, self._num_stale = self._tried, score, 0
        else:
            self._num_stale += 1

    def _as_set(self, sublayers: frozenset[Sublayer]) -> LayerSet:
        kinds = {kind: tuple(sorted(i for k, i in sublayers if k == kind)) for kind in ("attention", "mlp")}
        return LayerSet(kinds["attention"], kinds["mlp"], self._num_layers)
