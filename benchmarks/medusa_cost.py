"""The cost of drafting with Medusa and Hydra: milliseconds per level and step, random weights, beside bytes read.

    python benchmarks/medusa_cost.py [--models zoo:tiny zoo:smollm2] [--dtype auto] [--repeats 40] [--nodes 16]
        [--context 256] [--out medusa_cost.json]

The time of a draft does not depend on what heads have learnt. For every kind: the shortest time of each level's
network (the modules alone), of a whole proposal (ranking the vocabulary, building the tree and handing it over
included), of taking in what a step committed; the time in which the weights that one proposal reads come from memory,
at the rate at which one thread sums a large tensor here, measured in turns with the rest; a plain forward of the
target; and what a row keeps at 8,192 tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from foretoken import LLM, SamplingParams
from foretoken.bench.provenance import provenance
from foretoken.drafters.heads.hydra import HydraDrafter
from foretoken.drafters.heads.medusa import MedusaDrafter
from foretoken.drafters.parts.head_states import PrefixStates
from foretoken.engine.costs import Forward, filled_cache, seconds_of
from foretoken.engine.drafter import Budget, Features
from foretoken.engine.engine import Engine
from foretoken.heads.hydra import HydraHeads, HydraShape
from foretoken.heads.hydra_layout import write_hydra
from foretoken.heads.layers import LayerShape
from foretoken.heads.medusa import MedusaHeads, MedusaShape
from foretoken.heads.medusa_layout import write_medusa
from foretoken.model.lm import CausalLM

NUM_HEADS = 4
LONG = 8192
KINDS = ("medusa", "medusa over the target's layer", "hydra", "hydra++")


class Laps:
    """The shortest time of every named piece of work."""

    def __init__(self) -> None:
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        start = perf_counter()
        result = call()
        self.last[name] = perf_counter() - start
        self.best[name] = min(self.best.get(name, float("inf")), self.last[name])
        return result


def write_heads(kind: str, target: CausalLM, folder: str) -> None:
    """Random heads of a kind in the sizes of a target."""
    config = target.config
    size, vocab_size = int(config.hidden_size), target.vocab_size
    torch.manual_seed(0)
    if kind.startswith("medusa"):
        write_medusa(
            MedusaHeads(MedusaShape(size, vocab_size if kind == "medusa" else 0, NUM_HEADS)).to(target.dtype), folder
        )
        return
    num_heads = config.num_attention_heads
    layer = LayerShape(
        size, config.intermediate_size, num_heads, config.num_key_value_heads or num_heads, size // num_heads
    )
    shape = HydraShape(
        size, vocab_size, NUM_HEADS, 4 if kind == "hydra++" else 1, prefix=layer if kind == "hydra++" else None
    )
    write_hydra(HydraHeads(shape).to(target.dtype), folder)


def weight_bytes(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() * p.element_size() for p in module.parameters())


def bytes_read(drafter: Any, target: CausalLM, depth: int) -> int:
    """Weights that one proposal of this depth reads, each once; embeddings of a few tokens are left out."""
    heads = drafter.heads
    itemsize = target.dtype.itemsize
    if isinstance(drafter, HydraDrafter):
        levels = [weight_bytes(heads.first[i]) + weight_bytes(heads.lm_heads[i]) for i in range(depth)]
        blocks = [weight_bytes(heads.later[i]) * (heads.shape.num_layers - 1) for i in range(depth) if heads.later]
        return sum(levels) + sum(blocks)
    own = sum(weight_bytes(heads.blocks[i]) for i in range(depth))
    if heads.needs_output_layer:
        return own + target.vocab_size * int(target.config.hidden_size) * itemsize
    return own + sum(weight_bytes(heads.lm_heads[i]) for i in range(depth))


def measure(llm: LLM, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one kind of heads on one target."""
    target = llm.target
    with tempfile.TemporaryDirectory() as folder:
        write_heads(kind, target, folder)
        method = kind.split()[0]
        tree = [[0] * (d + 1) for d in range(NUM_HEADS)]
        tree += [[r] for r in range(1, 6)] + [[0, r] for r in range(1, 5)] + [[1, 0], [1, 1]]
        config = {"method": method, "model": folder, "speculative_token_tree": tree[: options.nodes - 1]}
        drafter: Any = llm.with_speculative_config(config).drafting.new_drafter()
    engine = Engine(target, drafter)
    prompt = [1 + i % (target.vocab_size - 2) for i in range(options.context)]
    (row,) = engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True))
    while not engine.decoding_rows:
        engine.step()
    engine.step()
    laps = Laps()
    stages = _watch(drafter, laps)
    large = torch.ones(1 << 26)  # 256 MB
    cache, _ = filled_cache(target, options.context, 2)
    plain = Forward(target, cache)
    read = options.tokens_per_step
    states = drafter.contexts if isinstance(drafter, HydraDrafter) else drafter._states
    features = [_Given(torch.randn(read, int(target.config.hidden_size)).to(target.dtype))]
    with torch.inference_mode():
        for _ in range(options.repeats):
            laps.timed("propose", lambda: drafter.propose([row], [Budget(NUM_HEADS)]))
            rest = laps.last["propose"] - sum(laps.last[name] for name in stages)
            laps.best["rest"] = min(laps.best.get("rest", 1.0), rest)
            length = len(row.token_ids) - 1
            laps.timed(
                "observe", lambda at=length: states._take_in([row], [features[0].last_hidden(range(read))], [at - 1])
            )
            laps.timed("memory", large.sum)
            laps.best["plain"] = min(laps.best.get("plain", 1.0), seconds_of(plain, target.device))
    rate = large.numel() * 4 / laps.best["memory"]
    num_bytes = bytes_read(drafter, target, NUM_HEADS)
    bound = num_bytes / rate
    network = sum(laps.best[name] for name in stages)
    return {
        "heads": kind,
        "parameters": sum(p.numel() for p in drafter.heads.parameters()),
        "level_ms": [1e3 * laps.best[name] for name in stages],
        "propose_ms": 1e3 * laps.best["propose"],
        "observe_ms": 1e3 * laps.best["observe"],
        "bytes_read": num_bytes,
        "bound_ms": 1e3 * bound,
        "network_by_bound": network / bound,
        "rest_ms": 1e3 * laps.best["rest"],
        "rest_of_proposal": laps.best["rest"] / laps.best["propose"],
        "plain_ms": 1e3 * laps.best["plain"],
        "draft_by_plain": (laps.best["propose"] + laps.best["observe"]) / laps.best["plain"],
        "row_bytes_at_8192": row_bytes(drafter, target),
        "memory_gb_per_s": rate / 1e9,
    }


