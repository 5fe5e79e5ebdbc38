"""OpenVINO GenAI on the exported pair: run in an environment with openvino-genai and optimum-intel.

    python benchmarks/peer_openvino.py OUT [--weights fp32|fp16] [--precision f32] [--threads 2]

The pair is exported on the first run. Prompts go in as token ids; a streamer notes when tokens come, and what came with
the first emission does not count, as in ``foretoken bench``.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import openvino
import openvino_genai
from peers import Answer, measure
from tokenizers import Tokenizer


class Clock(openvino_genai.StreamerBase):
    """Notes when how many tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.counts: list[int] = []

    def write(self, token):
        self.times.append(perf_counter())
        self.counts.append(len(token) if isinstance(token, list) else 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def export(folder: Path, part: str, weights: str) -> Path:
    out = folder / f"{part}-openvino-{weights}"
    if not (out / "openvino_model.xml").exists():
        command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(folder / part)]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, str(out)]
        subprocess.run([sys.executable, *command], check=True)
    return out


def arm(pipeline: openvino_genai.LLMPipeline, decode, max_new_tokens: int, **options):
    def run(record: dict) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = max_new_tokens, False, False
        config.stop_token_ids = {0, 3}
        for name, value in options.items():
            setattr(config, name, value)
        ids = np.array([record["prompt_ids"]], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        clock = Clock()
        found = pipeline.generate(inputs, config, clock)
        tokens = list(found.tokens[0])
        return Answer(decode(tokens), len(tokens) - clock.counts[0], clock.times[-1] - clock.times[0])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", choices=("fp32", "fp16"), default="fp32")
    parser.add_argument("--precision", default="f32", help="of the computation: f32, bf16 or f16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=int, default=4, help="prompts per group")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.folder / "target" / "tokenizer.json"))
    target, draft = (str(export(options.folder, part, options.weights)) for part in ("target", "draft"))
    device = {"INFERENCE_PRECISION_HINT": options.precision, "INFERENCE_NUM_THREADS": options.threads}

    def pipeline(**extra) -> openvino_genai.LLMPipeline:
        return openvino_genai.LLMPipeline(target, "CPU", {**device, **extra})

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids)

    length = options.max_new_tokens
    drafted = pipeline(draft_model=openvino_genai.draft_model(draft, "CPU", **device))
    lookup = pipeline(prompt_lookup=True)
    arms = {
        "plain": arm(pipeline(), decode, length),
        "draft model, 2": arm(drafted, decode, length, num_assistant_tokens=2),
        "draft model, 4": arm(drafted, decode, length, num_assistant_tokens=4),
        "prompt lookup, 5": arm(lookup, decode, length, num_assistant_tokens=5, max_ngram_size=3),
    }
    for row in measure(options.folder, arms, decode, options.repeats, options.limit):
        engine = f"OpenVINO GenAI, weights {options.weights}, computes in {options.precision}"
        print(json.dumps({"engine": engine, "threads": options.threads, **row}))


if __name__ == "__main__":
    main()
