"""The keyed noise: reproducible, uniform, uncorrelated, equal in its three implementations."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from foredraft.sampling import noise
from foredraft.sampling.noise import KeyedNoise, Purpose, mix

FALSE_ALARM = 1e-7

DRAFT_KEYS = [(4, 10, 2), (4, 11, 1), (5, 10, 2), (4, 10, 3)]  # step, position, depth: the first two are one place

GOLDEN_ROW_KEYS = [2158877437495972032, 5518117603416245160]
GOLDEN_BITS = [9053312114293951467, 5239262691109632041, 12232081093386441195]
GOLDEN_MIX = [8323494716019514143, 10334464897978377457]
GOLDEN_STREAM = 14714832633429860375
GOLDEN_GUMBEL = [0.34001842051704645, -0.2300850840841883, 0.8895860382207622]


def words(seeds: list[int], positions: list[int], tokens: list[int]) -> np.ndarray:
    """64-bit words of the match stream, uint64 (seeds, positions, tokens)."""
    keys = torch.tensor(noise.as_int64([noise.row_key(s, p) for s in seeds for p in positions]))
    drawn = noise.bits(keys[:, None], torch.tensor(tokens))
    return drawn.numpy().view(np.uint64).reshape(len(seeds), len(positions), len(tokens))


def units(seeds: list[int], positions: list[int], tokens: list[int]) -> np.ndarray:
    return (words(seeds, positions, tokens) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def test_golden_values() -> None:
    """Seeded text is a promise across versions: the noise may never change. Any edit of the hash turns this red."""
    assert noise.row_key(0, 0) == GOLDEN_ROW_KEYS[0]
    assert noise.row_key(1234567, 42) == GOLDEN_ROW_KEYS[1]
    assert [noise.token_bits(noise.row_key(7, 3), t) for t in (0, 1, 151935)] == GOLDEN_BITS
    assert mix(5, 1) == GOLDEN_MIX[0]
    assert mix(2**64 - 1, 3, 4) == GOLDEN_MIX[1]
    assert noise.stream_key(5, 1, 2, Purpose.ACCEPT) == GOLDEN_STREAM
    drawn = noise.gumbel(torch.tensor([7]), torch.tensor([3]), torch.tensor([0, 1, 151935]))[0]
    assert drawn.tolist() == pytest.approx(GOLDEN_GUMBEL, abs=1e-13)


def test_three_implementations_agree() -> None:
    """Python integers, torch's wrapping int64 and numpy's uint64 give one hash, so devices and paths agree."""
    generator = random.Random(1)
    for _ in range(50):
        seed, position = generator.getrandbits(64), generator.randrange(10**6)
        tokens = [generator.randrange(200_000) for _ in range(20)]
        reference = [noise.token_bits(noise.row_key(seed, position), t) for t in tokens]
        keys = noise.row_keys(torch.tensor(noise.as_int64([seed])), torch.tensor([position]))
        assert keys.tolist() == noise.as_int64([noise.row_key(seed, position)])
        drawn = noise.bits(keys, torch.tensor(tokens))
        assert drawn.tolist() == noise.as_int64(reference)
        expected = [-math.log(-math.log(noise.unit(word))) for word in reference]
        by_torch = noise.gumbel(torch.tensor(noise.as_int64([seed])), torch.tensor([position]), torch.tensor(tokens))
        by_numpy = noise.token_gumbel(np.array(noise.row_key(seed, position), dtype=np.uint64), np.array(tokens))
        np.testing.assert_allclose(by_torch[0].numpy(), expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(by_numpy, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("least", [-math.inf, -3.7, 0.0, 6.0, 30.0, math.inf])
def test_the_noisiest_tokens_are_found_from_the_hash(least: float) -> None:
    """None with that much noise is missed, and hardly any other is taken: 2**-30 or a millionth of them."""
    key, num_tokens = noise.row_key(3, 9), 50_000
    scratch = np.empty((2, num_tokens), dtype=np.uint64)
    found = noise.noisiest(key, least, noise.weyl_steps(num_tokens), scratch)
    drawn = noise.token_gumbel(np.array(key, dtype=np.uint64), np.arange(num_tokens))
    assert found[drawn >= least].all()
    assert (found & (drawn < least)).sum() <= 1


def test_no_noise_is_missed_by_its_bits() -> None:
    """For words of every size the bound of their own noise is no larger than the word, and close to it."""
    generator = random.Random(7)
    for word in [generator.getrandbits(64) >> generator.randrange(12) for _ in range(500)]:
        for bits in (word, (1 << 64) - 1 - (word >> 20)):
            bound = noise.least_bits(-math.log(-math.log(noise.unit(bits))))
            assert bound >> 33 <= bits >> 33
            assert (bits >> 33) - (bound >> 33) <= 2 + 1.1e-6 * (2**31 - (bits >> 33))


@pytest.mark.parametrize("axis", ["seeds", "positions", "tokens"])
def test_uniform_along_every_coordinate(axis: str) -> None:
    """Kolmogorov-Smirnov and chi-square over 256 cells of 100,000 numbers. False alarm 1e-7 each."""
    many = list(range(100_000))
    drawn = units(**{**{"seeds": [5], "positions": [11], "tokens": [17]}, axis: many}).ravel()
    assert stats.kstest(drawn, "uniform").pvalue > FALSE_ALARM
    assert stats.chisquare(np.bincount((drawn * 256).astype(int), minlength=256)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "tokens"])
@pytest.mark.parametrize("lag", [1, 64])
def test_neighbours_are_uncorrelated(axis: int, lag: int) -> None:
    """Pairs at a distance along one coordinate fill the unit square evenly: 16 x 16 cells, and no linear correlation.

    False alarm 1e-7 for the chi-square, 5.5 standard errors (4e-8) for the correlation.
    """
    drawn = np.moveaxis(units(list(range(65, 165)), list(range(100)), list(range(100))), axis, 0)
    left, right = drawn[:-lag].ravel(), drawn[lag:].ravel()
    assert abs(np.corrcoef(left, right)[0, 1]) < 5.5 / math.sqrt(len(left))
    cells = np.bincount((left * 16).astype(int) * 16 + (right * 16).astype(int), minlength=256)
    assert stats.chisquare(cells).pvalue > FALSE_ALARM


def test_gumbel_has_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)), 100,000 numbers, false alarm 1e-7."""
    drawn = noise.gumbel(torch.arange(10), torch.arange(10), torch.arange(10_000)).numpy().ravel()
    assert stats.kstest(drawn, "gumbel_r").pvalue > FALSE_ALARM


