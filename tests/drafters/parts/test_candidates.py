"""What may follow a node: a reduced vocabulary gives the children that spreading its logits over all tokens gives."""

from __future__ import annotations

import pytest
import torch

from foredraft.config.sampling import SamplingParams
from foredraft.drafters.parts.candidates import Candidates
from foredraft.errors import ShapeError
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.sampling import choice
from foredraft.sampling.distribution import Sampler, choose_siblings

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, seed=3),
    "top-k": SamplingParams(temperature=1.2, top_k=7, seed=4),
    "top-p": SamplingParams(temperature=0.7, top_p=0.8, min_p=0.01, seed=5),
    "typical-p": SamplingParams(temperature=1.0, typical_p=0.9, seed=6),
    "biased": SamplingParams(temperature=0.0, logit_bias={11: 4.0, 12: 4.0}),
    "allowed": SamplingParams(temperature=0.9, allowed_token_ids=[11, 12, 13, 30], seed=8),
    "penalised": SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=7),
}


def places(names: list[str], size: int) -> tuple[list[Sampler], list[tuple[int, ...]], list[int]]:
    samplers = [Sampler(PARAMS[name], vocab_size=size, prompt_ids=[1, 2, 3]) for name in names]
    return samplers, [(5, 6)[: i % 3] for i in range(len(names))], [10 + i for i in range(len(names))]


@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize("power", [None, 1.5])
@pytest.mark.parametrize(("size", "num_kept"), [(40, 17), (6000, 4000)])
def test_a_reduced_vocabulary_has_the_children_of_the_whole_one(
    size: int, num_kept: int, power: float | None, is_greedy: bool
) -> None:
    """All kinds of rows at once; few different logits in the small case, so that children tie."""
    generator = torch.Generator().manual_seed(size)
    ids = torch.randperm(size, generator=generator)[:num_kept].tolist()
    vocabulary = DraftVocabulary.of({11, *ids}, size)
    names = [*PARAMS, *PARAMS]
    logits = torch.randint(-4, 5, (len(names), len(vocabulary)), generator=generator).float()
    if size > 100:
        logits = logits + torch.rand(logits.shape, generator=generator)
    where = places(names, size)
    own = Candidates(size, vocabulary, is_greedy=is_greedy)
    whole = Candidates(size, None, is_greedy=is_greedy)
    spread = vocabulary.spread(logits)
    for k in (1, 4):
        got, want = (each.best(x, *where, k, power) for each, x in ((own, logits), (whole, spread)))
        for mine, theirs, name in zip(got, want, names, strict=True):
            assert [token for token, _ in mine] == [token for token, _ in theirs], name
            assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], abs=1e-5), name
            assert all(token in vocabulary.target_ids for token, _ in mine)
    assert own.only(logits, *where) == whole.only(spread, *where)
    assert torch.allclose(own.whole(logits, *where[:2]).exp(), whole.whole(spread, *where[:2]).exp())
    unprocessed = places(["greedy", "sampled"], size)
    assert own.log_probs(logits[:2], *unprocessed[:2]).shape == (2, len(vocabulary))


def test_no_child_where_there_is_no_distribution() -> None:
    vocabulary = DraftVocabulary.of(range(0, 40, 2), 40)
    logits = torch.full((2, 20), torch.nan)
    where = places(["greedy", "sampled"], 40)
    for is_greedy in (False, True):
        own = Candidates(40, vocabulary, is_greedy=is_greedy)
        assert own.best(logits, *where, 3, 1.5) == [[], []]
        assert own.only(logits, *where) == [-1, -1]


def test_processors_are_not_run_over_columns_that_are_no_tokens() -> None:
    with pytest.raises(ShapeError, match="expand these logits first"):
        choose_siblings(torch.zeros(1, 3), places(["biased"], 40)[0], [()], [0], 1, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shares_are_those_of_the_sharpened_distribution(dtype: torch.dtype) -> None:
    """Impossible tokens have none; rows without a distribution have no tokens."""
    logits = (torch.randn(6, 500, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    logits[1, ::2] = -torch.inf
    logits[2, 7] = torch.nan
    logits[3] = -torch.inf
    logits[4, 3] = torch.inf
    logits[5, 2:] = -torch.inf
    tokens, shares = choice.likeliest(logits, 4, 2.0)
    best, _ = choice.largest(logits, 4)
    assert torch.equal(tokens, best)
    assert tokens[2:5].eq(-1).all()
    assert shares[2:5].eq(-torch.inf).all()
    sampler = torch.log_softmax(2.0 * logits.float().double(), dim=-1)
    for row in (0, 1, 5):
        kept = tokens[row] >= 0
        assert torch.allclose(shares[row, kept], sampler[row, tokens[row, kept]], atol=1e-5)
    assert (tokens[5] >= 0).tolist() == [shares[5, i] > -torch.inf for i in range(4)]
