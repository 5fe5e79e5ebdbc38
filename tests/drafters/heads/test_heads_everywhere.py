"""Heads through the faces: named by a folder or given as modules, in compositions, in the hook, and where they lack."""

from __future__ import annotations

import copy
import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafting import StubRow
from foredraft import LLM, SamplingParams, SpeculativeConfig, zoo
from foredraft.cli.writers import as_record
from foredraft.drafters.heads import medusa_hydra
from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.heads.checkpoint import read_checkpoint, write_checkpoint
from foredraft.heads.medusa_hydra_layouts import write_hydra, write_medusa
from foredraft.testing import PROMPTS, toy_model
from toy_heads import VOCAB_SIZE, hydra_heads, medusa_heads, narrow_opt

GIVEN = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_tokens=20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("heads")
    write_checkpoint(root / "medusa", *write_medusa(medusa_heads()))
    write_checkpoint(root / "shared", *write_medusa(medusa_heads(False)))
    write_checkpoint(root / "hydra", *write_hydra(hydra_heads(False)))
    write_checkpoint(root / "hydra++", *write_hydra(hydra_heads(True)))
    return {name: str(root / name) for name in ("medusa", "shared", "hydra", "hydra++")}


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in llm.generate(GIVEN, params)]


def rate(llm: LLM, params: SamplingParams = GREEDY) -> float:
    results = [result.metrics.speculative_decoding for result in llm.generate(GIVEN, params)]
    return sum(one["tokens_per_step"] for one in results) / len(results)


@cache
def plain() -> LLM:
    return LLM(toy_model(VOCAB_SIZE))


def check_drafts(config: dict[str, Any]) -> None:
    """Texts stay, and most of what is drafted is accepted."""
    llm = plain().with_speculative_config(config)
    assert tokens(llm, GREEDY) == tokens(plain(), GREEDY)
    assert rate(llm) > 2.5


