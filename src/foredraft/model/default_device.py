"""Where tensors are made for which no device is named: on the CPU, whatever default device a caller has set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def cpu_by_default() -> AbstractContextManager[object]:
    """Inside, tensors are made on the CPU where no device is named.

    Kernels are handed addresses of tensors made here; one of ``torch.set_default_device("cuda")`` or "meta" has none
    that they could read.
    """
    context: AbstractContextManager[object] = torch.device("cpu")
    return nullcontext() if torch.get_default_device().type == "cpu" else context


def makes_on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run inside `cpu_by_default`."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with cpu_by_default():
            return function(*args, **kwargs)

    return wrapped
