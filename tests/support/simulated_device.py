"""A GPU that is simulated on the CPU, for machines without one: torch's device "sim".

A tensor there holds one of the CPU, which computes; all that is done with it comes by `run`. Simulated is what a GPU
refuses, and what it gives in another form:

- Tensors of two devices are never mixed, but for what CUDA lets pass: scalars, index tensors, copies. Numpy, generators
  of the CPU and addresses of memory belong to the CPU alone.
- Attention gives its result with heads and nodes turned in memory, as a kernel of CUDA's does in float32, and
  ``topk`` gives equal values in another order.
- Transfers are counted in `transfers`: on a GPU those to the host wait for all that was computed so far.

Not simulated are speed, memory, what runs meanwhile, streams, graphs, and how CUDA's kernels round.

Importing it changes torch for the whole process, so it has one of its own: see tests/engine/test_accelerator.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("sim")
DEVICE = torch.device("sim:0")
TO_HOST, TO_DEVICE = "to the host", "to the device"
transfers: list[tuple[str, int]] = []
"""Direction of each, and how many numbers it took along."""

refused: set[torch.dtype] = set()
"""Dtypes that the device does not have, as MPS has no float64."""

ONLY_SIZES = {"expand_as", "view_as", "reshape_as", "type_as"}
"""Operations that look at nothing else of another tensor."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


def is_simulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


class Simulated(torch.Tensor):
    """A tensor on the device.

    Args:
      raw: its numbers, on the CPU.
    """

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Simulated:
        is_other = raw.is_inference() != torch.is_inference_mode_enabled()  # a view of a parameter is none of inference
        with torch.inference_mode(raw.is_inference()) if is_other else nullcontext():
            return torch.Tensor._make_wrapper_subclass(
                cls,
                raw.size(),
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=DEVICE,
                requires_grad=raw.requires_grad,
            )

    def __init__(self, raw: torch.Tensor) -> None:
        assert not isinstance(raw, Simulated)
        if raw.dtype in refused:
            raise TypeError(f"Cannot convert a sim tensor to {raw.dtype}, which the device does not have")
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, *args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"Simulated({self.raw!r})"

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def tolist(self) -> Any:
        transfers.append((TO_HOST, self.raw.numel()))
        return self.raw.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert sim:0 device type tensor to numpy; use Tensor.cpu()")

    def data_ptr(self) -> int:
        """An address that nobody on the CPU may read."""
        return self.raw.data_ptr() | 1 << 62

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What files hold of it: they are read to the CPU (``map_location``)."""
        return self.raw.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = Simulated(self.raw.clone()).requires_grad_(self.requires_grad)
        copied.__dict__.update({key: value for key, value in self.__dict__.items() if key != "raw"})
        return copied

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **others)


def _indices(index: Any) -> Any:
    """Lists of numbers become tensors on the device, as they do on a GPU."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index, device=DEVICE, dtype=None if index else torch.long) if type(index) is list else index


def raw(value: Any) -> Any:
    """What lies on the CPU of any value."""
    return value.raw if isinstance(value, Simulated) else value


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """`tree_map` of torch, in a fraction of its time for what operators take and give."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(change, each) for each in value])
    if kind is dict:
        return {key: mapped(change, each) for key, each in value.items()}
    return tree_map(change, value) if isinstance(value, (tuple, list, dict)) else change(value)


def run(function: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation of torch with arguments on the device, or one that is to give its result there."""
    name = function.overloadpacket.__name__
    if name == "_has_compatible_shallow_copy_type":  # asked by `Module.to`
        return type(args[0]) is type(args[1])
    given: list[torch.Tensor] = []
    on_cpu = mapped(lambda value: _noted(value, given) if isinstance(value, torch.Tensor) else value, (args, kwargs))
    _check_devices(name, args, given)
    if kwargs.get("generator") is not None:
        raise RuntimeError("Expected a 'sim' device type for generator but found 'cpu'")
    if name in ("_to_copy", "to"):
        return _copied(function, *args, **kwargs)
    if name == "copy_":
        if type(args[0]) is not type(args[1]):
            transfers.append((TO_DEVICE if isinstance(args[0], Simulated) else TO_HOST, args[1].numel()))
    elif name in ("_local_scalar_dense", "equal", "nonzero"):
        transfers.append((TO_HOST, 1))
    device = kwargs.get("device", DEVICE)
    if "device" in kwargs:
        on_cpu[1]["device"] = "cpu"
    found = FORMS.get(name, _as_it_is)(function, *on_cpu)
    if type(found) is torch.Tensor and len(given) == 1 and found is not raw(given[0]):
        return Simulated(found) if is_simulated(device) else found
    owners = {id(value.raw): value for value in given if isinstance(value, Simulated)}

    def on_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        owner = owners.get(id(value))  # written in place
        if owner is not None and owner.shape != value.shape:
            raise NotImplementedError(f"{function} gives a tensor of the device another shape in place")
        return owner if owner is not None else Simulated(value)

    return mapped(on_device, found) if is_simulated(device) else found


