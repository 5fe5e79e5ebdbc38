"""Test of a model at load time: can drafts be verified exactly with it?

Three questions are tested separately, each where a fault is clearly visible:

1. Does the model's code use masks, positions and the cache correctly? This does not depend on dtype or depth, so a few
   layers are tested in single precision, where rounding cannot be mistaken for a fault.
2. Does every packed layer compute what the original computes? Each layer is tested alone.
3. Does the whole model, in its final execution, agree with plain forward passes? The bound is its own rounding.

All bounds are measured on the model as well.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from foredraft.errors import ProbeError, error_with_type, is_fatal
from foredraft.model.reduced import converted_bytes, group_attention, representative, representatives
from foredraft.model.reference import (
    FAULTS,
    NUM_ROWS,
    WINDOW,
    ProbePlan,
    Reference,
    epsilon,
    linear_errors,
    linear_samples,
    plain_forwards,
    sampled,
    shift_positions,
    show_everything,
)

if TYPE_CHECKING:
    from foredraft.model.lm import CausalLM


Verdict = Literal["right", "wrong", "unclear"]
MARGIN = 4.0
"""An error below this multiple of the rounding counts as rounding. A fault below this multiple cannot be detected."""


@dataclass(frozen=True)
class Check:
    """One comparison with plain forward passes. All numbers are relative to the spread of the correct values.

    Args:
      error: measured error.
      noise: error that rounding alone causes.
      control: error that the least visible of the deliberate faults causes.
      bound: limit for the error: the geometric mean of noise and control, and at least `MARGIN` times the noise.
      verdict: "right", "wrong", or "unclear" if the control is not above the bound, so that a small error proves
        nothing.
    """

    name: str
    error: float
    noise: float
    control: float
    bound: float
    verdict: Verdict

    @classmethod
    def of(cls, name: str, error: float, noise: float, control: float) -> Check:
        """Compare an error with the bound that follows from noise and control."""
        bound = max(MARGIN * noise, math.sqrt(noise * control))
        verdict: Verdict = "wrong" if not error <= bound else "right" if control > bound else "unclear"
        return cls(name, error, noise, control, bound, verdict)

    def describe(self) -> str:
        """Return the numbers in one phrase."""
        return (
            f"relative error {self.error:.2g}; rounding alone gives {self.noise:.2g}, a deliberate fault "
            f"{self.control:.2g}; the limit is {self.bound:.2g}"
        )


@dataclass(frozen=True)
class Probe:
    """Result of the test of a model.

    Args:
      checks: checks named "chains", "trees" and "branches" of the reduced model, "linears" if layers are packed, and
        "execution" of the whole model in its final execution.
      layers: decoder layers of the reduced model.
      dtype: dtype of the reduced model.
      window: width of the model's sliding windows, small enough for a short sequence to fill them; None without any.
      invisible: faults that have no effect in this model, such as wrong positions in a model without positions.
      num_forwards: number of forward passes of all kinds.
      num_tokens: sum of rows times width over these forward passes.
      seconds: duration, without packing.
      extra_bytes: largest of these layers in that dtype, which is held beside the model for the duration of a call.
      is_kept: True if this result was found at an earlier start and read from the cache folder; see
        `foredraft.model.verdicts`.
    """

    checks: tuple[Check, ...]
    layers: tuple[int, ...]
    dtype: str
    window: int | None
    invisible: tuple[str, ...]
    num_forwards: int
    num_tokens: int
    seconds: float
    extra_bytes: int
    is_kept: bool = False

    @property
    def supports_trees(self) -> bool:
        return all(check.verdict != "wrong" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return data for JSON, which has no infinity: a non-finite error becomes None."""
        data = dataclasses.asdict(self)
        for check in data["checks"]:
            check["error"] = check["error"] if math.isfinite(check["error"]) else None
        return data


logger = logging.getLogger("foredraft")

COARSEST = 0.03
"""Four times the rounding of bfloat16. Results of coarser arithmetic depend on more than the sequence."""


