"""Chat over several turns: each answer is added to the messages, and the next answer is drafted from the whole chat."""

from foredraft import LLM, SamplingParams, zoo

llm = LLM(zoo.default(), speculative_config="auto")
params = SamplingParams(temperature=0, max_tokens=45)
messages: list[dict[str, str]] = []
for question in ("Convert to JSON: name Anna, age 31, city Oslo.", "Convert to JSON: name Ben, age 42, city Rome."):
    messages.append({"role": "user", "content": question})
    (output,) = llm.chat(messages, params)
    messages.append({"role": "assistant", "content": output.outputs[0].text})
    print(f"> {question}\n{output.outputs[0].text}")
