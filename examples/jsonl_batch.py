"""Answer a file of questions, one JSON object per line, in a batch, and write one line for each answer."""

import json
import tempfile
from pathlib import Path

from foredraft import LLM, SamplingParams, zoo

folder = Path(tempfile.mkdtemp())
questions = folder / "prompts.jsonl"
asked = ("What is the capital of France?", "Convert to JSON: name Anna, age 31, city Oslo.")
questions.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))

prompts = [json.loads(line)["prompt"] for line in questions.read_text().splitlines()]
llm = LLM(zoo.default(), speculative_config="auto")
conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=45))
with (folder / "answers.jsonl").open("w") as answers:
    for prompt, output in zip(prompts, outputs, strict=True):
        steps = output.metrics.speculative_decoding["num_steps"]
        answers.write(json.dumps({"prompt": prompt, "text": output.outputs[0].text, "steps": steps}) + "\n")
print((folder / "answers.jsonl").read_text(), end="")
