"""What cannot be exact is refused before anything is drafted, and nobody's model is changed on the way."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES, REFUSED, but_variants, in_turns
from foredraft import LLM, speculate
from foredraft.classic.sampling import autoregressive_generate
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.errors import ForedraftError, ProbeError, UnsupportedModelError, UnsupportedStateError
from foredraft.model.lm import CausalLM
from foredraft.model.support import unwrapped
from foredraft.testing import PerfectDrafter, compare, decode, strengthen, toy_model
from harness import first_attention

ENCODERS = {"electra-encoder", "bert-generation-encoder"}
RECURRENT = set(REFUSED) - {"bloom", "falcon-alibi", "mpt", "gpt-neo", "bart", "t5"} - ENCODERS


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_by_name(name: str) -> None:
    """And stay as they are."""
    model = REFUSED[name].build(REFUSED[name].attention[0], torch.float32)
    before = fingerprint(model)
    kind = UnsupportedStateError if name in RECURRENT else UnsupportedModelError
    with pytest.raises(kind, match=f"the {model.config.model_type} model") as refusal:
        CausalLM(model)
    assert isinstance(refusal.value, ForedraftError)
    assert_unchanged(before, fingerprint(model))


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_attention_that_looks_ahead_is_refused(name: str) -> None:
    """It counted as rounding, so its text was decoded under a causal mask, and another than that of `generate`."""
    model = REFUSED[name].build(dtype=torch.float32)
    with pytest.raises(ProbeError, match=r"looks ahead.*is_decoder=True"):
        LLM(model)
    with pytest.raises(ProbeError, match="looks ahead"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, custom_generate=speculate("ngram"))


class Wrapped(torch.nn.Module):
    """As PEFT and DDP wrap a model: everything is passed on, and the signature says nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model
        self.config = model.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)


FACES: dict[str, Callable[[Any], Any]] = {
    "CausalLM": CausalLM,
    "LLM": LLM,
    "classic": lambda model: autoregressive_generate([1, 2], model, 3),
    "draft model": lambda model: LLM(toy_model(64), {"method": "draft_model", "model": model}),
    "draft model of the hook": lambda model: toy_model(64).generate(
        torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=speculate("draft_model", model=model)
    ),
}


@pytest.mark.parametrize("face", [face for face in FACES if face != "classic"])  # which reads through wrappers
def test_a_wrapped_model_is_told_to_come_unwrapped(face: str) -> None:
    """The first version printed all layers of the wrapper."""
    with pytest.raises(UnsupportedModelError, match="the model is a Wrapped around the llama model") as refusal:
        FACES[face](Wrapped(toy_model(64)))
    assert "pass the inner one: model.base_model.model." in str(refusal.value)
    assert len(str(refusal.value)) < 500
    with pytest.raises(UnsupportedModelError, match="the model is a Linear, which contains no supported transformers"):
        FACES[face](torch.nn.Linear(2, 2))


@pytest.mark.parametrize("face", FACES)
def test_a_model_without_an_output_embedding_says_how_to_load_one(face: str) -> None:
    """It was an AttributeError of transformers' output."""
    with pytest.raises(UnsupportedModelError, match=r"the llama model has no output embedding .* AutoModelForCausalLM"):
        FACES[face](toy_model(64).base_model)


@pytest.mark.parametrize("face", [face for face in FACES if face != "classic"])
def test_a_model_without_values_is_named(face: str) -> None:
    """It was a RuntimeError of autocast, which does not know the meta device."""
    with pytest.raises(UnsupportedModelError, match=r"no values for 21 of its weights \(model.*meta.*from_pretrained"):
        FACES[face](toy_model(64).to("meta"))
    offloaded = toy_model(64)
    offloaded.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModelError, match=r"no values for 9 of its weights \(model\.layers\.1"):
        FACES[face](offloaded)


@pytest.mark.parametrize("face", FACES)
def test_a_compiled_model_is_the_model(face: str) -> None:
    """``torch.compile`` wraps lazily: nothing is compiled here, and nothing would be by our forwards."""
    FACES[face](torch.compile(toy_model(64)))


def said(model: PreTrainedModel) -> tuple[int, ...]:
    (output,) = LLM(model, "ngram").generate([{"prompt_token_ids": [5, 6, 7]}], {"max_tokens": 8, "temperature": 0.0})
    return output.outputs[0].token_ids


def _compile_whole(model: PreTrainedModel) -> Any:
    return torch.compile(model)


def _compile_forward(model: PreTrainedModel) -> Any:
    model.forward = torch.compile(model.forward)
    return model


def _compile_decoder(model: PreTrainedModel) -> Any:
    model.model = torch.compile(model.model)
    return model


def _compile_layer(model: PreTrainedModel) -> Any:
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


