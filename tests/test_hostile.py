"""What a hostile reader tried: text that is no Unicode, autocast, drafters that are nothing, models kept alive."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

from foredraft import LLM, SamplingParams, SpeculativeConfig, speculate, zoo
from foredraft.errors import ConfigError, DatastoreError, PromptError
from foredraft.model.lm import CausalLM
from foredraft.retrieval.build import build
from foredraft.testing import toy_model
from tiny import tiny


def test_text_with_half_a_surrogate_pair_is_refused_by_place() -> None:
    with pytest.raises(PromptError, match="prompt 1 is not valid Unicode: character 2"):
        tiny().generate(["fine", "x \ud83d y"], SamplingParams(max_tokens=2))


def test_a_corpus_with_half_a_surrogate_pair_is_refused_by_line(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "Once upon a time"}\n' + json.dumps({"text": "x \ud83d y"}) + "\n")
    _, _, tokenizer = zoo.load("tiny")
    with pytest.raises(DatastoreError, match="line 2 contains"):
        build([corpus], tokenizer, tmp_path / "out", tokenizer_name="zoo:tiny", field="text")


def test_autocast_is_refused_by_name() -> None:
    target = CausalLM(toy_model(64, dtype=torch.float32), execution="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ConfigError, match="autocast is on"):
            CausalLM(toy_model(64, dtype=torch.float32))
        with pytest.raises(ConfigError, match="autocast is on"):
            LLM(target_model(), "ngram")
    assert target.num_forwards == 0


def target_model() -> torch.nn.Module:
    return toy_model(64, dtype=torch.float32)


def test_a_drafter_that_is_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="drafters contains None"):
        SpeculativeConfig(method="union", drafters=["ngram", None])


def test_a_model_inside_of_a_composition_is_not_kept_alive() -> None:
    target, drafter, _ = zoo.load("tiny")
    dear = copy.deepcopy(drafter)
    watched = weakref.ref(dear)
    ids = torch.tensor([[20, 30, 40]])
    parts = ["ngram", {"method": "draft_model", "model": dear}]
    target.generate(ids, custom_generate=speculate(method="union", drafters=parts), max_new_tokens=6, do_sample=False)
    del dear, parts
    gc.collect()
    assert watched() is None
