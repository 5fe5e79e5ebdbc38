"""A model that its owner changes between calls: every face decodes with the model as it is.

What an adapter of the PEFT kind does is switched by plain attributes of modules; tensors and hooks stay the same. The
first version looked at tensors and hooks only, and went on with the adapter that was active at the first call.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import lora
from foredraft import LLM, speculate
from foredraft.classic.adapters import adapter_of
from foredraft.classic.sampling import autoregressive_generate
from foredraft.errors import UnsupportedModelError
from foredraft.loading.adapters import shared_adapter
from foredraft.model.execution.execution import choose_execution
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from generated import generated

PROMPT = [5, 6, 7, 8]
GREEDY = {"max_tokens": 12, "temperature": 0.0}


def plain(model: PreTrainedModel) -> list[int]:
    return generated(model, PROMPT, 12)


def hook(model: PreTrainedModel, **options: Any) -> Callable[[], list[int]]:
    return functools.partial(generated, model, PROMPT, 12, custom_generate=speculate("ngram", **options))


def llm(model: PreTrainedModel, **options: Any) -> Callable[[], list[int]]:
    face = LLM(model, "ngram", **options)
    return lambda: list(face.generate([{"prompt_token_ids": PROMPT}], GREEDY)[0].outputs[0].token_ids)


def classic(model: PreTrainedModel) -> Callable[[], list[int]]:
    return lambda: autoregressive_generate(PROMPT, model, 12, eos_tokens_id=[])


FACES: dict[str, Callable[[PreTrainedModel], Callable[[], list[int]]]] = {
    "hook": hook,
    "hook, eager": functools.partial(hook, execution="eager"),
    "LLM": llm,
    "LLM with prefixes": functools.partial(llm, num_cached_prefixes=2),
    "LLM, eager, with prefixes": functools.partial(llm, num_cached_prefixes=2, execution="eager"),
    "classic": classic,
}


WHOLE = {"hook, eager", "LLM with prefixes"}
"""That stand in the whole matrix alone, as the hook, packed, and prefixes, eager, stand in every run."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "face",  # with prefixes an LLM does all that it does without
    [pytest.param(face, marks=pytest.mark.full if face in WHOLE else ()) for face in FACES if face != "LLM"],
)
def test_switched_and_merged_adapters_are_followed(face: str) -> None:
    """PEFT merges through ``.data``: no version counter counts that, but a list of what is merged changes.

    Merged and disabled, their forward takes them out of the weights: in a shadow, the owner's layers would not know.
    """
    model = lora.lora_model()
    speak = FACES[face](model)
    texts = [plain(model)]
    assert speak() == texts[0]
    with lora.disabled(model):
        texts.append(plain(model))
        assert speak() == texts[1]
    assert speak() == texts[0]
    lora.set_adapter(model, "two")
    texts.append(plain(model))
    assert speak() == texts[2]
    lora.set_adapter(model, "one", "two")
    texts.append(plain(model))
    assert speak() == texts[3]
    for layer in lora.layers(model):
        layer.scaling["two"] *= -3
    texts.append(plain(model))
    assert speak() == texts[4]
    assert len(set(map(tuple, texts))) == len(texts), "the adapters must show, or this test cannot fail"
    for layer in lora.layers(model):
        layer.merge()
    assert speak() == plain(model) == texts[4]
    if face != "classic":  # which then runs the model as it is
        with lora.disabled(model), pytest.raises(UnsupportedModelError, match="both merged and disabled"):
            speak()
    for layer in lora.layers(model):
        layer.unmerge()
    lora.set_adapter(model, "one")
    assert speak() == plain(model) == texts[0]


def large(lm: CausalLM) -> list[int]:
    """Packed matrices of the model itself; those of adapters are as narrow as their rank, together if active."""
    return [id(each.matrix) for each in lm.execution.products if min(each.layers[0].weight.shape) > 16]


def test_a_switch_packs_nothing_again_and_probes_each_adapter_once() -> None:
    """Switching to and fro costs a new shadow; weights that are the same stay packed."""
    model = lora.lora_model()
    lm = CausalLM(model)
    probes = [lm.probe]
    is_packed = choose_execution("auto", "cpu", torch.float32) == "packed"
    packed = large(lm)
    assert is_packed == bool(packed)
    for name in ("two", "one", "two", "one"):
        lora.set_adapter(model, name)
        assert lm.refresh()
        assert not lm.refresh()
        assert large(lm) == packed
        probes.append(lm.probe)
    assert probes[0] is probes[2] is probes[4]
    assert probes[0] is not probes[1] is probes[3]
    assert lm.num_changes == 4
    if is_packed:
        layer = lora.layers(model)[1]
        layer.base_layer.weight.data += 1.0
        assert not lm.refresh(), "by itself such a write cannot be seen"
        lora.set_adapter(model, "two")
        assert lm.refresh()
        assert len(set(packed) - set(large(lm))) == 1


