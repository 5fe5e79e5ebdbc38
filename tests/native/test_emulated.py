"""Kernels of every instruction set, emulated where this machine does not have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.native import library as native

KERNELS = "not TestInstructionSet and not TestLibrary and not leaves_the_same_bits and not several_layers"
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.full
@pytest.mark.skipif(native.library("AVX2") is None, reason="no C++ compiler builds the kernels here")
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("native/test_native.py", KERNELS),
        ("native/test_codes.py", "product or fewer or infinite"),
        ("native/test_prefill_attention.py", KERNELS),
        ("model/execution/test_native_program.py", "architectures and (llama or gpt2 or gemma3 or phi) and bfloat16"),
    ],
)
def test_kernels_compute_the_same_on_wider_processors(file: str, chosen: str) -> None:
    """Products, attention of few nodes and of prompts by AVX-512, AVX512_BF16 and AMX, to the tests of their own, and
    whole programs by AMX, whose products take bfloat16."""
    path = os.pathsep.join([str(TESTS / "support" / "emulation"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "plugin", "-m", "", "-k", chosen, str(TESTS / file)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