def _noted(value: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
    given.append(value)
    return raw(value)


def _check_devices(name: str, args: Any, given: list[torch.Tensor]) -> None:
    """Refuse what CUDA refuses."""
    if name in ONLY_SIZES or name in ("copy_", "_to_copy", "to"):
        return
    if name in INDEXING:  # the indices may lie on the CPU, if what they look into does not
        given = [args[0], *args[2:3]]
        if not isinstance(args[0], Simulated):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        transfers.extend((TO_HOST, 1) for index in args[1] if index is not None and index.dtype == torch.bool)
    if any(value.dim() > 0 and not isinstance(value, Simulated) for value in given):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu! ({name})"
        )


def _copied(function: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """To another device or dtype."""
    targets = [each.device if isinstance(each, torch.Tensor) else each for each in (*args, *kwargs.values())]
    target = next((each for each in targets if isinstance(each, torch.device)), value.device)
    on_device = is_simulated(target)

    def here(each: Any) -> Any:
        return torch.device("cpu") if isinstance(each, torch.device) else raw(each)

    found = function(raw(value), *map(here, args), **{key: here(each) for key, each in kwargs.items()})
    if on_device == isinstance(value, Simulated):
        return value if found is raw(value) else Simulated(found) if on_device else found
    transfers.append((TO_DEVICE if on_device else TO_HOST, value.numel()))
    found = found.clone() if found is raw(value) else found
    return Simulated(found) if on_device else found


# -- results of another form than on a CPU -------------------------------------------------------------------------


def _as_it_is(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _turned(function: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """(B, H, N, D) that lies in memory as (B, N, H, D)."""
    return function(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)


def _topk(function: Any, args: Any, kwargs: Any) -> Any:
    """Of equal values the last ones first."""
    values, *others = args
    dim = kwargs.get("dim", others[1] if len(others) > 1 else -1)
    best, places = function(values.flip(dim), *others, **kwargs)
    return best, values.shape[dim] - 1 - places


FORMS: dict[str, Callable[[Any, Any, Any], Any]] = {"scaled_dot_product_attention": _turned, "topk": _topk}


# -- torch ---------------------------------------------------------------------------------------------------------

_library = torch.library.Library("_", "IMPL")
_library.fallback(run, "PrivateUse1")  # without a tensor
torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` keeps tied weights tied, as it does elsewhere
_operators = torch.library.Library("aten", "IMPL")
for _name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m"):  # else an empty tensor would be enlarged
    _packet, _, _overload = _name.partition(".")
    _made = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    _operators.impl(_name, partial(run, _made), "PrivateUse1")
_device_constructors()  # `with torch.device(...)` knows them by identity, and from now on
_tensor, _as_tensor = torch.tensor, torch.as_tensor


def tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **others: Any) -> torch.Tensor:
    """`torch.tensor`, which would write numbers of Python into memory of the device itself."""
    if not is_simulated(device):
        return _tensor(data, device=device, requires_grad=requires_grad, **others)
    return _tensor(data, device="cpu", **others).to(device).requires_grad_(requires_grad)


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor) or not is_simulated(device):
        return _as_tensor(data, dtype=dtype, device=device)
    return tensor(data, dtype=dtype, device=device)


torch.tensor, torch.as_tensor = tensor, as_tensor
