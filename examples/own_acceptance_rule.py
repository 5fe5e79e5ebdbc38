"""Write an acceptance rule of your own, and let `verify` test whether it keeps the model's distribution.

The draft is one token, the likeliest one of the model itself. A real drafter would take its place.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.verify import FunctionSubject, verify

llm = LLM("zoo:tiny", "ngram", dtype="float32")
Rule = Callable[[Tensor, int, torch.Generator], int]


def rejection(probs: Tensor, draft: int, generator: torch.Generator) -> int:
    """Accept the draft with its probability, else draw from the other tokens (2211.17192): lossless."""
    if torch.rand((), generator=generator) < probs[draft]:
        return draft
    rest = probs.clone()
    rest[draft] = 0.0
    return int(torch.multinomial(rest, 1, generator=generator))


def threshold(probs: Tensor, draft: int, generator: torch.Generator) -> int:
    """Accept every draft with a probability of more than 0.05: lossy."""
    return draft if probs[draft] > 0.05 else int(torch.multinomial(probs, 1, generator=generator))


def decoder(rule: Rule) -> FunctionSubject:
    """Return a decoder for greedy settings and for sampling at any temperature."""

    @torch.inference_mode()
    def generate(prompt: list[int], params: SamplingParams) -> list[int]:
        generator = torch.Generator().manual_seed(params.seed or 0)
        ids = list(prompt)
        for _ in range(params.max_tokens or 0):
            logits = llm.target.shadow(torch.tensor([ids])).logits[0, -1].double()
            best = int(logits.argmax())
            token = best if params.is_greedy else rule((logits / params.temperature).softmax(0), best, generator)
            ids.append(token)
            if token in llm.eos_token_ids:
                break
        return ids[len(prompt) :]

    return FunctionSubject(generate, rule.__name__, takes=frozenset({"temperature"}))


prompts = ["Once upon a time there was a boy. Once upon a time there was a girl. Once upon a"]
for rule in (rejection, threshold):
    found = verify(llm, prompts, decoder(rule), max_tokens=8, budget_seconds=10.0)
    print(found.sentence())
    assert (found.status == "not lossless") == (rule is threshold)