@pytest.mark.full
def test_a_folder_says_what_lies_in_it(folders: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    for name, folder in folders.items():
        config = SpeculativeConfig(model=folder)
        assert config.method == ("medusa" if name == "shared" else name)
        with caplog.at_level(logging.INFO, "foredraft"):
            llm = LLM(toy_model(VOCAB_SIZE), {"model": folder})
        assert f"method {config.method} with the head {folder}" in caplog.text
        assert tokens(llm, SEEDED) == tokens(plain(), SEEDED)
        check_drafts({"model": folder})
        applying = dict(llm.applicable_methods())
        other = "medusa" if config.method != "medusa" else "hydra"
        assert "needs a head that was trained for this target" in str(applying[other])


@pytest.mark.parametrize("name", ["shared", "hydra++"])
def test_a_target_whose_output_layer_is_narrower_than_its_layers_is_refused(name: str, folders: dict[str, str]) -> None:
    """OPT-350m projects its last hidden states: heads of its width failed in every step instead."""
    with pytest.raises(UnsupportedModelError, match="have width 32, and its output layer has input width 16"):
        LLM(narrow_opt(), {"model": folders[name]})


def test_files_of_torch_are_told_and_read(tmp_path: Path) -> None:
    """As the authors publish them: one file of torch, and a config that counts wrongly."""
    for name, heads, write, keys in (
        ("medusa", medusa_heads(), write_medusa, {"medusa_num_heads": 2, "medusa_num_layers": 2}),
        ("hydra++", hydra_heads(True), write_hydra, {}),
    ):
        write_checkpoint(tmp_path / "written", *write(heads))
        found = read_checkpoint(tmp_path / "written")
        folder = tmp_path / name
        folder.mkdir()
        torch.save(dict(found.tensors), folder / f"{name.rstrip('+')}_lm_head.pt")
        (folder / "config.json").write_text(json.dumps({**found.config, **keys}))
        assert SpeculativeConfig(model=str(folder)).method == name
        check_drafts({"model": str(folder)})


def test_a_model_with_its_heads_inside_is_target_and_heads(tmp_path: Path) -> None:
    """Medusa-2: one folder, one file, named twice."""
    model = toy_model(VOCAB_SIZE)
    model.config.medusa_num_heads, model.config.medusa_num_layers = 4, 2
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    write_checkpoint(tmp_path / "heads", *write_medusa(medusa_heads()))
    inside = load_file(tmp_path / "heads" / "model.safetensors")
    both = {**tensors, **{f"medusa_head.{name}": tensor for name, tensor in inside.items()}}
    save_file(both, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(tmp_path, {"model": str(tmp_path)}, dtype="float64")
    assert llm.speculative_config.method == "medusa"
    assert tokens(llm, GREEDY) == tokens(plain(), GREEDY)
    assert rate(llm) > 2.5


def test_targets_of_a_known_size_are_told_of_published_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(toy_model(VOCAB_SIZE))
    for published in medusa_hydra.PUBLISHED.values():
        monkeypatch.setitem(published, (32, 2, VOCAB_SIZE), ("owner/heads",))
    reasons = dict(llm.applicable_methods())
    for method in ("medusa", "hydra++"):
        assert str(reasons[method]).endswith("published for targets of this size: owner/heads")


def test_loaded_heads_are_taken_as_they_are() -> None:
    for method, heads in (("medusa", medusa_heads()), ("hydra++", hydra_heads(True))):
        check_drafts({"method": method, "model": heads})
    with pytest.raises(ConfigError, match="needs a head"):
        plain().with_speculative_config({"method": "hydra", "model": medusa_heads()})
    for method, other in (("hydra", "hydra++"), ("hydra++", "hydra")):
        with pytest.raises(ConfigError, match=re.escape(f"{other!r} heads, not {method!r} heads")):
            plain().with_speculative_config({"method": method, "model": hydra_heads(other == "hydra++")})


@pytest.mark.parametrize(
    ("method", "held", "named"),
    [
        ("hydra++", "hydra", "hydra"),
        ("hydra", "hydra++", r"hydra\+\+"),
        ("medusa", "hydra++", r"hydra\+\+"),
        ("hydra", "shared", "medusa"),
        ("eagle", "medusa", "medusa"),
        ("eagle3", "hydra", "hydra"),
    ],
)
def test_heads_of_another_kind_than_the_method_are_refused(
    method: str, held: str, named: str, folders: dict[str, str]
) -> None:
    """``hydra++`` drafted with heads of Hydra, and said nothing."""
    with pytest.raises(ConfigError, match=f"contains '{named}' heads.*use method '{named}'"):
        LLM(toy_model(VOCAB_SIZE), {"method": method, "model": folders[held]})


def test_a_method_with_a_sign_in_its_name_can_be_a_part(folders: dict[str, str]) -> None:
    """A union was taken apart at every +, that of its part's own name too."""
    config = SpeculativeConfig("suffix+hydra++", model=folders["hydra++"])
    assert [part.method for part in config.parts] == ["suffix", "hydra++"]
    assert config.title == "suffix+hydra++"
    assert SpeculativeConfig("ngram>hydra+++suffix").title == "ngram>hydra+++suffix"
    with pytest.raises(ConfigError, match=r"names nothing on one side of '\+'"):
        SpeculativeConfig("suffix++ngram")


def test_typical_acceptance_is_said_everywhere(folders: dict[str, str]) -> None:
    llm = LLM(toy_model(VOCAB_SIZE), {"model": folders["medusa"], "rejection_sample_method": "typical"})
    for params in (GREEDY, SEEDED):
        (result,) = llm.generate(GIVEN[0], params)
        assert result.lossless is False
        assert result.metrics.speculative_decoding["lossless"] is False
        record = as_record(result)
        assert record["lossless"] is False
        assert record["metrics"]["speculative_decoding"]["lossless"] is False
    assert tokens(llm, GREEDY) == tokens(plain(), GREEDY)
    texts = [tokens(llm, SamplingParams(temperature=1.0, seed=seed, max_tokens=12)) for seed in (1, 2)]
    assert texts[0] == texts[1]  # nothing is drawn


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_what_typical_accepts_is_set(threshold: float, folders: dict[str, str]) -> None:
    """Everything at 0; at 1, with a large alpha, only what is certain."""
    config = {"model": folders["hydra"], "acceptance": "typical", "posterior_threshold": threshold}
    llm = LLM(toy_model(VOCAB_SIZE), {**config, "posterior_alpha": 1e9 if threshold else 0.3})
    found = rate(llm, SamplingParams(temperature=1.0, seed=3, max_tokens=20))
    assert found > 3.0 if threshold == 0.0 else found == 1.0


@pytest.mark.parametrize(
    "name", ["hydra++", *(pytest.param(name, marks=pytest.mark.full) for name in ("medusa", "shared", "hydra"))]
)
def test_some_tokens_alone_may_be_drafted(name: str, folders: dict[str, str]) -> None:
    """Rows of the output layers: all tokens are as good as none left out, few cost acceptance and no token."""
    penalised = SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.2, max_tokens=20)
    whole = rate(plain().with_speculative_config({"model": folders[name]}))
    for kept in (range(VOCAB_SIZE), range(0, VOCAB_SIZE, 3), (5, 9, 12)):
        llm = plain().with_speculative_config({"model": folders[name], "draft_vocabulary": list(kept)})
        for params in (GREEDY, penalised):
            assert tokens(llm, params) == tokens(plain(), params)
        found = rate(llm)
        assert found == whole if len(kept) == VOCAB_SIZE else 1.0 <= found < whole
        sources = [result.metrics.speculative_decoding["num_draft_tokens"] for result in llm.generate(GIVEN, GREEDY)]
        assert min(sources) > 0


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"speculative_token_tree": [[0], [0, 0], [0, 0, 0], [0] * 4, [0] * 5]}, ConfigError, "5 levels deep"),
    ({"speculative_token_tree": [[0], [0, 0], [1], [3]]}, ConfigError, "the better sibling"),
    ({"speculative_token_tree": "70"}, ConfigError, "70 siblings, and the vocabulary has 64 tokens"),
    ({"max_draft_nodes": 1}, ConfigError, "2 or more"),
    ({"dtype": "float32"}, ConfigError, "a head runs in that of its target"),
    ({"num_draft_branches": 2}, ConfigError, "has no meaning for method 'medusa'"),
    ({"rejection_sample_method": "block"}, ConfigError, "drafts trees"),
]


