"""Models of two tokens and more, and drafters whose embeddings are padded differently."""

from __future__ import annotations

import pytest

from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model


@pytest.mark.parametrize("vocab_size", [2, 3, 5, 13])
def test_the_probe_passes_on_the_smallest_vocabularies(vocab_size: int) -> None:
    """With 3 tokens the probe's texts are beginnings of each other, and some logits were never taken."""
    assert CausalLM(toy_model(vocab_size)).supports_trees
