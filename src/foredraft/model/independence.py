"""Whether quantised layers compute every row of a forward by itself, as exact verification needs.

Quantised weights are harmless: a layer that turns them back into floats computes each row on its own. Layers
that round their inputs, too, may do so by a scale that all rows of a forward share. Then what a row says depends on
what is drafted, and on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from foredraft.errors import UnsupportedModelError

NUM_ROWS = 17  # more than any kernel for few rows takes (8 in GGUF's)
FEW = (1, 5)
LOUD = 50.0
SHARED_LIMIT = 2e-3
"""Of one shape, other rows must change nothing; kernels that do not repeat their sums move a row by less than this."""
SMALL = 2.0**-12
"""Of the largest number of a row: a change far below a step of 8 bits, and far above the rounding of float32."""
UNLIKE = 0.1
"""A layer over floats answers to such a change and to one that is `LARGE` times as large alike, within a hundredth; one
that rounds its inputs to 8 bits answers to the small one by whole steps or not at all, so that they differ by all."""
LARGE = 64.0
SHAPE_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_SHAPE_LIMIT = 0.02


@torch.inference_mode()
def check_rows_independent(model: nn.Module, name: str, dtype: torch.dtype, device: torch.device) -> str:
    """Run every quantised linear of a shadow over a few random rows, beside quiet and loud ones, in forwards of several
    sizes; about as much work as four forwards of the model.

    Returns: that a layer rounds its inputs, coarser than its dtype does; empty where none does.
    Raises: UnsupportedModelError when a row depends on others, naming the layer.
    """
    rounding = ""
    for path, layer in quantised_layers(model):
        errors = _errors(layer, dtype, device)
        if errors is None:
            continue  # it expects other inputs; the probe runs it within the model
        what = f"{path} of {name} is quantised ({_kind(layer)}) and"
        remedy = "Load the weights dequantised, or in a format that quantises weights alone (int8 or int4 weight-only)."
        shared, shape = errors
        if not shared <= SHARED_LIMIT:
            raise UnsupportedModelError(
                f"{what} rounds the inputs of a row by what all rows of a forward hold: one row moved by {shared:.2g} "
                f"of its size when another became larger (allowed {SHARED_LIMIT:.2g}). Its text depends on what is "
                f"drafted and batched, so drafts cannot be verified exactly. {remedy}"
            )
        limit = SHAPE_LIMITS.get(dtype, HALF_SHAPE_LIMIT)
        if not shape <= limit:
            raise UnsupportedModelError(
                f"{what} computes few rows differently from many: one row moved by {shape:.2g} of its size between "
                f"forwards of {', '.join(map(str, FEW))} and {NUM_ROWS} rows (allowed {limit:.2g}). Its text depends "
                f"on how much is drafted, so drafts cannot be verified exactly. {remedy}"
            )
        if _rounds_inputs(layer, dtype, device):
            rounding = f"{_kind(layer)} rounds its inputs, so that log-probabilities hundredths apart are near-ties"
    return rounding


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linears, by their ``in_features``, whose weight is not a plain tensor of floats; of nested ones the innermost."""
    for path, layer in model.named_modules():
        if isinstance(_num_inputs(layer), int) and not has_plain_weight(layer):
            inner = (child for child in layer.modules() if child is not layer)
            if not any(isinstance(_num_inputs(child), int) for child in inner):
                yield path, layer


def other_products(model: nn.Module) -> str:
    """The name of a module that holds a matrix and is neither a linear layer nor an embedding, such as experts; empty
    where there is none."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
            continue
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)) and not _is_norm(module):
            return type(module).__name__
    return ""


@torch.inference_mode()
def _is_norm(module: nn.Module) -> bool:
    """Whether a module scales what is shaped like its weight, (heads, size), and gives the same shape."""
    weights = list(module.parameters())
    if len(weights) != 1:
        return False
    states = torch.ones(1, 1, *weights[0].shape).to(weights[0])
    try:
        scaled = module(states)
    except Exception:  # it takes something else
        return False
    return isinstance(scaled, torch.Tensor) and scaled.shape == states.shape


def has_plain_weight(layer: nn.Module) -> bool:
    """Whether the layer is a linear over floats, as `nn.Linear` computes it."""
    weight = getattr(layer, "weight", None)
    return isinstance(layer, nn.Linear) and type(weight) is nn.Parameter and weight.is_floating_point()


@contextmanager
def unchanged_attributes(model: nn.Module, name: str) -> Iterator[None]:
    """Put back what forwards of a shadow change about the tensors that it shares, apart from their values.

    Raises: UnsupportedModelError when they changed anything, since the owner's own modules would miss it.
    """
    tensors = {
        f"{path}.{key}": tensor
        for path, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    before = {path: dict(vars(tensor)) for path, tensor in tensors.items()}
    changed = []
    try:
        yield
    finally:
        for path, tensor in tensors.items():
            now, was = vars(tensor), before[path]
            if now.keys() != was.keys() or any(now[key] is not was[key] for key in was):
                changed.append(path)
                now.clear()
                now.update(was)
    if changed:
        raise UnsupportedModelError(
            f"{changed[0]} of {name} is set up by the first forward (as bitsandbytes does for int8), and foredraft "
            "runs modules of its own over the tensors of your model, which yours would not notice. Run the model once, "
            "model(input_ids), before you hand it over."
        )


def _errors(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[float, float] | None:
    """How far a row moves, relative to its size, with louder companions and with fewer; None when it cannot run."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, _num_inputs(layer), generator=generator).to(device, dtype)  # type: ignore[arg-type]
    loud = rows.clone()
    loud[FEW[-1] :] *= LOUD
    try:
        quiet = layer(rows)
        shared = _distance(layer(loud)[: FEW[-1]], quiet[: FEW[-1]])
        shape = max(_distance(layer(rows[:count]), quiet[:count]) for count in FEW)
    except Exception:
        return None
    return shared, shape


def _rounds_inputs(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a layer rounds what it is given, told by what it makes of small changes; never of half precision, which
    is as coarse."""
    if torch.finfo(dtype).eps > SMALL / LARGE:
        return False
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(FEW[-1], _num_inputs(layer), generator=generator)  # type: ignore[arg-type]
    change = torch.randn(rows.shape, generator=generator) * rows.abs().amax(-1, keepdim=True) * SMALL
    results = [layer((rows + factor * change).to(device, dtype)).cpu().double() for factor in (0.0, 1.0, LARGE)]
    small, large = results[1] - results[0], (results[2] - results[0]) / LARGE
    return _distance(small, large) > UNLIKE


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest root-mean-square difference of a row, relative to its root mean square."""
    got, want = got.cpu().double(), want.cpu().double()  # not every device has float64
    size = want.square().mean(-1).sqrt().clamp_min(1e-12)
    return float(((got - want).square().mean(-1).sqrt() / size).max())


def _num_inputs(layer: nn.Module) -> int | None:
    number = getattr(layer, "in_features", getattr(layer, "infeatures", None))
    return number if type(number) is int else None


def _kind(layer: nn.Module) -> str:
    weight, kind = getattr(layer, "weight", None), type(layer)
    is_own = isinstance(weight, torch.Tensor) and type(weight) not in (nn.Parameter, torch.Tensor)
    return f"{kind.__module__}.{kind.__name__}" + (f" over {type(weight).__name__}" if is_own else "")
