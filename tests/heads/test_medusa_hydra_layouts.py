"""Published layouts of the heads of Medusa and Hydra: read strictly, written as they are read, refused readably."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaModel

from foredraft.errors import CheckpointError
from foredraft.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from foredraft.heads.layers import LayerShape
from foredraft.heads.medusa_hydra import HeadsShape, HydraHeads, MedusaHeads
from foredraft.heads.medusa_hydra_layouts import read_hydra, read_medusa, write_hydra, write_medusa
from foredraft.heads.recognition import is_hydra, is_medusa

H, V, K = 8, 20, 3
LAYER = LayerShape(H, 12, 4, 2, 2, eps=1e-5, rope={"rope_type": "default", "rope_theta": 500.0})

Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def medusa_tensors(has_outputs: bool = True, num_layers: int = 1, prefix: str = "", num_heads: int = K) -> Tensors:
    """As the authors write them: the blocks of a head are one block, several times."""
    tensors: Tensors = {}
    for head in range(num_heads):
        weight, bias = random(H, H), random(H)
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = weight
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = bias
        if has_outputs:
            tensors[f"{prefix}{head}.{num_layers}.weight"] = random(V, H)
    return tensors


def hydra_tensors(has_prefix: bool, num_layers: int = 4) -> Tensors:
    """As the authors write them: later layers are copies, dropouts count in prefix-mlp, embeddings are stored."""
    first, step, output = (1, 2, ".1") if has_prefix else (0, 1, "")
    tensors: Tensors = {"input_embed_fn.weight": random(V, H)}
    for head in range(K):
        for name in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{head}.{first}.{name}.weight"] = random(H, (head + 2) * H)
            tensors[f"hydra_mlp.{head}.{first}.{name}.bias"] = random(H)
        weight, bias = random(H, H), random(H)
        for layer in range(1, num_layers):
            tensors[f"hydra_mlp.{head}.{first + layer * step}.linear.weight"] = weight
            tensors[f"hydra_mlp.{head}.{first + layer * step}.linear.bias"] = bias
        tensors[f"hydra_lm_head.{head}{output}.weight"] = random(V, H)
        tensors[f"hydra_lm_head.{head}{output}.bias"] = random(V)
    if has_prefix:
        tensors |= {f"prefix_embeding_layer.{name}": tensor for name, tensor in llama().state_dict().items()}
    return tensors


def llama() -> LlamaModel:
    """The prefix layer as its authors build it: a model of one layer."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attn_implementation="eager",
    )
    torch.manual_seed(5)
    model = LlamaModel(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


HYDRA_CONFIG = {
    "base_model_name_or_path": "lmsys/vicuna-13b-v1.3",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "hydra_num_heads": K,
    "hydra_num_layers": 4,
}


def hydra_checkpoint(has_prefix: bool, **keys: Any) -> Checkpoint:
    config = {**HYDRA_CONFIG, "hydra_head_arch": "prefix-mlp" if has_prefix else "mlp", **keys}
    return Checkpoint("heads", config, hydra_tensors(has_prefix))


# -- Medusa ----------------------------------------------------------------------------------------------------------


def naive_medusa(tensors: Tensors, hidden: Tensor, num_layers: int, prefix: str = "") -> list[Tensor]:
    states = []
    for head in range(K):
        x = hidden
        for layer in range(num_layers):
            name = f"{prefix}{head}.{layer}.linear"
            x = x + silu(x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
        output = tensors.get(f"{prefix}{head}.{num_layers}.weight")
        states.append(x if output is None else x @ output.T)
    return states


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("has_outputs", [True, False])
def test_medusa_as_published(num_layers: int, prefix: str, has_outputs: bool, tmp_path: Path) -> None:
    tensors = medusa_tensors(has_outputs, num_layers, prefix)
    model = {"model.embed_tokens.weight": random(V, H)} if prefix else {}
    config = {"medusa_num_heads": 2, "medusa_num_layers": num_layers}
    heads, notes = read_medusa(Checkpoint("x", config, {**tensors, **model}), H, V)
    assert heads.num_heads == K
    assert any("medusa_num_heads=2, but the checkpoint has 3" in note for note in notes)
    hidden = random(5, H)
    got = heads(hidden, output=lambda states: states)
    for head, want in enumerate(naive_medusa(tensors, hidden, num_layers, prefix)):
        assert torch.equal(got[:, head], want) or float((got[:, head] - want).abs().max()) < 1e-12
    assert heads.needs_output_layer == (not has_outputs)
    assert heads(hidden, 2, lambda states: states).shape[1] == 2
    assert is_medusa(config, [*tensors, *model])
    assert is_medusa(config)
    write_checkpoint(tmp_path / "heads", *write_medusa(heads, "base"))
    again, notes = read_medusa(read_checkpoint(tmp_path / "heads"), H, V)
    assert notes == ()
    assert torch.allclose(again(hidden, output=lambda states: states), got, rtol=0, atol=1e-12)
    assert set(read_checkpoint(tmp_path / "heads").tensors) == {name.removeprefix(prefix) for name in tensors}


def test_blocks_that_are_shared_are_one_module() -> None:
    heads, _ = read_medusa(Checkpoint("x", {}, medusa_tensors(num_layers=3)), H, V)
    assert heads.shape.is_shared
    assert len({id(block) for block in heads.blocks[0]}) == 1
    different = medusa_tensors(num_layers=3)
    different["1.2.linear.bias"] = random(H)
    assert not read_medusa(Checkpoint("x", {}, different), H, V)[0].shape.is_shared


@pytest.mark.parametrize("has_bias", [True, False])
def test_medusa_as_servers_pack_it(has_bias: bool) -> None:
    plain = medusa_tensors(num_layers=2)
    served: Tensors = {"token_map": torch.arange(0, V, 2)}
    for name, tensor in plain.items():
        head, layer, *rest = name.split(".")
        if rest[0] == "weight":
            served[f"lm_heads.{head}.weight"] = tensor[::2].clone()
        elif has_bias or rest[1] == "weight":
            served[f"blocks.{head}.layers.{layer}.{rest[1]}"] = tensor
    heads, _ = read_medusa(Checkpoint("x", {"model_type": "medusa", "num_heads": K}, served), H, V)
    assert heads.shape.has_bias == has_bias
    hidden = random(4, H)
    if not has_bias:
        plain = {name: tensor if "bias" not in name else torch.zeros(H).double() for name, tensor in plain.items()}
    wide = heads.vocabulary.spread(heads(hidden))
    for head, want in enumerate(naive_medusa(plain, hidden, 2)):
        torch.testing.assert_close(wide[:, head, ::2], want[:, ::2])
        assert bool((wide[:, head, 1::2] == -torch.inf).all())
    assert is_medusa({}, served)


def changed(tensors: Tensors, name: str, tensor: Tensor | None) -> Tensors:
    """One tensor is another, or missing."""
    others = {key: value for key, value in tensors.items() if key != name}
    return others if tensor is None else {**others, name: tensor}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("1.0.linear.bias", None, "missing: blocks.1.0.linear.bias 8"),
        ("lm_head.weight", torch.ones(V, H), "extra: lm_head.weight 20x8"),
        ("lm_heads.9.weight", torch.ones(V, H), "missing: blocks.3.0.linear.bias"),
        ("2.1.weight", torch.ones(H, V), "transposed: lm_heads.2.weight is 8x20, expected 20x8"),
        ("0.1.weight", torch.ones(V + 4, H), "lm_heads.0.weight is 24x8, expected 20x8"),
        ("0.0.linear.weight", torch.full((H, H), torch.nan), "NaN or infinite"),
        ("0.0.linear.weight", torch.zeros(H, H, dtype=torch.int8), "not floating-point"),
    ],
)
def test_medusa_that_is_not_as_published(name: str, tensor: Tensor | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_medusa(Checkpoint("x", {}, changed(medusa_tensors(), name, tensor)), H, V)


def test_medusa_of_another_target_or_none() -> None:
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    with pytest.raises(
        CheckpointError, match=r"states of size 8, and the target's have size 16; the heads are for lmsys/vic"
    ):
        read_medusa(Checkpoint("x", config, medusa_tensors()), 16, V)
    with pytest.raises(CheckpointError, match=r"has no Medusa heads; its tensors are fc\.weight"):
        read_medusa(Checkpoint("x", {}, {"fc.weight": random(H, H)}), H, V)
    outside = {**medusa_tensors(), "token_map": torch.tensor([1, 2, V])}
    with pytest.raises(CheckpointError, match="is for another target"):
        read_medusa(Checkpoint("x", {}, outside), H, V)


# -- Hydra -----------------------------------------------------------------------------------------------------------


def naive_hydra(tensors: Tensors, head: int, inputs: Tensor, has_prefix: bool, num_layers: int = 4) -> Tensor:
    first, step, output = (1, 2, ".1") if has_prefix else (0, 1, "")

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    name = f"hydra_mlp.{head}.{first}"
    x = linear(f"{name}.res_connection", inputs) + silu(linear(f"{name}.linear", inputs))
    for layer in range(1, num_layers):
        x = x + silu(linear(f"hydra_mlp.{head}.{first + layer * step}.linear", x))
    return linear(f"hydra_lm_head.{head}{output}", x)


@pytest.mark.parametrize("has_prefix", [False, True])
def test_hydra_as_published(has_prefix: bool, tmp_path: Path) -> None:
    checkpoint = hydra_checkpoint(has_prefix)
    tensors = dict(checkpoint.tensors)
    heads, notes = read_hydra(checkpoint, H, V, LAYER)
    assert notes == ()
    assert heads.shape.is_shared
    assert heads.shape.num_layers == 4
    for head in range(K):
        inputs = random(5, (head + 2) * H)
        want = naive_hydra(tensors, head, inputs, has_prefix)
        torch.testing.assert_close(heads.logits(head, inputs), want, rtol=0, atol=1e-10)
    hidden = random(7, H)
    if has_prefix:
        with torch.no_grad():
            want = llama()(inputs_embeds=hidden[None], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(heads.contexts(hidden), want, rtol=0, atol=1e-5)  # its angles are float32
    else:
        assert heads.contexts(hidden) is hidden
    assert is_hydra(checkpoint.config, tensors)
    assert is_hydra(checkpoint.config)
    assert not is_medusa(checkpoint.config, tensors)
    write_checkpoint(tmp_path / "heads", *write_hydra(heads, "base"))
    stored = read_checkpoint(tmp_path / "heads")
    again, _ = read_hydra(stored, H, V)  # its config says what the target would
    inputs = random(2, 3 * H)
    assert torch.equal(again.logits(1, inputs), heads.logits(1, inputs))
    assert torch.equal(again.contexts(hidden), heads.contexts(hidden))
    copies = {"input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"}
    assert set(stored.tensors) == set(tensors) - copies


def test_later_layers_may_differ() -> None:
    checkpoint = hydra_checkpoint(False)
    tensors = {**checkpoint.tensors, "hydra_mlp.1.3.linear.bias": random(H)}
    heads, _ = read_hydra(Checkpoint("x", checkpoint.config, tensors), H, V)
    assert not heads.shape.is_shared
    inputs = random(2, 3 * H)
    torch.testing.assert_close(heads.logits(1, inputs), naive_hydra(tensors, 1, inputs, False), rtol=0, atol=1e-10)


def test_the_number_of_heads_is_that_of_the_tensors() -> None:
    heads, notes = read_hydra(hydra_checkpoint(False, hydra_num_heads=9), H, V)
    assert heads.num_heads == K
    assert notes == ("the config says hydra_num_heads=9, but the checkpoint has 3, which are used",)


def test_another_base_of_positions_is_heard() -> None:
    heads, _ = read_hydra(hydra_checkpoint(True, rope_theta=7.0), H, V, LAYER)
    assert heads.shape.prefix.rope["rope_theta"] == 7.0


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("hydra_mlp.0.0.linear.weight", None, r"missing: first.0.linear.weight 8x16"),
        ("hydra_lm_head.2.bias", None, r"missing: lm_heads.2.bias 20"),
        ("hydra_lm_head.3.weight", (V, H), "extra: lm_heads.3.weight 20x8"),
        ("fc.weight", (H, H), "extra: fc.weight 8x8"),
        ("hydra_mlp.1.0.res_connection.weight", (24, 8), "transposed: first.1.res_connection.weight is 24x8"),
        ("hydra_mlp.1.0.linear.weight", (8, 16), "wrongly shaped: first.1.linear.weight is 8x16, expected 8x24"),
        ("hydra_lm_head.0.weight", (V + 1, H), "lm_heads.0.weight is 21x8, expected 20x8"),
    ],
)
def test_hydra_that_is_not_as_published(name: str, tensor: tuple[int, ...] | None, message: str) -> None:
    tensors = changed(hydra_tensors(False), name, None if tensor is None else random(*tensor))
    with pytest.raises(CheckpointError, match=message):
        read_hydra(Checkpoint("x", HYDRA_CONFIG, tensors), H, V)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hydra_head_arch": "eagle-attn"}, "mlp and prefix-mlp are supported"),
        ({"hydra_head_arch": "prefix-mlp"}, "but the checkpoint lacks prefix_embeding_layer"),
        ({"grounded_heads": False}, "heads that do not read drafted tokens"),
        ({"hydra_num_layers": 2}, "each head has 4 layers"),
        ({"hidden_state_offset": -1}, "whole number of layers, 0 or more"),
    ],
)
def test_configs_of_hydra_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_hydra(hydra_checkpoint(False, **keys), H, V)


def test_hydra_of_another_target_or_none() -> None:
    with pytest.raises(CheckpointError, match="the heads are for lmsys/vicuna-13b"):
        read_hydra(hydra_checkpoint(False), 16, V)
    with pytest.raises(CheckpointError, match="has no Hydra heads"):
        read_hydra(Checkpoint("x", {}, {"fc.weight": random(H, H)}), H, V)
    with pytest.raises(CheckpointError, match="not match 2 and 2 heads of size 4"):
        read_hydra(hydra_checkpoint(True, num_attention_heads=2), H, V, LAYER)
    with pytest.raises(CheckpointError, match="num_attention_heads is missing"):
        read_hydra(hydra_checkpoint(True), H, V)


def test_new_heads_begin_as_their_authors_begin() -> None:
    """W = 0: a block adds SiLU of its bias alone."""
    block = MedusaHeads(HeadsShape(H, 0, 1)).blocks[0][0]
    x = torch.randn(3, H)
    torch.testing.assert_close(block(x), x + silu(block.linear.bias))
    first = HydraHeads(HeadsShape(H, V, 1)).first[0]
    assert not first.linear.weight.any()
    assert first.res_connection.weight.any()
