"""The sampler: transformers' processors token by token, exact distributions, choices decided by their key alone."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError, NumericsError, ShapeError
from foredraft.sampling import choice, distribution, noise
from foredraft.sampling.distribution import Sampler, choose, choose_siblings, log_probs, probs, process
from foredraft.sampling.filters import LogitsFilter
from foredraft.sampling.processors import apply_entries

FALSE_ALARM = 1e-7
EOS = (1, 2)


class OccurrencePenalty:
    """Presence and frequency penalties, counted afresh from the output: the definition, without any cleverness."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.prompt_length :].tolist()):
            for token in set(ids):
                scores[row, token] -= torch.tensor(self.frequency) * ids.count(token)
                scores[row, token] -= torch.tensor(self.presence)
        return scores


class Allowed:
    """vLLM's mask of allowed tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -math.inf)
        masked[:, self.tokens] = scores[:, self.tokens]
        return masked


class Tilt:
    """A custom processor that looks at the whole prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        shift = (input_ids.sum(dim=1, keepdim=True) % 7).float()
        return scores + shift * torch.arange(scores.shape[1]).remainder(3)


def processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """What generate builds, in its order; presence and frequency after repetition."""
    chain = LogitsProcessorList()
    if params.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        chain.append(OccurrencePenalty(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.no_repeat_ngram_size:
        chain.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words_ids:
        chain.append(NoBadWordsLogitsProcessor([list(words) for words in params.bad_words_ids], list(EOS)))
    if params.min_tokens:
        stop = [*EOS, *params.stop_token_ids]
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, stop))
    chain.extend(params.logits_processors)
    if params.allowed_token_ids is not None:
        chain.append(Allowed(params.allowed_token_ids))
    return chain


def warpers(params: SamplingParams) -> LogitsProcessorList:
    """The part that generate adds when it samples."""
    chain = LogitsProcessorList()
    if params.temperature == 0.0:
        return chain
    if params.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1.0:
        chain.append(TypicalLogitsWarper(params.typical_p))
    return chain


