"""Whether a model can be verified exactly: measured when it is loaded, against bounds that are measured, too.

Three questions, each asked where the answer is sharp. Does the model's code take masks, positions and cache as they are
meant? That does not depend on dtype and depth, so a few layers are asked in single precision, where rounding cannot be
mistaken for a fault. Does every packed layer compute what the original does? Each is asked on its own. Does the model,
as it is going to run, agree with plain forwards? Here its own rounding is the yardstick.
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

from foredraft.errors import ProbeError, described, is_fatal
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
"""An error below this multiple of the rounding is rounding; a fault below this multiple of it cannot be seen."""


@dataclass(frozen=True)
class Check:
    """One thing that was compared with plain forwards. All numbers are relative to the spread of the correct values.

    Args:
      error: what was measured.
      noise: the error that rounding alone causes.
      control: the error that the least visible of the deliberate faults causes.
      bound: the limit that the error was held against: between noise and control, as far from either, and at least
        `MARGIN` times the noise.
      verdict: "unclear" when the control cannot be told from the noise, so that a small error proves nothing.
    """

    name: str
    error: float
    noise: float
    control: float
    bound: float
    verdict: Verdict

    @classmethod
    def of(cls, name: str, error: float, noise: float, control: float) -> Check:
        """Hold an error against the bound that follows from noise and control."""
        bound = max(MARGIN * noise, math.sqrt(noise * control))
        verdict: Verdict = "wrong" if not error <= bound else "right" if control > bound else "unclear"
        return cls(name, error, noise, control, bound, verdict)

    def describe(self) -> str:
        """The numbers in one phrase."""
        return (
            f"relative error {self.error:.2g}; rounding alone gives {self.noise:.2g}, a fault made on purpose "
            f"{self.control:.2g}, allowed is {self.bound:.2g}"
        )


@dataclass(frozen=True)
class Probe:
    """The findings of a model's probe.

    Args:
      checks: by name: "chains", "trees" and "branches" of the reduced model, "linears" where layers are packed,
        "execution" of the whole model as it runs.
      layers: decoder layers of the reduced model.
      dtype: in which it ran.
      window: width of its sliding windows, narrow enough for a short text to fill them; None without any.
      invisible: faults that do not show in this model, such as wrong positions in one that has none.
      num_forwards: of all kinds; ``num_tokens`` is the sum of rows times width over them.
      seconds: that it took, packing not included.
      extra_bytes: the largest of these layers in that dtype, which is held besides the model for the length of a call.
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

    @property
    def supports_trees(self) -> bool:
        return all(check.verdict != "wrong" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """As data for JSON, which has no infinity: an error without a number is None."""
        data = dataclasses.asdict(self)
        for check in data["checks"]:
            check["error"] = check["error"] if math.isfinite(check["error"]) else None
        return data


logger = logging.getLogger("foredraft")

COARSEST = 0.03
"""Four times the rounding of bfloat16: coarser arithmetic depends on more than the text."""


class Prober:
    """Probes an adapter: `before` its weights are packed, and `after`.

    Args:
      lm: not packed yet.
      is_packed: whether it is going to be. Attention then does not copy the keys of grouped heads, as on accelerators.
      seed: of the tokens.
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
        """Check the structure, and remember what plain forwards and original layers give.

        Raises: ProbeError when chains are wrong, or the model does not round alike in every batch.
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
                "%s hardly reacts to a wrong mask (%s), so the probe cannot tell whether its drafts are verified "
                "exactly.",
                lm.name,
                chains.describe(),
            )
        with linear_samples(lm.shadow if self._is_packed else None) as self._samples:
            self._reference = self._plain(lm.shadow, lm.layers, self._rehearsal, lm.dtype, once_more=False)
        self._seconds = time.perf_counter() - start

    def _check_structure(self) -> list[Check]:
        """Checks of the reduced model in single precision, or the nearest dtype that runs."""
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
                    said = described(error).partition("\n")[0]
                    raise ProbeError(f"{lm.name} fails on plain text, without any draft ({said}).") from error
                logger.debug("%s: layers %s do not run in %s: %s", lm.name, self._layers, self._dtype, error)
        raise AssertionError("the last attempt returns or raises")

    def _rehearse_twice(self) -> list[Check]:
        checks = self._rehearse(self._seed)
        if any(check.verdict == "wrong" for check in checks):
            # a near-tie between experts that falls the other way is as large as a fault, and does not come twice
            checks = self._rehearse(self._seed + 1, checks[0].noise)
        return checks

    def _rehearse(self, seed: int, noise: float = 0.0) -> list[Check]:
        """Chains, trees, and what follows a branch, each against plain forwards, in the reduced model.

        Args:
          noise: that is known already.
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
        """Raises: ProbeError when the logits of a token depend on those that follow it."""
        if reference.ahead > COARSEST:
            raise ProbeError(
                f"{self._lm.name} gives a token other logits where other tokens follow it (relative error "
                f"{reference.ahead:.2g}): its attention looks ahead, as an encoder's does, so it is not a causal "
                "language model and has no drafts to verify. BERT's kind needs is_decoder=True in its config."
            )

    def _refuse_coarse(self, reference: Reference) -> None:
        """Raises: ProbeError when a text has other states alone than in a batch, by more than a rounding."""
        alone, rounding = max(reference.shape), max(*reference.rounding, reference.epsilon / 2)
        if not alone * reference.epsilon <= COARSEST * rounding:
            raise ProbeError(
                f"{self._lm.name} gives a text different logits alone than in a batch (relative error {alone:.2g}, "
                f"where rounding gives {rounding:.2g}): its arithmetic depends on what else runs, as where activations "
                "are quantised together, so drafts cannot be verified exactly. Quantise weights only."
            )

    # -- the whole model, as it runs ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def after(self) -> Probe:
        """Check packed layers and the whole model; the verdict on everything.

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
                "" if is_code else f" This comes from running it {self._as_it_runs()}: try {self._remedy()}.",
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
        """In which the reduced model ran."""
        return self._dtype or self._lm.dtype

    def _check_linears(self) -> list[Check]:
        """Every layer that does not compute as its class does, on an input that it was given before."""
        if not (errors := linear_errors(self._lm.shadow, self._samples)):
            return []
        self._num_forwards, self._num_tokens = self._num_forwards + 1, self._num_tokens + NUM_ROWS
        path, worst = max(errors.items(), key=lambda item: (math.isnan(item[1]), item[1]))
        if math.isnan(worst):  # torch's attention hides it from plain logits
            raise ProbeError(f"layer {path} of {self._lm.name} gives NaN for plain text; its weights are damaged.")
        noise = epsilon(self._lm.dtype, self._lm.rounds_inputs) / 2
        check = Check.of("linears", worst, noise, 1.0)  # another layer's output is off by all
        if check.verdict == "wrong":
            raise ProbeError(
                f"layer {path} of {self._lm.name} does not compute in {self._lm.execution.kind} execution what it "
                f'computes eagerly ({check.describe()}); use execution="eager".'
            )
        return [check]

    def _check_execution(self) -> list[Check]:
        """Trees, or chains where trees are out of the question, through the model as it will run."""
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
        """Hold a rehearsal against plain forwards, and the same with a fault in every row.

        Args:
          control: row of the fault that the bound is derived from.
          must_show: name of the fault in every row, if it has to make a difference.
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
        # medians, since in half precision some tokens go to other experts
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
                    f"{lm.name} cannot run over 4-D masks and explicit positions ({described(error)}), "
                    "so drafts cannot be verified exactly."
                ) from error
            raise
        self._num_forwards += rehearsal.num_forwards
        self._num_tokens += rehearsal.num_tokens
        return {name: sampled(logits) for name, logits in results.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
