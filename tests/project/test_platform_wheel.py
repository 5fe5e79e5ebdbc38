"""The wheel for x86-64: honest about its platform, and native on a machine without a compiler, to the bits of one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.native import library as native
from foredraft.native.compiler import OPTIONS, file_digest, library_digest
from programs import printed

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
MOST_BYTES = 30e6
NARROW = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SETS = {"as it is": {}, "avx2": NARROW}
LOGITS = """
import json, sys
from foredraft import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype=sys.argv[2], execution="packed", speculative_config={"method": "ngram"})
found = []
for temperature in (0.0, 1.0):
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=1, logprobs=3)
    for output in llm.generate(["Once upon a time, there was a little", "The capital of France is"], params):
        for token, places in zip(output.outputs[0].token_ids, output.outputs[0].logprobs):
            found.append([token, sorted([place, one.logprob.hex()] for place, one in places.items())])
print(json.dumps({"guarantee": llm.guarantee.kind, "logits": found}))
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not sys.platform.startswith("linux"), reason="it is for Linux on x86-64"
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("dist")
    environment = {**os.environ, "FOREDRAFT_WHEEL": "x86_64", "CXX": "/nowhere/c++"}
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, env=environment, check=True)
    (made,) = folder.glob("*.whl")
    return made


class Installation:
    """A fresh environment with the wheel, and with the other packages of this one."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        install = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--no-index", str(wheel)], check=True)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        here = next(path for path in sys.path if path.endswith("site-packages"))
        (site / "others.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        (folder / "empty").mkdir()

    def run(self, *arguments: str, **environment: str) -> Any:
        """Run Python without any compiler, and read what it prints as JSON."""
        nowhere = {"PATH": str(self.folder / "empty"), "CXX": "/nowhere/c++", "CC": "/nowhere/cc"}
        kept = {"FOREDRAFT_CACHE": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        given = {**nowhere, **kept, **environment}
        return json.loads(printed([str(self.python), *arguments], self.folder / "empty", given))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(wheel, tmp_path_factory.mktemp("machine"))


def test_it_holds_every_instruction_set_and_is_small(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    folder = tmp_path / "foredraft" / "native" / "precompiled"
    made = json.loads((folder / "libraries.json").read_text())["libraries"]
    assert made.keys() == OPTIONS.keys()
    for instruction, of in made.items():
        assert of == {
            "made_from": library_digest(instruction),
            "sha256": file_digest(folder / f"{instruction.lower()}.so"),
        }
    (metadata,) = tmp_path.glob("*.dist-info/WHEEL")
    assert "Root-Is-Purelib: false" in metadata.read_text()


def test_its_platform_is_the_one_that_its_libraries_need(wheel: Path) -> None:
    pytest.importorskip("auditwheel")
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "manylinux_2_28_x86_64" in told.stdout, told.stdout + told.stderr


@pytest.mark.parametrize("held", SETS)
def test_a_machine_without_a_compiler_is_told_what_it_has(installed: Installation, held: str) -> None:
    if native.instruction_set() is None:
        pytest.skip("this CPU has no instruction set of the kernels")
    report = installed.run("-m", "foredraft", "info", "--json", **SETS[held])
    assert report["compiler"] is None
    assert report["kernels_from"] == "wheel"
    assert report["kernels"] == ("AVX2" if held == "avx2" else native.instruction_set())
    assert report["guarantee"]["kind"] == "bit-identical"
    missing = {one["what"]: one["remedy"] for one in report["missing"]}
    assert "kernels" not in missing
    assert missing["compiler"] == "install g++ or clang++, or set CXX to one"


@pytest.mark.parametrize("held", SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["zoo:tiny", pytest.param("zoo:smollm2", marks=pytest.mark.smollm2)])
def test_it_has_the_bits_of_kernels_that_are_compiled_here(
    installed: Installation, model: str, dtype: str, held: str
) -> None:
    """Another compiler, and an older C library: log-probabilities of greedy and of sampled tokens, to the last bit."""
    if native.library() is None:
        pytest.skip("nothing is compiled here")
    by_wheel = installed.run("-c", LOGITS, model, dtype, **SETS[held])
    source = str(Path(foredraft.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **SETS[held]}
    here = json.loads(printed([sys.executable, "-c", LOGITS, model, dtype], installed.folder, environment))
    assert by_wheel["guarantee"] == here["guarantee"] == "bit-identical"
    assert by_wheel["logits"] == here["logits"]


@pytest.mark.parametrize("model", ["zoo:tiny", pytest.param("zoo:smollm2", marks=pytest.mark.smollm2)])
def test_the_command_line_says_native(installed: Installation, model: str) -> None:
    arguments = ["generate", "Once upon a time", "--model", model, "--max-new-tokens", "8", "--json"]
    found = installed.run("-m", "foredraft", *arguments, **NARROW)
    assert found["num_generated_tokens"] == 8
    assert found["metrics"]["guarantee"]["kind"] == "bit-identical"