def reference(params: SamplingParams, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
    """transformers' processed scores of one node: (V,) -> float32 (V,)."""
    ids = torch.tensor([[*prompt, *output]])
    scores = processors(params, len(prompt))(ids, logits[None].to(torch.float32, copy=True))
    return warpers(params)(ids, scores)[0]


def sampler_of(
    params: SamplingParams, vocab_size: int, prompt: Sequence[int] = (0,), output: Sequence[int] = (), seed: int = 7
) -> Sampler:
    sampler = Sampler(params, vocab_size=vocab_size, eos_token_ids=EOS, prompt_ids=prompt)
    sampler.seed = seed
    sampler.extend(output)
    return sampler


def random_params(generator: random.Random, vocab_size: int, **fixed: Any) -> SamplingParams:
    """Any mixture of processors; each is on with chance one half."""

    def maybe(value: Any, off: Any) -> Any:
        return value if generator.random() < 0.5 else off

    tokens = range(vocab_size)
    values: dict[str, Any] = {
        "temperature": generator.choice([0.0, 0.7, 1.0, 1.3]),
        "top_k": maybe(generator.choice([1, 3, vocab_size // 2, 2 * vocab_size]), 0),
        "top_p": maybe(generator.choice([0.01, 0.5, 0.9, 0.999]), 1.0),
        "min_p": maybe(generator.choice([0.01, 0.2, 1.0]), 0.0),
        "typical_p": generator.choice([1.0, 1.0, 1.0, 0.6]),
        "presence_penalty": maybe(0.7, 0.0),
        "frequency_penalty": maybe(-0.3, 0.0),
        "repetition_penalty": maybe(generator.choice([0.8, 1.3]), 1.0),
        "no_repeat_ngram_size": maybe(generator.choice([1, 2, 3]), 0),
        "logit_bias": maybe({generator.choice(tokens): 1.5, generator.choice(tokens): -math.inf}, None),
        "bad_words_ids": maybe([[3], [1], generator.choices(tokens, k=2), generator.choices(tokens, k=3)], ()),
        "min_tokens": maybe(generator.choice([1, 4, 12]), 0),
        "stop_token_ids": maybe([4], ()),
        "logits_processors": maybe((Tilt(),), ()),
        "allowed_token_ids": generator.choice([None, None, [2, 4], generator.choices(tokens, k=vocab_size)]),
    }
    return SamplingParams(**{**values, **fixed})


class TestAgainstTransformers:
    @settings(max_examples=80, deadline=None)
    @given(st.integers(0, 2**32))
    def test_any_mixture_on_any_history(self, number: int) -> None:
        """Scores before the temperature are equal bit for bit; support, log-probabilities and choice follow.

        Bug that this guards against: a processor in another place of the order, or one that sees the committed tokens
        instead of the node's own path.
        """
        generator = random.Random(number)
        vocab_size = generator.choice([6, 12, 40])
        params = random_params(generator, vocab_size)
        prompt = generator.choices(range(vocab_size), k=generator.randint(1, 12))
        output = generator.choices(range(vocab_size), k=generator.randint(0, 12))
        paths = [tuple(generator.choices(range(vocab_size), k=k)) for k in (0, 1, 2, 2, 5)]
        logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(number)) * 3
        before = logits.clone()
        sampler = sampler_of(params, vocab_size, prompt)
        for token in output:
            sampler.extend([token])
        samplers, positions = [sampler] * 5, [50, 51, 52, 52, 55]
        scores = process(logits, samplers, paths)
        result = log_probs(logits, samplers, paths)
        tokens = choose(logits, samplers, paths, positions).tolist()
        assert torch.equal(logits, before)
        for i, path in enumerate(paths):
            ids = torch.tensor([[*prompt, *output, *path]])
            assert torch.equal(scores[i], processors(params, len(prompt))(ids, logits[i : i + 1].clone())[0])
            wanted = reference(params, prompt, [*output, *path], logits[i])
            if not wanted.max().isfinite():
                assert tokens[i] == -1
                assert bool(result[i].isnan().all())
                continue
            assert torch.equal(result[i].isinf(), wanted.isinf())
            torch.testing.assert_close(result[i], wanted.log_softmax(-1), atol=2e-6, rtol=2e-7)
            if params.temperature == 0.0:
                assert tokens[i] == int(wanted.argmax())
            else:
                drawn = noise.gumbel(torch.tensor([7]), torch.tensor([positions[i]]), torch.arange(vocab_size))[0]
                assert tokens[i] == int((result[i].double() + drawn).argmax())

    def test_a_history_of_many_different_tokens(self) -> None:
        params = SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3)
        prompt, output = range(100), [*range(50, 150), 60]
        logits = torch.randn(200, generator=torch.Generator().manual_seed(3)) * 2
        found = process(logits[None], [sampler_of(params, 200, prompt, output)], [(7, 180)])[0]
        assert torch.equal(found, reference(params, prompt, [*output, 7, 180], logits))

    def test_tokens_beyond_the_logits_are_left_out(self) -> None:
        """Embeddings may be longer than the output layer, and a drafter's vocabulary may be padded otherwise."""
        params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={11: 3.0, 2: 1.0})
        sampler = sampler_of(params, 12, [10, 11, 2], [11, 3])
        scores = process(torch.ones(1, 8), [sampler], [(10,)])
        assert scores[0].tolist() == pytest.approx([1, 1, 2 / 1.5, 1 / 1.5 - 1.0, 1, 1, 1, 1])


class LargestOf64Bits(TorchDispatchMode):
    """How many numbers the largest tensor has that is made of numbers of 64 bits."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor) and each.itemsize == 8]
        self.numbers = max([self.numbers, *(each.numel() for each in made)])
        return found


def rows_of(kind: str, num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Logits of a certain shape: (num_rows, vocab_size)."""
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    if kind == "flat":
        return logits * 0.1
    if kind == "language":
        ranks = torch.argsort(torch.rand(num_rows, vocab_size, generator=generator), dim=-1)
        return logits * 1.5 - 1.3 * torch.log(ranks + 1.0)
    if kind == "peaked":
        return logits.scatter(1, torch.full((num_rows, 1), vocab_size // 3), 14.0)
    if kind == "ties":
        return (logits * 3).bfloat16().float()
    if kind == "few values":
        return torch.randint(0, 3, (num_rows, vocab_size), generator=generator).float()
    raise AssertionError(kind)


KINDS = ["flat", "language", "peaked", "ties", "few values"]


def check_rows(kind: str, vocab_size: int, num_rows: int, params: SamplingParams) -> None:
    """Support and choice of every row equal those of transformers' own classes."""
    logits = rows_of(kind, num_rows, vocab_size, torch.Generator().manual_seed(vocab_size))
    sampler = sampler_of(params, vocab_size)
    wanted = warpers(params)(None, logits.clone())
    positions = list(range(num_rows))
    result = log_probs(logits, [sampler] * num_rows, [()] * num_rows)
    assert torch.equal(result == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(result.double().exp().sum(-1), torch.ones(num_rows).double(), atol=2e-4, rtol=0)
    drawn = noise.gumbel(torch.tensor([7] * num_rows), torch.tensor(positions), torch.arange(vocab_size))
    perturbed = wanted.double() + drawn
    tokens = choose(logits, [sampler] * num_rows, [()] * num_rows, positions)
    assert torch.equal(tokens, perturbed.argmax(-1))
    best, distances = choose_siblings(logits, [sampler] * num_rows, [()] * num_rows, positions, 3)
    values = perturbed.topk(3, dim=-1).values
    assert torch.equal(best[:, 0], tokens)
    torch.testing.assert_close(distances, values - values[:, :1], atol=1e-9, rtol=0)
    possible = best >= 0
    assert torch.equal(possible, values > -torch.inf)
    assert torch.equal(perturbed.gather(1, best.clamp(min=0))[possible], values[possible])


class TestTruncation:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "values",
        [
            {"top_p": 1e-6},
            {"top_p": 0.5},
            {"top_p": 0.99999},
            {"top_k": 1},
            {"top_k": 40, "top_p": 0.9},
            {"min_p": 0.05},
            {"top_p": 0.8, "min_p": 0.02},
            {"top_k": 20, "top_p": 0.95, "min_p": 0.1, "temperature": 0.7},
            {"top_p": 0.9, "typical_p": 0.9, "temperature": 1.5},
            {},
        ],
        ids=str,
    )
    def test_every_truncation(self, kind: str, values: dict[str, Any]) -> None:
        """transformers sorts everything, in an unstable order and with a float32 sum; we do not, and agree."""
        for vocab_size in (5, 30, 5000):
            check_rows(kind, vocab_size, 8, SamplingParams(**values))

    @pytest.mark.parametrize("kind", KINDS)
    def test_large_vocabularies(self, kind: str) -> None:
        for vocab_size, num_rows in ((32_000, 4), (151_936, 2)):
            check_rows(kind, vocab_size, num_rows, SamplingParams(top_p=0.9))
            check_rows(kind, vocab_size, num_rows, SamplingParams(temperature=0.8))

    def test_an_accelerator_makes_noise_for_a_few_rows_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """512 nodes of a vocabulary of 128,000 took 0.5 GB for each of the tensors that noise is made of."""
        logits = rows_of("language", 30, 700, torch.Generator().manual_seed(1))
        keys = [noise.row_key(3, position) for position in range(30)]
        whole = choice.perturbed_best_dense(LogitsFilter(top_p=0.9), logits, keys, 4)
        monkeypatch.setattr(choice, "NOISE_NUMBERS", 5000)  # 7 rows
        with LargestOf64Bits() as largest:
            blocks = choice.perturbed_best_dense(LogitsFilter(top_p=0.9), logits, keys, 4)
        assert largest.numbers == 7 * 700
        assert all(torch.equal(mine, its) for mine, its in zip(blocks, whole, strict=True))

    @pytest.mark.parametrize("temperature", [0.2, 0.01])
    @pytest.mark.parametrize("scale", [1.0, 10.0])
    def test_low_temperatures_choose_alike_and_without_warnings(self, scale: float, temperature: float) -> None:
        """Weights far below the peak are zero in float32, or so small that dividing by them overflows.

        That gave RuntimeWarnings from T = 0.2 on; and siblings beyond the range of float32 were lost.
        """
        generator = torch.Generator().manual_seed(0)
        warper = LogitsFilter(temperature)
        logits = torch.randn(40, 4096, generator=generator) * scale
        logits[::3, torch.randperm(4096, generator=generator)[:2048]] = -math.inf
        keys = [noise.row_key(3, position) for position in range(40)]
        for k in (1, 4):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                quick = choice.perturbed_best(warper, logits, keys, k)
            dense = choice.perturbed_best_dense(warper, logits, keys, k)
            assert torch.equal(quick[0], dense[0])
            torch.testing.assert_close(quick[1], dense[1], atol=1e-9, rtol=0)


class TestDistribution:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("values", "key"),
        [
            pytest.param(
                values, key, marks=() if key == "seed" or not values else pytest.mark.full, id=f"{key}-{values}"
            )
            for key in ("seed", "position")
            for values in (
                *({}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}),
                {"min_p": 0.1, "repetition_penalty": 1.3},
            )
        ],
    )
    def test_choices_have_the_distribution(self, values: dict[str, Any], key: str) -> None:
        """Chi-square of 8,000 choices over seeds, or over positions, against `probs`. False alarm 1e-7 per case."""
        logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.3]])
        num_draws = 8_000
        sampler = sampler_of(SamplingParams(**values), 8, [2, 3])
        keys = [noise.row_key(*((i, 5) if key == "seed" else (5, i))) for i in range(num_draws)]
        scores = process(logits, [sampler], [()]).expand(num_draws, -1)
        tokens, _ = choice.perturbed_best(sampler.warper, scores, keys, 1)
        counts = np.bincount(tokens[:, 0].numpy(), minlength=8)
        expected = probs(logits, [sampler], [()])[0].numpy() * num_draws
        assert (counts[expected == 0] == 0).all()
        kept = expected > 0
        assert stats.chisquare(counts[kept], expected[kept]).pvalue > FALSE_ALARM

    def test_siblings_are_draws_without_replacement(self) -> None:
        """Ordered pairs have the chance p(a) p(b) / (1 - p(a)): chi-square of 20,000, false alarm 1e-7."""
        logits = torch.tensor([[1.0, 0.0, -0.5, -math.inf]])
        sampler = sampler_of(SamplingParams(), 4)
        keys = [noise.row_key(seed, 5) for seed in range(20_000)]
        pairs, _ = choice.perturbed_best(sampler.warper, logits.expand(20_000, -1), keys, 2)
        p = logits[0].double().softmax(-1).tolist()
        orders = [(a, b) for a in range(3) for b in range(3) if a != b]
        counted = [int((pairs == torch.tensor(pair)).all(-1).sum()) for pair in orders]
        expected = [20_000 * p[a] * p[b] / (1 - p[a]) for a, b in orders]
        assert stats.chisquare(counted, expected).pvalue > FALSE_ALARM

    def test_greedy_distribution_is_a_point_mass(self) -> None:
        """`probs` is what rejection compares with; the log-softmax would make it sample at temperature 1."""
        logits = torch.tensor([[0.0, 3.0, 1.0], [1.0, 0.0, 0.0]])
        greedy, sampled = sampler_of(SamplingParams(temperature=0.0), 3), sampler_of(SamplingParams(), 3)
        sampler = probs(logits, [greedy, sampled], [(), ()])
        assert sampler[0].tolist() == [0.0, 1.0, 0.0]
        torch.testing.assert_close(sampler[1], logits[1].double().softmax(-1), atol=1e-7, rtol=0)
        told = log_probs(logits, [greedy, sampled], [(), ()])
        torch.testing.assert_close(told, logits.log_softmax(-1))


