"""Answer a file of prompts, one JSON object a line, in batches, and write one line for each answer."""

import json
import tempfile
from pathlib import Path

from foredraft import LLM, SamplingParams

folder = Path(tempfile.mkdtemp())
questions = folder / "prompts.jsonl"
questions.write_text(
    "".join(json.dumps({"prompt": f"Once upon a time there was a {what}"}) + "\n" for what in ("dog", "cat"))
)

prompts = [json.loads(line)["prompt"] for line in questions.read_text().splitlines()]
llm = LLM("zoo:tiny", speculative_config="suffix")
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
with (folder / "answers.jsonl").open("w") as answers:
    for output in outputs:
        steps = output.metrics.speculative_decoding["num_steps"]
        answers.write(json.dumps({"prompt": output.prompt, "text": output.outputs[0].text, "steps": steps}) + "\n")
print((folder / "answers.jsonl").read_text(), end="")
