"""Traced programs on disk: tracing a model takes seconds, and reading what came of it takes milliseconds.

A program is stored under a digest of everything that it was traced from: the structure of the layers, the code of their
classes, and the versions of torch, transformers and of this package. A program that was read is compared with the
modules like one that was just traced (`NativeProgram.check`), unless one from the same key was compared before
(`model.verdicts`). A file contains a digest of its content, so a damaged one costs speed and no token.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import transformers
from torch import fx, nn

from foredraft import tree
from foredraft.folders import cache_folder, keep_json, known_sha256, parsed_json, sha256_of
from foredraft.native import abi

logger = logging.getLogger("foredraft")


class NotStorableError(Exception):
    """A key or a program refers to something that cannot be written down."""


# ---- files ----------------------------------------------------------------------------------------------------------


def stored(key: Any, unpack: Callable[[Mapping[str, Any]], Any], folder: str = "programs") -> Any:
    """The object that is stored under a key; None where there is none, or where its file is damaged.

    Args:
      key: everything that the object was made from; see `digest_of`.
      unpack: makes the object from the content of its file.
      folder: folder of such files inside the cache.
    """
    try:
        file = _file(key, folder)
        if not file.is_file():
            return None
        found = parsed_json(file.read_bytes())
        if found["sha256"] != _sum_of(found["content"]):
            raise ValueError("its digest is wrong")
        return unpack(found["content"])
    except NotStorableError:
        return None
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        logger.debug("a file in %s cannot be used (%s); what it contains is made again", folder, error)
        return None


def store(key: Any, pack: Callable[[], Mapping[str, Any]], folder: str = "programs") -> None:
    """Store an object under a key, where both can be written down and the cache folder is writable.

    Args:
      key, folder: see `stored`.
      pack: function that returns the content of the file.
    """
    try:
        content = pack()
        keep_json(_file(key, folder), {"sha256": _sum_of(content), "content": content})
    except (NotStorableError, OSError) as error:
        logger.debug("nothing is stored in %s: %s", folder, error)


def _sum_of(content: Any) -> str:
    """Return a digest of the content of a file, which is the same before it is written and after it is read."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of(key: Any) -> str:
    """Digest of a key, the same in every process.

    Args:
      key: nested tuples of plain values, dtypes, and classes. A class counts with its code and its file.

    Raises: NotStorableError for anything else, and for a class without a file.
    """
    return hashlib.sha256(f"{_versions()}{_written(key)}".encode()).hexdigest()


def _file(key: Any, folder: str) -> Path:
    return cache_folder(folder, f"{digest_of(key)[:32]}.json")


@cache
def _versions() -> str:
    """Versions of all code that stored objects depend on, besides that of the model."""
    folders = Path(__file__).parents[1], Path(abi.__file__).parent
    own = [Path(tree.__file__), *sorted(file for folder in folders for file in folder.rglob("*.py"))]
    return " ".join([sys.version, torch.__version__, transformers.__version__, *map(sha256_of, own)])


def _written(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_written, value))})"
    if isinstance(value, type):
        return _code_of(value)
    raise NotStorableError(f"{type(value).__name__} has no stable form")


def _code_of(kind: type) -> str:
    """Name, file and code of a class and of its bases."""
    found = []
    for each in kind.__mro__:
        name = f"{each.__module__}.{each.__qualname__}"
        if each in (nn.Module, object) or name.startswith(("torch.", "typing.", "abc.")):
            found.append(name)
            continue
        try:
            file = inspect.getsourcefile(each)
        except (TypeError, OSError):
            file = None
        if file is None:
            raise NotStorableError(f"{name} has no file")
        functions = [inspect.unwrap(one) for _, one in sorted(vars(each).items()) if inspect.isfunction(one)]
        code = [code_text(one.__code__) for one in functions]
        found.append(f"{name} {known_sha256(Path(file))} {hashlib.sha256(repr(code).encode()).hexdigest()}")
    return ";".join(found)