class TestKey:
    """Nothing but (seed, position, token) and the distribution itself decides."""

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**32))
    def test_batch_and_order_do_not_matter(self, number: int) -> None:
        generator = random.Random(number)
        vocab_size = generator.choice([12, 3000])
        samplers = [
            sampler_of(random_params(generator, vocab_size), vocab_size, [3, 4, 5], seed=seed) for seed in range(6)
        ]
        rows = [generator.randrange(6) for _ in range(14)]
        nodes = [samplers[row] for row in rows]
        paths = [tuple(generator.choices(range(12), k=generator.randint(0, 4))) for _ in rows]
        positions = [3 + len(path) for path in paths]
        logits = torch.randn(14, vocab_size, generator=torch.Generator().manual_seed(number)) * 3
        together = choose(logits, nodes, paths, positions).tolist()
        alone = [int(choose(logits[i : i + 1], [nodes[i]], [paths[i]], [positions[i]])) for i in range(14)]
        assert together == alone
        order = generator.sample(range(14), 14)
        shuffled = choose(
            logits[order], [nodes[i] for i in order], [paths[i] for i in order], [positions[i] for i in order]
        )
        assert shuffled.tolist() == [together[i] for i in order]
        siblings, scores = choose_siblings(logits, nodes, paths, positions, 3)
        assert siblings[:, 0].tolist() == together
        assert bool((scores[:, 0][siblings[:, 0] >= 0] == 0).all())
        assert bool((scores <= 0).all())

    def test_greedy_takes_the_lowest_of_equals(self) -> None:
        sampler = sampler_of(SamplingParams(temperature=0.0), 4)
        assert sampler.is_argmax
        assert choose(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [sampler], [()], [0]).tolist() == [1]
        tokens, scores = choose_siblings(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [sampler], [()], [0], 3)
        assert tokens.tolist() == [[1, 2, 0]]
        assert scores.tolist() == [[0.0, 0.0, -1.0]]


