"""Greedy classic functions equal `transformers`, at every edge, with and without cache; beams equal beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from classic_models import PROMPT, FixedStorage, drafter, target, tiny

from foredraft.classic import last_trace
from foredraft.classic.ngram_assisted import (
    NGramStorage,
    OneLevelNGramStorage,
    ngram_assisted_speculative_generate,
)
from foredraft.classic.sampling import autoregressive_generate, beam_search_generate, speculative_generate
from foredraft.classic.utils.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    TopKProcessor,
)
from foredraft.testing import perturbed, toy_model
from generated import generated

FUNCTIONS = ("autoregressive", "speculative", "ngram")


def generate(kind: str, prompt: Sequence[int] = PROMPT, seed: int = 0, **options: Any) -> list[int]:
    options = {"eos_tokens_id": [], **options}
    if kind == "autoregressive":
        options.pop("gamma", None)
        return autoregressive_generate(prompt, target(seed), **options)
    if kind == "speculative":
        return speculative_generate(prompt, drafter(seed), target(seed), **options)[0]
    return ngram_assisted_speculative_generate(prompt, NGramStorage(3, 64), target(seed), **options)[0]


def check_pair(seed: int, use_cache: bool) -> None:
    """Prompt, draft length, vocabulary and quality of the drafter vary with the seed."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = 17 + seed
    model = toy_model(vocab_size, seed=seed)
    small = perturbed(model, 0.02 * (seed % 12), seed=seed)
    prompt = torch.randint(vocab_size, (1 + seed % 9,), generator=generator).tolist()
    wanted = generated(model, prompt, 24)
    options: dict[str, Any] = {"max_gen_len": 24, "eos_tokens_id": [], "use_cache": use_cache}
    gamma = 1 + seed % 7
    assert autoregressive_generate(prompt, model, **options) == wanted
    tokens, rate = speculative_generate(prompt, small, model, gamma=gamma, first_target=bool(seed % 2), **options)
    assert tokens == wanted
    assert 0.0 <= rate <= 1.0
    for storage in (NGramStorage(2 + seed % 3, vocab_size), OneLevelNGramStorage(2 + seed % 3, vocab_size)):
        tokens, rate = ngram_assisted_speculative_generate(
            prompt, storage, model, gamma=gamma, stop_if_unknown=bool(seed % 2), **options
        )
        assert tokens == wanted
        assert 0.0 <= rate <= 1.0


QUICK = ((0, False), (11, True), (30, True))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("seed", "use_cache"),
    [*QUICK, *(pytest.param(seed, cache, marks=pytest.mark.full) for seed in range(50) for cache in (False, True))],
)
def test_greedy_equals_transformers(seed: int, use_cache: bool) -> None:
    check_pair(seed, use_cache)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_greedy_is_greedy_at_every_temperature(kind: str) -> None:
    wanted = generated(target(), PROMPT, 8)
    assert generate(kind, max_gen_len=8, logits_processor=GreedyProcessor(1e7)) == wanted


def test_greedy_finds_the_argmax_that_softmax_hides() -> None:
    """In float32 at a high temperature all probabilities round to one number, whose first index is no answer."""
    processor = GreedyProcessor(1e9)
    logits = torch.tensor([[1.0, 1.5, 0.2], [3.0, 1.0, 2.9]])
    assert processor.sample(processor(logits)).tolist() == [[1], [0]]
    assert torch.equal(GreedyProcessor()(logits), logits.softmax(-1))


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("processor", [MultinomialProcessor(0.9), TopKProcessor(1.2, 8)], ids=["all", "top-k"])
def test_use_cache_changes_no_sample_and_the_seed_repeats_all(kind: str, processor: LogitsProcessor) -> None:
    outputs = []
    for use_cache in (False, True, True):
        torch.manual_seed(5)
        outputs.append(generate(kind, max_gen_len=14, use_cache=use_cache, logits_processor=processor))
    assert outputs[0] == outputs[1] == outputs[2]
    assert generate(kind, max_gen_len=14, use_cache=True, logits_processor=processor) != outputs[0]


