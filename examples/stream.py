"""Stream one answer, with drafted text in brackets."""

from foredraft import LLM, SamplingParams, zoo

llm = LLM(zoo.default(), speculative_config="auto")
params = SamplingParams(temperature=0, max_tokens=45)
prompt = llm.chat_prompt([{"role": "user", "content": "Write a Python list of the seven days of the week."}])
with llm.stream(prompt, params) as stream:
    for delta in stream:
        for text, proposed_by in delta.segments:
            print(text if proposed_by == "target" else f"[{text}]", end="", flush=True)
metrics = stream.outputs()[0].metrics.speculative_decoding
print(f"\nmean acceptance length {metrics['mean_acceptance_length']:.2f}, tau {metrics['tokens_per_step']:.2f}")
