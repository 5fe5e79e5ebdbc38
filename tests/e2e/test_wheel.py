"""The wheel holds everything it needs: it speaks from an empty directory, without the sources."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_works_from_an_empty_directory(tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    wheels, site, empty = (tmp_path / name for name in ("wheels", "site", "empty"))
    for directory in (wheels, site, empty):
        directory.mkdir()
    made = subprocess.run(
        [sys.executable, "-c", build, str(wheels)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wheel = wheels / made.stdout.split()[-1]
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "training", "docs"))]
    assert "foretoken/py.typed" in names
    zipfile.ZipFile(wheel).extractall(site)
    code = "import sys, foretoken; sys.stderr.write(foretoken.__file__); from foretoken.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "Once upon a time", "--max-new-tokens", "8", "--json"],
        cwd=empty,
        env={"PYTHONPATH": str(site), "PATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr
    assert json.loads(done.stdout)["num_generated_tokens"] == 8
