"""Use the functions of `foredraft.classic`: greedy speculative decoding returns the tokens of greedy decoding."""

from foredraft import zoo
from foredraft.classic import last_trace
from foredraft.classic.sampling import autoregressive_generate, speculative_generate
from foredraft.classic.utils.logits_processor import GreedyProcessor

target, drafter, tokenizer = zoo.load("tiny")
inputs = tokenizer("The capital of France").input_ids
options = {"logits_processor": GreedyProcessor(), "eos_tokens_id": tokenizer.eos_token_id, "use_cache": True}

plain = autoregressive_generate(inputs, target, max_gen_len=30, **options)
tokens, acceptance_rate = speculative_generate(inputs, drafter, target, gamma=4, max_gen_len=30, **options)

assert tokens == plain
print(tokenizer.decode(tokens))
trace = last_trace()
if trace is not None:
    print(f"{len(trace.steps)} forward passes of the target for {len(tokens)} tokens, {acceptance_rate:.0%} accepted")
