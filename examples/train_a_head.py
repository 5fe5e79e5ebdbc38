"""Train a head for a target, draft with it, and check that the output is the same. This training is very short."""

import subprocess
import sys
import tempfile

from foredraft import LLM, SamplingParams

folder = tempfile.mkdtemp() + "/head"
options = "--target zoo:tiny --own-prompts 24 --max-new-tokens 24 --batch-tokens 64 --draft-vocabulary-size 512"
command = [
    sys.executable,
    "-m",
    "foredraft",
    "train",
    "medusa",
    *options.split(),
    "--dtype",
    "float32",
    "--out",
    folder,
]
subprocess.run(command, check=True)

llm = LLM("zoo:tiny", {"method": "medusa", "model": folder}, dtype="float32")
params = SamplingParams(temperature=0, max_tokens=32)
drafted, plain = (one.generate("Once upon a time", params)[0] for one in (llm, llm.with_speculative_config(None)))
assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
print(drafted.outputs[0].text, drafted.metrics.speculative_decoding["tokens_per_step"])