@pytest.mark.parametrize(("keys", "error", "message"), BAD)
def test_impossible_configs_are_refused(
    keys: dict[str, Any], error: type[Exception], message: str, folders: dict[str, str]
) -> None:
    with pytest.raises(error, match=message):
        LLM(toy_model(VOCAB_SIZE), {"method": "medusa", "model": folders["medusa"], **keys})


def test_heads_of_another_target_are_refused(folders: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="the target's have size 16"):
        LLM(toy_model(VOCAB_SIZE, hidden_size=16), {"model": folders["hydra"]})
    with pytest.raises(CheckpointError, match="64x32, expected 80x32"):
        LLM(toy_model(80), {"model": folders["medusa"]})


def test_the_default_tree_is_as_large_as_it_is_cheap() -> None:
    """8 nodes in float32, 16 in half precision on a CPU; what is given goes before."""
    for dtype, nodes in ((torch.float32, 8), (torch.float64, 8), (torch.bfloat16, 16)):
        llm = LLM(toy_model(VOCAB_SIZE, dtype=dtype))
        heads = copy.deepcopy(medusa_heads()).to(dtype)
        drafter = llm.with_speculative_config({"method": "medusa", "model": heads}).drafting
        assert len(drafter.new_drafter().growth.tree) == nodes
    config = {"method": "medusa", "model": medusa_heads(), "max_draft_nodes": 21}
    made = LLM(toy_model(VOCAB_SIZE), config).drafting.new_drafter()
    assert len(made.growth.tree) == 21
    config["speculative_token_tree"] = "mc_sim_7b_63"
    made = LLM(toy_model(VOCAB_SIZE), config).drafting.new_drafter()
    assert len(made.growth.begin(StubRow(), 4).shape.children) == 21


def changed(head: str, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A head of zoo:tiny with other keys and tensors, as a config of speculation."""
    own = zoo.path("tiny").parent / head
    write_checkpoint(
        folder,
        json.loads((own / "config.json").read_text()) | config,
        load_file(own / "model.safetensors") | tensors,
    )
    return {"method": head.replace("_plus_plus", "++"), "model": str(folder)}


@cache
def zoo_tiny() -> LLM:
    return LLM("zoo:tiny")


PREFIX = "prefix_embeding_layer.layers.0"


@pytest.mark.parametrize(
    ("head", "config", "tensors", "said"),
    [
        ("hydra", {"hidden_state_offset": 7}, {}, "offset of these heads is 7, and the target has 6 layers"),
        ("hydra_plus_plus", {"hidden_state_offset": 10**30}, {}, "and the target has 6 layers"),
        ("hydra_plus_plus", {"rope_parameters": "x"}, {}, "rope_parameters is 'x'"),
        ("hydra_plus_plus", {"rope_parameters": []}, {}, r"rope_parameters is \[\]"),
        ("hydra", {}, {"hydra_mlp.0.0.linear.bias": torch.tensor(1.0)}, "hydra_mlp.0.0.linear.bias; download"),
        ("hydra_plus_plus", {}, {f"{PREFIX}.self_attn.q_proj.weight": torch.ones(9)}, "is not a matrix"),
        ("eagle", {}, {"transformer.self_attn.k_proj.weight": torch.ones(0, 192)}, "empty or a single number"),
        ("eagle3", {}, {"layers.0.self_attn.k_proj.weight": torch.ones(0, 384)}, "empty or a single number"),
        ("eagle3", {}, {"fc.weight": torch.tensor(1.0)}, "empty or a single number"),
        ("eagle3", {}, {"d2t": torch.tensor(1)}, "a single number: d2t"),
    ],
)
def test_heads_that_no_target_has_are_refused_by_name(
    head: str, config: dict[str, Any], tensors: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    """Of 1,900 heads with one tensor or key changed, 23 ended in a traceback, of IndexError to ZeroDivisionError."""
    with pytest.raises((CheckpointError, ConfigError), match=said):
        zoo_tiny().with_speculative_config(changed(head, tmp_path / "head", config, tensors))
