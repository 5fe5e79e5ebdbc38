"""Tokens that sampling parameters name, beside the vocabulary that they have to come from."""

from __future__ import annotations

from foretoken.config.sampling import SamplingParams
from foretoken.errors import ConfigError

MAX_NAMED = 10
"""Token ids that an error names."""


def check_named_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raises: ConfigError for a token outside of the vocabulary, and words that are not tokens yet."""
    if params.bad_words and not params.bad_words_ids:
        raise ConfigError(
            f"bad_words {params.bad_words} were not resolved to tokens; give bad_words_ids, or a tokenizer"
        )
    named = {
        "logit_bias": [int(token) for token in params.logit_bias or ()],
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words_ids": [token for words in params.bad_words_ids or () for token in words],
        "stop_token_ids": params.stop_token_ids or (),
    }
    for name, tokens in named.items():
        outside = [token for token in tokens if token >= vocab_size]
        if outside:
            more = f" and {len(outside) - MAX_NAMED} more" if len(outside) > MAX_NAMED else ""
            raise ConfigError(
                f"{name} holds token ids {outside[:MAX_NAMED]}{more}, outside the vocabulary, 0..{vocab_size - 1}; "
                "leave them out"
            )
