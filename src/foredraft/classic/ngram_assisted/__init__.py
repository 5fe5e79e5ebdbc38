"""N-gram assisted speculative decoding (NASD): storages, and the function that drafts with them."""

from foredraft.classic.ngram_assisted.ngram_assisted import ngram_assisted_speculative_generate
from foredraft.classic.ngram_assisted.ngram_storage import INgramStorage, NGramStorage, OneLevelNGramStorage

__all__ = ["INgramStorage", "NGramStorage", "OneLevelNGramStorage", "ngram_assisted_speculative_generate"]
