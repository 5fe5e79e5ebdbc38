"""Models with a text model inside that take pictures: prompts of text are decoded, pictures are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as T
from transformers import PreTrainedModel

from foredraft import LLM, SamplingParams, speculate
from foredraft.errors import ConfigError
from foredraft.testing import strengthen, toy_model

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EYE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EYE |= {"image_size": 28, "patch_size": 14}
PLANES: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}
QWEN_EYE: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 14}
QWEN_IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def llava() -> PreTrainedModel:
    config = T.LlavaConfig(text_config=T.LlamaConfig(**TEXT), vision_config=T.CLIPVisionConfig(**EYE))
    config.image_token_id = config.image_token_index = 60
    return T.LlavaForConditionalGeneration(config)


def gemma3() -> PreTrainedModel:
    types = ["sliding_attention", "full_attention"]
    text = T.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=8, layer_types=types)
    tokens = {"image_token_index": 60, "mm_tokens_per_image": 4, "boi_token_index": 61, "eoi_token_index": 62}
    config = T.Gemma3Config(text_config=text, vision_config=T.SiglipVisionConfig(**EYE), **tokens)
    return T.Gemma3ForConditionalGeneration(config)


def mistral3() -> PreTrainedModel:
    text, eye = T.MistralConfig(**TEXT, head_dim=8), T.PixtralVisionConfig(**EYE)
    config = T.Mistral3Config(text_config=text, vision_config=eye, image_token_index=60, spatial_merge_size=1)
    return T.Mistral3ForConditionalGeneration(config)


def smolvlm() -> PreTrainedModel:
    eye = T.SmolVLMVisionConfig(**EYE)
    config = T.SmolVLMConfig(text_config=T.LlamaConfig(**TEXT), vision_config=eye, image_token_id=60, scale_factor=2)
    return T.SmolVLMForConditionalGeneration(config)


def qwen2_vl() -> PreTrainedModel:
    eye = {**QWEN_EYE, "embed_dim": 32}
    return T.Qwen2VLForConditionalGeneration(
        T.Qwen2VLConfig(text_config={**TEXT, **PLANES}, vision_config=eye, **QWEN_IDS)
    )


def qwen3_vl() -> PreTrainedModel:
    eye = {**QWEN_EYE, "out_hidden_size": 32, "intermediate_size": 48, "deepstack_visual_indexes": [0]}
    return T.Qwen3VLForConditionalGeneration(
        T.Qwen3VLConfig(text_config={**TEXT, **PLANES, "head_dim": 8}, vision_config=eye, **QWEN_IDS)
    )


def made(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return strengthen(make()).double().eval()


IDS = torch.randint(5, 58, (2, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
ASKED = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 12, "do_sample": False}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "make",
    [llava, gemma3, qwen2_vl, *(pytest.param(one, marks=pytest.mark.full) for one in (mistral3, smolvlm, qwen3_vl))],
)
def test_prompts_of_text_are_decoded(make: Callable[[], PreTrainedModel]) -> None:
    """Inside `generate` as by `LLM`: transformers adds an empty `mm_encoder_outputs`, and positions in planes."""
    model = made(make)
    plain = model.generate(**ASKED)
    assert torch.equal(model.generate(**ASKED, custom_generate=speculate("ngram")), plain)
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    outputs = LLM(model, "ngram").generate([IDS[0, 5:].tolist(), IDS[1].tolist()], params)
    for output, row in zip(outputs, plain[:, 20:].tolist(), strict=True):
        said = list(output.outputs[0].token_ids)
        assert said == row[: len(said)]


@pytest.mark.parametrize(("make", "name"), [(gemma3, "token_type_ids"), (qwen2_vl, "mm_token_type_ids")])
def test_kinds_of_tokens_that_are_all_text_are_taken(make: Callable[[], PreTrainedModel], name: str) -> None:
    """Processors of such models return them for every prompt."""
    model, given = made(make), {name: torch.zeros_like(IDS)}
    try:
        plain = model.generate(**ASKED, **given)
    except ValueError:
        pytest.skip(f"{type(model).__name__} takes no {name} in transformers {T.__version__}")
    assert torch.equal(model.generate(**ASKED, **given, custom_generate=speculate("ngram")), plain)


def test_pictures_are_refused_by_the_name_that_the_user_gave() -> None:
    """transformers encodes them beforehand, and passes them on by another name. Text goes on after that."""
    model, ids = made(llava), IDS.clone()
    ids[:, 8:12] = 60
    given = {**ASKED, "input_ids": ids, "pixel_values": torch.rand(2, 3, 28, 28).double()}
    assert model.generate(**given).shape == (2, 32)
    with pytest.raises(ConfigError, match=r"pixel_values cannot be used .*: prompts are text, without pictures"):
        model.generate(**given, custom_generate=speculate("ngram"))
    plain = model.generate(**ASKED)
    assert torch.equal(model.generate(**ASKED, custom_generate=speculate("ngram")), plain)


def test_positions_of_pictures_leave_no_trace() -> None:
    """Qwen's models remember how far a picture has shifted positions; prompts of text count from 0 after it."""
    model, ids = made(qwen2_vl), IDS.clone()
    ids[:, 7], ids[:, 8:12] = 62, 60
    pictures = {
        "pixel_values": torch.rand(32, 3 * 2 * 14 * 14).double(),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }
    given = {**ASKED, "input_ids": ids, **pictures, "mm_token_type_ids": (ids == 60).long()}
    model.generate(**given)
    with pytest.raises(ConfigError, match="pixel_values cannot be used"):
        model.generate(**given, custom_generate=speculate("ngram"))
    plain = model.generate(**ASKED)
    assert torch.equal(model.generate(**ASKED, custom_generate=speculate("ngram")), plain)


def test_positions_in_planes_that_differ_are_refused() -> None:
    """Those of pictures; and planes for a model that has none."""
    model = made(qwen2_vl)
    positions = (MASK.cumsum(-1) - 1).clamp(min=0).expand(3, 2, 20).clone()
    hook = speculate("ngram")
    assert torch.equal(
        model.generate(**ASKED, position_ids=positions, custom_generate=hook),
        model.generate(**ASKED, custom_generate=hook),
    )
    positions[1, :, 12:] += 1
    with pytest.raises(ConfigError, match="remove the image tokens"):
        model.generate(**ASKED, position_ids=positions, custom_generate=hook)
    with pytest.raises(ConfigError, match=r"position_ids of shape \(3, 2, 20\)"):
        toy_model().generate(**ASKED, position_ids=positions, custom_generate=hook)
