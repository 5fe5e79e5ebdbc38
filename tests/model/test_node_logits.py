"""Trees and chains through cache and 4-D masks give the logits of plain text, on every architecture."""

from __future__ import annotations

import pytest

from architectures import ALWAYS, ARCHITECTURES
from harness import PREFIXES, Session, adapter, largest_difference, oracle, rounds_of, tolerance

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
    session = Session.start(adapter(name, attention), PREFIXES)
    error = largest_difference(session.run(rounds_of(is_tree)), oracle(name, attention, is_tree))
    assert error < tolerance(name, attention)
    assert adapter(name, attention).supports_trees, "the probe at load time"