class Prober:
    """Tests an adapter `before` its weights are packed, and `after`.

    Args:
      lm: adapter whose weights are not packed yet.
      is_packed: True if the adapter's weights will be packed. Attention then does not copy the keys of grouped heads,
        as on accelerators.
      seed: seed of the test tokens.
    """

    def __init__(self, lm: CausalLM, *, is_packed: bool, seed: int = 0) -> None:
        self._lm = lm
        self._is_packed = is_packed
        self._seed = seed
        self._rehearsal = ProbePlan.of_trees(lm.vocab_size, seed, (show_everything, shift_positions))
        self._layers: tuple[int, ...] = ()
        self._dtype: torch.dtype | None = None
        self._seconds = 0.0
        self._num_forwards = self._num_tokens = 0

    # -- a few layers in single precision ----------------------------------------------------------------------------

    @torch.inference_mode()
    def before(self) -> None:
        """Check the structure, and store the results of plain forward passes and of original layers.

        Raises: ProbeError if chains are wrong, or the results of a row depend on the batch by more than rounding.
        """
        lm, start = self._lm, time.perf_counter()
        self._structure = self._check_structure()
        chains, *others = self._structure
        if chains.verdict == "wrong":
            raise ProbeError(
                f"{lm.name} does not give the same logits for a draft as for plain text ({chains.describe()}): it "
                "ignores explicit positions or 4-D masks, so drafts cannot be verified exactly. Use a model with "
                "rotary or learned absolute positions."
            )
        self._without_trees = next((check for check in others if check.verdict == "wrong"), None)
        if chains.verdict == "unclear":
            logger.warning(
                "%s hardly reacts to a wrong mask (%s), so the test at load time cannot show whether its drafts are "
                "verified exactly.",
                lm.name,
                chains.describe(),
            )
        with linear_samples(lm.shadow if self._is_packed else None) as self._samples:
            self._reference = self._plain(lm.shadow, lm.layers, self._rehearsal, lm.dtype, once_more=False)
        self._seconds = time.perf_counter() - start

    def _check_structure(self) -> list[Check]:
        """Return the checks of the reduced model, in single precision or the nearest dtype that runs."""
        lm = self._lm
        layers = representatives(lm.layers, lm.layer_types)
        everything, single = tuple(range(lm.num_layers)), torch.promote_types(lm.dtype, torch.float32)
        own = lm.dtype if lm.dtype.is_floating_point else single
        for self._layers, self._dtype in ((layers, single), (layers, own), (everything, None)):
            try:
                return self._rehearse_twice()
            except ProbeError:
                raise
            except Exception as error:
                if is_fatal(error):
                    raise
                if self._dtype is None:
                    said = error_with_type(error).partition("\n")[0]
                    raise ProbeError(f"{lm.name} fails on plain text, without any draft ({said}).") from error
                logger.debug("%s: testing layers %s in dtype %s failed: %s", lm.name, self._layers, self._dtype, error)
        raise AssertionError("the last attempt returns or raises")

    def _rehearse_twice(self) -> list[Check]:
        checks = self._rehearse(self._seed)
        if any(check.verdict == "wrong" for check in checks):
            # a near-tie between experts can look like a fault, but does not occur twice
            checks = self._rehearse(self._seed + 1, checks[0].noise)
        return checks

    def _rehearse(self, seed: int, noise: float = 0.0) -> list[Check]:
        """Compare chains, trees, and steps after a branch with plain forward passes, in the reduced model.

        Args:
          noise: rounding error that is already known.
        """
        lm, faults = self._lm, [fault for _, fault in FAULTS]
        rehearsal = ProbePlan.whole(lm.vocab_size, seed, faults)
        small = representative(lm, self._layers, self._dtype, WINDOW)
        layers = [small.layers[index] for index in self._layers]
        reference = self._plain(small.shadow, layers, rehearsal, small.dtype, once_more=True)
        self._refuse_looking_ahead(reference)
        noise = max(noise, *reference.rounding, *reference.shape, reference.epsilon / 2)
        self._refuse_coarse(reference)
        if self._is_packed or small.device.type != "cpu":
            group_attention(small)
        results = self._run(rehearsal, small)
        errors = {step.name: reference.errors(rehearsal.texts(step), results[step.name]) for step in rehearsal.steps}
        controls: dict[str, float] = {}
        for (name, _), row in zip(FAULTS, errors["trees"][2:], strict=True):
            controls[name] = min(max(row), controls.get(name, math.inf))
        visible = [control for control in controls.values() if control > MARGIN * noise]
        control = min(visible) if controls["masks"] in visible else controls["masks"]
        self._invisible = tuple(name for name in controls if controls[name] not in visible)
        self._window = small.window
        worst = {name: max(max(row) for row in rows[:2]) for name, rows in errors.items()}
        chains = max(worst["chains"], worst["token"])
        measured = {"chains": chains, "trees": worst["trees"], "branches": worst["branches"]}
        return [Check.of(name, error, noise, control) for name, error in measured.items()]

    def _refuse_looking_ahead(self, reference: Reference) -> None:
        """Check that the logits of a token do not depend on later tokens.

        Raises: ProbeError if they do.
        """
        if reference.ahead > COARSEST:
            raise ProbeError(
                f"{self._lm.name} gives a token different logits if the tokens after it change (relative error "
                f"{reference.ahead:.2g}): its attention looks ahead, as an encoder's does, so it is not a causal "
                "language model and cannot verify drafts. BERT models need is_decoder=True in their config."
            )

    def _refuse_coarse(self, reference: Reference) -> None:
        """Check that a sequence has the same states alone and in a batch, within rounding.

        Raises: ProbeError if it does not.
        """
        alone, rounding = max(reference.shape), max(*reference.rounding, reference.epsilon / 2)
        if not alone * reference.epsilon <= COARSEST * rounding:
            raise ProbeError(
                f"{self._lm.name} gives a sequence different logits alone than in a batch (relative error "
                f"{alone:.2g}; rounding explains {rounding:.2g}): its arithmetic depends on the other rows, for "
                "example because activations are quantised together. Drafts cannot be verified exactly. Quantise "
                "weights only."
            )

    # -- the whole model, as it runs ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def after(self) -> Probe:
        """Check packed layers and the whole model, and return all results.

        Raises: ProbeError.
        """
        lm, start = self._lm, time.perf_counter()
        checks = [*self._structure, *self._check_linears(), *self._check_execution()]
        if self._without_trees is not None:
            is_code = self._without_trees in self._structure
            logger.warning(
                "%s verifies chains but not trees (%s); drafts are reduced to chains.%s",
                lm.name,
                self._without_trees.describe(),
                "" if is_code else f" The cause is running {self._as_it_runs()}: try {self._remedy()}.",
            )
        lm.num_forwards = 0
        return Probe(
            tuple(checks),
            layers=self._layers,
            dtype=_name(self._small_dtype),
            window=self._window,
            invisible=self._invisible,
            num_forwards=self._num_forwards,
            num_tokens=self._num_tokens,
            seconds=self._seconds + time.perf_counter() - start,
            extra_bytes=max(converted_bytes(lm.layers[index], self._dtype) for index in self._layers),
        )

    @property
    def _small_dtype(self) -> torch.dtype:
        """Dtype of the reduced model."""
        return self._dtype or self._lm.dtype

    def _check_linears(self) -> list[Check]:
        """Compare every layer with a replaced forward with its original, on an earlier input."""
        if not (errors := linear_errors(self._lm.shadow, self._samples)):
            return []
        self._num_forwards, self._num_tokens = self._num_forwards + 1, self._num_tokens + NUM_ROWS
        path, worst = max(errors.items(), key=lambda item: (math.isnan(item[1]), item[1]))
        if math.isnan(worst):  # torch's attention hides it from plain logits
            raise ProbeError(f"layer {path} of {self._lm.name} gives NaN for plain text; its weights are damaged.")
        noise = epsilon(self._lm.dtype, self._lm.rounds_inputs) / 2
        check = Check.of("linears", worst, noise, 1.0)  # the output of another layer has relative error 1
        if check.verdict == "wrong":
            raise ProbeError(
                f"layer {path} of {self._lm.name} does not compute in {self._lm.execution.kind} execution what it "
                f'computes eagerly ({check.describe()}); use execution="eager".'
            )
        return [check]

    def _check_execution(self) -> list[Check]:
        """Run trees through the model in its final execution, or chains if trees have already failed."""
        lm, check = self._lm, None
        if self._without_trees is None:
            check = self._execute(self._rehearsal, 0, ("masks", "positions"))
            if check.verdict != "wrong":
                return [check]
        chains = self._execute(self._rehearsal.as_chains(), 1)
        if chains.verdict != "wrong":
            self._without_trees = self._without_trees or check
            return [each for each in (check, chains) if each is not None]
        raise ProbeError(
            f"{lm.name} does not give the same logits for a draft as for plain text {self._as_it_runs()} "
            f"({chains.describe()}), although its code handles masks and positions correctly in "
            f"{_name(self._small_dtype)}. Use {self._remedy()}."
        )

    def _as_it_runs(self) -> str:
        return f"in {_name(self._lm.dtype)} and {self._lm.execution.kind} execution"

    def _remedy(self) -> str:
        return 'dtype="float32"' if self._lm.execution.kind == "eager" else 'execution="eager"'

    def _execute(self, rehearsal: ProbePlan, control: int, must_show: Sequence[str] = ()) -> Check:
        """Compare the results of a plan with plain forward passes, and do the same with a fault in every row.

        Args:
          control: row of the deliberate fault that determines the bound.
          must_show: names of the faults, by row, that must change the result.
        """
        lm, reference = self._lm, self._reference
        step, faulty = rehearsal.steps
        texts, results = rehearsal.texts(step), self._run(rehearsal, lm)
        for row, name in enumerate(must_show):
            right, wrong = (results[each.name][row, : len(texts[row])] for each in (step, faulty))
            if name not in self._invisible and torch.equal(right, wrong):
                raise ProbeError(
                    f"{lm.name} gives the same logits with right and with wrong {name} {self._as_it_runs()}, so "
                    f"drafts cannot be verified exactly. Use {self._remedy()}."
                )
        errors, controls = (reference.errors(texts, results[each.name]) for each in (step, faulty))
        # medians, since in half precision some tokens are routed to other experts
        noise = max(median(reference.rounding), reference.epsilon / 2)
        return Check.of("execution", median(error for row in errors for error in row), noise, median(controls[control]))

    # -- forwards ----------------------------------------------------------------------------------------------------

    def _plain(
        self,
        model: PreTrainedModel,
        layers: Sequence[torch.nn.Module],
        rehearsal: ProbePlan,
        dtype: torch.dtype,
        *,
        once_more: bool,
    ) -> Reference:
        reference = plain_forwards(
            model, layers, rehearsal, epsilon(dtype, self._lm.rounds_inputs), self._lm.device, once_more=once_more
        )
        self._num_forwards += 1 + once_more
        self._num_tokens += reference.num_tokens
        if any(logits.isnan().any() for logits in reference.logits.values()):
            cause = "its weights are damaged" if dtype.itemsize >= 4 else 'dtype="float32" has a wider range'
            raise ProbeError(f"{self._lm.name} gives NaN for plain text in {_name(dtype)}; {cause}.")
        return reference

    def _run(self, rehearsal: ProbePlan, lm: CausalLM) -> dict[str, torch.Tensor]:
        try:
            results = rehearsal.run(lm.forward, lm.new_cache(len(rehearsal.prefixes), capacity=64, rounds=False))
        except Exception as error:
            if self._dtype is None or lm is self._lm:
                raise ProbeError(
                    f"{lm.name} cannot run over 4-D masks and explicit positions ({error_with_type(error)}), "
                    "so drafts cannot be verified exactly."
                ) from error
            raise
        self._num_forwards += rehearsal.num_forwards
        self._num_tokens += rehearsal.num_tokens
        return {name: sampled(logits) for name, logits in results.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
