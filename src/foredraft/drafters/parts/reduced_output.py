"""Output layers of frequent tokens only, so that drafters read fewer weights per token."""

from __future__ import annotations

from typing import Any

import torch

from foredraft.config.drafting import VocabularyOptions
from foredraft.drafters.context import DrafterContext
from foredraft.errors import ConfigError
from foredraft.heads.eagle import EagleHead
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.model.execution import forwards, packing
from foredraft.model.lm import CausalLM


def chosen_vocabulary(
    options: VocabularyOptions, context: DrafterContext, trained_as: Any = None
) -> DraftVocabulary | None:
    """Return the reduced vocabulary of a config, or None for all tokens.

    Args:
      options: options with the key ``draft_vocabulary``.
      context: target and tokenizer.
      trained_as: config of a draft model, which may name the tokens it was trained with; used if the user names none.

    Raises: ConfigError or CheckpointError for anything but a list of target tokens that includes EOS.
    """
    given = options.draft_vocabulary
    if given is None:
        given = getattr(trained_as, "draft_vocabulary", None)
    if given is None:
        return None
    size = context.target.vocab_size
    if isinstance(given, (list, tuple)):
        found = DraftVocabulary.of(given, size)
    elif isinstance(given, str) or hasattr(given, "__fspath__"):
        found = DraftVocabulary.load(given, size)
    else:
        raise ConfigError(f"draft_vocabulary is a {type(given).__name__}; give a file or a list of token ids")
    eos = getattr(context.tokenizer, "eos_token_id", None)
    found.check_eos([] if eos is None else [int(eos)], "this config")
    return found


def rows_of_output(layer: torch.nn.Module, vocabulary: DraftVocabulary) -> torch.nn.Module:
    """Return an output layer of some tokens only, executed in the same way as the whole layer.

    Args:
      layer: output embedding of a model, packed or not.
      vocabulary: tokens to keep.

    Raises: ConfigError for anything but a plain linear layer.
    """
    if type(layer) is not torch.nn.Linear:
        raise ConfigError(
            "draft_vocabulary needs a plain linear output layer, and this model's is of another kind; leave "
            "draft_vocabulary out"
        )
    packed = forwards.replacement(layer)
    weight = packed.dense() if isinstance(packed, packing.PackedLinear) else layer.weight
    ids = vocabulary.target_ids.to(weight.device)
    reduced = torch.nn.Linear(weight.shape[1], len(ids), bias=layer.bias is not None, device="meta")
    reduced.weight = torch.nn.Parameter(weight.detach().index_select(0, ids).to(layer.weight.dtype), False)
    if layer.bias is not None:
        reduced.bias = torch.nn.Parameter(layer.bias.detach().index_select(0, ids), False)
    if isinstance(packed, packing.PackedLinear):
        copy = packing.PackedLinear.of(reduced)
        forwards.replace_forward(reduced, copy)
        copy.product.release()
    return reduced


def reduced_model(model: CausalLM, vocabulary: DraftVocabulary) -> CausalLM:
    """Return an adapter of the same model whose logits cover only these tokens."""
    layer = rows_of_output(model.shadow.get_output_embeddings(), vocabulary)
    return model.variant(f"{len(vocabulary)} tokens", lambda _, copied: copied.set_output_embeddings(layer))


def output_of(
    head: EagleHead, target: CausalLM, vocabulary: DraftVocabulary | None
) -> tuple[DraftVocabulary | None, torch.nn.Module | None]:
    """Return the vocabulary of a head, and the output layer that the head needs in addition to its own.

    Raises: ConfigError if the head already has a reduced vocabulary and another one is given.
    """
    if vocabulary is not None and head.vocabulary is not None:
        raise ConfigError(
            f"this head already has a reduced vocabulary of {len(head.vocabulary)} tokens; leave draft_vocabulary out"
        )
    if vocabulary is None:
        vocabulary = head.vocabulary
    if vocabulary is None or head.lm_head is not None:
        return vocabulary, None
    return vocabulary, rows_of_output(target.shadow.get_output_embeddings(), vocabulary)
