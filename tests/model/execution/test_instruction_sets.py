"""What a CPU can make believe of being another: the promise holds, and names what holds, by each instruction set.

oneDNN, torch, MKL and the library's own kernels are told by the environment what to hold to, which they read once: each
case is a process, that runs ``benchmarks/guarantee.py`` with stock kernels perturbed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from guarantee import Study

import foredraft
from foredraft import SamplingParams
from foredraft.native import library as native
from foredraft.native.build import instruction_set
from foredraft.testing import hostile_kernels, toy_model
from mutants import replaced
from programs import printed

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

NOT_AS_A_WHOLE = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
NARROW = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
PLAIN = {"ATEN_CPU_CAPABILITY": "default"}
NO_COMPILER = {"CXX": "/nowhere/c++"}
CASES = {
    "avx2 alone": NARROW,
    "no avx2": PLAIN,
    "no compiler": NO_COMPILER,
    "avx512 without amx, mkl avx2": NOT_AS_A_WHOLE,
    "onednn avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "onednn avx512 bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "torch avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "mkl avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
QUICK = "avx2 alone"
"""What `make test` runs: that on which every x86 CPU of the last ten years agrees."""

has_kernels = native.library() is not None


def run(environment: dict[str, str], folder: Path, *arguments: str) -> list[dict[str, object]]:
    """Cells of zoo:tiny in a process of its own."""
    found = folder / "found.json"
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    given["PYTHONPATH"] = os.pathsep.join([str(Path(foredraft.__file__).parents[1]), given.get("PYTHONPATH", "")])
    if environment is NO_COMPILER:
        given["FOREDRAFT_CACHE"] = str(folder)  # where no kernels lie
    command = [sys.executable, str(BENCHMARKS / "guarantee.py"), "--json", str(found), "--max-new-tokens", "16"]
    printed([*command, "--temperatures", "0", "--batch-sizes", "5", *arguments], folder, given)
    cells: list[dict[str, object]] = json.loads(found.read_text())["cells"]
    return cells


@pytest.mark.skipif(instruction_set() is None, reason="the promise is near-ties on this machine however it is run")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == QUICK else pytest.mark.full) for case in CASES]
)
def test_the_promise_is_named_and_kept(case: str, tmp_path: Path) -> None:
    """Chains and trees; bits wherever kernels of our own run."""
    is_native = has_kernels and CASES[case] not in (PLAIN, NO_COMPILER)
    methods = ("ngram", "token_recycling") if is_native else ("token_recycling",)
    cells = run(CASES[case], tmp_path, "--methods", *methods)
    assert len(cells) == len(methods)
    for cell in cells:
        assert cell["guarantee"] == ("bit-identical" if is_native else "up to rounding"), cell
        assert cell["is_kept"], cell
        assert cell["is_whole"], cell
        assert cell["num_accepted"], cell


def test_it_is_less_where_no_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a compiler, in this process: stock kernels are packed for, and perturbed."""
    replaced(native, "library", lambda *_: None)(monkeypatch)
    with hostile_kernels():
        study = Study(
            toy_model(512, dtype=torch.bfloat16),
            prompts=[[5, 6, 7] * 9, [3], [8, 300]],
            max_num_seqs=3,
            max_model_len=64,
        )
        params = SamplingParams(temperature=0.0, seed=7, max_tokens=24, ignore_eos=True)
        cell = study.cell("token_recycling", params, 3)
    assert "own kernels need AVX2, a C++ compiler" in study.llm.guarantee.reason
    assert (cell.guarantee, cell.is_good) == ("up to rounding", True), cell.line()


@pytest.mark.full
@pytest.mark.skipif(instruction_set() is None, reason="the promise is near-ties on this machine however it is run")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_every_method_keeps_it_in_either_dtype(case: str, dtype: str, tmp_path: Path) -> None:
    cells = run(CASES[case], tmp_path, "--dtypes", dtype)
    assert all(cell["num_accepted"] for cell in cells)


def test_the_widest_of_these_is_the_machines() -> None:
    """What is run here is what the tests of kernels in this process run: AVX2 at least, where torch has it."""
    capability = torch.backends.cpu.get_cpu_capability()
    assert (instruction_set() is None) == (not capability.startswith(("AVX2", "AVX512")))
