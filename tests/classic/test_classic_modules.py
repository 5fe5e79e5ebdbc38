"""Any module that returns logits for token ids may be target or drafter; wrappers come off where that is exact."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from classic_models import PROMPT, difference, drafter, enumerated, plain_distribution, target
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM

from foredraft.classic.adapters import PlainModule, adapter_of, opened, ready
from foredraft.classic.ngram_assisted import INgramStorage, NGramStorage, ngram_assisted_speculative_generate
from foredraft.classic.sampling import autoregressive_generate, beam_search_generate, speculative_generate
from foredraft.classic.utils.logits_processor import MultinomialProcessor
from foredraft.errors import ConfigError, ContextLengthError, ShapeError, UnsupportedModelError
from foredraft.testing import toy_model
from generated import generated

FORMS = {"tensor": lambda logits: logits, "object": lambda logits: SimpleNamespace(logits=logits)}


class Recurrent(nn.Module):
    """A language model that transformers does not know: an embedding, a GRU, an output layer, in float64."""

    def __init__(self, vocab_size: int = 16, seed: int = 0, form: str = "object", scale: float = 4.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(vocab_size, 8)
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, vocab_size)
        self.double()
        with torch.no_grad():
            for parameter in self.cell.parameters():
                parameter.mul_(4.0)  # or it says one token for ever
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self._form, self._scale = form, scale

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        states, _ = self.cell(self.embedding(input_ids))
        return FORMS[self._form](self.head(self.dropout(states)) * self._scale)


@cache
def recurrent(seed: int = 0, vocab_size: int = 16, form: str = "object") -> Recurrent:
    return Recurrent(vocab_size, seed, form).eval()


class Around(nn.Module):
    """A module around a model that changes what it says."""

    def __init__(self, model: nn.Module, bias: float) -> None:
        super().__init__()
        self.model = model
        self.bias = bias

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids).logits
        return logits + self.bias * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)


def naive(model: nn.Module, prompt: Sequence[int], length: int) -> list[int]:
    """Greedy decoding by hand."""
    text = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            output = model(torch.tensor([text]))
        text.append(int(getattr(output, "logits", output)[0, -1].argmax()))
    return text[len(prompt) :]


def all_four(model: nn.Module, small: nn.Module, prompt: Sequence[int], **options: Any) -> list[list[int]]:
    """What every function makes of a prompt, greedily; beams are one wide."""
    given = {"max_gen_len": 9, "eos_tokens_id": [], **options}
    width = {name: value for name, value in given.items() if name in ("max_gen_len", "eos_tokens_id")}
    return [
        autoregressive_generate(prompt, model, **given),
        speculative_generate(prompt, small, model, gamma=3, **given)[0],
        ngram_assisted_speculative_generate(prompt, NGramStorage(3, 64), model, stop_if_unknown=True, **given)[0],
        beam_search_generate(prompt, model, num_beams=1, top_k=1, **width),
    ]


@pytest.mark.filterwarnings("ignore:the model is a Recurrent")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_module_of_ones_own_is_decoded_as_by_hand(form: str, use_cache: bool) -> None:
    model, small, prompt = recurrent(0, form=form), recurrent(1), [3, 1, 4, 1, 5]
    expected = naive(model, prompt, 9)
    assert len(set(expected)) > 1
    assert all_four(model, small, prompt, use_cache=use_cache) == [expected] * 4
    assert len(beam_search_generate(prompt, model, 9, num_beams=3, top_k=4, eos_tokens_id=[])) == 9


@pytest.mark.parametrize(
    "which", ["both", *(pytest.param(which, marks=pytest.mark.full) for which in ("drafter", "target"))]
)
def test_the_distribution_is_that_of_the_target_whoever_is_a_plain_module(which: str, monkeypatch: Any) -> None:
    """Every draw taken every way, to 1e-12."""
    from classic_models import tiny

    prompt, processor = [0, 2, 1, 0], MultinomialProcessor(0.9)
    model: Any = tiny(7, 3) if which == "drafter" else recurrent(2, 3)
    small: Any = tiny(8, 3) if which == "target" else recurrent(3, 3)
    run = lambda: speculative_generate(  # noqa: E731
        prompt, small, model, gamma=2, logits_processor=processor, max_gen_len=3, eos_tokens_id=[], first_target=False
    )[0]
    assert difference(enumerated(run, monkeypatch), plain_distribution(model, processor, prompt, 3)) < 1e-12


@pytest.mark.filterwarnings("ignore:the model is a Around")
def test_a_wrapper_that_computes_is_read_through_and_one_that_does_not_comes_off() -> None:
    model = target()
    biased = Around(model, 6.0)
    expected = naive(biased, PROMPT, 9)
    assert expected != generated(model, PROMPT, 9)
    assert all_four(biased, drafter(), PROMPT)[:3] == [expected] * 3
    assert isinstance(ready(biased), PlainModule)
    parallel = nn.DataParallel(model)
    assert opened(parallel) is model
    assert adapter_of(parallel) is adapter_of(model)
    assert all_four(parallel, drafter(), PROMPT)[0] == generated(model, PROMPT, 9)
    hooked = nn.DataParallel(model)
    hooked.register_forward_hook(lambda module, inputs, output: output)
    assert opened(hooked) is hooked


def test_that_there_is_no_cache_is_said_once_and_only_where_one_is_asked_for() -> None:
    model = Recurrent(seed=5).eval()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        autoregressive_generate([1, 2], model, 3, eos_tokens_id=[])
        assert not said
        for _ in range(2):
            autoregressive_generate([1, 2], model, 3, eos_tokens_id=[], use_cache=True)
    assert ["the whole text is read at every step" in str(one.message) for one in said] == [True]


def test_a_module_in_training_is_read_without_dropout_and_left_in_training() -> None:
    model = Recurrent(seed=6).train()
    model.cell.eval()
    tokens = autoregressive_generate([1, 2, 3], model, 8, eos_tokens_id=[])
    assert (model.training, model.dropout.training, model.cell.training) == (True, True, False)
    assert tokens == naive(model.eval(), [1, 2, 3], 8)


def test_a_context_that_the_module_names_ends_the_output() -> None:
    model = Recurrent(seed=7).eval()
    model.max_context_length = 6
    assert len(autoregressive_generate([1, 2], model, 40, eos_tokens_id=[])) == 4
    with pytest.raises(ContextLengthError):
        autoregressive_generate([1, 2] * 3, model, 1)


class Bad(nn.Module):
    """Returns something that cannot be decoded."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, input_ids: Tensor) -> Any:
        return self._forward(input_ids)


