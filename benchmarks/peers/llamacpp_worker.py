"""llama.cpp (wheel xllamacpp) in the race: run by race.py in an environment with xllamacpp, gguf and safetensors.

The checkpoints are converted on the first run. Prompts go in as token ids, token ids and llama.cpp's own timings come
out. Its decode time starts with the first token, so that one does not count. One server per arm, all in this process.
"""

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import xllamacpp
from protocol import Answer, Arms, Decode, first_prompt, folder_and_threads, has_draft, serve
from to_gguf import TYPES, convert

NUM_DRAFT_TOKENS = (2, 4)
NGRAMS = {"n-gram": None, "n-gram, 3 then 5": (3, 5)}  # None: its own default, a match of 12 tokens


def converted(folder: Path, part: str, kind: str) -> str:
    path = folder / f"{part}-{kind}.gguf"
    if not path.exists():
        convert(folder / part, path, kind)
    return str(path)


def server(
    folder: Path,
    kind: str,
    threads: int,
    num_draft: int = 0,
    ngram: bool = False,
    sizes: tuple[int, int] | None = None,
) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = converted(folder, "target", kind)
    params.n_ctx, params.n_parallel, params.verbosity = 2048, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if num_draft:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = params.speculative.draft
        draft.mparams.path = converted(folder, "draft", kind)
        draft.n_max, draft.n_min, draft.p_min = num_draft, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
    if ngram:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        if sizes is not None:
            params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = sizes
    return xllamacpp.Server(params)


def decode(engine: xllamacpp.Server) -> Decode:
    def run(prompt_ids: list[int], max_new_tokens: int) -> Answer:
        started = perf_counter()
        found = engine.handle_completions(
            {
                "prompt": prompt_ids,
                "max_tokens": max_new_tokens,
                "temperature": 0.0,
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
                "verbose": True,  # hands the tokens out
            }
        )
        total = perf_counter() - started
        tokens, seconds = found["__verbose"]["tokens"], found["timings"]["predicted_ms"] / 1e3
        return Answer(tokens, 1 + len(tokens) - found["timings"]["predicted_n"], total - seconds, seconds)

    return run


def main() -> None:
    parser, parse = folder_and_threads(__doc__)
    parser.add_argument("--type", choices=tuple(TYPES), default="f32")
    options = parse()
    make = partial(server, options.folder, options.type, options.threads)

    def start() -> tuple[Arms, dict[str, Any]]:
        arms = Arms(first_prompt(options.folder))
        arms.add("plain", decode(make()))
        if not options.plain_only:
            for length in NUM_DRAFT_TOKENS if has_draft(options.folder) else ():
                arms.add(f"draft model, {length}", decode(make(num_draft=length)))
            for name, sizes in NGRAMS.items():
                arms.add(name, decode(make(ngram=True, sizes=sizes)))
        return arms, {"engine": f"llama.cpp, xllamacpp {xllamacpp.__version__}", "numerics": options.type}

    serve(start)


if __name__ == "__main__":
    main()
