"""Autoregressive, beam search and speculative generation, as plain functions."""

from foredraft.classic.sampling.base_decoding import autoregressive_generate, beam_search_generate
from foredraft.classic.sampling.speculative_decoding import max_fn, speculative_generate

__all__ = ["autoregressive_generate", "beam_search_generate", "max_fn", "speculative_generate"]
