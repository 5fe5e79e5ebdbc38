"""What drafting with a head of EAGLE costs, part by part, at the shapes of a target: random weights have the same cost.

    python benchmarks/head_cost.py --model zoo:smollm2 --steps 40

Per step of one row: processor time of every part of a draft, one thread, medians over steps, beside the time that
reading the weights once takes at the bandwidth of this machine. Host is what is left of propose and observe.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from foretoken import LLM, SamplingParams
from foretoken.drafters.heads.eagle2 import Eagle2Drafter
from foretoken.drafters.heads.eagle3 import Eagle3Drafter
from foretoken.drafters.lengths import Fixed
from foretoken.drafters.parts.eagle_rows import EagleRows
from foretoken.drafters.parts.grown_eagle import GrownEagleDrafter
from foretoken.drafters.parts.head_loading import pack
from foretoken.heads.eagle import EagleHead, EagleShape, default_streams
from foretoken.heads.layers import LayerShape
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.model.lm import CausalLM

PROMPT = "The quick brown fox jumps over the lazy dog. "


def random_head(target: CausalLM, generation: int, num_kept: int) -> EagleHead:
    """A head with the sizes of the target's own layers."""
    config = target.config
    layer = LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    streams = default_streams(target.num_layers) if generation == 3 else (target.num_layers,)
    shape = EagleShape(generation, layer, config.hidden_size, streams, target.num_layers)
    vocabulary = DraftVocabulary.of(range(num_kept), target.vocab_size) if generation == 3 else None
    torch.manual_seed(0)
    head = EagleHead(shape, vocabulary).to(target.dtype).eval().requires_grad_(False)
    if target.execution.kind != "eager":
        pack(head)
    return head


def bandwidth() -> float:
    """Bytes per second that one thread reads."""
    values = np.ones(1 << 27, dtype=np.float32)
    best = float("inf")
    for _ in range(5):
        start = perf_counter()
        values.max()
        best = min(best, perf_counter() - start)
    return values.nbytes / best


def watched(function: Callable[..., Any], name: str, times: dict[str, list[float]]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        start = process_time()
        result = function(*args, **options)
        times[name].append(process_time() - start)
        return result

    return timed


def costs(llm: LLM, generation: int, num_kept: int, steps: int, context: int) -> dict[str, Any]:
    """Milliseconds of the parts of a step, medians over steps."""
    target = llm.target
    head = random_head(target, generation, num_kept)
    kind: type[GrownEagleDrafter] = Eagle3Drafter if generation == 3 else Eagle2Drafter
    drafter = kind(
        head,
        target,
        target_vocab_size=target.vocab_size,
        policy=Fixed(5),
        num_branches=4,
        reranks=True,
        max_nodes=12,
    )
    times: dict[str, list[float]] = defaultdict(list)
    states = drafter.states
    own_run = states._run
    levels: list[float] = []
    entries: list[float] = []

    def run(nodes: Any, given: Any, first: int, *, is_true: bool) -> Any:
        start = process_time()
        result = own_run(nodes, given, first, is_true=is_true)
        (entries if is_true else levels).append(process_time() - start)
        return result

    states._run = run  # type: ignore[method-assign]
    states.logits = watched(states.logits, "logits", times)  # type: ignore[method-assign]
    drafter.propose = watched(drafter.propose, "propose", times)  # type: ignore[method-assign]
    drafter.observe = watched(drafter.observe, "observe", times)  # type: ignore[method-assign]
    ids = llm.tokenizer(PROMPT)["input_ids"]
    prompt = (ids * (context // len(ids) + 1))[:context]
    verify = []
    with llm.engine(drafter) as engine:
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=steps * 2, min_tokens=steps))
        while engine.has_unfinished and len(times["observe"]) < steps:
            before = engine.profile.verify_seconds
            engine.step()
            if engine.profile.verify_seconds > before:
                verify.append(engine.profile.verify_seconds - before)
        place = next(iter(states.rows._places.values()), None)
        length = 0 if place is None else place.trunk
        row_bytes = 0 if place is None else _row_bytes(states, length)
    per_step = len(levels) // max(1, len(times["propose"]))
    skip = 3
    parts = {
        "level_ms": 1e3 * median(levels[skip * per_step :]),
        "output_ms": 1e3 * median(times["logits"][skip:]),
        "entries_ms": 1e3 * median(entries[skip + 1 :]),
        "propose_ms": 1e3 * median(times["propose"][skip:]),
        "observe_ms": 1e3 * median(times["observe"][skip:]),
        "verify_ms": 1e3 * median(verify[skip:]),
    }
    layer_bytes = sum(p.numel() for name, p in head.named_parameters() if not name.startswith(("lm_head", "embed")))
    rows = num_kept if generation == 3 else target.vocab_size
    size = target.dtype.itemsize
    busy = per_step * parts["level_ms"] + (per_step + 1) * parts["output_ms"] + parts["entries_ms"]
    whole = parts["propose_ms"] + parts["observe_ms"]
    return {
        "method": drafter.name,
        "draft_vocabulary": rows,
        "levels": per_step + 1,
        **parts,
        "host_ms": whole - busy,
        "host_share": (whole - busy) / (whole + parts["verify_ms"]),
        "layer_mbytes": layer_bytes * size / 1e6,
        "output_mbytes": rows * head.shape.layer.hidden_size * size / 1e6,
        "context": length,
        "row_kbytes": row_bytes / 1e3,
        "row_kbytes_at_8k": row_bytes / 1e3 * 8192 / max(1, length),
    }


def _row_bytes(states: EagleRows, length: int) -> int:
    """Memory of the entries of one row."""
    pairs = [(layer.keys, layer.values) for layer in states.cache.layers]
    return sum(x.shape[1] * x.shape[3] * x.element_size() * length for pair in pairs for x in pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--kept", type=int, nargs="*", help="sizes of reduced vocabularies of EAGLE-3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(options.model)
    speed = bandwidth()
    size = llm.target.vocab_size
    kept = [number for number in options.kept or (size // 6, size // 2, size) if number <= size]
    print(json.dumps({"model": options.model, "dtype": str(llm.target.dtype), "gbytes_per_second": speed / 1e9}))
    for generation, number in ((1, size), *((3, number) for number in kept)):
        found = costs(llm, generation, number, options.steps, options.context)
        found["level_bound_ms"] = found["layer_mbytes"] * 1e6 / speed * 1e3
        found["output_bound_ms"] = found["output_mbytes"] * 1e6 / speed * 1e3
        print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}))


if __name__ == "__main__":
    main()
