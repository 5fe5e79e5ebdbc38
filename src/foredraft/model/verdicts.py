"""Results of the test at load time, kept on disk: a model is tested once on a machine, not at every start.

Only a result without reservation is kept: every check was right. A model with any other result is tested again at every
start, and its warning or refusal is repeated.

A wrong result would break exactness, so its key contains everything that the test (`Prober`) computes with:

- **Code**: the source files that run a model, and the versions of Python, torch and transformers. The functions in
  memory count too, so that a function which was replaced in this process has another key (a patched model,
  `hostile_kernels`). A model with hooks, or with code from its checkpoint, has no key.
- **Arithmetic**: the processor, the kernels and their instruction set, torch's settings, the number of threads, and the
  environment variables that limit or configure libraries of kernels (`SETTINGS`).
- **Structure**: config, classes, shapes and dtypes of all tensors, formats of packed weights, and the options and the
  execution of the adapter.
- **Values of the weights**: masks, positions and columns are right or wrong whatever the weights are. The values decide
  how clearly a fault shows, how far rounding grows, and whether there is a NaN. The key therefore contains the identity
  of the files that the library itself has read them from (`foredraft.loading.identity`). A model that other code has
  built has no such identity, and is tested whenever it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel

from foredraft.machine import cpu_digest
from foredraft.model.execution.forwards import StandIn, replacement
from foredraft.model.execution.packing import PackedLinear
from foredraft.model.execution.stored_programs import NotStorableError, code_text, store, stored
from foredraft.model.prober import Check, Probe
from foredraft.native.build import instruction_set
from foredraft.native.library import library, source_digest

FOLDER = "verdicts"
"""Folder of the results inside the cache."""

SETTINGS = ("ATEN_", "CUBLAS_", "CUDA_", "DNNL_", "KMP_", "MKL_", "NVIDIA_", "ONEDNN_", "PYTORCH_", "TORCH_")
"""First characters of the environment variables that change which kernels torch and its libraries run."""

OWN = ("foredraft.model.", "foredraft.native.", "foredraft.tree")
"""First characters of the names of the modules of this package that run a model."""

STOCK = ("mm", "bmm", "matmul", "addmm", "baddbmm")
"""Products of torch, each a function and a method of tensors."""

_Plain = (bool, int, float, str, bytes, type(None))


def key_of(model: PreTrainedModel, weights: str, options: Mapping[str, Any]) -> Any:
    """Return the key for `known` and `keep`; None for a model that has none.

    Args:
      model: the model, before any of its modules is changed.
      weights: identity of the values of its weights.
      options: options of the adapter, as plain values.
    """
    try:
        classes = list(dict.fromkeys(type(module) for module in model.modules()))
        modules = {kind.__module__ for kind in classes if not kind.__module__.startswith("torch.")}
        if any(not name.startswith("transformers.") for name in modules):
            raise NotStorableError("its code is not in transformers")
        structure = model.config.to_json_string(), tuple(classes), tuple(_modules(model, classes))
        return weights, tuple(sorted(options.items())), structure, _arithmetic(model), _code_in_memory(modules)
    except NotStorableError:
        return None


def known(key: Any) -> tuple[Probe, bool] | None:
    """Return the result kept under a key, and whether the model had a recorded program; None if there is none."""
    return None if key is None else stored(key, _unpacked, FOLDER)


def keep(key: Any, probe: Probe, *, has_program: bool) -> None:
    """Keep a result that is without reservation; without effect for any other result, and without a key."""
    if key is not None and all(check.verdict == "right" for check in probe.checks):
        store(key, lambda: {"probe": probe.as_dict(), "has_program": has_program}, FOLDER)


def _unpacked(content: Mapping[str, Any]) -> tuple[Probe, bool]:
    probe = dict(content["probe"])
    checks = tuple(Check(**check) for check in probe.pop("checks"))
    lists = {name: tuple(value) for name, value in probe.items() if isinstance(value, list)}
    return Probe(checks=checks, **{**probe, **lists, "is_kept": True}), bool(content["has_program"])


def _modules(model: nn.Module, classes: list[type]) -> Iterator[Any]:
    """Yield path, number of the class, tensors and replaced forward of every module.

    Raises: NotStorableError for hooks, and for forwards that other code has replaced.
    """
    has_hooks = torch_modules._has_any_global_hook()  # type: ignore[no-untyped-call]
    numbers = {kind: number for number, kind in enumerate(classes)}
    for path, module in model.named_modules():
        forward, run = replacement(module), None
        if has_hooks or module._forward_hooks or module._forward_pre_hooks:
            raise NotStorableError(f"{path} has hooks")
        if isinstance(forward, PackedLinear):
            matrix = forward.product.matrix
            run = forward.index, *forward.product.sizes, type(matrix).__name__, matrix.compute_dtype, matrix.num_bytes
        elif forward is not None and not isinstance(forward, StandIn):
            raise NotStorableError(f"the forward of {path} was replaced")
        tensors = [
            (name, tuple(tensor.shape), tensor.stride(), tensor.dtype, type(tensor).__name__)
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        yield path, numbers[type(module)], tensors, run, type(forward).__name__


def _arithmetic(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return everything besides code that decides which instructions compute a forward pass."""
    device = model.get_input_embeddings().weight.device
    kernels = library()
    found: list[Any] = [
        device,
        cpu_digest(),
        torch.backends.cpu.get_cpu_capability(),
        instruction_set(),
        None if kernels is None else source_digest(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        *sorted((name, value) for name, value in os.environ.items() if name.startswith(SETTINGS)),
    ]
    if device.type == "cuda":
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        found += [torch.cuda.get_device_name(device), torch.version.cuda, torch.backends.cudnn.version(), *allowed]  # type: ignore[no-untyped-call]
    return tuple(found)


# -- code in memory --------------------------------------------------------------------------------------------------


def _code_in_memory(of_model: set[str]) -> str:
    """Return a digest of the functions that run a model: those of this package, of the model's modules, and torch's
    products and attention.
    """
    reader, digest = _CodeReader(), hashlib.sha256()
    for name in sorted({*_own_modules(), *of_model}):
        for key, value in sorted(vars(sys.modules[name]).items()):
            digest.update(f"{name}.{key} {reader.text(value, name, is_constant=key.isupper())}\n".encode())
    kernels = [F.linear, F.scaled_dot_product_attention, torch.Tensor.__matmul__]
    kernels += [getattr(holder, name) for holder in (torch, torch.Tensor) for name in STOCK]
    digest.update(repr([reader.text(kernel) for kernel in kernels]).encode())
    return digest.hexdigest()


def _own_modules() -> set[str]:
    """Return the names of this package's modules that run a model, found from the module of the adapter."""
    found, waiting = set[str](), ["foredraft.model.lm"]
    while waiting:
        name = waiting.pop()
        if name in found or name not in sys.modules:
            continue
        found.add(name)
        for value in vars(sys.modules[name]).values():
            home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str) and home.startswith(OWN):
                waiting.append(home)
    return found


