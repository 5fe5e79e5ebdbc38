"""llama.cpp (wheel xllamacpp) on the exported pair: run in an environment with xllamacpp and tokenizers.

    python benchmarks/peer_llamacpp.py OUT [--type f32|f16|bf16] [--threads 2]

Prompts go in as token ids, llama.cpp's own timings and token counts come out. Its decode time starts with the first
token, so that one does not count. One server per arm, all in this process, run in turn.
"""

import argparse
import json
from pathlib import Path

import xllamacpp
from peers import Answer, measure
from tokenizers import Tokenizer


def server(options: argparse.Namespace, speculation: str | None = None, num_draft: int = 0) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(options.folder / f"target-{options.type}.gguf")
    params.n_ctx, params.n_parallel, params.verbosity = 2048, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    if speculation is not None:
        kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{speculation}")
        params.speculative.types = [kind]
    if speculation == "DRAFT_SIMPLE":
        draft = params.speculative.draft
        draft.mparams.path = str(options.folder / f"draft-{options.type}.gguf")
        draft.n_max, draft.n_min, draft.p_min = num_draft, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options.threads
    return xllamacpp.Server(params)


def arm(engine: xllamacpp.Server, max_new_tokens: int):
    def run(record: dict) -> Answer:
        found = engine.handle_completions(
            {
                "prompt": record["prompt_ids"],
                "max_tokens": max_new_tokens,
                "temperature": 0.0,
                "top_k": 1,
                "cache_prompt": False,
            }
        )
        timings = found["timings"]
        return Answer(found["choices"][0]["text"], timings["predicted_n"] - 1, timings["predicted_ms"] / 1e3)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--type", choices=("f32", "f16", "bf16"), default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=int, default=4, help="prompts per group")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.folder / "target" / "tokenizer.json"))
    engines = {
        "plain": server(options),
        "draft model, 2": server(options, "DRAFT_SIMPLE", 2),
        "draft model, 4": server(options, "DRAFT_SIMPLE", 4),
        "n-gram": server(options, "NGRAM_SIMPLE"),
    }
    arms = {name: arm(engine, options.max_new_tokens) for name, engine in engines.items()}
    for row in measure(options.folder, arms, lambda ids: tokenizer.decode(ids), options.repeats, options.limit):
        print(json.dumps({"engine": f"llama.cpp {options.type}", "threads": options.threads, **row}))


if __name__ == "__main__":
    main()
