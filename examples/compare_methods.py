"""One target, several ways of drafting: the same tokens, different numbers of steps."""

from foretoken import LLM, SamplingParams

plain = LLM("zoo:tiny")
params = SamplingParams(temperature=1, top_p=0.95, max_tokens=48, seed=2, ignore_eos=True)
prompts = ["Once upon a time there was a", "The cat saw the dog. The dog saw the cat. The cat saw"]
expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
for config in ("none", "ngram", "nasd", "draft_model", {"method": "draft_model", "num_draft_branches": 3}):
    outputs = plain.with_speculative_config(config).generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    steps = sum(output.metrics.speculative_decoding["num_steps"] for output in outputs)
    print(f"{config}: {sum(map(len, expected)) / steps:.2f} tokens per step")