class TestProcessors:
    def test_minimum_length_ends(self) -> None:
        """Once the minimum is reached the greedy choice is the plain argmax again."""
        sampler = sampler_of(SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[4]), 6, [0])
        logits = torch.tensor([[0.0, 9.0, 8.0, 1.0, 7.0, 0.0]])
        assert choose(logits, [sampler], [()], [1]).tolist() == [3]
        assert choose(logits, [sampler], [(3, 3)], [3]).tolist() == [1]
        assert not sampler.is_argmax
        sampler.extend([3, 3])
        assert sampler.is_argmax
        assert choose(logits, [sampler], [()], [3]).tolist() == [1]

    def test_custom_processors_get_whole_prefixes_by_depth(self) -> None:
        """Nodes of equal depth and one sequence come in one call; the time spent is known."""
        seen: list[list[list[int]]] = []

        def record(input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(input_ids.tolist())
            return scores * 2

        params = SamplingParams(temperature=0.0, logits_processors=[record])
        a, b = sampler_of(params, 9, [5, 6], [7]), sampler_of(params, 9, [8])
        logits = torch.randn(5, 9)
        scores = process(logits, [a, a, b, a, a], [(), (1,), (1,), (2,), (2, 3)])
        assert seen == [[[5, 6, 7]], [[5, 6, 7, 1], [5, 6, 7, 2]], [[8, 1]], [[5, 6, 7, 2, 3]]]
        assert torch.equal(scores, logits * 2)
        assert a.custom_processor_seconds > 0.0

    def test_bad_words_are_not_ignored_for_want_of_a_tokenizer(self) -> None:
        with pytest.raises(ConfigError, match="bad_words_ids, or a tokenizer"):
            sampler_of(SamplingParams(bad_words=["no"]), 9)

    @pytest.mark.parametrize(
        "values",
        [{"logit_bias": {9: 1.0}}, {"allowed_token_ids": [1, 9]}, {"bad_words_ids": [[1, 9]]}, {"stop_token_ids": [9]}],
        ids=str,
    )
    def test_ids_outside_of_the_vocabulary(self, values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"outside the vocabulary, 0\.\.8"):
            sampler_of(SamplingParams(**values), 9)


def test_tensor_path_of_accelerators_processes_alike() -> None:
    """The gathers and scatters of the GPU path, run on the CPU, equal those on numpy's view."""
    generator = random.Random(4)
    for _ in range(40):
        sampler = sampler_of(random_params(generator, 20), 20, generator.choices(range(20), k=9), [3, 4, 3])
        nodes = [(row, sampler, tuple(generator.choices(range(20), k=row))) for row in range(4)]
        by_array, by_tensor = torch.randn(4, 20).repeat(2, 1, 1)
        apply_entries(by_array, nodes, as_arrays=True)
        apply_entries(by_tensor, nodes, as_arrays=False)
        assert torch.equal(by_array, by_tensor)


def test_an_error_names_few_of_many_tokens() -> None:
    with pytest.raises(
        ConfigError, match=r"allowed_token_ids contains token ids \[6, .*, 15\] and 999 more, outside"
    ) as error:
        sampler_of(SamplingParams(allowed_token_ids=range(1015)), 6)
    assert len(str(error.value)) < 200


class TestBadRows:
    @pytest.mark.parametrize(
        "values", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"typical_p": 0.5}], ids=str
    )
    def test_only_the_bad_row_fails(self, values: dict[str, Any]) -> None:
        """NaN, +inf and all -inf: the row's choice is -1, its log-probabilities NaN, the others are as without it."""
        good = torch.randn(8)
        nan, huge = good.clone(), good.clone()
        nan[5], huge[2] = math.nan, math.inf
        logits = torch.stack([good, nan, torch.full((8,), -math.inf), huge, good])
        sampler = sampler_of(SamplingParams(**values), 8)
        samplers, paths, positions = [sampler] * 5, [()] * 5, [3] * 5
        tokens = choose(logits, samplers, paths, positions).tolist()
        assert tokens[1:4] == [-1, -1, -1]
        assert tokens[0] == tokens[4] == choose(good[None], [sampler], [()], [3]).item()
        siblings, scores = choose_siblings(logits, samplers, paths, positions, 2)
        assert siblings[1:4].eq(-1).all()
        assert scores[1:4].eq(-math.inf).all()
        for result in (log_probs(logits, samplers, paths), probs(logits, samplers, paths)):
            assert result[1:4].isnan().all()
            assert not result[[0, 4]].isnan().any()

    def test_the_error_tells_why(self) -> None:
        sampler = sampler_of(SamplingParams(bad_words_ids=[[0], [3]]), 4)
        for bad, message in (
            ([0.0, math.nan, 0.0, 0.0], "NaN"),
            ([-math.inf] * 4, "-inf for every token"),
            ([0.0, math.inf, 0.0, 0.0], "infinite"),
            ([0.0, -math.inf, -math.inf, 0.0], "bad_words"),
        ):
            logits = torch.tensor(bad)
            assert choose(logits[None], [sampler], [()], [0]).item() == -1
            error = distribution.failure(logits, sampler)
            assert isinstance(error, NumericsError)
            assert message in str(error)

    def test_shapes_are_checked(self) -> None:
        sampler = sampler_of(SamplingParams(), 4)
        with pytest.raises(ShapeError, match="1 samplers"):
            choose(torch.zeros(2, 4), [sampler], [()], [0])


