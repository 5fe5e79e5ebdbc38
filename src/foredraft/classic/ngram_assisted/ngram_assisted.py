"""Speculative decoding with an n-gram storage instead of a draft model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from foredraft.classic.ngram_assisted.ngram_storage import INgramStorage
from foredraft.classic.reader import Readable, reader_of
from foredraft.classic.request import Request, check_least
from foredraft.classic.rounds import Decoding, Draft, ProcessorSampler
from foredraft.classic.trace import begin_trace
from foredraft.classic.utils import printing
from foredraft.classic.utils.logits_processor import GreedyProcessor, LogitsProcessor
from foredraft.devices import makes_on_cpu
from foredraft.errors import ConfigError, TreeError

__all__ = ["ngram_assisted_speculative_generate"]


@torch.no_grad()
@makes_on_cpu
def ngram_assisted_speculative_generate(
    inputs: Sequence[int],
    ngramstorage: INgramStorage,
    target: Module,
    tokenizer: Any = None,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: LogitsProcessor = GreedyProcessor(),  # noqa: B008
    max_gen_len: int = 40,
    eos_tokens_id: int | Iterable[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    first_target: bool = True,
    stop_if_unknown: bool = False,
    debug: bool = False,
    *,
    filler_weight: float = 1.0,
) -> tuple[list[int], float]:
    """Generate with drafts from an n-gram storage, which learns from the prompt and from every emitted token.

    Source: n-gram assisted speculative decoding, NASD (romsto/Speculative-Decoding). Without filler it is ANPD (Ou et
    al. 2024, arXiv:2404.08698).

    Args:
      inputs: token ids of one prompt; its n-grams are added to the storage.
      ngramstorage: any `INgramStorage`. The storage keeps its n-grams until ``reset`` is called.
      target: a `transformers` causal LM, or any module; see `speculative_generate`.
      tokenizer: tokenizer for ``debug``; None prints ids.
      gamma: tokens per draft.
      filler_top_k: number of the target's most likely tokens that are counted at every new position, in addition to the
        emitted one; 1 for none.
      logits_processor, max_gen_len, eos_tokens_id, use_cache, first_target, debug: see `speculative_generate`.
      pad_token_id: ignored, because nothing is padded.
      stop_if_unknown: True to end a draft at the first unknown context; False to draft a random token there.
      filler_weight: count of each of the likely tokens. The emitted token counts 1 in addition, so 2 if it is one of
        them.

    Returns: the generated ids without the prompt, and accepted / drafted tokens (0.0 if nothing was drafted).
    Raises: the errors of `speculative_generate`; TreeError for a drafted token outside the vocabulary.
    Exactness: lossless for any storage, because a drafted token is accepted only if it equals the token that the
      processor samples.
    Randomness: torch's global generator, for the processor's ``sample`` and the storage's tokens for unknown contexts.
    """
    check_least("gamma", gamma, 0)
    check_least("filler_top_k", filler_top_k, 0)
    if not 0.0 < filler_weight <= 1.0:
        raise ConfigError(
            f"filler_weight is {filler_weight}; it must be above 0 and at most 1 (use filler_top_k=1 for no filler)"
        )
    if not isinstance(ngramstorage, INgramStorage):
        raise ConfigError(
            f"ngramstorage is a {type(ngramstorage).__name__}; use an NGramStorage, a OneLevelNGramStorage or another "
            "subclass of INgramStorage"
        )
    reader = reader_of(target, keeps_cache=use_cache)
    model = reader.model
    request = Request.of(inputs, model, max_gen_len, eos_tokens_id)
    proposer = StorageProposer(
        request, ngramstorage, model, gamma, filler_top_k, stop_if_unknown, filler_weight=filler_weight
    )
    trace = begin_trace("ngram_assisted_speculative_generate", len(request.prompt))
    decoding = Decoding(
        request,
        reader,
        ProcessorSampler(logits_processor, model.vocab_size),
        trace,
        proposer,
        first_target=first_target,
        on_step=printing.printer(request.prompt, tokenizer) if debug else None,
    )
    return decoding.run(), trace.acceptance_rate


class StorageProposer:
    """Drafts of the successors in a storage, one after the other. The storage learns from the emitted tokens.

    The storage gets CPU tensors (1, T), which are views of one buffer.

    Args:
      request: request whose prompt is added to the storage.
      storage: storage of n-grams.
      target: model that verifies the drafts.
      gamma, filler_top_k, stop_if_unknown, filler_weight: see `ngram_assisted_speculative_generate`.
    """

    def __init__(
        self,
        request: Request,
        storage: INgramStorage,
        target: Readable,
        gamma: int,
        filler_top_k: int,
        stop_if_unknown: bool,
        *,
        filler_weight: float,
    ) -> None:
        self._storage = storage
        self._vocab_size, self._num_embeddings = target.vocab_size, target.num_embeddings
        self._gamma = gamma
        self._filler_top_k = filler_top_k
        self._stop_if_unknown = stop_if_unknown
        self._filler_weight = filler_weight
        self._ids = torch.zeros(1, request.max_length, dtype=torch.long)
        self._ids[0, : len(request.prompt)] = torch.tensor(request.prompt)
        storage.initialize(self._ids[:, : len(request.prompt)])

    def propose(self, text: Sequence[int], budget: int) -> Draft:
        tokens: list[int] = []
        for place in range(len(text), len(text) + min(self._gamma, budget)):
            token, known = self._storage.next_token(self._ids[:, :place])
            if self._stop_if_unknown and not bool(known.reshape(-1)[0]):
                break
            drafted = self._checked(int(token.reshape(-1)[0]))
            if drafted >= self._vocab_size:  # a token that the target can read but never emits
                break
            tokens.append(drafted)
            self._ids[0, place] = tokens[-1]
        return Draft(tuple(tokens))

    def _checked(self, token: int) -> int:
        if not 0 <= token < self._num_embeddings:
            raise TreeError(
                f"the storage drafted token {token}, outside the vocabulary, 0..{self._num_embeddings - 1}; create it "
                f"with vocab_size={self._num_embeddings}"
            )
        return token

    def observe(self, text: Sequence[int], target_probs: Sequence[Tensor]) -> None:
        """Count every new token, and after it the other likely tokens of the same position, so that their counts do not
        tie."""
        first = len(text) - len(target_probs)
        for place, probs in enumerate(target_probs, first):
            self._ids[0, place] = text[place]
            self._storage.update(self._ids[:, :place], torch.tensor([[text[place]]]))
            likely = self._likely(probs)
            if len(likely):
                self._storage.fill(self._ids[:, :place], likely[None], self._filler_weight)

    def _likely(self, target_probs: Tensor) -> Tensor:
        """Return the most likely possible tokens, best first."""
        if self._filler_top_k < 2:
            return torch.empty(0, dtype=torch.long)
        probs, tokens = target_probs.topk(min(self._filler_top_k, len(target_probs)))
        return tokens[probs > 0].cpu()
