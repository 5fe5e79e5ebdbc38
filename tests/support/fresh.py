"""What this process has made once for all models: traced programs, compiled layers and libraries of kernels."""

from __future__ import annotations

import pytest

from foredraft.model.execution import compiled_layers, ends, tracing
from foredraft.native import library as native


def forget_programs(patch: pytest.MonkeyPatch) -> None:
    """Trace and read programs anew, as a new process does."""
    patch.setattr(tracing, "_programs", {})
    patch.setattr(ends, "_forms", {})


def forget_compiled_layers(patch: pytest.MonkeyPatch) -> None:
    """Compile layers anew, as a new process does."""
    patch.setattr(compiled_layers, "_graphs", {})


def num_compiled_layers() -> int:
    """Number of different layers that this process has compiled."""
    return len(compiled_layers._graphs)


def forget_kernels(patch: pytest.MonkeyPatch) -> None:
    """Load the library of kernels anew, as a new process does."""
    patch.setattr(native, "_libraries", {})
