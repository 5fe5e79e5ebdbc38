"""OpenVINO GenAI in the race: run by race.py in an environment with openvino-genai and optimum-intel.

The checkpoints are exported on the first run. Prompts go in as token ids; a streamer notes when tokens come. With one
thread OpenVINO GenAI 2026.4 ends in a floating point exception (signal 8): take two or more.
"""

import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Answer, Arms, Decode, eos_token_ids, first_prompt, folder_and_threads, has_draft, serve

NUM_ASSISTANT_TOKENS = (2, 4)


class Clock(openvino_genai.StreamerBase):
    """Notes when how many tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.started = perf_counter()
        self.times: list[float] = []
        self.counts: list[int] = []

    def write(self, token):
        self.times.append(perf_counter())
        self.counts.append(len(token) if isinstance(token, list) else 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def exported(folder: Path, part: str, weights: str) -> str:
    out = folder / f"{part}-openvino-{weights}"
    if not (out / "openvino_model.xml").exists():
        command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(folder / part)]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, str(out)]
        subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)
    return str(out)


def decode(pipeline: openvino_genai.LLMPipeline, eos: set[int], **options: Any) -> Decode:
    def run(prompt_ids: list[int], max_new_tokens: int) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = max_new_tokens, False, False
        config.stop_token_ids = eos
        for name, value in options.items():
            setattr(config, name, value)
        ids = np.array([prompt_ids], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        clock = Clock()
        tokens = list(pipeline.generate(inputs, config, clock).tokens[0])
        first, last = clock.times[0], clock.times[-1]
        return Answer(tokens, clock.counts[0], first - clock.started, last - first)

    return run


def main() -> None:
    parser, parse = folder_and_threads(__doc__)
    parser.add_argument("--weights", choices=("fp32", "fp16"), default="fp32")
    parser.add_argument("--precision", default="f32", help="of the computation: f32, bf16 or f16")
    options = parse()
    device = {"INFERENCE_PRECISION_HINT": options.precision, "INFERENCE_NUM_THREADS": options.threads}

    def start() -> tuple[Arms, dict[str, Any]]:
        target = exported(options.folder, "target", options.weights)

        def pipeline(**extra: Any) -> openvino_genai.LLMPipeline:
            return openvino_genai.LLMPipeline(target, "CPU", {**device, **extra})

        arms, eos = Arms(first_prompt(options.folder)), eos_token_ids(options.folder)
        arms.add("plain", decode(pipeline(), eos))
        if has_draft(options.folder) and not options.plain_only:
            draft = exported(options.folder, "draft", options.weights)
            drafted = pipeline(draft_model=openvino_genai.draft_model(draft, "CPU", **device))
            for length in NUM_ASSISTANT_TOKENS:
                arms.add(f"draft model, {length}", decode(drafted, eos, num_assistant_tokens=length))
        if not options.plain_only:
            lookup = pipeline(prompt_lookup=True)
            arms.add("prompt lookup, 5", decode(lookup, eos, num_assistant_tokens=5, max_ngram_size=3))
        return arms, {
            "engine": f"OpenVINO GenAI {openvino_genai.__version__}",
            "numerics": f"weights {options.weights}, computes in {options.precision}",
        }

    serve(start)


if __name__ == "__main__":
    main()
