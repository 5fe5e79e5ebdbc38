"""The structure of a model apart from the values in its tensors, to tell whether its owner has changed it since."""

from __future__ import annotations

import functools
import types
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that are read one by one below, or that make no difference to a forward: ``training`` is among them, since
shadows always run in evaluation mode."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_WITHOUT_EFFECT = (GenerationConfig, Cache)  # attributes of models that no forward reads
_MAX_ENTRIES = 4096  # larger containers are tables; replaced they are seen, written into they are not
_MAX_DEPTH = 8


@dataclass(frozen=True)
class ModelState:
    """The structure of a model at one moment. Models in equal states run alike, but for values in tensors.

    It keeps neither modules nor tensors alive: they are told apart by their ids, which stay taken as long as a shadow
    shares them.

    Args:
      structure: types, tensors and hooks of all modules, and the values of their plain attributes, configs included.
      versions: of every tensor; they count what is written in place, except through ``.data``.
    """

    structure: tuple[Any, ...]
    versions: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Takes a millisecond or two for 400 modules, and twenty for 3,000, as two adapters in 210 linears make.

        Attributes are looked into as far as containers, configs and other plain objects go. What a function or a
        module that is kept in an attribute refers to is not.
        """
        read: dict[int, Any] = {}
        structure: list[Any] = []
        versions: list[Any] = []
        waiting, known = [model], {id(model)}
        while waiting:
            module = waiting.pop()
            own = vars(module)
            structure += (id(module), type(module))
            for name, child in own["_modules"].items():
                structure += (name, id(child))
                if child is not None and id(child) not in known:
                    known.add(id(child))
                    waiting.append(child)
            for tensors in (own["_parameters"], own["_buffers"]):
                for name, tensor in tensors.items():
                    structure.append(name)
                    if tensor is not None:
                        structure += (id(tensor), tensor.dtype, tensor.device, tensor.shape)
                        versions.append(version_of(tensor))
            structure += own["_forward_hooks"]  # keys that are never given twice
            structure += own["_forward_pre_hooks"]
            for name in [name for name in own if name not in _OF_EVERY_MODULE]:
                value = own[name]
                structure += (name, value if type(value) in _PLAIN else _readable(value, _MAX_DEPTH, read))
        return cls(tuple(structure), tuple(versions))


def _readable(value: Any, depth: int, known: dict[int, Any]) -> Any:
    """A value as something that can be compared; each object is read once."""
    if type(value) in _PLAIN:
        return value
    if id(value) not in known:
        known[id(value)] = id(value)  # of what refers to itself
        known[id(value)] = _read(value, depth - 1, known)
    return known[id(value)]


def _read(value: Any, depth: int, known: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, _WITHOUT_EFFECT):
        return None
    if depth == 0 or isinstance(value, (nn.Module, type, types.FunctionType, types.ModuleType)):
        return id(value)
    if isinstance(value, types.MethodType):
        return id(value.__func__), id(value.__self__)
    if isinstance(value, functools.partial):
        args, keywords = (_read(each, depth, known) for each in (value.args, value.keywords))
        return _readable(value.func, depth, known), args, keywords
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes() if value.size <= _MAX_ENTRIES else id(value)
    if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
        return _container(value, depth, known)
    if hasattr(value, "__dict__"):
        return type(value), _container(vars(value), depth, known)
    return id(value)


def _container(values: Any, depth: int, known: dict[int, Any]) -> Any:
    if len(values) > _MAX_ENTRIES:
        return id(values), len(values)
    if isinstance(values, dict):
        return tuple((_readable(key, depth, known), _readable(each, depth, known)) for key, each in values.items())
    parts = [_readable(value, depth, known) for value in values]
    return frozenset(parts) if isinstance(values, (set, frozenset)) else tuple(parts)


def version_of(tensor: torch.Tensor) -> Any:
    """Changes when somebody writes into a tensor, except through ``.data``, or replaces its storage."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return id(tensor)  # subclasses need not have a storage of their own
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, tensor.dtype
