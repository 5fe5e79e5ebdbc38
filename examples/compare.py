"""Compare plain and speculative decoding of the same questions: equal tokens, fewer steps."""

from foredraft import LLM, SamplingParams, zoo

QUESTIONS = ["Convert to JSON: name Anna, age 31, city Oslo.", "Write a Python list of the seven days of the week."]
params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=45, seed=11)

plain = LLM(zoo.default())
expected = [plain.chat(question, params)[0] for question in QUESTIONS]
for method in ("auto", "suffix", "nasd"):
    llm = plain.with_speculative_config(method)
    outputs = [llm.chat(question, params)[0] for question in QUESTIONS]
    same = all(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(expected, outputs, strict=True))
    tau = [output.metrics.speculative_decoding["tokens_per_step"] for output in outputs]
    print(f"{method:12s} equal: {same}   tokens per step: " + ", ".join(f"{value:.2f}" for value in tau))
    assert same
