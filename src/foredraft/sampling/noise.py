"""Randomness as a pure function of its key: a counter-based generator of the splitmix64 type.

The noise has two separate families of streams. The *match* stream is keyed by (seed, absolute position, token id). The
choice of a token is therefore independent of batch, draft, tree and device, and target and drafter may share the
stream. The *rule* streams, keyed by (seed, step, position, purpose, index), are used for draft draws, acceptance tests
and residual draws of the rejection rules. Position alone is not enough for these rules, because drafts are redrawn
after a rejection.

Source: the finaliser of splitmix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195) over a Weyl sequence; the
choice by perturbed maximum is the Gumbel-max trick.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from foredraft.sampling.precision import for_double

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
MATCH_SALT = 0xD1B54A32D192ED03
RULE_SALT = 0x8CB92BA72F3D8DD7
MIX_SALT = 0xA0761D6478BD642F
UNIT = 2.0**-53


class Purpose(IntEnum):
    """The purpose of a number in a rule stream."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


# -- one number at a time: the reference ---------------------------------------------------------------------------


def finalise(state: int) -> int:
    """Apply the splitmix64 finaliser: a bijection of 64-bit words in which every input bit affects every output bit."""
    state &= MASK
    state = ((state ^ (state >> 30)) * MULTIPLIER_1) & MASK
    state = ((state ^ (state >> 27)) * MULTIPLIER_2) & MASK
    return state ^ (state >> 31)


def mix(seed: int, *numbers: int) -> int:
    """Return a seed, 0..2**64-1, for each combination of numbers; ``mix(seed, 0) == seed``.

    For one seed, different numbers below 2**64 give different results, except that a result may equal the seed itself
    with a probability of 2**-64. ``mix(seed, i, j) == mix(mix(seed, i), j)``.
    """
    for number in numbers:
        if number:
            seed = finalise(finalise(seed ^ MIX_SALT) + number * GOLDEN)
    return seed & MASK


def row_key(seed: int, position: int) -> int:
    """Return the key of the match stream at one position: the start of the Weyl sequence over token ids."""
    return finalise(finalise(seed ^ MATCH_SALT) + (position + 1) * GOLDEN)


def token_bits(key: int, token: int) -> int:
    """Return 64 bits of the match stream for one token."""
    return finalise(key + (token + 1) * GOLDEN)


def unit(bits: int) -> float:
    """Convert 53 bits to a float64 strictly inside (0, 1): 2**-53 to 1 - 2**-53."""
    return max(bits >> 11, 1) * UNIT


def stream_key(seed: int, step: int, position: int, purpose: Purpose) -> int:
    """Return the key of a rule stream. The key never equals a key of the match stream, which has another salt."""
    key = finalise(seed ^ RULE_SALT)
    for number in (step, position, int(purpose)):
        key = finalise(key + (number + 1) * GOLDEN)
    return key


def uniform(key: int, index: int = 0) -> float:
    """Return the ``index``-th uniform, strictly inside (0, 1), of the stream with this key."""
    return unit(token_bits(key, index))


def fresh_seed() -> int:
    """Return a seed from the operating system, for requests without one; 0..2**53-1, which is exact in JSON."""
    return secrets.randbits(53)


# -- many numbers at a time ----------------------------------------------------------------------------------------


def as_int64(words: Iterable[int]) -> list[int]:
    """Convert 64-bit words to the signed integers that torch uses."""
    return [((word & MASK) ^ (1 << 63)) - (1 << 63) for word in words]


def row_keys(seed_keys: Tensor, positions: Tensor) -> Tensor:
    """Compute `row_key` for M rows: int64 (M,) seeds and positions -> int64 (M,)."""
    start = _finalise(seed_keys ^ _signed(MATCH_SALT))
    return _finalise(start + (positions + 1) * _signed(GOLDEN))


def bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Compute `token_bits` elementwise: int64 keys (M, 1) or (S,), int64 ids (M, S) or (S,) -> int64, same shape."""
    return _finalise(keys + (token_ids + 1) * _signed(GOLDEN))


def gumbel_of_bits(words: Tensor) -> Tensor:
    """Convert 64-bit words to standard Gumbel noise, float64: between -3.61 and 36.74."""
    mantissa = ((words >> 11) & ((1 << 53) - 1)).clamp_(min=1)
    return mantissa.double().mul_(UNIT).log_().neg_().log_().neg_()


def gumbel(seed_keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise of the match stream.

    Args:
      seed_keys: int64 (M,), seeds converted by `as_int64`.
      positions: int64 (M,), absolute index in the sequence of the token that is chosen.
      token_ids: int64 (M, S), or (S,) for the same tokens in every row.

    Returns: float64 (M, S). The argmax over v of ``log p(v) + gumbel`` has exactly the distribution p.
    Exactness: the hash is the same on every device; the two logarithms agree to about 1e-15.
    Randomness: a pure function of (seed, position, token id).
    """
    return gumbel_of_bits(bits(row_keys(seed_keys, positions)[:, None], token_ids))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _finalise(state: Tensor) -> Tensor:
    """Compute `finalise` on wrapping int64. A shift of a signed word repeats its sign bit, which a mask removes."""
    state = (state ^ _shifted(state, 30)) * _signed(MULTIPLIER_1)
    state = (state ^ _shifted(state, 27)) * _signed(MULTIPLIER_2)
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    return (state >> by) & ((1 << (64 - by)) - 1)


