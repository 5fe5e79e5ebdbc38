"""Talk in turns: the model's answer goes back into the messages, and the next one drafts from all that was said."""

from foredraft import LLM, SamplingParams

llm = LLM("zoo:tiny", speculative_config="suffix")
params = SamplingParams(temperature=0, max_tokens=24)
messages: list[dict[str, str]] = []
for question in ("How do I list files?", "How do I list files by size?"):
    messages.append({"role": "user", "content": question})
    (output,) = llm.chat(messages, params)
    messages.append({"role": "assistant", "content": output.outputs[0].text})
    print(f"> {question}\n{output.outputs[0].text}")