def logits_of(ids: Tensor) -> Tensor:
    return nn.functional.one_hot(ids, 8).double()


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (lambda ids: logits_of(ids).flip(1), "depend on later tokens"),
        (lambda ids: logits_of(ids) + logits_of(ids).mean(1, keepdim=True), "depend on later tokens"),
        (lambda ids: torch.rand(*ids.shape, 8), "change from call to call"),
        (lambda ids: logits_of(ids) * torch.nan, "depend on later tokens, or"),
        (lambda ids: logits_of(ids)[:, -1], "not one row of logits per token"),
        (lambda ids: ids, "returns torch.int64 instead of logits"),
        (lambda ids: {"logits": logits_of(ids)}, "returns dict instead of logits"),
        (lambda ids: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_decoded_is_refused_and_says_why(forward: Any, text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        autoregressive_generate([1, 2], Bad(forward), 3)


def test_logits_of_another_shape_later_on_are_refused() -> None:
    model = Bad(lambda ids: logits_of(ids)[:, : max(3, ids.shape[1] - 1)])
    with pytest.raises(ShapeError, match=r"shape \(1, 3, 8\) for ids of shape \(1, 4\)"):
        autoregressive_generate([1, 2, 3], model, 3, eos_tokens_id=[])


@pytest.mark.filterwarnings("ignore:the model is a BloomForCausalLM")
def test_a_model_whose_cache_the_engine_refuses_is_read_from_the_beginning() -> None:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2, initializer_range=0.5)
    model = BloomForCausalLM(config).double().eval()
    expected = naive(model, PROMPT, 9)
    assert all_four(model, drafter(), PROMPT, use_cache=True) == [expected] * 4


class Called:
    """No module: it has a place and a configuration, and is called."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=16, max_position_embeddings=12)

    def __call__(self, input_ids: Tensor, past_key_values: Any, use_cache: bool) -> Any:
        return recurrent()(input_ids)


class Unhashable(Called):
    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


class Named(Recurrent):
    """Takes ids by name alone, as the listings give them."""

    def forward(self, *, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        return super().forward(input_ids)


class Second(Recurrent):
    """Has something else in the first place, and returns a tuple."""

    def forward(self, inputs_embeds: Any = None, input_ids: Any = None, **kwargs: Any) -> Any:
        assert inputs_embeds is None
        return super().forward(input_ids).logits, None


@pytest.mark.filterwarnings("ignore:the model is a")
@pytest.mark.parametrize(
    "model", [Called(), Unhashable(), Named().eval(), Second().eval(), lambda input_ids: recurrent()(input_ids)]
)
def test_what_is_called_otherwise_is_decoded_as_by_hand(model: Any) -> None:
    """Drafted for by itself; a context that its configuration names ends the output."""
    expected = naive(recurrent(), [3, 1, 4, 1, 5], 7)
    length = 7 if isinstance(model, Called) else 9
    outputs = all_four(model, model, [3, 1, 4, 1, 5])
    assert [output[:7] for output in outputs] == [expected] * 4
    assert {len(output) for output in outputs} == {length}


def test_a_storage_of_the_three_methods_of_the_description_generates() -> None:
    """It could not be made: `has_gram` and `reset`, which generation never calls, were abstract too."""

    class Repeats(INgramStorage):
        def next_token(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return input_ids[:, -1:], torch.ones_like(input_ids[:, -1:], dtype=torch.bool)

        def update(self, input_ids: torch.Tensor, next_tokens: torch.Tensor) -> None:
            pass

        def initialize(self, input_ids: torch.Tensor) -> None:
            pass

    model, storage = toy_model(64), Repeats(3, 64)
    plain = autoregressive_generate([5, 6, 7], model, max_gen_len=6, eos_tokens_id=[])
    found, _ = ngram_assisted_speculative_generate([5, 6, 7], storage, model, max_gen_len=6, eos_tokens_id=[])
    assert found == plain
    with pytest.raises(ConfigError, match="Repeats has no has_gram"):
        storage.has_gram(torch.tensor([5, 6, 7]))
    with pytest.raises(ConfigError, match="Repeats has no reset"):
        storage.reset()
