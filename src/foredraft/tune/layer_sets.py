"""Bayesian optimisation of the layers to skip, in trials that can be interrupted and resumed, and its search space."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.errors import ConfigError, NothingAcceptedError
from foredraft.extras import install_command
from foredraft.tune.objective import Costs, Score

ATTENTION, MLP = "attention", "mlp"


@dataclass(frozen=True)
class Space:
    """The search space: one binary variable per sublayer, true if the sublayer is skipped while drafting.

    Args:
      num_layers: number of layers of the model.
      kept: layers that are never skipped, counted from 0.
    """

    num_layers: int
    kept: frozenset[int] = frozenset()

    @classmethod
    def of(cls, num_layers: int, kept: Iterable[int] = ()) -> Space:
        """Return the space of a model. Negative layers are counted from the end.

        Raises: ConfigError for a layer that the model does not have, and if all layers are kept.
        """
        wanted = tuple(kept)
        wrong = [layer for layer in wanted if not -num_layers <= layer < num_layers]
        if wrong:
            raise ConfigError(
                f"keep-layers contains {wrong}; the layers of this model are 0..{num_layers - 1} (-1 is the last)"
            )
        space = cls(num_layers, frozenset(layer % num_layers for layer in wanted))
        if not space.free:
            raise ConfigError(f"keep-layers keeps all {num_layers} layers, so there is nothing to search; keep fewer")
        return space

    @property
    def free(self) -> list[int]:
        """Layers whose sublayers may be skipped."""
        return [layer for layer in range(self.num_layers) if layer not in self.kept]

    @property
    def names(self) -> list[str]:
        """Names of the variables, such as "attention.0" for the attention of layer 0."""
        return [f"{kind}.{layer}" for kind in (ATTENTION, MLP) for layer in self.free]

    def layer_set(self, choice: Mapping[str, bool]) -> LayerSet:
        """Return the layer set of an assignment of the variables."""
        left_out: dict[str, list[int]] = {ATTENTION: [], MLP: []}
        for name in self.names:
            kind, layer = name.split(".")
            if choice[name]:
                left_out[kind].append(int(layer))
        return LayerSet(tuple(left_out[ATTENTION]), tuple(left_out[MLP]), self.num_layers)

    def choice(self, layer_set: LayerSet) -> dict[str, bool]:
        """Return the variables of a layer set; sublayers outside the search space are ignored."""
        named = {f"{ATTENTION}.{layer}" for layer in layer_set.attention} | {
            f"{MLP}.{layer}" for layer in layer_set.mlp
        }
        return {name: name in named for name in self.names}

    def probes(self, limit: int) -> list[dict[str, bool]]:
        """Return assignments to begin with, at most ``limit``, all different.

        Patterns come first. They skip more attention than MLP sublayers, because attention is more redundant: the
        published sets skip 24 attention and 10 MLP sublayers of 40 layers, and 47 and 37 of 80 (Draft & Verify,
        arXiv:2309.08168). After the patterns, every sublayer is skipped alone, attention first.
        """
        middle = [layer for layer in self.free if 0 < layer < self.num_layers - 1] or self.free
        patterns = [
            LayerSet(tuple(middle[::2]), (), self.num_layers),
            LayerSet(tuple(middle), (), self.num_layers),
            LayerSet(tuple(middle[::2]), tuple(middle[::4]), self.num_layers),
            LayerSet(tuple(middle[::2]), tuple(middle[::2]), self.num_layers),
        ]
        choices = [self.choice(pattern) for pattern in patterns]
        choices += [{name: name == single for name in self.names} for single in self.names]
        distinct = {tuple(choice.values()): choice for choice in choices}
        return list(distinct.values())[:limit]


_PROBE_SHARE = 0.4
_MAX_REPEATS = 32  # largest number of consecutive proposals that were tried before


def require_optuna() -> ModuleType:
    """Return Optuna, with its log messages silenced.

    Raises: ConfigError if Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError(f"this search needs Optuna, which is not installed: {install_command('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    module: ModuleType = optuna
    return module


class LayerSearch:
    """A search for the layer set with the lowest score, and its trials.

    Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168), section on the choice of skipped layers. Deviations:
    variables are binary instead of thresholded numbers. The optimiser is Optuna's tree-structured Parzen estimator,
    since a Gaussian process took 100 times as long per proposal (2 s against 15 ms at 60 trials of 12 variables, two
    cores). Scores are relative to plain decoding at the same time. The first trials work for any number of layers. Once
    every sublayer was skipped alone, the best of them are tried together.

    Args:
      journal: file to which every trial is written when it ends; None keeps trials in memory only.
      resume: True to continue with the trials in the journal; otherwise the file must not exist.
      identity: facts that must be equal for trials to be comparable, such as model, prompts and objective.
      seed: seed of the optimiser.

    Attributes:
      trials: scores in the order of the trials, without repetitions.
      is_interrupted: True if Ctrl-C ended the search; ``resume`` continues it.

    Raises: ConfigError if Optuna is missing, if the journal exists and ``resume`` is not set, or if the journal belongs
      to another search.
    Randomness: ``seed``.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        journal: Path | None = None,
        resume: bool = False,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self.space = space
        self.trials: list[Score] = []
        self.is_interrupted = False
        self._optuna = require_optuna()
        self._random = random.Random(seed)
        self._seen: dict[tuple[bool, ...], Score] = {}
        self._study = self._open(journal, resume)
        self._check_identity({"num_layers": space.num_layers, "kept": sorted(space.kept), **(identity or {})})
        self._recall()
        seed += len(self.trials)  # a resumed search must not repeat the random numbers of the earlier one
        self._study.sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)

    @property
    def best(self) -> Score:
        return self.ranking(1)[0]

    def ranking(self, count: int) -> list[Score]:
        """Return the best trials, best first; among equal ones the earlier first.

        The set that skips nothing comes after the useful ones, and sets without any accepted token come last.
        """
        return sorted(self.trials, key=lambda trial: (not trial.is_of_use, len(trial.layer_set) == 0, trial.value))[
            :count
        ]

    def check(self) -> None:
        """Raise NothingAcceptedError if no drafted token was accepted under any layer set."""
        if any(trial.is_of_use for trial in self.trials):
            return
        num_drafted = sum(trial.num_drafted for trial in self.trials)
        held = next((f"; under the first of these sets, {one.cuts}" for one in self.trials if one.cuts), "")
        raise NothingAcceptedError(
            f"none of {num_drafted} drafted tokens was accepted under any of the {len(self.trials)} sets that were "
            f"tried{held}; no set is written. Try more sets, or keep more layers (--keep-layers)"
        )

    def _open(self, journal: Path | None, resume: bool) -> Any:
        """Return an Optuna study over the journal."""
        optuna: Any = self._optuna
        if journal is None:
            return optuna.create_study()
        if journal.exists() and not resume:
            raise ConfigError(f"{journal} contains trials of an earlier search; continue with --resume, or remove it")
        try:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
            return optuna.create_study(study_name="layer-skip", storage=storage, load_if_exists=True)
        except OSError as error:
            raise ConfigError(f"the trials cannot be written to {journal}: {error.strerror or error}") from None
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{journal} is not the journal of a search ({error}); remove it") from None

    def costs(self, measured: Costs) -> Costs:
        """Return the costs of forward passes that the journal contains; if there are none, store and return
        ``measured``.

        Scores computed with different costs would not be comparable.
        """
        known = self._study.user_attrs.get("costs")
        if known is None:
            self._study.set_user_attr("costs", asdict(measured))
            return measured
        return Costs(**{**known, "verify": tuple(known["verify"])})

    def _check_identity(self, identity: dict[str, Any]) -> None:
        known = self._study.user_attrs.get("identity")
        if known is None:
            self._study.set_user_attr("identity", identity)
            return
        plain = json.loads(json.dumps(identity))
        different = sorted(key for key in known.keys() | plain.keys() if known.get(key) != plain.get(key))
        if different:
            key = different[0]
            raise ConfigError(
                f"the journal belongs to another search: its {key} is {known.get(key)!r}, not {plain.get(key)!r}; "
                "use the same options as before, or another file"
            )

    def _recall(self) -> None:
        """Read the trials of the journal."""
        for trial in self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,)):
            if "score" in trial.user_attrs and all(name in trial.params for name in self.space.names):
                self._note(trial.params, Score(self.space.layer_set(trial.params), **trial.user_attrs["score"]))

    def _note(self, choice: Mapping[str, bool], score: Score) -> None:
        key = tuple(choice[name] for name in self.space.names)
        if key not in self._seen:
            self._seen[key] = score
            self.trials.append(score)

    def run(
        self, score: Callable[[LayerSet], Score], num_trials: int, on_trial: Callable[[], None] = lambda: None
    ) -> None:
        """Try layer sets until ``num_trials`` different ones are known, including those of the journal.

        Ctrl-C ends the search early and keeps the finished trials.

        Args:
          score: function that decodes the prompts with a layer set and returns its score.
          on_trial: function that is called after every trial.
        """
        limit = min(num_trials, 2 ** len(self.space.names))
        probes = self.space.probes(max(1, round(_PROBE_SHARE * num_trials)))
        try:
            while len(self.trials) < limit:
                untried = (probe for probe in [*probes, *self._together()] if tuple(probe.values()) not in self._seen)
                self._try(next(untried, None), score)
                on_trial()
        except KeyboardInterrupt:
            self.is_interrupted = True

    def _together(self) -> list[dict[str, bool]]:
        """Return the sets of the best 2, 3, 4, 6, 8, 12, ... sublayers, once each was skipped alone.

        Without them the optimiser needs many trials to find that few of many sublayers should be skipped.
        """
        alone = {key.index(True): score.value for key, score in self._seen.items() if sum(key) == 1}
        names = self.space.names
        if len(alone) < len(names):
            return []
        ranked = sorted(alone, key=lambda place: alone[place])
        sizes = [size for power in range(1, len(names)) for size in (2**power, 3 * 2 ** (power - 1))]
        chosen = [{names[place] for place in ranked[:size]} for size in sizes if size < len(names)]
        return [{name: name in several for name in names} for several in chosen]

    def _try(self, probe: dict[str, bool] | None, score: Callable[[LayerSet], Score]) -> None:
        """Score one set that was not tried yet."""
        for _ in range(_MAX_REPEATS):
            trial, choice = self._ask(probe)
            known = self._seen.get(tuple(choice.values()))
            if known is None:
                break
            self._study.tell(trial, known.value)
        else:
            trial, choice = self._ask(self._neighbour())
        found = score(self.space.layer_set(choice))
        trial.set_user_attr("score", found.figures())
        self._study.tell(trial, found.value)
        self._note(choice, found)

    def _ask(self, probe: dict[str, bool] | None = None) -> tuple[Any, dict[str, bool]]:
        if probe is not None:
            self._study.enqueue_trial(probe)
        trial = self._study.ask()
        return trial, {name: trial.suggest_categorical(name, [False, True]) for name in self.space.names}

    def _neighbour(self) -> dict[str, bool]:
        """Return an untried set near the best one, for when the optimiser only repeats itself."""
        choice = self.space.choice(self.best.layer_set)
        while tuple(choice.values()) in self._seen:
            name = self._random.choice(self.space.names)
            choice[name] = not choice[name]
        return choice


def fingerprint(prompts: Any) -> str:
    """Return a short hash of token ids that identifies a workload."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
