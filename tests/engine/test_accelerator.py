"""A GPU, simulated: `on_device.py` in a process of its own, since the device changes torch for the whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
has_backends = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")


@pytest.mark.skipif(not has_backends, reason="this torch takes no devices that are written in Python")
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("not full", id="covering", marks=pytest.mark.slow),
        pytest.param("full", id="full", marks=pytest.mark.full),
    ],
)
def test_everything_runs_on_a_simulated_device(chosen: str) -> None:
    """Every method, parameter, face and training: the texts of the CPU, under the rules and layouts of a GPU."""
    path = os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "simulated_device",
            "-m",
            chosen,
            str(TESTS / "engine" / "on_device.py"),
        ],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},  # of this run: its report would be overwritten
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "100%" in done.stdout
