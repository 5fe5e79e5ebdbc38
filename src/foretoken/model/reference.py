"""What the probe holds a model against: plain forwards over every text of a rehearsal, and linear layers' own code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from foretoken.model.execution.forwards import replacement
from foretoken.model.execution.packing import packable
from foretoken.model.rehearsal import Rehearsal, Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Errors: TypeAlias = list[list[float]]
"""The root-mean-square error of the logits of every node of every row, relative to the spread of the true ones."""

MAX_COLUMNS = 1024  # of the vocabulary; enough for a mean square
NUM_ROWS = 2  # of every linear layer


@dataclass(frozen=True)
class Reference:
    """Plain forwards, without cache, masks and positions.

    Args:
      logits: after the last token of every text.
      rounding: errors of a few of the texts when every layer is given an input that is off by one rounding.
      shape: errors of one text alone, in a forward of another shape; empty when it was not asked for.
      epsilon: what a number is rounded by, relatively, in the dtype that they ran in.
      ahead: largest error of a text that another one goes on from, in whose row other tokens follow it.
      num_tokens: rows times width of these forwards.
    """

    logits: dict[Text, torch.Tensor]
    rounding: list[float]
    shape: list[float]
    epsilon: float
    ahead: float
    num_tokens: int

    def errors(self, texts: Sequence[Sequence[Text]], logits: torch.Tensor) -> Errors:
        """The errors of logits (rows, nodes, V), row by row."""
        return [
            [relative_error(logits[row, node], self.logits[text]) for node, text in enumerate(row_texts)]
            for row, row_texts in enumerate(texts)
        ]


def plain_forwards(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    rehearsal: Rehearsal,
    epsilon: float,
    device: torch.device,
    *,
    once_more: bool,
) -> Reference:
    """Run every text of a rehearsal through the model itself, all in one batch, padded at their ends.

    Args:
      layers: whose inputs are rounded once more in additional rows.
      epsilon: of the dtype that is rounded to.
      once_more: run one of the texts alone, too.
    """
    texts = {text for step in rehearsal.steps for row in rehearsal.texts(step) for text in row}
    whole = sorted((text for text in texts if not _goes_on(text, texts)), key=lambda text: (-len(text), text))
    rounded = whole[:1] + whole[-1:]  # of different rows
    width, start = len(whole[0]), min(map(len, texts))
    rows = [[*text, *[text[-1]] * (width - len(text))] for text in whole + rounded]

    def run(rows: list[list[int]]) -> torch.Tensor:
        ids = torch.tensor(rows, device=device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=width - start + 1).logits
        return sampled(logits)

    with _rounded_inputs(layers, len(whole), epsilon):
        results = run(rows)
    logits: dict[Text, torch.Tensor] = {}
    ahead = 0.0
    for row, text in enumerate(whole):
        for end in range(start, len(text) + 1):
            first = logits.setdefault(text[:end], results[row, end - start])
            ahead = max(ahead, relative_error(results[row, end - start], first))

    def errors(texts: list[Text], results: torch.Tensor) -> list[float]:
        return [
            relative_error(results[row, end - start], logits[text[:end]])
            for row, text in enumerate(texts)
            for end in range(start, len(text) + 1)
        ]

    shape = errors(whole[:1], run(rows[:1])) if once_more else []
    rounding = errors(rounded, results[len(whole) :])
    return Reference(logits, rounding, shape, epsilon, ahead, (len(rows) + once_more) * width)


def _goes_on(text: Text, texts: set[Text]) -> bool:
    return any(len(other) > len(text) and other[: len(text)] == text for other in texts)


@contextmanager
def _rounded_inputs(layers: Sequence[nn.Module], first_row: int, epsilon: float) -> Iterator[None]:
    """Let the rows from the given one on enter every layer with a relative error as a rounding makes it.

    What kernels round depends on the machine and on luck; how a model magnifies what is rounded does not.
    """
    generator = torch.Generator().manual_seed(0)

    def disturb(states: torch.Tensor) -> torch.Tensor:
        rows = states[first_row:]
        noise = torch.randn(rows.shape, generator=generator).to(states.device) * (epsilon / 2)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return torch.cat([states[:first_row], (wide * (1 + noise)).to(states.dtype)])

    def hook(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (disturb(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": disturb(kwargs["hidden_states"])}

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sampled(logits: torch.Tensor) -> torch.Tensor:
    """Evenly spaced columns (..., V) of logits, at most `MAX_COLUMNS`, as float64 on the CPU."""
    stride = -(-logits.shape[-1] // MAX_COLUMNS)
    return logits[..., ::stride].double().cpu()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root-mean-square error (V,), relative to the spread of what is right; infinite for NaN.

    Entries that are infinite in both count as equal: some models rule tokens out.
    """
    finite = torch.isfinite(want)
    if not bool(finite.any()) or not torch.equal(torch.isfinite(got), finite):
        return float("inf")
    got, want = got[finite], want[finite]
    error = float((got - want).square().mean().sqrt())
    spread = float((want - want.mean()).square().mean().sqrt())
    return 0.0 if error == 0.0 else error / max(spread, 1e-12)


def epsilon(dtype: torch.dtype, rounds_inputs: str) -> float:
    """What a number is rounded by, relatively: at least as in float32, in which models take norms and angles anyway.

    Args:
      rounds_inputs: that layers round their inputs to 8 bits, if they do, which is about as coarse as bfloat16: the
        last bit of an input can move it by a whole step.
    """
    least = torch.finfo(torch.bfloat16 if rounds_inputs else torch.float32).eps
    return max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0, least)


class LinearSamples:
    """Inputs and outputs of linear layers' own code, a few rows of each, to compare with the code that replaces it."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._samples: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    @contextmanager
    def taken(cls, model: nn.Module | None) -> Iterator[LinearSamples | None]:
        """Take samples in the forwards of the block; without a model, none."""
        if model is None:
            yield None
            return
        samples = cls(model)
        # in front of the model's own hooks: they are not what is replaced
        handles = [layer.register_forward_hook(samples._keep, prepend=True) for layer in packable(model)]
        try:
            yield samples
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        rows = (tensor.reshape(-1, tensor.shape[-1])[:NUM_ROWS].clone() for tensor in (args[0], output))
        self._samples[layer] = (next(rows), next(rows))

    def errors(self) -> dict[str, float]:
        """Relative errors, by path, of layers whose forward was replaced since; NaN where their own code gave it."""
        return {
            self._paths[layer]: _relative_distance(layer.forward(inputs), outputs)
            for layer, (inputs, outputs) in self._samples.items()
            if replacement(layer) is not None
        }


def _relative_distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if bool(got.isnan().any()) and not bool(want.isnan().any()):
        return math.inf
    error, size = (float(tensor.square().sum().sqrt()) for tensor in (got.double() - want.double(), want.double()))
    return 0.0 if error == 0.0 else error / max(size, 1e-30)
