"""Files faithful to the published layouts of EAGLE's heads are read, whatever their configs say; others are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import foredraft
from eagle_heads import HIDDEN, LAYER, VOCAB_SIZE, model, random_head, streams_of, texts
from foredraft import LLM, SamplingParams, zoo
from foredraft.bench.candidates import read_candidates
from foredraft.classic.sampling import speculative_generate
from foredraft.cli import app
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.heads.eagle import PUBLISHED
from foredraft.engine import acceptance_model
from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from foredraft.heads.eagle import EagleHead, default_streams
from foredraft.heads.eagle_layouts import TargetFacts, check_fits, read_eagle, write_eagle
from foredraft.heads.layers import AttentionContext
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods import methods
from foredraft.testing import toy_model

EOS = 3


def facts(**others: Any) -> TargetFacts:
    given = {"name": "the toy", "hidden_size": HIDDEN, "vocab_size": VOCAB_SIZE, "num_layers": 2}
    embedding = model().get_input_embeddings().weight.detach()
    return TargetFacts(**{**given, "eos_token_ids": (EOS,), "embedding": embedding, **others})


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": LAYER.intermediate_size,
    "num_attention_heads": LAYER.num_heads,
    "num_key_value_heads": LAYER.num_kv_heads,
    "num_hidden_layers": 1,
    "rms_norm_eps": LAYER.eps,
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}


def tensors_of(head: EagleHead) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in head.named_parameters()}


def renamed(tensors: dict[str, Tensor], *pairs: tuple[str, str]) -> dict[str, Tensor]:
    for old, new in pairs:
        tensors = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in tensors.items()}
    return tensors


def mapped(head: EagleHead) -> dict[str, Tensor]:
    return {"d2t": head.vocabulary.d2t, "t2d": head.vocabulary.t2d}


def with_eos(generation: int, **others: Any) -> EagleHead:
    """A random head whose vocabulary holds EOS."""
    head = random_head(generation, **others)
    if head.vocabulary is not None and EOS not in head.vocabulary.target_ids:
        ids = [EOS, *(token for token in head.vocabulary.target_ids.tolist()[1:])]
        head.vocabulary = DraftVocabulary.of(ids, VOCAB_SIZE)
    return head


def eagle() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """yuhuili/EAGLE-*: a Llama config, a copy of the embedding, a fusing layer with a bias of which nothing is said."""
    head = with_eos(1, has_fc_bias=True)
    return head, LLAMA, {**tensors_of(head), "embed_tokens.weight": model().get_input_embeddings().weight.float()}


def eagle_llama3() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """yuhuili/EAGLE-LLaMA3-*: no bias; its embedding in half precision."""
    head = with_eos(1)
    own = model().get_input_embeddings().weight.half()
    return head, {**LLAMA, "bias": False}, {**tensors_of(head), "embed_tokens.weight": own}


def eagle3() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """yuhuili/EAGLE3-*: "midlayer", offsets and mask of a reduced vocabulary, no embedding."""
    head = with_eos(3)
    named = renamed(tensors_of(head), ("layers.0.", "midlayer."))
    return head, {**LLAMA, "draft_vocab_size": len(head.vocabulary or ())}, {**named, **mapped(head)}


def eagle3_full_vocabulary() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """Vicuna 13B: 32000 = 32000, no map; its config says 40 layers."""
    head = EagleHead(with_eos(3).shape, DraftVocabulary.full(VOCAB_SIZE)).double()
    named = renamed(tensors_of(head), ("layers.0.", "midlayer."))
    return head, {**LLAMA, "num_hidden_layers": 40, "draft_vocab_size": VOCAB_SIZE}, named


def sglang() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """Repacked for SGLang: another architecture, "model." before the layers, ids of outputs of layers."""
    head = with_eos(3, streams=(2, 2, 2))
    named = {name if name.startswith("lm_head") else f"model.{name}": t for name, t in tensors_of(head).items()}
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 1, 1]}
    return head, config, {**named, **mapped(head), "model.rotary_emb.inv_freq": torch.ones(4)}


def nested(head: EagleHead, **others: Any) -> dict[str, Any]:
    kind = "eagle3" if head.shape.generation == 3 else "eagle"
    return {"speculators_model_type": kind, "transformer_layer_config": LLAMA, **others}


def speculators() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    head = with_eos(3, norm_before_residual=True, norm_before_fc=True)
    ids = list(head.shape.streams)
    config = nested(head, norm_before_residual=True, norm_before_fc=True, eagle_aux_hidden_state_layer_ids=ids)
    copies = {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": torch.ones(5, HIDDEN)}
    return head, config, {**tensors_of(head), **mapped(head), **copies}


def speculators_31() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """EAGLE-3.1, with Qwen3's norms by head."""
    head = with_eos(3, fc_norm=True, norm_output=True, layer=replace(LAYER, has_head_norms=True))
    config = nested(head, fc_norm=True, norm_output=True, draft_vocab_size=len(head.vocabulary or ()))
    return head, config, {**tensors_of(head), **mapped(head)}


