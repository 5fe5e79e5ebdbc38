"""Draft from a storage of n-grams, which learns from one answer and drafts the next."""

from foredraft import zoo
from foredraft.classic.ngram_assisted import NGramStorage, ngram_assisted_speculative_generate

target, _, tokenizer = zoo.load("tiny")
storage = NGramStorage(n=3, vocab_size=target.config.vocab_size)
inputs = tokenizer("The history of the city").input_ids

for attempt in ("first", "second"):
    tokens, acceptance_rate = ngram_assisted_speculative_generate(
        inputs,
        storage,
        target,
        max_gen_len=50,
        eos_tokens_id=[tokenizer.eos_token_id],
        stop_if_unknown=True,
        use_cache=True,
    )
    print(f"{attempt} answer: {acceptance_rate:.0%} of the drafts accepted")
print(tokenizer.decode(tokens, skip_special_tokens=True))