class TestArgmax:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_halves_are_compared_by_their_bits_as_floats_are(self, dtype: torch.dtype) -> None:
        """Every pair of bit patterns stands in some row: signs, zeros, denormals, infinities and NaN of either sign."""
        bits = torch.cat((torch.arange(-(2**15), 2**15, 37), torch.tensor([0, 1, -1, -(2**15), 1 - 2**15])))
        infinities = torch.tensor([math.inf, -math.inf, math.nan]).to(torch.bfloat16).view(torch.int16)
        bits = torch.cat((bits, infinities.long(), infinities.long() - 2**15)).clamp(-(2**15), 2**15 - 1).short()
        values = bits.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(3))
        columns = [values, values[order], values.flip(0), -values.abs(), values.roll(1), torch.zeros_like(values)]
        logits = torch.stack(columns, dim=1)
        wide = logits.double()
        largest = wide.amax(dim=1, keepdim=True)
        expected = (wide == largest).int().argmax(dim=1).where(largest[:, 0].isfinite(), -1)
        assert torch.equal(choice.argmax(logits), expected)
        assert torch.equal(choice.argmax(logits[:, None]), expected[:, None])


@pytest.mark.parametrize("values", [{"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.05}, {}], ids=str)
def test_sampled_rows_take_no_hundred_calls_each(values: dict[str, Any]) -> None:
    """Python that grows with the rows is what made steps of batches slow."""
    sampler = sampler_of(SamplingParams(temperature=0.8, **values), 5000)
    logits = rows_of("language", 8, 5000, torch.Generator().manual_seed(1)).bfloat16()
    calls: list[str] = []
    for _ in range(2):  # the first call makes what later ones use
        calls.clear()
        before = sys.gettrace()
        sys.settrace(lambda frame, event, _: calls.append(event))
        try:
            choose(logits, [sampler] * 8, [()] * 8, list(range(8)))
        finally:
            sys.settrace(before)
    assert 0 < len(calls) < 8 * 40
