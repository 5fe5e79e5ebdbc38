"""Bad input of every kind is a typed error that names the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from classic_models import PROMPT, FixedStorage, drafter, target

from foredraft.classic.ngram_assisted import (
    NGramStorage,
    OneLevelNGramStorage,
    ngram_assisted_speculative_generate,
)
from foredraft.classic.sampling import autoregressive_generate, beam_search_generate, speculative_generate
from foredraft.classic.utils.caching import prune_cache
from foredraft.classic.utils.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from foredraft.errors import (
    ConfigError,
    ContextLengthError,
    NumericsError,
    PromptError,
    ShapeError,
    TokenizerMismatchError,
    TreeError,
    UnsupportedModelError,
    UnsupportedStateError,
)
from foredraft.testing import toy_model

CALLS: dict[str, Callable[..., Any]] = {
    "autoregressive": lambda prompt, **options: autoregressive_generate(prompt, target(), **options),
    "beams": lambda prompt, **options: beam_search_generate(prompt, target(), **options),
    "speculative": lambda prompt, **options: speculative_generate(prompt, drafter(), target(), **options),
    "ngram": lambda prompt, **options: ngram_assisted_speculative_generate(
        prompt, NGramStorage(3, 64), target(), **options
    ),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
sampling_call = pytest.mark.parametrize("call", [CALLS[k] for k in ("autoregressive", "speculative", "ngram")])


@every_call
@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ([], PromptError, "no tokens"),
        ([3, 64], PromptError, "token id 64 lies outside the vocabulary of the model, 0..63"),
        ([-1], PromptError, "token id -1"),
        ("text", PromptError, "not a list of token ids"),
        ("12", PromptError, "not a list of token ids"),
        ([1.5], PromptError, "not a list of token ids"),
        (None, PromptError, "not a list of token ids"),
        (torch.zeros(2, 3, dtype=torch.long), PromptError, "not a list of token ids"),
        ([1] * 256, ContextLengthError, "256 tokens and the context 256"),
        ([1] * 1000, ContextLengthError, "no room"),
    ],
)
def test_prompts(call: Any, prompt: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(prompt)


@every_call
def test_a_prompt_may_be_a_tensor_or_a_tuple(call: Any) -> None:
    outputs = []
    for prompt in (PROMPT, tuple(PROMPT), torch.tensor(PROMPT)):
        torch.manual_seed(0)  # of the tokens that stand for an unknown context
        outputs.append(call(prompt, max_gen_len=3))
    assert outputs[0] == outputs[1] == outputs[2]


@every_call
@pytest.mark.parametrize("eos", [None, [None], "stop", 1.5, True, [True], torch.tensor(True)])
def test_end_tokens_that_are_none(call: Any, eos: Any) -> None:
    with pytest.raises(ConfigError, match="eos_tokens_id"):
        call(PROMPT, eos_tokens_id=eos)


@pytest.mark.sample(9)
@every_call
@pytest.mark.parametrize("eos", [-1, 64, [-1, 10**9], torch.tensor(-1)])
def test_end_tokens_that_the_model_cannot_say_end_nothing(call: Any, eos: Any) -> None:
    """Output is compared with them, as described: -1 is how many programs ask for no end."""
    outputs = []
    for given in ([], eos):
        torch.manual_seed(0)
        outputs.append(call(PROMPT, max_gen_len=12, eos_tokens_id=given))
    assert outputs[0] == outputs[1]


@every_call
def test_a_negative_budget(call: Any) -> None:
    with pytest.raises(ConfigError, match="max_gen_len is -1"):
        call(PROMPT, max_gen_len=-1)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("speculative", {"gamma": -1}, "gamma is -1"),
        ("speculative", {"gamma_min": 5, "gamma_max": 2}, "is 5 and gamma_max .* is 2"),
        ("speculative", {"use_egag": True, "gamma_min": 5, "gamma_max": 2}, "is 5 and gamma_max .* is 2"),
        ("speculative", {"use_egag": True, "gamma_min": 6}, "is 6 and gamma_max .* is 5"),
        ("speculative", {"use_egag": True, "gamma_min": -1}, "gamma_min .* is -1"),
        ("speculative", {"use_egag": True, "egag_ema_beta": 1.0}, "beta is 1.0"),
        ("speculative", {"logits_processor": None}, "logits_processor is None"),
        ("speculative", {"logits_processor": torch.softmax}, "__call__"),
        ("ngram", {"gamma": -2}, "gamma is -2"),
        ("ngram", {"gamma": 2.5}, "gamma is 2.5; it must be a whole number"),
        ("ngram", {"max_gen_len": 2.5}, "max_gen_len is 2.5; it must be a whole number"),
        ("ngram", {"filler_top_k": "3"}, "filler_top_k is '3'; it must be a whole number"),
        ("ngram", {"filler_top_k": -1}, "filler_top_k is -1"),
        ("ngram", {"filler_weight": 0.0}, r"filler_weight is 0\.0"),
        ("ngram", {"filler_weight": 1.5}, r"filler_weight is 1\.5"),
        ("beams", {"num_beams": 0}, "num_beams is 0"),
        ("beams", {"top_k": 0}, "top_k is 0"),
        ("beams", {"min_length": -1.0}, "min_length is -1.0"),
    ],
)
def test_options(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CALLS[name](PROMPT, **options)


# -- processors --------------------------------------------------------------------------------------------------------


class Broken(LogitsProcessor):
    """Returns what it is told to."""

    def __init__(self, probs: Callable[[torch.Tensor], Any], token: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(1.0)
        self.probs, self.token = probs, token

    def __call__(self, logits: torch.Tensor) -> Any:
        return self.probs(logits)

    def _process(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def sample(self, probs: torch.Tensor) -> Any:
        return self.token(probs)


def even(logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, 1 / 64)


def first(probs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, 1, dtype=torch.long)


@sampling_call
@pytest.mark.parametrize(
    ("probs", "token", "error", "text"),
    [
        (lambda logits: even(logits) * torch.nan, first, NumericsError, "Broken returned NaN"),
        (lambda logits: even(logits)[:, :-1], first, ShapeError, r"Broken returned \(1, 63\)"),
        (lambda logits: even(logits)[0], first, ShapeError, r"Broken returned \(64,\)"),
        (lambda logits: even(logits).tolist(), first, ShapeError, "Broken returned list"),
        (lambda logits: logits, first, NumericsError, "Broken returned values"),
        (lambda logits: even(logits) * 0, first, NumericsError, "sum to 0"),
        (lambda logits: even(logits) * torch.inf, first, NumericsError, "sum to inf"),
        (even, lambda probs: torch.zeros(1, 2), ShapeError, r"sample returned \(1, 2\)"),
        (even, lambda probs: 3, ShapeError, "sample returned int"),
        (even, lambda probs: torch.tensor([[64]]), NumericsError, "token 64"),
        (even, lambda probs: torch.tensor([[-1]]), NumericsError, "token -1"),
    ],
)
def test_processors_that_return_nonsense(call: Any, probs: Any, token: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(PROMPT, logits_processor=Broken(probs, token))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: GreedyProcessor(0.0), "temperature is 0.0"),
        (lambda: MultinomialProcessor(-1.0), "temperature is -1.0"),
        (lambda: MultinomialProcessor(float("nan")), "temperature is nan"),
        (lambda: MultinomialProcessor(float("inf")), "temperature is inf"),
        (lambda: TopKProcessor(1.0, 0), "top_k is 0"),
        (lambda: TopKProcessor(1.0, 2.5), "top_k is 2.5; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: NucleusProcessor(1.0, 0.0), "top_p is 0.0"),
        (lambda: NucleusProcessor(1.0, 1.1), "top_p is 1.1"),
        (lambda: TopKNucleusProcessor(1.0, -1, 0.5), "top_k is -1"),
        (lambda: TopKNucleusProcessor(1.0, 1, 2.0), "top_p is 2.0"),
    ],
)
def test_options_of_processors(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_a_model_that_returns_nan_is_blamed_itself() -> None:
    model = toy_model(64, seed=5)
    call = lambda: autoregressive_generate(PROMPT, model, max_gen_len=3)  # noqa: E731
    call()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(NumericsError, match="the model returned NaN"):
        call()
    with pytest.raises(NumericsError, match="the model returned NaN"):
        beam_search_generate(PROMPT, model, max_gen_len=3)


# -- models and storages -----------------------------------------------------------------------------------------------


def test_models() -> None:
    with pytest.raises(UnsupportedModelError, match="a Linear, which contains no supported transformers model"):
        autoregressive_generate(PROMPT, torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="a str"):
        autoregressive_generate(PROMPT, "gpt2")
    with pytest.raises(TokenizerMismatchError, match="64 token ids and its drafter, the llama model, has 91"):
        speculative_generate(PROMPT, toy_model(91), target())


@pytest.mark.parametrize("kind", [NGramStorage, OneLevelNGramStorage])
def test_storages(kind: Any) -> None:
    for n in (1, 0, -3):
        with pytest.raises(ConfigError, match=f"n is {n}; it must be 2 or more"):
            kind(n, 64)
    with pytest.raises(AssertionError):  # by which the description refuses it
        kind(1, 64)
    with pytest.raises(ConfigError, match="n is '3'; it must be a whole number"):
        kind("3", 64)
    with pytest.raises(ConfigError, match="vocab_size is 0"):
        kind(3, 0)
    storage = kind(3, 64)
    with pytest.raises(PromptError, match="token id 64 is outside the storage's vocabulary"):
        storage.initialize(torch.tensor([[1, 2, 64]]))
    with pytest.raises(PromptError, match="token id -2"):
        storage.update(torch.tensor([[1, 2]]), torch.tensor([[-2]]))
    with pytest.raises(ShapeError, match=r"must be \(batch"):
        storage.initialize(torch.tensor([1, 2, 3]))
    with pytest.raises(ShapeError, match=r"must be \(batch"):
        storage.next_token(torch.tensor([1, 2, 3]))
    with pytest.raises(ShapeError, match="2 rows"):
        storage.update(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5]]))
    assert not any(storage.counts.values())


def test_a_storage_of_another_vocabulary() -> None:
    with pytest.raises(TreeError, match="drafted token 77, outside the vocabulary"):
        ngram_assisted_speculative_generate(PROMPT, FixedStorage([*PROMPT, *[77] * 9], 99), target())
    with pytest.raises(PromptError, match=r"storage's vocabulary, 0\.\.4"):
        ngram_assisted_speculative_generate(PROMPT, NGramStorage(3, 5), target())
    with pytest.raises(ConfigError, match="ngramstorage is a dict"):
        ngram_assisted_speculative_generate(PROMPT, {}, target())


def test_caches() -> None:
    layer = (torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    for number in (6, -1):
        with pytest.raises(ShapeError, match=f"cannot discard {number} tokens of a cache with 5"):
            prune_cache((layer, layer), number)
    with pytest.raises(UnsupportedStateError, match="list"):
        prune_cache([layer], 1)
