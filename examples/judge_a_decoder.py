"""Test whether another decoder is lossless: prompt lookup of transformers, and a decoder that is always greedy."""

from typing import Any

from transformers import AutoModelForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.verify import FunctionSubject, TransformersSubject, verify
from foredraft.zoo import path

llm = LLM("zoo:tiny", dtype="float32")  # plain decoding, the reference
prompts = ["Once upon a time there was a boy. Once upon a time there was a girl. Once upon a"]

model = AutoModelForCausalLM.from_pretrained(path("tiny", "target"), dtype="float32")
lookup = TransformersSubject(
    model, "prompt lookup", eos_token_ids=llm.eos_token_ids, options={"prompt_lookup_num_tokens": 4}
)
print(verify(llm, prompts, lookup, budget_seconds=5.0).sentence())


def cheat(prompt: list[int], params: SamplingParams) -> Any:
    """Return greedy tokens, even for requests that set a temperature."""
    output = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=params.max_tokens))
    return list(output[0].outputs[0].token_ids)


found = verify(llm, prompts, FunctionSubject(cheat, takes=frozenset({"temperature"})), budget_seconds=5.0)
print(found.sentence())
assert found.status == "not lossless"