@pytest.mark.parametrize("compile_", [_compile_whole, _compile_forward, _compile_decoder, _compile_layer])
def test_shadows_run_what_was_given_to_the_compiler(
    compile_: Callable[[PreTrainedModel], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled parts of a model would be compiled anew for every shape of a step, which takes minutes."""
    model = compile_(toy_model(64))
    before = fingerprint(unwrapped(model))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # which counts for the whole process, and `reset` keeps
    assert said(model) == said(toy_model(64))
    assert not torch._dynamo.utils.counters["frames"], "something was compiled"
    assert_unchanged(before, fingerprint(unwrapped(model)))


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a user could notice, tensors by value and by address."""
    modules = dict(model.named_modules())
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "addresses": {key: value.data_ptr() for key, value in model.state_dict().items()},
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "training": {key: module.training for key, module in modules.items()},
        "forwards": {key: module.__dict__.get("forward") for key, module in modules.items()},
        "hooks": {key: (len(module._forward_pre_hooks), len(module._forward_hooks)) for key, module in modules.items()},
        "gradients": {key: weight.requires_grad for key, weight in model.named_parameters()},
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    weights = before.pop("weights"), after.pop("weights")
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert before == after


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "execution"),
    but_variants(in_turns(["eager", "packed"])),
)
def test_the_users_model_stays_as_it_is(name: str, execution: str) -> None:
    """Weights, configs, hooks, modes and methods, in float32; also its own logits afterwards."""
    model = ARCHITECTURES[name].build(first_attention(name), torch.float32).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    model.eval()
    want = model(input_ids=ids).logits
    model.train()
    before = fingerprint(model)
    request = ((1, 2, 3), SamplingParams(max_tokens=3, temperature=0.0))
    decode(CausalLM(model, execution=execution), EmptyDrafter(), [request])
    assert_unchanged(before, fingerprint(model))
    assert torch.equal(model.eval()(input_ids=ids).logits, want)


# -- what the probe finds ----------------------------------------------------------------------------------------


class Odd(LlamaForCausalLM):
    """A model whose forward does not take masks and positions as it is given them."""

    def taken(self, width: int, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        mask, positions = self.taken(input_ids.shape[1], attention_mask, position_ids, past_key_values)
        return super().forward(input_ids, mask, positions, past_key_values, **kwargs)


class ChainsOnly(Odd):
    """Takes 4-D masks, but shows every node all nodes before it, as some custom attention kernels do."""

    def taken(self, width: int, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        if mask is not None and mask.ndim == 4 and width > 1:
            own = positions[:, None, :1, None] + torch.arange(width)[:, None]  # (B, 1, N, 1)
            mask = torch.arange(mask.shape[-1]) <= own
        return mask, positions


class IgnoresPositions(Odd):
    """Counts positions from the longest row of the cache."""

    def taken(self, width: int, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        start = 0 if cache is None else cache.get_seq_length()
        return mask, (start + torch.arange(width))[None]


class IgnoresTheMask(Odd):
    def taken(self, width: int, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        return None, positions


class RejectsTheMask(Odd):
    def taken(self, width: int, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        if mask is not None and mask.ndim != 2:
            raise ValueError("attention_mask must have two dimensions")
        return mask, positions


def odd_model(model_class: type[LlamaForCausalLM]) -> PreTrainedModel:
    config = LlamaConfig(**toy_model().config.to_dict())
    return strengthen(model_class(config)).double().eval()


def test_where_trees_are_wrong_drafts_become_chains(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "foredraft"):
        lm = CausalLM(odd_model(ChainsOnly), execution="eager")
    assert not lm.supports_trees
    assert "chains but not trees" in caplog.text
    requests = [((3, 1, 4, 1, 5), SamplingParams(max_tokens=12, temperature=0.0))]
    plain = decode(lm, EmptyDrafter(), requests)
    text = (*requests[0][0], *plain.outputs["0.0"])
    drafter = PerfectDrafter([text], 4, vocab_size=64, num_branches=3)
    compare(decode(lm, drafter, requests), plain, "trees reduced to chains")


@pytest.mark.parametrize("model_class", [IgnoresPositions, IgnoresTheMask, RejectsTheMask])
def test_where_chains_are_wrong_the_model_is_refused(model_class: type[LlamaForCausalLM]) -> None:
    with pytest.raises(ProbeError, match=r"the llama model (does not give the same logits|cannot run over 4-D masks)"):
        CausalLM(odd_model(model_class), execution="eager")


class FailsOnPlainText(Odd):
    """As models do whose positions need the id of a padding token that their configuration does not have."""

    def taken(self, width: int, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        if cache is None:
            raise TypeError("ne() received NoneType")
        return mask, positions


def test_a_model_that_fails_by_itself_is_told_apart_from_one_that_cannot_draft() -> None:
    with pytest.raises(ProbeError, match=r"the llama model fails on plain text.*NoneType"):
        CausalLM(odd_model(FailsOnPlainText), execution="eager")
