"""Import of transformers without its parts for other purposes, which take half of the time to the first token.

``from transformers import PreTrainedModel`` also imports TorchDynamo with SymPy, torch's distributed tensors, and
SciPy. They serve ``torch.compile``, training on several machines, and losses of object detectors. No verb of the
command line uses these parts of transformers, and its process has no other user. A program that imports foredraft gets
transformers as it is.

What is left out is found in ways that transformers provides, or is looked up when it is used. A version of transformers
that imports something else still works, and takes longer.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from foredraft.machine import collector_paused

ABSENT = ("is_torch_distributed_available", "is_torch_flex_attn_available", "is_scipy_available")
"""Functions by which transformers asks whether a package or a part of torch is installed; they return False."""

DYNAMO = "torch._dynamo"
MASKS = f"{DYNAMO}._trace_wrapped_higher_order_op"
LOADERS = "transformers.utils.import_utils"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import modules of transformers quickly inside the block. Without effect if they are imported already.

    The collector of cyclic garbage is paused, and ignores afterwards what modules hold: there is no garbage in it.
    """
    if "transformers" in sys.modules:
        yield
        return
    with collector_paused():
        import torch  # noqa: F401 - in full, and before the finder

        finder = _Finder()
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            finder.end()
            sys.meta_path.remove(finder)
        gc.freeze()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for modules of TorchDynamo until a name is needed that they do not have."""

    def __init__(self) -> None:
        self._stand_ins: dict[str, types.ModuleType] = {}
        self._is_over = DYNAMO in sys.modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == LOADERS:
            return _with(importlib.machinery.PathFinder.find_spec(fullname, path), _answer_quickly)
        if self._is_over or not f"{fullname}.".startswith(f"{DYNAMO}."):
            return None
        if fullname in (DYNAMO, MASKS):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == DYNAMO)
        self.end()
        importlib.import_module(DYNAMO)
        found = sys.modules.get(fullname)  # it may have been imported by its package just now
        return None if found is None else _with(found.__spec__, None, found)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name, self)
        if spec.name == DYNAMO:
            vars(module).update(dict.fromkeys(("allow_in_graph", "assume_constant_result"), _unchanged))
            vars(module)["disable"] = _disable
        else:
            vars(module)["TransformGetItemToIndex"] = _transform
        self._stand_ins[spec.name] = module
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module as it is: it was filled when it was made."""

    def end(self) -> None:
        """Remove the stand-ins, so that the next import of a module is that of the module itself."""
        self._is_over = True
        for name, module in self._stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            package, _, last = name.rpartition(".")
            holder = sys.modules.get(package)
            if holder is not None and vars(holder).get(last) is module:
                delattr(holder, last)


class _StandIn(types.ModuleType):
    """A module that is imported when a name is needed that it does not have."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # questions of the import system
            raise AttributeError(name)
        self._finder.end()
        return getattr(importlib.import_module(self.__name__), name)


def _unchanged(function: Any) -> Any:
    """Stand for decorators that tell TorchDynamo how to trace a function, which then does the same."""
    return function


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    return _unchanged if function is None else function


def _transform(*args: Any, **options: Any) -> Any:
    """Make a TransformGetItemToIndex."""
    return importlib.import_module(MASKS).TransformGetItemToIndex(*args, **options)


class _Loader(importlib.abc.Loader):
    """Loads a module and calls a function with it; or returns a module that is loaded already."""

    def __init__(
        self, inner: Any, then: Callable[[types.ModuleType], None] | None, loaded: types.ModuleType | None
    ) -> None:
        self._inner, self._then, self._loaded = inner, then, loaded

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loaded if self._loaded is not None else self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if self._loaded is None:
            self._inner.exec_module(module)
        if self._then is not None:
            self._then(module)


def _with(
    spec: importlib.machinery.ModuleSpec | None,
    then: Callable[[types.ModuleType], None] | None,
    loaded: types.ModuleType | None = None,
) -> importlib.machinery.ModuleSpec | None:
    if spec is not None:
        spec = importlib.util.spec_from_loader(spec.name, _Loader(spec.loader, then, loaded), origin=spec.origin)
    return spec


def _answer_quickly(module: Any) -> None:
    """Let transformers find optional packages absent, and read the list of its models once instead of twice."""
    for name in ABSENT:
        if hasattr(module, name):
            setattr(module, name, _no)
    listing = getattr(module, "create_import_structure_from_path", None)
    if listing is not None and hasattr(listing, "__wrapped__"):  # its cache has fewer entries than there are models
        module.create_import_structure_from_path = functools.cache(listing.__wrapped__)


def _no() -> bool:
    return False
