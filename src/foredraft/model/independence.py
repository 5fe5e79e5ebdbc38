"""Check that quantised layers compute every row of a forward pass independently, as exact verification needs.

Quantised weights alone are harmless: a layer that dequantises them computes each row independently. Layers that also
round their inputs may use a scale that all rows of a forward pass share. The output of a row then depends on the draft,
and on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from foredraft.errors import UnsupportedModelError
from foredraft.model.execution.experts import own_matrices

NUM_ROWS = 17  # more than any kernel for few rows takes (8 in GGUF's)
FEW = (1, 5)
LOUD = 50.0
SHARED_LIMIT = 2e-3
"""Maximum relative change of a row when other rows of the same shape change. An exact layer does not change. Kernels
whose sums are not repeatable stay below this limit.
"""
SMALL = 2.0**-12
"""Size of a test change, relative to the largest number of a row: far below one step of 8 bits, and far above the
rounding of float32.
"""
UNLIKE = 0.1
"""Maximum relative difference between the responses to a small change and to one `LARGE` times as large.

A layer over floats responds in proportion, within a hundredth. A layer that rounds its inputs to 8 bits responds to the
small change in whole steps or not at all, so the responses differ completely.
"""
LARGE = 64.0
SHAPE_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_SHAPE_LIMIT = 0.02


@torch.inference_mode()
def check_rows_independent(model: nn.Module, name: str, dtype: torch.dtype, device: torch.device) -> str:
    """Run every quantised linear layer of a shadow over random rows of normal and of large size, in batches of several
    sizes.

    Costs about as much as four forward passes of the model.

    Returns: a sentence if a layer rounds its inputs more coarsely than its dtype does; empty if none does.
    Raises: UnsupportedModelError if a row depends on others; the message names the layer.
    """
    rounding = ""
    for path, layer in quantised_layers(model):
        errors = _errors(layer, dtype, device)
        if errors is None:
            continue  # the layer expects other inputs; the probe tests it within the model
        what = f"{path} of {name} is quantised ({_kind(layer)}) and"
        remedy = "Load the weights dequantised, or in a format that quantises weights alone (int8 or int4 weight-only)."
        shared, shape = errors
        if not shared <= SHARED_LIMIT:
            raise UnsupportedModelError(
                f"{what} rounds inputs with a scale shared by all rows of a forward pass: one row changed by "
                f"{shared:.2g} of its size when another became larger (allowed {SHARED_LIMIT:.2g}). Outputs depend "
                f"on the draft and the batch, so drafts cannot be verified exactly. {remedy}"
            )
        limit = SHAPE_LIMITS.get(dtype, HALF_SHAPE_LIMIT)
        if not shape <= limit:
            raise UnsupportedModelError(
                f"{what} computes few rows differently from many: one row changed by {shape:.2g} of its size between "
                f"batches of {', '.join(map(str, FEW))} and {NUM_ROWS} rows (allowed {limit:.2g}). Outputs depend on "
                f"the size of the draft, so drafts cannot be verified exactly. {remedy}"
            )
        if _rounds_inputs(layer, dtype, device):
            rounding = f"{_kind(layer)} rounds its inputs, so that log-probabilities hundredths apart are near-ties"
    return rounding


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the innermost linear layers (modules with ``in_features``) whose weights are not plain tensors of
    floats."""
    for path, layer in model.named_modules():
        if isinstance(_num_inputs(layer), int) and not has_plain_weight(layer):
            inner = (child for child in layer.modules() if child is not layer)
            if not any(isinstance(_num_inputs(child), int) for child in inner):
                yield path, layer


def other_products(model: nn.Module) -> str:
    """Return the path of a module with a matrix that the library's own kernels do not multiply by: neither a linear
    layer nor an embedding, nor experts or a router that can be packed. Empty if there is none.
    """
    own = own_matrices(model)
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)) or module in own:
            continue
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)) and not _is_norm(module):
            return str(path)
    return ""


@torch.inference_mode()
def _is_norm(module: nn.Module) -> bool:
    """Return whether a module scales inputs that have the shape of its weight, (heads, size), and returns the same
    shape."""
    weights = list(module.parameters())
    if len(weights) != 1:
        return False
    states = torch.ones(1, 1, *weights[0].shape).to(weights[0])
    try:
        scaled = module(states)
    except Exception:  # the module needs other inputs
        return False
    return isinstance(scaled, torch.Tensor) and scaled.shape == states.shape


def has_plain_weight(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer over floats, computed as in `nn.Linear`."""
    weight = getattr(layer, "weight", None)
    return isinstance(layer, nn.Linear) and type(weight) is nn.Parameter and weight.is_floating_point()


@contextmanager
def unchanged_attributes(model: nn.Module, name: str) -> Iterator[None]:
    """Restore attributes of shared tensors that forward passes of a shadow change inside the block.

    Raises: UnsupportedModelError if anything changed, because the owner's modules would lack the change.
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
            f"{changed[0]} of {name} is set up by the first forward pass (as bitsandbytes does for int8). Foredraft "
            "runs a private copy of the modules, so your own modules would miss this setup. Run the model once, "
            "model(input_ids), before you pass it to foredraft."
        )


def _errors(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[float, float] | None:
    """Return relative changes of a row, with larger other rows and with fewer rows; None if the layer cannot run."""
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
    """Return whether a layer rounds its inputs, judged by its response to small changes. False in half precision, which
    is as coarse.
    """
    if torch.finfo(dtype).eps > SMALL / LARGE:
        return False
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(FEW[-1], _num_inputs(layer), generator=generator)  # type: ignore[arg-type]
    change = torch.randn(rows.shape, generator=generator) * rows.abs().amax(-1, keepdim=True) * SMALL
    results = [layer((rows + factor * change).to(device, dtype)).cpu().double() for factor in (0.0, 1.0, LARGE)]
    small, large = results[1] - results[0], (results[2] - results[0]) / LARGE
    return _distance(small, large) > UNLIKE


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest root-mean-square difference of a row, relative to the root mean square of the row."""
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