def _watch(drafter: Any, laps: Laps) -> list[str]:
    """Time the networks of a drafter; the names of what is timed, level by level."""
    heads = drafter.heads
    if isinstance(drafter, MedusaDrafter):
        forward = heads.forward
        heads.forward = lambda *args: laps.timed("all levels", lambda: forward(*args))
        return ["all levels"]
    logits = heads.logits
    heads.logits = lambda head, inputs: laps.timed(f"level {head}", lambda: logits(head, inputs))
    return [f"level {head}" for head in range(NUM_HEADS)]


class _Given(Features):
    def __init__(self, states: torch.Tensor) -> None:
        self._states = states

    def last_hidden(self, nodes: Any) -> torch.Tensor:
        return self._states[list(nodes)]


def row_bytes(drafter: Any, target: CausalLM) -> int:
    """What a drafter keeps for a row of 8,192 tokens: a state, and with a prefix layer its keys and values."""
    size = int(target.config.hidden_size) * target.dtype.itemsize
    contexts = getattr(drafter, "contexts", None)
    if not isinstance(contexts, PrefixStates):
        return size
    layer = contexts.layer.layer.self_attn
    return size + 2 * LONG * layer.k_proj.out_features * target.dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:tiny", "zoo:smollm2"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=16, help="of the tree, root included; four levels deep")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens-per-step", type=int, default=3, help="committed by a step, for what takes them in")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for name in options.models:
        llm = LLM(name, dtype=options.dtype)
        for kind in KINDS:
            figures = {"model": name, "dtype": llm.model_info.dtype, **measure(llm, kind, options)}
            found.append(figures)
            levels = " ".join(f"{ms:.2f}" for ms in figures["level_ms"])
            print(
                f"{name} {figures['dtype']} {kind}: {figures['parameters'] / 1e6:.1f} M, levels {levels} ms, "
                f"propose {figures['propose_ms']:.2f}, observe {figures['observe_ms']:.2f}; reads "
                f"{figures['bytes_read'] / 1e6:.1f} MB = {figures['bound_ms']:.2f} ms at "
                f"{figures['memory_gb_per_s']:.1f} GB/s; network / bound {figures['network_by_bound']:.2f}, rest of "
                f"the proposal {figures['rest_of_proposal']:.0%}; plain forward {figures['plain_ms']:.2f} ms, draft "
                f"{figures['draft_by_plain']:.2f} of it; a row at 8k keeps {figures['row_bytes_at_8192'] / 1e6:.2f} MB",
                flush=True,
            )
    if options.out is not None:
        options.out.write_text(json.dumps({"conditions": provenance(), "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