def test_the_model_itself_stays_as_it_was() -> None:
    model = lora.lora_model()
    before = [(id(module), sorted(vars(module))) for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    speak = hook(model)
    speak()
    with lora.disabled(model):
        speak()
    speak()
    assert [(id(module), sorted(vars(module))) for module in model.modules()] == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_draft_model_that_is_switched_is_followed() -> None:
    """A drafter that says what the target says drafts well, another one does not."""
    target, drafter = lora.lora_model(), lora.lora_model()
    lora.set_adapter(target, "two")
    face = LLM(target, {"method": "draft_model", "model": drafter})

    def accepted() -> float:
        (output,) = face.generate([{"prompt_token_ids": PROMPT}], GREEDY)
        counts = output.metrics.speculative_decoding
        return float(counts["num_accepted_draft_tokens"]) / counts["num_draft_tokens"]

    assert accepted() < 0.7
    lora.set_adapter(drafter, "two")
    assert accepted() == 1.0
    with lora.disabled(drafter):
        assert accepted() < 0.7


def test_a_self_drafter_is_made_of_the_model_as_it_is() -> None:
    """`layer_skip` drafts with the target's own layers, adapters included."""
    model = lora.lora_model()
    for layer in model.model.layers[1:]:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj.base_layer):
            nn.init.zeros_(linear.weight)  # the second layer says something by its adapter alone
    face = LLM(model, {"method": "layer_skip", "exit_layer": 1})

    def rate() -> float:
        (output,) = face.generate([{"prompt_token_ids": PROMPT}], GREEDY)
        assert list(output.outputs[0].token_ids) == plain(model)
        counts = output.metrics.speculative_decoding
        return float(counts["num_accepted_draft_tokens"]) / counts["num_draft_tokens"]

    assert rate() < 0.9
    with lora.disabled(model):
        assert rate() == 1.0


def test_rows_that_run_while_the_model_is_switched_leave_no_prefix() -> None:
    """What they have in the cache is of both models."""
    model = lora.lora_model()
    face = LLM(model, "ngram", num_cached_prefixes=4)
    prompt = [{"prompt_token_ids": PROMPT * 4}]
    with face.stream(prompt, GREEDY) as stream:
        next(stream)
        lora.set_adapter(model, "two")
        other = list(face.generate([{"prompt_token_ids": PROMPT}], GREEDY)[0].outputs[0].token_ids)
        for _ in stream:
            pass
    assert other == plain(model)
    again = face.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens <= len(PROMPT)
    assert list(again.outputs[0].token_ids) == generated(model, PROMPT * 4, 12)


# -- other changes ---------------------------------------------------------------------------------------------------


def _wrap(model: PreTrainedModel) -> None:
    """Adapters are put into a model that has none, as ``get_peft_model`` does."""
    down = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = lora.LoraLinear(down, ("one",))


def _replace_forward(model: PreTrainedModel) -> None:
    model.lm_head.forward = lambda x: -torch.nn.functional.linear(x, model.lm_head.weight)


CHANGES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "an epsilon": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 10.0),
    "an attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "a forward": _replace_forward,
    "modules put in": _wrap,
    "a module replaced": lambda model: setattr(model, "lm_head", copy.deepcopy(toy_model(seed=1).lm_head).float()),
    "a tensor replaced": lambda model: setattr(model.lm_head, "weight", nn.Parameter(-model.lm_head.weight.detach())),
    "loaded": lambda model: model.load_state_dict(toy_model(seed=1).state_dict()),
    "written in place": lambda model: model.lm_head.weight.detach().mul_(-1),
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda _module, _args, output: -output),
    "another dtype": lambda model: model.double(),
    "another attention": lambda model: model.set_attn_implementation("eager"),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(3.0),
}


def _change_cells() -> list[Any]:
    """Every change behind the hook, a third of them by turns behind each other face; the rest in the whole matrix."""
    return [
        pytest.param(face, change, marks=() if not turn or number % 3 == turn - 1 else pytest.mark.full)
        for turn, face in enumerate(["hook", "LLM with prefixes", "classic"])
        for number, change in enumerate(CHANGES)
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("face", "change"), _change_cells())
def test_every_change_is_followed(face: str, change: str) -> None:
    torch.manual_seed(0)
    model = toy_model(dtype=torch.float32)
    speak = FACES[face](model)
    before = speak()
    CHANGES[change](model)
    after = plain(model)
    assert speak() == after
    assert (after != before) == (change not in ("another dtype", "another attention"))


def test_a_model_that_has_become_unfit_is_refused_until_it_is_fit_again() -> None:
    model = toy_model(dtype=torch.float32)
    face = LLM(model, "ngram")
    speaks = [hook(model), classic(model), lambda: list(face.generate([{"prompt_token_ids": PROMPT}], GREEDY)[0])]
    expected = [speaks[0](), speaks[1]()]
    model.config.layer_types = ["linear_attention", "full_attention"]
    for speak in speaks * 2:
        with pytest.raises(UnsupportedModelError):
            speak()
    model.config.layer_types = None
    assert [speaks[0](), speaks[1]()] == expected
    assert list(face.generate([{"prompt_token_ids": PROMPT}], GREEDY)[0].outputs[0].token_ids) == expected[0]


def test_classic_and_hook_keep_one_adapter_through_changes() -> None:
    model = lora.lora_model()
    first = adapter_of(model)
    lora.set_adapter(model, "two")
    assert adapter_of(model) is first
    assert first.target.num_changes == 1
    assert shared_adapter(model) is first  # the hook's
    assert hook(model)() == classic(model)() == plain(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", ["hook", "classic", "LLM"])
def test_a_stream_of_an_llm_goes_on_as_it_began(other: str) -> None:
    """Other faces decode with the model as it has become, and the stream with that of its call."""
    model = lora.lora_model()
    face = LLM(model, "ngram")
    before = plain(model)
    stream = face.stream([{"prompt_token_ids": PROMPT}], GREEDY)
    tokens = list(next(stream).token_ids)
    lora.set_adapter(model, "two")
    after = plain(model)
    assert FACES[other](model)() == after != before
    for delta in stream:
        tokens += delta.token_ids
    assert tokens == before
