"""Trees and chains through cache and 4-D masks give the logits of plain text, on every architecture."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from architectures import ALWAYS, ARCHITECTURES, target_model
from foredraft.model.execution.execution import Execution
from foredraft.model.lm import CausalLM
from harness import adapter, node_logit_error, tolerance

CASES = [
    pytest.param(name, attention, is_tree, marks=() if is_tree or name in ALWAYS else pytest.mark.full)
    for name, arch in ARCHITECTURES.items()
    for attention in arch.attention
    for is_tree in (False, True)
]
"""Trees of all, and chains where architectures differ in kind."""


@pytest.mark.sample(8)
@pytest.mark.every_version
@pytest.mark.parametrize(("name", "attention", "is_tree"), CASES)
def test_node_logits_equal_those_of_plain_text(name: str, attention: str, is_tree: bool) -> None:
    """Four rounds over two ragged rows, prefilled in chunks: the error stays at the rounding of float64."""
    assert node_logit_error(name, attention, is_tree) < tolerance(name, attention)
    assert adapter(name, attention).supports_trees, "the probe at load time"


@lru_cache(1)  # a chain, then a tree
def packed(name: str, attention: str) -> CausalLM:
    return CausalLM(target_model(name, attention, torch.float32), execution="packed")


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("name", "attention", "is_tree"),
    [pytest.param(*case.values, marks=() if case.values[0] in ALWAYS else pytest.mark.full) for case in CASES],
)
def test_packed_execution_gives_the_same_node_logits(
    name: str, attention: str, is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear layer packed, however small, grouped attention included: the rounding of float32 remains.

    By modules; test_native_program.py compares what runs in their place with them, and test_probe.py loads every
    architecture packed.
    """
    monkeypatch.setattr(Execution, "record", lambda *_: None)
    lm = packed(name, attention)
    assert lm.execution.num_packed_layers > 0
    assert node_logit_error(name, attention, is_tree, lm) < 1e-3
