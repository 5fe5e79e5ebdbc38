"""Machines without kernels (Arm, Apple silicon, below AVX2) run eagerly; nothing assumes x86."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.model.execution import packing
from foredraft.testing import toy_model
from instruction_sets import limit_to
from programs import printed


@pytest.fixture(params=["aarch64", "arm64"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(packing.platform, "machine", lambda: request.param)
    limit_to(None, monkeypatch)
    return str(request.param)


def test_packed_is_refused_where_nothing_can_be_packed(elsewhere: str) -> None:
    """It once ran eagerly, calling itself packed."""
    with pytest.raises(ConfigError, match=r"needs the library's own kernels.*x86 CPU with AVX2.*'eager' or 'auto'"):
        LLM(toy_model(), execution="packed")


@pytest.mark.sample(1)
def test_rounded_weights_and_heads_run_without_kernels(elsewhere: str) -> None:
    """A reduced output of rounded weights once could not be packed there."""
    llm = LLM("zoo:tiny", "eagle3", quantization="int8", dtype="float32")
    assert llm.target.execution.describe().startswith("eager")
    assert "own kernels need AVX2" in llm.guarantee.reason
    params = SamplingParams(temperature=0, max_tokens=8)
    found, plain = (each.generate("Once", params)[0].outputs[0] for each in (llm, llm.with_speculative_config(None)))
    assert found.token_ids == plain.token_ids


ELSEWHERE = """
import json, platform, sys
import torch

class NoOperators:
    def __getattr__(self, name):
        raise AttributeError(name)

machine, has_onednn = sys.argv[1], sys.argv[2] == "True"
platform.machine = lambda: machine
if not has_onednn:  # as in wheels for Apple silicon
    torch.backends.mkldnn.is_available = lambda: False
    torch.ops.mkldnn = NoOperators()

import foredraft
from foredraft import LLM, SamplingParams, zoo
from foredraft.model.execution.packing import cpu_has_bfloat16
from foredraft.native.build import instruction_set

llm = LLM("zoo:tiny", "draft_model+ngram")
params = SamplingParams(temperature=0, max_tokens=24)
found = llm.generate("Once upon a time", params)[0].outputs[0].token_ids
plain = llm.with_speculative_config(None).generate("Once upon a time", params)[0].outputs[0].token_ids
refused = ""
try:
    LLM("zoo:tiny", execution="packed")
except foredraft.ForedraftError as error:
    refused = str(error)
info = llm.model_info
dtype, kind = info.dtype, info.execution
is_equal = found == plain or dtype != "float32"
print(json.dumps([kind, dtype, cpu_has_bfloat16(), is_equal, len(found), refused, instruction_set()]))
"""

ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",  # so that there are no kernels of our own, which are for AVX2 and more
    "PYTHONPATH": str(Path(foredraft.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("machine", "has_onednn"),
    [pytest.param("aarch64", True, marks=pytest.mark.full), pytest.param("arm64", False, marks=pytest.mark.slow)],
)
def test_the_package_works_where_the_operators_of_x86_are_missing(
    machine: str, has_onednn: bool, tmp_path: Path
) -> None:
    """Importing it once asked for an operator that torch's builds for Apple silicon lack."""
    told = printed([sys.executable, "-c", ELSEWHERE, machine, str(has_onednn)], tmp_path, ENVIRONMENT)
    kind, dtype, has_bfloat16, is_equal, length, refused, kernels = json.loads(told)
    assert (kind, is_equal, length, kernels) == ("eager", True, 24, None)
    assert "x86 CPU with AVX2" in refused
    assert has_bfloat16 == (dtype == "bfloat16")
    assert has_onednn or dtype == "float32"


OTHER_TORCH = """
import json
import torch
from foredraft import LLM, SamplingParams

plain = LLM("zoo:tiny", dtype="float32")
found = {}
for method in ("draft_model", "ngram", "jacobi", "eagle3"):
    llm = plain.with_speculative_config({"method": method, "length_policy": "fixed"})
    num_accepted, are_equal = 0, True
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=32, ignore_eos=True)
        expected, drafted = (one.generate("Once upon a time", params)[0] for one in (plain, llm))
        are_equal &= expected.outputs[0].token_ids == drafted.outputs[0].token_ids
        num_accepted += drafted.metrics.speculative_decoding["num_accepted_draft_tokens"]
    found[method] = [are_equal, num_accepted > 0]
print(json.dumps([torch.__version__, plain.model_info.execution, plain.guarantee.kind, found]))
"""

OTHER_PYTHONS = [path for path in os.environ.get("FOREDRAFT_OTHER_PYTHONS", "").split(os.pathsep) if path]
"""Interpreters of environments with another torch and everything else that this library needs; see CONTRIBUTING.md."""


@pytest.mark.full
@pytest.mark.skipif(not OTHER_PYTHONS, reason="FOREDRAFT_OTHER_PYTHONS names no environment with another torch")
@pytest.mark.parametrize("python", OTHER_PYTHONS)
def test_texts_are_those_of_plain_decoding_under_another_torch(python: str, tmp_path: Path) -> None:
    """The oldest supported torch runs packed, newer ones compile; drafts are accepted and change nothing under any."""
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": ENVIRONMENT["PYTHONPATH"], "HF_HUB_OFFLINE": "1"}
    told = printed([python, "-c", OTHER_TORCH], tmp_path, given)
    version, execution, promise, found = json.loads(told.splitlines()[-1])
    said = f"torch {version}, {execution}, {promise}"
    assert all(both == [True, True] for both in found.values()), (said, found)
