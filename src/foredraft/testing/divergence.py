"""First differences between two rows, and the gap between the two tokens under the model's distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from foredraft.beginnings import shared_length
from foredraft.config.sampling import SamplingParams
from foredraft.model.lm import CausalLM, Nodes
from foredraft.sampling.distribution import Sampler, log_probs
from foredraft.sampling.noise import mix, row_key, token_bits, unit
from foredraft.testing.conformance import Trace

NEAR_TIES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-5,  # models compute norms and softmax in single precision
    torch.float32: 1e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.5,
}
"""Largest gap between two tokens that rounding can exchange. Logits reach 20, where neighbouring values in bfloat16 are
0.125 apart, and every layer rounds."""


@dataclass(frozen=True)
class Divergence:
    """The first token at which a row differs from plain decoding, and the gap between the two tokens.

    Args:
      row: name of the row in its trace.
      index: index of the output token.
      got, want: token of the row, and token of plain decoding.
      gap: difference of the processed logits of the two tokens after the common prefix, with noise if tokens are
        sampled. For a token outside the nucleus it is the distance to the edge, in probability. Rounding explains a
        small gap; a large one is a fault.
    """

    row: str
    index: int
    got: int
    want: int
    gap: float


def divergences(
    target: CausalLM, requests: Sequence[tuple[Sequence[int], SamplingParams]], trace: Trace, plain: Trace
) -> list[Divergence]:
    """Return the first difference of every row between two traces of the same requests.

    Args:
      target: the model whose distribution measures the gaps, with one forward pass over the common prefix.
    """
    found = []
    for row, want in plain.outputs.items():
        got = trace.outputs[row]
        index = shared_length(list(got), list(want))
        if index < min(len(got), len(want)):
            request, sample = map(int, row.split("."))
            prompt, params = requests[request]
            gap = token_gap(target, prompt, want[:index], params, sample, (got[index], want[index]))
            found.append(Divergence(row, index, got[index], want[index], gap))
    return found


def token_gap(
    target: CausalLM,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    sample: int,
    tokens: tuple[int, int],
) -> float:
    """Return the gap between two tokens after a prefix; see `Divergence.gap`. Sampled ``params`` need a seed."""
    text = [*prompt, *output]
    logits = target.forward(Nodes.from_chains([text]), target.new_cache(1), keep=slice(len(text) - 1, len(text)))[0]
    whole = replace(params, top_p=1.0, top_k=0, min_p=0.0, typical_p=1.0)
    scores = _log_probs_after(whole, target, prompt, output, logits)[0]
    edge = _log_probs_after(params, target, prompt, output, logits)[0]
    outside = [token for token in tokens if not edge[token] > -torch.inf]
    if outside and params.top_p < 1.0:
        probs = scores.double().exp()
        tail = float(probs[probs <= probs[outside[0]]].sum())
        return abs(tail - (1.0 - params.top_p))
    return abs(float(scores[tokens[0]] - scores[tokens[1]]) + _noise_gap(params, sample, len(text), tokens))


def _log_probs_after(
    params: SamplingParams, target: CausalLM, prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor
) -> torch.Tensor:
    sampler = Sampler(params, vocab_size=target.vocab_size, prompt_ids=list(prompt))
    sampler.extend(output)
    return log_probs(logits, [sampler], [()])


def _noise_gap(params: SamplingParams, sample: int, position: int, tokens: tuple[int, int]) -> float:
    if params.temperature == 0 or params.seed is None:
        return 0.0
    key = row_key(mix(params.seed, sample), position)
    first, second = (-math.log(-math.log(unit(token_bits(key, token)))) for token in tokens)
    return first - second