class _CodeReader:
    """Describes functions and classes by their bytecode, the same in every process. Reads every function once."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def text(self, value: Any, module: str = "", *, is_constant: bool = False) -> str:
        """Describe a value.

        Args:
          module: module in whose classes functions are read; classes of other modules count by their names.
          is_constant: the value is one that nothing changes.
        """
        kind = type(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            name = f"{value.__module__}.{value.__qualname__}"
            return name + self._members(value) if value.__module__ == module else name
        if isinstance(value, functools.partial):
            return f"partial {self.text(value.func)}"
        inner = [getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "func")]
        if any(isinstance(each, types.FunctionType) for each in inner):
            return f"{kind.__name__} {[self.text(each) for each in inner]}"
        if is_constant and kind in _Plain:
            return repr(value)
        return f"{kind.__name__} {getattr(value, '__qualname__', '')}"

    def _members(self, kind: type) -> str:
        own = sorted(vars(kind).items())
        return repr([(name, self.text(value)) for name, value in own if not name.startswith("_abc_")])

    def _function(self, function: types.FunctionType) -> str:
        found = self._known.get(id(function))
        if found is None:
            self._known[id(function)] = "itself"
            inside = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
            functions = [self._function(each) for each in inside if isinstance(each, types.FunctionType)]
            defaults = [value for value in function.__defaults__ or () if type(value) in _Plain]
            code = repr((code_text(function.__code__), functions, defaults))
            found = self._known[id(function)] = hashlib.sha256(code.encode()).hexdigest()
        return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
