"""Which methods apply to a model, and the reasons of those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from architectures import ARCHITECTURES
from foredraft.cli import app
from foredraft.llm import LLM
from foredraft.methods import methods
from foredraft.testing import toy_model

HEADS = {name for name, method in methods().items() if method.drafts_with_heads}
"""Methods that need a head which somebody has trained for the target."""


def reasons(llm: LLM) -> dict[str, str | None]:
    return dict(llm.applicable_methods())


def test_every_method_applies_to_a_model_of_the_zoo() -> None:
    found = reasons(LLM("zoo:tiny"))
    assert set(found) == set(methods()) - {"none"}
    assert not {name: reason for name, reason in found.items() if reason is not None}


def test_what_a_model_alone_lacks_is_named() -> None:
    found = reasons(LLM(toy_model(64, dtype=torch.float32)))
    lacking = {name: reason for name, reason in found.items() if reason is not None}
    assert set(lacking) == {"draft_model", "rest", "layer_skip"} | HEADS
    assert "needs a draft model" in str(lacking["draft_model"])
    assert "datastore" in str(lacking["rest"])
    assert "foredraft tune" in str(lacking["layer_skip"])


def test_a_loaded_drafter_counts() -> None:
    llm = LLM(toy_model(64), {"method": "draft_model", "model": toy_model(64, seed=1)})
    assert reasons(llm)["draft_model"] is None


def test_chain_only_models_lack_the_methods_of_trees() -> None:
    llm = LLM(toy_model(64))
    llm.target.supports_trees = False
    found = reasons(llm)
    trees = {name for name, method in methods().items() if method.drafts_trees}
    assert {name for name, reason in found.items() if "can only verify chains" in str(reason)} >= trees - {"union"}
    assert found["union"] is not None
    assert found["ngram"] is None


def test_shapes_that_4_bit_kernels_do_not_take_are_named() -> None:
    model = ARCHITECTURES["llama"].build("sdpa")
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for child in module.children():
                if isinstance(child, torch.nn.Linear):
                    child.forward = child.forward  # somebody else's: not ours to replace
    assert "divisible by 32" in str(reasons(LLM(model))["quantized_self"])


@pytest.mark.full
@pytest.mark.parametrize("as_json", [True, False])
def test_info_tells_which_methods_apply(as_json: bool, tmp_path: Any) -> None:
    model = toy_model(64, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    options = ["info", "-m", str(tmp_path), "--repeats", "1", "--context", "8", "--dtype", "float32"]
    result = CliRunner().invoke(app, options + ["--json"] * as_json)
    assert result.exit_code == 0, result.output
    if as_json:
        methods = {entry["method"]: entry for entry in json.loads(result.stdout)["methods"]}
        assert methods["ngram"] == {"method": "ngram", "applies": True, "reason": None}
        assert methods["layer_skip"]["applies"] is False
        assert "layer_set" in methods["layer_skip"]["reason"]
    else:
        assert "methods that work with this model: " in result.stdout
        assert "not draft_model" in result.stdout