def code_text(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, list(map(_constant_text, code.co_consts))


def _constant_text(value: Any) -> Any:
    if isinstance(value, CodeType):
        return code_text(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)  # sets have no order of their own


# ---- operators of torch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A value among the inputs and results of `TorchCalls`, by number."""

    number: int


@dataclass(frozen=True)
class TorchCalls:
    """Operators of torch, called one after the other.

    Args:
      num_inputs: number of tensors and numbers that the first calls read.
      calls: function, positional arguments and named ones of every call. A `Reference` stands for an input or for the
        result of an earlier call.
    """

    num_inputs: int
    calls: Sequence[tuple[Any, Any, Any]]

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[fx.Node], body: Sequence[fx.Node]) -> TorchCalls:
        """The nodes of a traced module, the wanted one last."""
        numbers = {node: number for number, node in enumerate([*inputs])}
        calls: list[tuple[Any, Any, Any]] = []

        def referred(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return Reference(numbers[value]) if value in numbers else getattr(module, str(value.target))
            if isinstance(value, (list, tuple)):  # the lists of a graph are of a class of its own
                return [*map(referred, value)] if isinstance(value, list) else tuple(map(referred, value))
            return value

        for node in body:
            if node.op == "get_attr":  # a constant
                continue
            named = {name: referred(value) for name, value in node.kwargs.items()}
            calls.append((node.target, referred(node.args), named))
            numbers[node] = len(inputs) + len(calls) - 1
        return cls(len(inputs), tuple(calls))

    def __call__(self, *inputs: Any) -> Any:
        """Result of the last call."""
        values = list(inputs)

        def filled(argument: Any) -> Any:
            if isinstance(argument, Reference):
                return values[argument.number]
            return type(argument)(map(filled, argument)) if type(argument) in (list, tuple) else argument

        for target, args, kwargs in self.calls:
            values.append(target(*map(filled, args), **{name: filled(value) for name, value in kwargs.items()}))
        return values[-1]

    def as_dict(self) -> dict[str, Any]:
        """Content for a file.

        Raises: NotStorableError for a function or an argument that has no stable form.
        """
        calls = [
            [_name_of(target), list(map(_encoded, args)), {name: _encoded(value) for name, value in kwargs.items()}]
            for target, args, kwargs in self.calls
        ]
        return {"num_inputs": self.num_inputs, "calls": calls}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TorchCalls:
        """Make the calls that `as_dict` has written."""
        calls = [
            (_named(name), tuple(map(_decoded, args)), {key: _decoded(value) for key, value in kwargs.items()})
            for name, args, kwargs in content["calls"]
        ]
        return cls(int(content["num_inputs"]), tuple(calls))


def _name_of(target: Any) -> str:
    name = str(target) if isinstance(target, torch._ops.OpOverload) else f"operator.{target.__name__}"
    if _named(name) is not target:
        raise NotStorableError(f"{target} is no operator of torch or Python")
    return name


def _named(name: str) -> Any:
    package, *rest = name.split(".")
    if package == "operator" and len(rest) == 1:
        return getattr(operator, rest[0], None)
    found: Any = getattr(torch.ops, package) if package == "aten" else None
    for part in rest:
        found = getattr(found, part, None)
    if found is None:
        raise NotStorableError(f"{name} is no operator of torch or Python")
    return found


_TORCH_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def _encoded(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return {"list": list(map(_encoded, value)), "is_tuple": isinstance(value, tuple)}
    if isinstance(value, Reference):
        return {"value": value.number}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, tuple(_TORCH_KINDS.values())):
        return {"torch": str(value).removeprefix("torch.")}
    raise NotStorableError(f"an argument is {type(value).__name__}")


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "list" in value:
        items = map(_decoded, value["list"])
        return tuple(items) if value["is_tuple"] else list(items)
    if "value" in value:
        return Reference(int(value["value"]))
    if "device" in value:
        return torch.device(value["device"])
    found = getattr(torch, value["torch"])
    if not isinstance(found, tuple(_TORCH_KINDS.values())):
        raise ValueError(f"{value['torch']} is no dtype, layout or memory format")
    return found