def test_seeds_of_samples_differ_and_the_first_is_the_seed_itself() -> None:
    """A request with n = 1 says the same as sample 0 of n."""
    assert [mix(17, 0), mix(2**64 - 1, 0)] == [17, 2**64 - 1]
    assert mix(3, 4, 5) == mix(mix(3, 4), 5) != mix(3, 5, 4)
    seeds = [mix(seed, index) for seed in (*range(300), 2**63, 2**64 - 1) for index in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert 0 <= min(seeds) < max(seeds) < 2**64


class TestRuleStreams:
    def test_streams_never_meet(self) -> None:
        """Draft draws, acceptance tests, residuals and the match noise: all keys and numbers differ. (Birthday bound of
        a false alarm: 1e-10.)"""
        keys = {noise.row_key(9, position) for position in range(60)}
        for step in range(20):
            for position in range(60):
                keys |= {noise.stream_key(9, step, position, purpose) for purpose in Purpose}
        assert len(keys) == 60 + 20 * 60 * len(Purpose)

    def test_redrafted_position_gets_new_numbers(self) -> None:
        """Keyed by position alone, a draft repeated after a rejection would be rejected again for the same reason."""
        keys = [noise.stream_key(1, step, 10, Purpose.ACCEPT) for step in (4, 5)]
        assert noise.uniform(keys[0]) != noise.uniform(keys[1])
        assert noise.uniform(keys[0]) != noise.uniform(keys[0], 1)
        distribution = torch.full((10**4,), 1e-4, dtype=torch.float64)
        drafts = [KeyedNoise(1, step, position).draft(depth, distribution)[0] for step, position, depth in DRAFT_KEYS]
        assert drafts[0] == drafts[1]
        assert len(set(drafts)) == 3

    def test_draft_draws_without_replacement(self) -> None:
        """Ordered pairs have the chance q(a) q(b) / (1 - q(a)). Chi-square over 6 pairs, false alarm 1e-7."""
        distribution = torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64)
        pairs = [tuple(KeyedNoise(3, step, 7).draft(0, distribution, 2)) for step in range(5_000)]
        orders = [(a, b) for a in range(3) for b in range(3) if a != b]
        expected = [5_000 * float(distribution[a] * distribution[b] / (1 - distribution[a])) for a, b in orders]
        assert stats.chisquare([pairs.count(pair) for pair in orders], expected).pvalue > FALSE_ALARM
        assert len(KeyedNoise(3, 0, 7).draft(0, distribution, 4)) == 3

    def test_branches_at_one_depth_differ(self) -> None:
        distribution = torch.full((1000,), 1e-3, dtype=torch.float64)
        drawn = [KeyedNoise(3, 0, 7).draft(1, distribution, 1, branch)[0] for branch in range(20)]
        assert len(set(drawn)) > 15


def test_fresh_seeds_fit_json() -> None:
    seeds = {noise.fresh_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**53 for seed in seeds)