def speculators_eagle() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    head = with_eos(1, embed_norm=True, input_norm=True, output_norm=True, has_fc_bias=True)
    pairs = (
        ("layers.0.", "transformer."),
        ("fc.", "fusion_fc."),
        ("embed_norm.", "embedding_layernorm."),
        ("norm.", "pre_lm_head_layernorm."),
    )
    return head, nested(head, layernorms=True, fusion_bias=True), renamed(tensors_of(head), *pairs)


def biased() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """Qwen2: queries, keys and values with biases."""
    head = with_eos(1, layer=replace(LAYER, has_bias=True))
    return head, {**LLAMA, "qkv_bias": True}, tensors_of(head)


def other_head_dim() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """Qwen3: heads that are wider than their share."""
    head = with_eos(3, layer=replace(LAYER, num_heads=3, num_kv_heads=1, head_dim=16))
    config = {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    return head, config, {**tensors_of(head), **mapped(head)}


def own_embedding() -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """A head whose embedding was trained."""
    head = with_eos(3, own_embedding=VOCAB_SIZE)
    return head, LLAMA, {**tensors_of(head), **mapped(head)}


LAYOUTS = [
    eagle,
    eagle_llama3,
    eagle3,
    eagle3_full_vocabulary,
    sglang,
    speculators,
    speculators_31,
    speculators_eagle,
    biased,
    other_head_dim,
    own_embedding,
]
Layout = Callable[[], tuple[EagleHead, dict[str, Any], dict[str, Tensor]]]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], as_pickle: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    if not as_pickle:
        write_checkpoint(folder, config, tensors)
        return folder
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


# -- a second implementation, of matrices alone --------------------------------------------------------------------


