"""Import lines and calls of the documents as they stand there, after the one line that makes them run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import zoo
from foredraft.classic import PACKAGES, install
from foredraft.errors import ConfigError
from generated import generated

IMPORTS = """\
from ngram_assisted import ngram_assisted_speculative_generate
from ngram_assisted import NGramStorage, ngram_assisted_speculative_generate
from utils.logits_processor import GreedyProcessor
from ngram_assisted import OneLevelNGramStorage
from ngram_assisted import NGramStorage, OneLevelNGramStorage, INgramStorage
from ngram_assisted import NGramStorage
"""
GENERATION = """\
ngram_storage = NGramStorage(n=3, vocab_size=target.config.vocab_size)
output_ids, accept_rate = ngram_assisted_speculative_generate(
    inputs,
    ngram_storage,
    target,
    tokenizer=tokenizer,
    gamma=5,
    filler_top_k=3,
    logits_processor=GreedyProcessor(),
    max_gen_len=100,
    eos_tokens_id=[tokenizer.eos_token_id],
    stop_if_unknown=True,
)
"""
SINGLE_LEVEL = """\
ngram_storage = OneLevelNGramStorage(n=4, vocab_size=target.config.vocab_size)
output_ids, accept_rate = ngram_assisted_speculative_generate(
    inputs,
    ngram_storage,
    target,
    gamma=5,
    max_gen_len=50,
    eos_tokens_id=[tokenizer.eos_token_id],
)
"""
STORAGE = """\
import torch
storage = NGramStorage(n=3, vocab_size=128256)
prompt_ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
storage.initialize(prompt_ids)
predicted, known = storage.next_token(prompt_ids)
new_tokens = torch.tensor([[9]])
storage.update(prompt_ids, new_tokens)
"""
FILES = """\
from ngram_assisted.ngram_assisted import ngram_assisted_speculative_generate
from ngram_assisted.ngram_storage import INgramStorage, NGramStorage, OneLevelNGramStorage
from sampling.speculative_decoding import max_fn, speculative_generate
from sampling import autoregressive_generate, speculative_generate
from utils.caching import prune_cache
from utils import printing
"""


def installed() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in PACKAGES]


@pytest.fixture(autouse=True)
def _free_names() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in installed():
        del sys.modules[name]


def test_listings_run_unchanged_after_one_line() -> None:
    target, _, tokenizer = zoo.load("tiny")
    inputs = tokenizer("The history of the city").input_ids
    names: dict[str, Any] = {"target": target, "tokenizer": tokenizer, "inputs": inputs}
    with pytest.raises(ModuleNotFoundError):
        exec(IMPORTS, dict(names))
    install()
    exec(IMPORTS + GENERATION, names)
    tokens = names["output_ids"]
    assert len(tokens) > 10
    assert tokens == generated(target, inputs, 100, eos_token_id=tokenizer.eos_token_id)
    assert names["accept_rate"] > 0
    exec(SINGLE_LEVEL, names)
    assert names["output_ids"] == tokens[:50]
    exec(STORAGE, names)
    assert not bool(names["known"])
    predicted, known = names["storage"].next_token(names["prompt_ids"])
    assert (int(predicted), bool(known)) == (9, True)
    exec(FILES, names)


def test_names_are_those_of_the_package_whoever_imports_them() -> None:
    install()
    install()
    import ngram_assisted

    from foredraft.classic import ngram_assisted as ours

    assert ngram_assisted is ours
    assert sys.modules["utils.caching"] is sys.modules["foredraft.classic.utils.caching"]


def test_modules_of_the_users_own_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "utils.py").write_text("mine = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"the name utils belongs to .*utils\.py"):
        install()
    assert not installed()
    import utils

    with pytest.raises(ConfigError, match=r"the name utils belongs to .*utils\.py"):
        install()
    assert utils.mine == 1
