"""The toy target of tests that need any one, and what drafts beside it."""

from __future__ import annotations

from atexit import register
from collections.abc import Sequence
from functools import cache
from shutil import rmtree
from tempfile import mkdtemp

from foredraft.model.lm import CausalLM
from foredraft.retrieval.build import from_tokens
from foredraft.retrieval.datastore import Datastore
from foredraft.testing import perturbed, toy_model

VOCAB_SIZE = 64


@cache
def target() -> CausalLM:
    return CausalLM(toy_model(VOCAB_SIZE), execution="eager")


@cache
def small(scale: float = 0.1) -> CausalLM:
    """The target with noise on its weights, so that some of what it drafts is right."""
    return CausalLM(perturbed(toy_model(VOCAB_SIZE), scale, seed=2), execution="eager")


def datastore_of(texts: Sequence[Sequence[int]], vocab_size: int = VOCAB_SIZE, **options: int) -> Datastore:
    """These texts in a folder that is removed at the end."""
    folder = mkdtemp()
    register(rmtree, folder)
    from_tokens(texts, folder, vocab_size=vocab_size, **options)
    return Datastore.open(folder)