def naive_outputs(head: EagleHead, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Features fed back (S - 1, H) and what the output layer reads, one row after the other."""
    w = {name: tensor.double() for name, tensor in head.named_parameters()}
    shape, layer = head.shape, head.shape.layer

    def norm(x: Tensor, name: str) -> Tensor:
        return w[name] * x / (x.pow(2).mean() + layer.eps).sqrt() if name in w else x

    def turned(x: Tensor, position: int) -> Tensor:
        half = layer.head_dim // 2
        angles = position * 10000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / layer.head_dim)
        a, b = x[:half], x[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    table = w.get("embed_tokens.weight", model().get_input_embeddings().weight.double())
    streams = streams_of(ids[None], head, torch.float64)[0]
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    rows, read = [], []
    at = "layers.0."
    for t in range(len(ids) - 1):
        e, h = table[ids[t + 1]], streams[t]
        if shape.generation == 1:
            z = w["fc.weight"] @ torch.cat([norm(e, "embed_norm.weight"), h]) + w.get("fc.bias", torch.zeros(1))
            u = norm(z, at + "input_layernorm.weight")
            residual = z
        else:
            h = norm(h, "input_norm.weight")
            parts = h.chunk(len(shape.streams))
            h = torch.cat([norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)])
            g = w["fc.weight"] @ h
            u = torch.cat([norm(e, at + "input_layernorm.weight"), norm(g, at + "hidden_norm.weight")])
            residual = norm(g, at + "hidden_norm.weight") if shape.norm_before_residual else g
        q, k, v = (
            w[f"{at}self_attn.{p}_proj.weight"] @ u + w.get(f"{at}self_attn.{p}_proj.bias", torch.zeros(1))
            for p in "qkv"
        )
        heads = q.view(-1, layer.head_dim)
        keys.append([turned(norm(x, at + "self_attn.k_norm.weight"), t) for x in k.view(-1, layer.head_dim)])
        values.append(list(v.view(-1, layer.head_dim)))
        mixed = []
        for i, x in enumerate(heads):
            shared = i // (layer.num_heads // layer.num_kv_heads)
            x = turned(norm(x, at + "self_attn.q_norm.weight"), t)
            scores = torch.stack([x @ key[shared] for key in keys]) / layer.head_dim**0.5
            mixed.append(sum(p * value[shared] for p, value in zip(scores.softmax(0), values, strict=True)))
        y = residual + w[at + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        m = norm(y, at + "post_attention_layernorm.weight")
        gate, up = w[at + "mlp.gate_proj.weight"] @ m, w[at + "mlp.up_proj.weight"] @ m
        y = y + w[at + "mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
        if shape.norm_output:
            y = norm(y, "norm.weight")
            read.append(y)
        else:
            read.append(norm(y, "norm.weight"))
        rows.append(y)
    return torch.stack(rows), torch.stack(read)


def outputs(head: EagleHead, ids: Tensor) -> Tensor:
    size = len(ids) - 1
    table = model().get_input_embeddings().weight if head.embed_tokens is None else head.embed_tokens.weight
    mask = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
    placed = AttentionContext(*head.place(torch.arange(size)[None]), mask)
    features = head.features(streams_of(ids[None], head, torch.float64)[:, :-1])
    return head(table[ids[1:]][None], features, placed)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_published_layout_is_read(layout: Layout, tmp_path: Path) -> None:
    """Structure and weights, and the function that they make: that of matrices written out."""
    want, config, tensors = layout()
    folder = write(tmp_path / "head", config, tensors)
    found = read_eagle(read_checkpoint(folder), facts())[0].double()
    assert found.shape == want.shape
    assert {name: t.shape for name, t in found.named_parameters()} == {n: t.shape for n, t in want.named_parameters()}
    for name, tensor in want.named_parameters():
        torch.testing.assert_close(dict(found.named_parameters())[name], tensor, rtol=0, atol=0)
    if want.vocabulary is not None and found.vocabulary is not None:
        assert torch.equal(found.vocabulary.target_ids, want.vocabulary.target_ids)
    ids = torch.tensor(texts()[0][:7])
    fed_back, read = naive_outputs(want, ids)
    with torch.no_grad():
        got = outputs(found, ids)
        torch.testing.assert_close(got, fed_back, rtol=0, atol=1e-9)
        torch.testing.assert_close(found.before_output(got), read, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_what_is_written_in_the_layout_of_speculators_is_read_again(layout: Layout, tmp_path: Path) -> None:
    want, _, _ = layout()
    config, tensors = write_eagle(want, "somebody/target")
    write_checkpoint(tmp_path, {**config, "first_token_acceptance": 0.9}, tensors)
    found, notes = read_eagle(read_checkpoint(tmp_path), facts())
    assert found.shape == want.shape
    assert write_eagle(found)[0]["first_token_acceptance"] == 0.9
    assert all("embedding" in note for note in notes)
    for name, tensor in want.named_parameters():
        assert torch.equal(dict(found.named_parameters())[name].double(), tensor.double()), name


@pytest.mark.parametrize(
    ("layout", "method", "as_pickle"),
    [(eagle, "eagle2", True), (speculators, "eagle3", False)],
)
def test_the_method_follows_from_what_lies_there(
    layout: Layout, method: str, as_pickle: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, config, tensors = layout()
    folder = str(write(tmp_path / "head", config, tensors, as_pickle))
    assert SpeculativeConfig(model=folder).method == method
    assert SpeculativeConfig(model=folder, max_draft_nodes=5).max_draft_nodes == 5
    with caplog.at_level(logging.INFO, "foredraft"):
        llm = LLM(model(), {"model": folder})
    assert f"drafting: {method} · " in caplog.text
    assert dict(llm.applicable_methods())[method] is None
    params = SamplingParams(temperature=0, max_tokens=8)
    prompt = {"prompt_token_ids": list(texts()[0][:6])}
    plain = LLM(model()).generate(prompt, params)[0].outputs[0].token_ids
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == plain
    both = llm.with_speculative_config({"method": f"{method}+suffix", "model": folder})
    assert both.generate(prompt, params)[0].outputs[0].token_ids == plain
    assert both.drafting.heads == (folder,)
    with pytest.raises(ConfigError, match=f"use method '{method}'"):
        LLM(model(), {"method": "draft_model", "model": folder})


def test_a_model_is_no_head(tmp_path: Path) -> None:
    toy_model(VOCAB_SIZE, dtype=torch.float32).save_pretrained(tmp_path)
    assert SpeculativeConfig(model=str(tmp_path)).method == "draft_model"
    assert SpeculativeConfig(model="somebody/who-is-not-here").method == "draft_model"


def test_a_head_in_memory_drafts() -> None:
    llm = LLM(model(), {"method": "eagle3", "model": random_head(3)})
    assert llm.drafting.heads == ("EagleHead",)
    assert len(llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4))[0].outputs[0].token_ids) == 4
    with pytest.raises(ConfigError, match="convert it with"):
        LLM(model(), {"method": "eagle3", "model": random_head(3).float()})
    with pytest.raises(CheckpointError, match="generation 3"):
        LLM(model(), {"method": "eagle2", "model": random_head(3)})
    with pytest.raises(ConfigError, match="give a folder, a hub id or a EagleHead"):
        LLM(model(), {"method": "eagle3", "model": toy_model(VOCAB_SIZE)})
    with pytest.raises(CheckpointError, match="for a target of 2 layers"):
        check_fits(random_head(3), facts(num_layers=9), 3)
    with pytest.raises(CheckpointError, match="for a target of 64 tokens"):
        check_fits(random_head(3), facts(vocab_size=65), 3)


# -- configs that lie ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lie", "note"),
    [
        ({"num_hidden_layers": 40}, "num_hidden_layers=40"),
        ({"hidden_size": 4096}, "hidden_size=4096"),
        ({"intermediate_size": 7}, "intermediate_size=7"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size=32000"),
        ({"num_attention_heads": 2, "head_dim": 8}, "num_attention_heads=2"),
    ],
)
def test_tensors_are_right_where_a_config_says_otherwise(lie: dict[str, Any], note: str) -> None:
    head, config, tensors = eagle3()
    found, notes = read_eagle(Checkpoint("a head", {**config, **lie}, tensors), facts())
    assert found.shape == head.shape
    assert any(note in each for each in notes)


def test_angles_are_those_of_the_config_or_of_the_user() -> None:
    def theta(rope_theta: float | None = None, **config: Any) -> Any:
        _, given, tensors = eagle()
        found, _ = read_eagle(Checkpoint("a head", {**given, **config}, tensors), facts(), rope_theta=rope_theta)
        return found.shape.layer.rope["rope_theta"]

    assert theta() == 10000.0
    found, _ = read_eagle(Checkpoint("a head", {**LLAMA, "rope_theta": 5e5}, eagle()[2]), facts())
    assert found.shape.layer.rope["rope_theta"] == 5e5
    assert theta(rope_parameters={"rope_type": "default", "rope_theta": 1e6}) == 1e6
    assert theta(rope_scaling={"type": "linear", "factor": 2.0}) == 10000.0
    assert theta(1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}) == 1e4


def test_scaled_angles_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    head = EagleHead(random_head(1, layer=replace(LAYER, rope=scaling)).shape)
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=4, head_dim=8, rope_parameters=scaling)
    positions = torch.tensor([[0, 1, 500, 3000]])
    cos, sin = head.float().place(positions)
    want = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    torch.testing.assert_close((cos[:, 0], sin[:, 0]), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("num_layers", "streams"),
    [
        (2, (0, 1, 2)),
        (3, (0, 2, 3)),
        (4, (2, 3, 4)),
        (5, (2, 3, 4)),
        (6, (2, 3, 4)),
        (8, (2, 4, 5)),
        (30, (2, 15, 27)),
        (32, (2, 16, 29)),
    ],
)
def test_streams_of_shallow_targets_are_distinct(num_layers: int, streams: tuple[int, ...]) -> None:
    assert default_streams(num_layers) == streams
    assert len(set(streams)) == 3
    assert max(streams) <= num_layers


def test_a_target_of_one_layer_has_no_three_streams() -> None:
    with pytest.raises(ConfigError, match="'eagle2'"):
        default_streams(1)


def test_both_conventions_of_layer_ids() -> None:
    """The first id tells: 1 names outputs, one layer further on as inputs."""

    def streams(**config: Any) -> tuple[int, ...]:
        _, given, tensors = eagle3()
        wide = {**tensors, "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)}
        return read_eagle(Checkpoint("a head", {**given, **config}, wide), facts(num_layers=32))[0].shape.streams

    assert streams() == (2, 16, 29)
    assert streams(eagle_aux_hidden_state_layer_ids=[2, 16, 29]) == (2, 16, 29)
    assert streams(eagle_aux_hidden_state_layer_ids=[1, 15, 28]) == (2, 16, 29)
    assert streams(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}) == (2, 16, 29)


# -- refusals ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def turned(name: str) -> Change:
    return lambda config, tensors: tensors.update({name: tensors[name].T.contiguous()})


def without(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name)


def shaped(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: torch.zeros(*shape)})


def told(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


REFUSALS: list[tuple[Layout, Change, str]] = [
    (eagle, without("layers.0.mlp.up_proj.weight"), "missing: layers.0.mlp.up_proj.weight 64x32"),
    (eagle, without("layers.0.self_attn.q_proj.weight"), "layers.0.self_attn.q_proj.weight of a head is missing"),
    (eagle, shaped("layers.1.mlp.extra", 3), "missing: layers.1"),
    (eagle, shaped("something.weight", 3), "extra: something.weight 3"),
    (eagle, shaped("layers.last.weight", 3), "extra: layers.last.weight 3"),
    (eagle, turned("fc.weight"), "transposed: fc.weight is 64x32, expected 32x64"),
    (eagle, turned("layers.0.mlp.gate_proj.weight"), "transposed: layers.0.mlp.gate_proj.weight is 32x64"),
    (eagle, turned("layers.0.self_attn.k_proj.weight"), "transposed: layers.0.self_attn.k_proj.weight"),
    (eagle, shaped("fc.bias", 31), "wrongly shaped: fc.bias is 31, expected 32"),
    (eagle, shaped("layers.0.mlp.down_proj.weight", 32, 63), "wrongly shaped: layers.0.mlp.down_proj.weight is 32x63"),
    (eagle, shaped("layers.0.self_attn.k_proj.weight", 12, 32), "does not fit 4 heads"),
    (eagle, shaped("embed_tokens.weight", 63, 32), "embed_tokens.weight of a head is 63x32"),
    (eagle, told(num_attention_heads=5), "not a whole number of heads"),
    (eagle, told(num_attention_heads=None), "num_attention_heads is missing"),
    (eagle, told(num_attention_heads="4"), "num_attention_heads is '4'"),
    (eagle, told(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type is 'dynamic'"),
    (eagle, told(first_token_acceptance=1.5), "must be a number from 0 to 1"),
    (eagle, told(first_token_acceptance="0.9"), "must be a number from 0 to 1"),
    (eagle, told(first_token_acceptance=True), "must be a number from 0 to 1"),
    (eagle, without("fc.weight"), "contains no EAGLE head"),
    (eagle3, turned("lm_head.weight"), "transposed: lm_head.weight"),
    (eagle3, without("lm_head.weight"), "lm_head.weight is missing"),
    (eagle3, without("d2t"), "no d2t maps rows"),
    (eagle3, shaped("d2t", 4), "does not fit"),
    (eagle3, lambda config, tensors: tensors["d2t"].add_(40), "does not fit the toy"),
    (eagle3, lambda config, tensors: tensors.update(t2d=~tensors["t2d"]), "is inconsistent"),
    (eagle3, told(norm_output="yes"), "norm_output is 'yes'"),
    (eagle3, told(fc_norm=True), "sets fc_norm, and the tensors of that norm are missing"),
    (eagle3, told(target_hidden_size=64), "reads features of size 64"),
    (eagle3, told(eagle_aux_hidden_state_layer_ids=[2, 16, 29]), "reads the layers .* and the toy has 2"),
    (eagle3, told(eagle_aux_hidden_state_layer_ids="2"), "must be a list of whole numbers"),
    (eagle3, shaped("fc.weight", 32, 95), "fuses features of total size 95"),
    (sglang, shaped("midlayer.hidden_norm.weight", 32), "two tensors for layers.0.hidden_norm.weight"),
]


@pytest.mark.parametrize(("layout", "change", "message"), REFUSALS, ids=[message for _, _, message in REFUSALS])
def test_what_does_not_fit_is_refused_by_name(layout: Layout, change: Change, message: str) -> None:
    _, config, tensors = layout()
    config, tensors = dict(config), dict(tensors)
    change(config, tensors)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read_eagle(Checkpoint("a head", config, tensors), facts())


def test_heads_of_other_targets_are_refused() -> None:
    for layout, others, message in (
        (eagle, {"hidden_size": 64}, "the head is for another target"),
        (eagle3, {"hidden_size": 64}, "the head is for another target"),
        (eagle3, {"vocab_size": 65}, "does not fit the toy"),
        (eagle3_full_vocabulary, {"vocab_size": 63}, "and the toy has|another target|63"),
    ):
        _, config, tensors = layout()
        embedding = torch.zeros(others.get("vocab_size", VOCAB_SIZE), others.get("hidden_size", HIDDEN))
        with pytest.raises(CheckpointError, match=message):
            read_eagle(Checkpoint("a head", config, tensors), facts(**others, embedding=embedding))


def test_a_vocabulary_without_an_end_is_refused() -> None:
    head, config, tensors = eagle3()
    missing = next(token for token in range(VOCAB_SIZE) if token not in head.vocabulary.target_ids)
    with pytest.raises(CheckpointError, match=rf"none of the target's EOS tokens \[{missing}\]"):
        read_eagle(Checkpoint("a head", config, tensors), facts(eos_token_ids=(missing,)))


def test_the_other_generation_is_refused_with_its_method() -> None:
    for layout, generation, use in ((eagle, 3, "'eagle' or 'eagle2'"), (eagle3, 1, "'eagle3'")):
        _, config, tensors = layout()
        with pytest.raises(CheckpointError, match=f"use method {use}"):
            read_eagle(Checkpoint("a head", config, tensors), facts(), generation=generation)


def test_without_a_head_methods_say_what_is_missing_and_where_one_is() -> None:
    found = dict(LLM(model()).applicable_methods())
    for name in ("eagle2", "eagle3"):
        assert "needs a head that was trained for this target" in str(found[name])
        assert methods()[name].drafts_with_heads
    assert PUBLISHED[4096, 32, 128256][3][0] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"


def test_the_hook_takes_heads_and_the_classic_functions_say_that_they_do_not(tmp_path: Path) -> None:
    _, config, tensors = eagle3()
    folder = str(write(tmp_path / "head", config, tensors))
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    options = {"max_new_tokens": 9, "pad_token_id": 0, "do_sample": False}
    plain = model().generate(ids, **options)
    for head in (folder, random_head(3)):
        hook = foredraft.speculate(method="eagle3", model=head)
        assert torch.equal(model().generate(ids, custom_generate=hook, **options), plain)
    assert torch.equal(model().generate(ids, custom_generate=foredraft.speculate(model=folder), **options), plain)
    with pytest.raises(UnsupportedModelError, match=r"EAGLE\) do not work with the classic functions"):
        speculative_generate([1, 2, 3], random_head(3), model())


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", pytest.param("eagle", marks=pytest.mark.full)])
def test_a_right_head_is_not_named_on_text_unlike_its_training(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greedy text that repeats one rejection was once taken for a head of another target."""
    monkeypatch.setattr(acceptance_model, "NUM_COMPARED", 64)
    right = Path(zoo.__file__).parent / "tiny" / name
    tensors = dict(read_checkpoint(right).tensors)
    for key, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.is_floating_point():  # the basis of another hidden space
            tensors[key] = tensor[:, torch.randperm(tensor.shape[1], generator=torch.Generator().manual_seed(1))]
    write_checkpoint(tmp_path, read_checkpoint(right).config, tensors)
    prompts = ["\u00c4\u00d6\u00dc \u4f60\u597d", "SELECT * FROM", "1 2 3 4 5 6 7", "zxqv zxqv jjk"]
    for folder, is_named in ((right, False), (tmp_path, True)):
        caplog.clear()
        llm = LLM("zoo:tiny", {"method": name, "model": str(folder), "length_policy": "fixed"})
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True, seed=1)
            llm.generate(prompts, params)
        assert any("may have been trained for another target" in message for message in caplog.messages) is is_named


def test_the_command_line_takes_heads(tmp_path: Path) -> None:
    """A folder says by itself what it is; ``info`` names it, and says what the other methods lack."""
    toy_model(VOCAB_SIZE, dtype=torch.float32).save_pretrained(tmp_path / "target")
    _, config, tensors = eagle3()
    head = str(write(tmp_path / "head", config, tensors))
    options = ["info", "-m", str(tmp_path / "target"), "--dtype", "float32", "--repeats", "1", "--context", "8"]
    found = CliRunner().invoke(app, [*options, "--draft-model", head, "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert (report["method"], report["heads"]) == ("eagle3", [head])
    methods_of = {entry["method"]: entry for entry in report["methods"]}
    assert methods_of["eagle3"]["applies"]
    assert "needs a head" in methods_of["eagle2"]["reason"]
    by_name = read_candidates("eagle3,eagle3+suffix,draft_model,ngram", head, None)
    assert [name for name, given in by_name.items() if "model" in given] == ["eagle3", "eagle3+suffix"]
    shown = CliRunner().invoke(app, [*options, "--draft-model", head])
    assert head in shown.output.replace("\n", "")
