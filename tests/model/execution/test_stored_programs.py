"""Programs that were traced once are read by later processes, and never instead of other code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import ARCHITECTURES
from foredraft.model.execution import ends, tracing
from foredraft.model.execution.stored_programs import digest_of
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from fresh import forget_programs


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    forget_programs(monkeypatch)
    return tmp_path / "programs"


def loaded(name: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(ARCHITECTURES[name].build("sdpa", dtype), execution="packed", probe=False)


def logits(lm: CausalLM) -> torch.Tensor:
    cache = lm.new_cache(1, capacity=16)
    return lm.forward(Nodes.from_chains([[5, 6, 7, 8, 9, 10, 11]]), cache)[0]


def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("it is traced")

    monkeypatch.setattr(tracing.Tracer, "program", refused)
    monkeypatch.setattr(ends.EndsTracer, "form", refused)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "phi", "olmo2"])
@torch.inference_mode()
def test_a_program_that_was_read_has_the_bits_of_the_traced_one(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(loaded(name))
    assert len([*folder.iterdir()]) >= 2
    forget_programs(monkeypatch)
    no_trace(monkeypatch)
    lm = loaded(name)
    assert lm.execution.program is not None
    assert torch.equal(logits(lm), expected)
    assert lm.execution.program.num_runs


def test_damaged_files_are_traced_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded("llama")
    for number, file in enumerate(sorted(folder.iterdir())):
        file.write_bytes(file.read_bytes()[: 100 * number])
    forget_programs(monkeypatch)
    assert loaded("llama").execution.program is not None
    forget_programs(monkeypatch)
    no_trace(monkeypatch)
    assert loaded("llama").execution.program is not None


def test_without_a_cache_that_can_be_written_models_are_traced(folder: Path) -> None:
    folder.write_text("a file in its place")
    assert loaded("llama").execution.program is not None


def test_other_code_and_other_structure_have_other_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.dtype in {torch.float16, torch.bfloat16} else x

    def other(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + 2

    before = digest_of(("layer", Layer, 8))
    assert before == digest_of(("layer", Layer, 8))
    assert before != digest_of(("layer", Layer, 9))
    monkeypatch.setattr(Layer, "forward", other)
    assert before != digest_of(("layer", Layer, 8))
