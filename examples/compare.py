"""Plain and speculative decoding of the same prompts: equal tokens, fewer steps."""

from foredraft import LLM, SamplingParams

PROMPTS = ["Once upon a time there was a dog", "<|user|>How do I use the command tar?\n<|assistant|>"]
params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=48, seed=11)

plain = LLM("zoo:tiny").generate(PROMPTS, params)
for method in ("draft_model", "ngram", "nasd"):
    outputs = LLM("zoo:tiny", speculative_config={"method": method}).generate(PROMPTS, params)
    same = all(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(plain, outputs, strict=True))
    tau = [output.metrics.speculative_decoding["tokens_per_step"] for output in outputs]
    print(f"{method:12s} equal: {same}   tokens per step: " + ", ".join(f"{value:.2f}" for value in tau))
    assert same
