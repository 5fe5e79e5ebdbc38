"""The adapters of PEFT itself, where it is installed; `test_model_changes` shows the same with a stand-in.

PEFT is no dependency of the tests: what is followed is any attribute of any module, and a new version of another
library should not turn this suite red.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foredraft import LLM, speculate
from foredraft.classic.adapters import opened
from foredraft.classic.sampling import autoregressive_generate
from foredraft.errors import UnsupportedModelError
from foredraft.testing import toy_model

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

IDS = torch.tensor([[10, 11, 12]])
LAYERS = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"init_lora_weights": False}),
    "dora": ("LoraConfig", {"init_lora_weights": False, "use_dora": True}),
    "lora of embeddings": (
        "LoraConfig",
        {"init_lora_weights": False, "target_modules": [*LAYERS, "embed_tokens", "lm_head"]},
    ),
    "modules to save": ("LoraConfig", {"init_lora_weights": False, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down_proj"], "init_ia3_weights": False}),
    "loha": ("LoHaConfig", {"init_weights": False}),
    "vera": ("VeraConfig", {"target_modules": ["q_proj"], "init_weights": False}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 4, "init_weights": False}),
}


def config(kind: str) -> Any:
    peft = pytest.importorskip("peft")
    name, options = CONFIGS[kind]
    rank = {} if name == "IA3Config" else {"r": 4}
    return getattr(peft, name)(**{**rank, "target_modules": LAYERS, **options})


def wrapped(kind: str) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = toy_model(dtype=torch.float32)
    model.generation_config.pad_token_id = 3
    return peft.get_peft_model(model, config(kind)).eval()


def said(model: Any, **options: Any) -> list[int]:
    given = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False, **options}
    output: list[int] = model.generate(input_ids=IDS, **given)[0, IDS.shape[1] :].tolist()
    return output


class Faces:
    """All that decode one model, each with what it keeps between calls."""

    def __init__(self, model: Any) -> None:
        self._wrapper = model
        self._inner: PreTrainedModel = model.get_base_model()
        self._hook = speculate("ngram")
        self._llm = LLM(self._inner, "ngram")

    def check(self) -> tuple[int, ...]:
        want = said(self._wrapper)
        prompt = [{"prompt_token_ids": IDS[0].tolist()}]
        (output,) = self._llm.generate(prompt, {"max_tokens": 12, "temperature": 0.0})
        assert said(self._wrapper, custom_generate=self._hook) == want
        assert list(output.outputs[0].token_ids) == want
        assert autoregressive_generate(IDS[0].tolist(), self._inner, 12, eos_tokens_id=[]) == want
        return tuple(want)


@pytest.mark.parametrize("kind", CONFIGS)
def test_kinds_of_adapters(kind: str) -> None:
    model = wrapped(kind)
    faces = Faces(model)
    with_adapter = faces.check()
    with model.disable_adapter():
        assert faces.check() != with_adapter
    assert faces.check() == with_adapter
    if kind != "oft":  # merged by a product, whose rounding may show
        model.merge_adapter()
        faces.check()
        model.unmerge_adapter()
        faces.check()


def test_switched_added_and_deleted_adapters() -> None:
    model = wrapped("lora")
    faces = Faces(model)
    texts = [faces.check()]
    model.add_adapter("two", config("lora"))
    model.set_adapter("two")
    texts.append(faces.check())
    model.base_model.set_adapter(["default", "two"])
    texts.append(faces.check())
    model.set_adapter("default")
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= -3
    texts.append(faces.check())
    assert len(set(texts)) == len(texts)
    model.delete_adapter("two")
    assert faces.check() == texts[-1]
    merged = model.merge_and_unload()
    assert tuple(said(merged, custom_generate=speculate("ngram"))) == tuple(said(merged))


def test_adapters_of_transformers_itself() -> None:
    model = toy_model(dtype=torch.float32)
    model.generation_config.pad_token_id = 3
    hook = speculate("ngram")
    before = said(model, custom_generate=hook)
    model.add_adapter(config("lora"), "one")
    model.eval()
    assert said(model, custom_generate=hook) == said(model) != before
    model.disable_adapters()
    assert said(model, custom_generate=hook) == said(model) == before


@pytest.mark.parametrize("name", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = toy_model(dtype=torch.float32)
    model.generation_config.pad_token_id = 3
    tuned = peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with pytest.raises(UnsupportedModelError, match="prompt tuning"):
        said(tuned, custom_generate=speculate("ngram"))
    said(tuned)
    assert said(model, custom_generate=speculate("ngram")) == said(model)


def test_adapters_by_row_are_refused() -> None:
    model = wrapped("lora")
    with pytest.raises(UnsupportedModelError, match="adapter_names"):
        said(model, custom_generate=speculate("ngram"), adapter_names=["default"])


def test_merged_and_disabled_adapters_are_refused() -> None:
    model = wrapped("lora")
    faces = Faces(model)
    before = faces.check()
    model.merge_adapter()
    with model.disable_adapter(), pytest.raises(UnsupportedModelError, match="merged and disabled"):
        said(model, custom_generate=speculate("ngram"))
    model.unmerge_adapter()
    assert faces.check() == before


def test_a_wrapper_is_told_to_come_unwrapped() -> None:
    model = wrapped("lora")
    with pytest.raises(UnsupportedModelError, match=r"a PeftModel around the llama model.* model\.base_model\.model\."):
        LLM(model)
    assert model.base_model.model is model.get_base_model()


@pytest.mark.parametrize("kind", ["lora", "ia3", "loha", "oft"])
def test_the_classic_functions_take_off_a_wrapper_that_changes_layers_alone(kind: str) -> None:
    model = wrapped(kind)
    assert opened(model) is model.get_base_model()
    assert autoregressive_generate(IDS[0].tolist(), model, 12, eos_tokens_id=[]) == said(model)


def test_the_classic_functions_read_virtual_tokens_through_their_wrapper() -> None:
    """Prompt tuning puts tokens in front that no caller sees: without the wrapper the model says something else."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = toy_model(dtype=torch.float32)
    inner = autoregressive_generate(IDS[0].tolist(), model, 12, eos_tokens_id=[])
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with torch.no_grad():
        for parameter in tuned.prompt_encoder.parameters():
            parameter.normal_(std=2.0)
    assert opened(tuned) is tuned
    text = IDS[0].tolist()
    for _ in range(12):
        with torch.no_grad():
            text.append(int(tuned(torch.tensor([text])).logits[0, -1].argmax()))
    assert text[3:] != inner
    assert autoregressive_generate(IDS[0].tolist(), tuned, 12, eos_tokens_id=[]) == text[3:]