class OwnGreedy(LogitsProcessor):
    """A subclass of one's own that forbids a token and takes the argmax, and counts how often it is asked."""

    def __init__(self, forbidden: int) -> None:
        super().__init__(1.0)
        self.forbidden = forbidden
        self.num_calls = self.num_samples = 0

    def _process(self, logits: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        assert logits.shape == (1, 64)
        logits[:, self.forbidden] = -1e20  # in place: it may, the copy is its own
        return logits

    def sample(self, probs: torch.Tensor) -> torch.Tensor:
        self.num_samples += 1
        return probs.argmax(dim=-1, keepdim=True)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_processor_of_ones_own_is_called_and_obeyed(kind: str) -> None:
    plain = generated(target(), PROMPT, 12)
    wanted = generated(target(), PROMPT, 12, suppress_tokens=[plain[0]])
    processor = OwnGreedy(plain[0])
    assert generate(kind, max_gen_len=12, logits_processor=processor) == wanted
    assert processor.num_calls >= 12
    assert processor.num_samples >= 12


# -- edges -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_the_budget_is_kept(kind: str, use_cache: bool) -> None:
    wanted = generated(target(1), PROMPT, 7)
    for max_gen_len in (0, 1, 2, 3, 7):
        assert generate(kind, seed=1, max_gen_len=max_gen_len, use_cache=use_cache) == wanted[:max_gen_len]


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_the_context_ends_the_output(kind: str, use_cache: bool) -> None:
    """The toy has 256 positions: every one of them is used, by target and drafter, and no more."""
    prompt = (PROMPT * 30)[:248]
    tokens = generate(kind, prompt, max_gen_len=40, use_cache=use_cache)
    assert len(tokens) == 256 - 248
    assert tokens == generated(target(), prompt, 8)


def test_a_drafter_with_a_shorter_context_stops_drafting_and_the_target_goes_on() -> None:
    small = tiny(3, 64)  # 64 positions
    prompt = (PROMPT * 9)[:60]
    wanted = generated(target(), prompt, 12)
    tokens, _ = speculative_generate(prompt, small, target(), max_gen_len=12, gamma=3, eos_tokens_id=[])
    assert tokens == wanted
    trace = last_trace()
    assert [step.gamma for step in trace.steps if step.position > 65] == [0] * (len(prompt) + 12 - 66)
    assert max(step.position + step.gamma for step in trace.steps[:3]) > 62


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_runs_through_every_processor(dtype: torch.dtype) -> None:
    """Distributions are computed in float32; a target that drafts for itself is accepted nearly always."""
    model = toy_model(64, seed=0, dtype=dtype)
    for processor in (GreedyProcessor(), MultinomialProcessor(0.8), TopKProcessor(1.0, 5)):
        tokens, rate = speculative_generate(
            PROMPT, model, model, logits_processor=processor, max_gen_len=20, eos_tokens_id=[], use_cache=True
        )
        assert len(tokens) == 20
        assert rate > 0.8


@pytest.mark.parametrize("index", range(8))
def test_the_end_token_ends_the_output_wherever_it_stands_in_a_draft(index: int) -> None:
    """A storage that knows the future puts it at every place of an accepted draft, and behind it."""
    wanted = generated(target(1), PROMPT, 8)
    eos = wanted[index]
    cut = wanted[: wanted.index(eos) + 1]
    storage = FixedStorage([*PROMPT, *wanted])
    for first_target in (False, True):
        tokens, rate = ngram_assisted_speculative_generate(
            PROMPT, storage, target(1), gamma=4, max_gen_len=8, eos_tokens_id=eos, first_target=first_target
        )
        assert tokens == cut
        trace = last_trace()
        assert rate == trace.acceptance_rate
        assert trace.num_accepted <= len(cut)
    kind = FUNCTIONS[index % 3]
    assert generate(kind, seed=1, max_gen_len=8, eos_tokens_id=[63, eos]) == cut


@pytest.mark.parametrize("sizes", [(64, 57), (57, 64)])
def test_padded_vocabularies_fit(sizes: tuple[int, int]) -> None:
    """Drafter smaller and larger than the target: 57 padded to 64, either way."""
    model, small = toy_model(sizes[0], seed=1), toy_model(sizes[1], seed=2)
    prompt = [50, 3, sizes[0] - 1, 7]
    wanted = generated(model, prompt, 10)
    assert speculative_generate(prompt, small, model, max_gen_len=10, eos_tokens_id=[])[0] == wanted
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_gen_len": 10, "eos_tokens_id": [], "logits_processor": MultinomialProcessor(1.0)}
    assert len(speculative_generate(prompt, small, model, **options)[0]) == 10


def test_the_same_model_drafts_without_a_rejection() -> None:
    for processor in (GreedyProcessor(), MultinomialProcessor(1.0)):
        tokens, rate = speculative_generate(
            PROMPT, target(), target(), logits_processor=processor, max_gen_len=17, eos_tokens_id=[], gamma=3
        )
        assert len(tokens) == 17
        assert rate == 1.0


# -- EGAG --------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize("bounds", [(1, 4), (2, 2), (0, 6)])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_egag_changes_lengths_and_no_token(bounds: tuple[int, int], beta: float) -> None:
    tokens = generate(
        "speculative", use_egag=True, gamma_min=bounds[0], gamma_max=bounds[1], egag_ema_beta=beta, max_gen_len=30
    )
    assert tokens == generated(target(), PROMPT, 30)
    trace = last_trace()
    drafted = [step for step in trace.steps if step.normalised_entropy is not None]
    assert drafted
    ema = None
    for step in drafted:
        wanted = min(max(int((1.0 - step.normalised_entropy) * bounds[1]), bounds[0]), bounds[1])
        ema = float(wanted) if ema is None else beta * ema + (1.0 - beta) * wanted
        left = len(PROMPT) + 30 - step.position - 1
        assert step.gamma == min(round(ema), left)
        assert 0.0 <= step.normalised_entropy <= 1.0


def test_egag_is_bounded_by_gamma_where_gamma_max_is_not_given() -> None:
    generate("speculative", use_egag=True, gamma=3)
    trace = last_trace()
    assert max(step.gamma for step in trace.steps) <= 3


# -- beams -------------------------------------------------------------------------------------------------------------


def hf_beams(seed: int, prompt: list[int], num_beams: int, max_new_tokens: int, eos: list[int]) -> list[int]:
    output = generated(
        target(seed),
        prompt,
        max_new_tokens,
        num_beams=num_beams,
        length_penalty=0.0,
        early_stopping=False,
        eos_token_id=eos or None,
        pad_token_id=0,
    )
    end = next((i + 1 for i, token in enumerate(output) if token in eos), len(output))
    return output[:end]


@pytest.mark.parametrize("eos", [[], [9], [9, 30, 2]])
@pytest.mark.parametrize(("seed", "num_beams"), [(0, 2), (1, 4), (2, 7)])
def test_beams_equal_those_of_transformers(seed: int, num_beams: int, eos: list[int]) -> None:
    for max_gen_len in (1, 13):
        tokens = beam_search_generate(
            PROMPT[seed:],
            target(seed),
            max_gen_len=max_gen_len,
            num_beams=num_beams,
            top_k=2 * num_beams,
            alpha=0.0,
            eos_tokens_id=eos,
        )
        assert tokens == hf_beams(seed, PROMPT[seed:], num_beams, max_gen_len, eos)


def test_one_beam_is_greedy_and_more_are_likelier() -> None:
    @torch.no_grad()
    def log_prob(tokens: list[int]) -> float:
        ids = torch.tensor([[*PROMPT, *tokens]])
        table = target()(input_ids=ids).logits[0].log_softmax(-1)
        return float(sum(table[len(PROMPT) - 1 + i, token] for i, token in enumerate(tokens)))

    outputs = [
        beam_search_generate(PROMPT, target(), max_gen_len=12, num_beams=n, top_k=16, alpha=0.0, eos_tokens_id=[])
        for n in (1, 8)
    ]
    assert outputs[0] == generated(target(), PROMPT, 12)
    assert log_prob(outputs[1]) > log_prob(outputs[0])


def test_the_length_penalty_favours_longer_outputs() -> None:
    """A token that nearly always ends makes short outputs; alpha makes them worth less."""
    lengths = []
    for alpha in (0.0, 1.2, 5.0):
        eos = list(range(0, 64, 3))
        tokens = beam_search_generate(PROMPT, target(), max_gen_len=20, alpha=alpha, top_k=8, eos_tokens_id=eos)
        lengths.append(len(tokens))
    assert lengths[0] <= lengths[1] <= lengths[2]
    assert lengths[0] < lengths[2]


@pytest.mark.parametrize("length", [1, 5, 20])
def test_the_penalty_is_the_described_one(length: int) -> None:
    from foredraft.classic.reader import reader_of
    from foredraft.classic.request import Request
    from foredraft.classic.sampling.base_decoding import BeamSearch

    reader = reader_of(target(), keeps_cache=True)
    search = BeamSearch(Request.of(PROMPT, reader.model, 5, []), reader, 4, 3, 5.0, 1.2)
    assert search.penalty(length) == pytest.approx(((5.0 + length) / 6.0) ** 1.2)


def test_top_k_limits_the_continuations() -> None:
    """With one continuation per beam there is but one beam: greedy."""
    tokens = beam_search_generate(PROMPT, target(), max_gen_len=9, num_beams=4, top_k=1, eos_tokens_id=[])
    assert tokens == generated(target(), PROMPT, 9)
