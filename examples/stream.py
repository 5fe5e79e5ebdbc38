"""Stream one text and show what the drafter proposed in brackets."""

from foredraft import LLM, SamplingParams

llm = LLM("zoo:tiny", speculative_config="draft_model")
params = SamplingParams(temperature=0, max_tokens=40)
with llm.stream("Once upon a time there was a", params) as stream:
    for delta in stream:
        for text, proposed_by in delta.segments:
            print(text if proposed_by == "target" else f"[{text}]", end="", flush=True)
metrics = stream.outputs()[0].metrics.speculative_decoding
print(f"\nmean acceptance length {metrics['mean_acceptance_length']:.2f}, tau {metrics['tokens_per_step']:.2f}")
