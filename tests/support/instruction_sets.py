"""Instruction sets that kernels and oneDNN are limited to, as a user limits them."""

from __future__ import annotations

import pytest

LIMITS = {
    "AMX": "AVX512_CORE_AMX",
    "AVX512_BF16": "AVX512_CORE_BF16",
    "AVX512": "AVX512_CORE",
    "AVX2": "AVX2",
    None: "SSE41",
}
"""Values of ``ONEDNN_MAX_CPU_ISA`` by the widest set of kernels that they allow; None for no kernels."""


def limit_to(instruction: str | None, patch: pytest.MonkeyPatch) -> None:
    """Let models that are loaded from now on run by kernels of this instruction set."""
    patch.setenv("ONEDNN_MAX_CPU_ISA", LIMITS[instruction])