# -- the same on numpy's uint64, for CPU rows ----------------------------------------------------------------------

_ONE, _11, _27, _30, _31 = (np.uint64(number) for number in (1, 11, 27, 30, 31))
_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2 = (np.uint64(number) for number in (GOLDEN, MULTIPLIER_1, MULTIPLIER_2))


def weyl_steps(tokens: int | np.ndarray) -> np.ndarray:
    """Return (token + 1) * GOLDEN for int64 (V,) tokens, or for all ids below a number: uint64 (V,)."""
    return _weyl_steps(tokens) if isinstance(tokens, int) else (tokens.astype(np.uint64) + _ONE) * _GOLDEN


@lru_cache(maxsize=4)
def _weyl_steps(vocab_size: int) -> np.ndarray:
    """Return the steps of all ids below a number, cached and read-only."""
    steps = np.arange(1, vocab_size + 1, dtype=np.uint64)
    steps *= np.uint64(GOLDEN)
    steps.flags.writeable = False
    return steps


def token_gumbel(keys: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Return the match noise of single tokens on the CPU: uint64 keys (S,), int64 token ids (S,) -> float64 (S,)."""
    state = token_ids.astype(np.uint64)
    state += _ONE
    state *= _GOLDEN
    state += keys
    state ^= state >> _30
    state *= _MULTIPLIER_1
    state ^= state >> _27
    state *= _MULTIPLIER_2
    state ^= state >> _31
    state >>= _11
    np.maximum(state, _ONE, out=state)
    noise = state.astype(np.float64)
    noise *= UNIT
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def noisiest(key: int, least: float, steps: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens that may have match noise of ``least`` or more.

    All tokens with that much noise are included, and few others. Only the top 31 bits are compared, which the last step
    of the hash does not change. `noisiest` finds the few tokens that can win, and `token_gumbel` decides which of them
    wins.

    Args:
      key: key of the row.
      least: lower bound of the noise.
      steps: `weyl_steps` of the tokens, uint64 (V,).
      scratch: uint64 (2, V), overwritten, so that a pass over rows allocates it once.

    Returns: bool (V,).
    """
    state, shifted = scratch
    np.add(steps, np.uint64(key), out=state)
    np.right_shift(state, _30, out=shifted)
    np.bitwise_xor(state, shifted, out=state)
    np.multiply(state, _MULTIPLIER_1, out=state)
    np.right_shift(state, _27, out=shifted)
    np.bitwise_xor(state, shifted, out=state)
    np.multiply(state, _MULTIPLIER_2, out=state)
    found: np.ndarray = state >= np.uint64(least_bits(least))
    return found


def least_bits(least: float) -> int:
    """Return a lower bound of the 64 bits that give noise of ``least`` or more; its last 33 bits are zero.

    From u > exp(-exp(-least)) =: 1 - c follow bits of at least (1 - c) 2**64. To be safe, c is increased slightly, and
    the 31 bits are rounded down. Noise of 0 therefore gives 0x5e2d58 << 40 or less, and noise below -4 gives 0.
    """
    rest = -math.expm1(-math.exp(-least)) * (1.0 + 1e-6) if least > -4.0 else 1.0
    return max(0, math.floor((1.0 - rest) * 2.0**31) - 1) << 33


# -- draft draws for the rejection rules ----------------------------------------------------------------------


@dataclass(frozen=True)
class KeyedNoise:
    """Draft draws for one row in one step, from a stream that the acceptance rule never uses.

    Args:
      seed: seed of the row.
      step: number of the verify step, so that a position that is drafted again gets new numbers.
      position: absolute index of the token that would follow the root of the draft.
    """

    seed: int
    step: int
    position: int

    def draft(self, depth: int, probs: Tensor, num_tokens: int = 1, branch: int = 0) -> list[int]:
        """Draw the children of a node from the drafter's distribution ``probs`` (V,), without replacement, in order.

        ``branch`` distinguishes nodes of equal depth. The result is shorter if fewer tokens have mass.
        """
        key = mix(stream_key(self.seed, self.step, self.position + depth, Purpose.DRAFT), branch)
        scores, tokens = self._race(key, probs).topk(min(num_tokens, probs.shape[-1]))
        return [int(t) for s, t in zip(scores.tolist(), tokens.tolist(), strict=True) if s > -math.inf]

    def _race(self, key: int, probs: Tensor) -> Tensor:
        """Return log probs + Gumbel noise of the stream, float64 (V,)."""
        probs = for_double(probs)
        if probs.device.type == "cpu":
            drawn = torch.from_numpy(token_gumbel(np.array(key, dtype=np.uint64), np.arange(probs.shape[-1])))
        else:
            tokens = torch.arange(probs.shape[-1], device=probs.device)
            drawn = gumbel_of_bits(bits(torch.tensor(as_int64([key]), device=probs.device), tokens))
        return drawn.add_(probs.double().log())
