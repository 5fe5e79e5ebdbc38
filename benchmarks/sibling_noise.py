"""Siblings with the target's noise beside the likeliest ones, at temperature 1 and greedily, with quickly made heads.

    python benchmarks/sibling_noise.py [--model zoo:tiny] [--rows 128] [--new-tokens 96] [--seconds 240] [--nodes 16]

Fits Medusa's and Hydra's heads to texts that the target has sampled at temperature 1 (soft labels, the target's own
law), then drafts for other seeds and prompts: tokens per step with candidates drawn with the target's noise
("probabilistic"), with the likeliest ones ("greedy"), and under typical acceptance; the same trees in all arms. Rows
are equal in all of them under "match", so tokens per step compare text by text. Also the total variation between the
law of one next token under typical acceptance and the target's, over the places of these texts: what the rule is off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foretoken import LLM, SamplingParams
from foretoken.accept.typical import typical
from foretoken.bench.workload import load_prompts, read_questions, select
from foretoken.engine.drafter import Requirements
from foretoken.heads.hydra import HydraHeads, HydraShape
from foretoken.heads.medusa import MedusaHeads, MedusaShape
from foretoken.tree import DraftTree
from foretoken.tune.hits import states_along

NUM_HEADS = 4
BATCH = 256


def texts_of(llm: LLM, prompts: list[list[int]], num_rows: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Prompts with what the target samples after them."""
    given = [{"prompt_token_ids": prompts[i % len(prompts)]} for i in range(num_rows)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, seed=seed + i) for i in range(num_rows)
    ]
    results = llm.generate(given, params, use_tqdm=False)
    return [[*result.prompt_token_ids, *result.outputs[0].token_ids] for result in results]


def fit(heads: nn.Module, loss: Callable[[Tensor], Tensor], num_places: int, seconds: float) -> int:
    """Adam on random places until the time is over; the number of steps."""
    optimiser = torch.optim.AdamW(heads.parameters(), lr=2e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * max(0.05, 1 - (time.perf_counter() - start) / seconds)
        optimiser.zero_grad()
        loss(torch.randint(num_places, (BATCH,), generator=generator)).backward()
        optimiser.step()
        steps += 1
    heads.requires_grad_(False)
    return steps


def fitted(llm: LLM, kind: str, texts: list[list[int]], seconds: float) -> tuple[Any, int]:
    """Heads of a kind in float32, fitted to the target's law along its texts."""
    target = llm.target
    size, vocab_size = int(target.config.hidden_size), target.vocab_size
    states = [states_along(target, Requirements(last_hidden=True), text).float() for text in texts]
    tokens = torch.cat([torch.tensor(text[: -NUM_HEADS - 1]) for text in texts])
    table = target.shadow.get_input_embeddings().weight.detach().float().clone()
    with torch.inference_mode():
        layer = target.shadow.get_output_embeddings()
        laws = [layer(one.to(target.dtype)).float().softmax(-1).clone() for one in states]
    lengths = [len(text) - NUM_HEADS - 1 for text in texts]
    hidden = torch.cat([one[:length] for one, length in zip(states, lengths, strict=True)]).clone()
    later = [
        torch.cat([torch.tensor(text[1 + k : 1 + k + length]) for text, length in zip(texts, lengths, strict=True)])
        for k in range(NUM_HEADS)
    ]
    answers = [
        torch.cat([law[1 + k : 1 + k + length] for law, length in zip(laws, lengths, strict=True)])
        for k in range(NUM_HEADS)
    ]
    del tokens, laws
    torch.manual_seed(0)
    if kind == "medusa":
        heads: Any = MedusaHeads(MedusaShape(size, vocab_size, NUM_HEADS))

        def logits_of(places: Tensor) -> list[Tensor]:
            return list(heads(hidden[places]).unbind(1))
    else:
        heads = HydraHeads(HydraShape(size, vocab_size, NUM_HEADS, 2))

        def logits_of(places: Tensor) -> list[Tensor]:
            inputs = [hidden[places]]
            found = []
            for k in range(NUM_HEADS):
                inputs.append(table[later[k][places]])
                found.append(heads.logits(k, torch.cat(inputs, dim=-1)))
            return found

    def loss(places: Tensor) -> Tensor:
        each = [
            -(answers[k][places] * logits.log_softmax(-1)).sum(-1).mean() for k, logits in enumerate(logits_of(places))
        ]
        return torch.stack(each).sum()

    steps = fit(heads, loss, len(hidden), seconds)
    return heads.to(target.dtype).eval(), steps


def bias_of(llm: LLM, texts: list[list[int]], num_children: int = 4) -> float:
    """Mean total variation between the next token's law under typical acceptance and the target's at temperature 1.

    A draft of the likeliest tokens; the rule is deterministic, so its law is a point mass.
    """
    distances = []
    layer = llm.target.shadow.get_output_embeddings()
    for text in texts[:16]:
        states = states_along(llm.target, Requirements(last_hidden=True), text)
        with torch.inference_mode():
            laws = layer(states).float().softmax(-1)
        for law in laws[::4]:
            children = law.topk(num_children).indices.tolist()
            tree = DraftTree((0, *children), (-1, *[0] * num_children))
            verdict = typical(tree, lambda _, law=law: law)
            token = tree.tokens[verdict.path[1]] if verdict.num_accepted else verdict.next_token
            distances.append(1 - float(law[token]))
    return sum(distances) / len(distances)


def rate(llm: LLM, config: dict[str, Any], prompts: list[list[int]], params: SamplingParams) -> float:
    results = llm.with_speculative_config(config).generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    counts = [result.metrics.speculative_decoding for result in results]
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return tokens / sum(one["num_steps"] for one in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=240.0, help="to fit each kind of heads")
    parser.add_argument("--nodes", type=int, default=16)
    options = parser.parse_args()
    llm = LLM(options.model, dtype=options.dtype, max_num_seqs=32)
    prompts = [list(p.token_ids) for p in load_prompts(llm.tokenizer, select(read_questions(), 24))]
    texts = texts_of(llm, prompts[8:], options.rows, options.new_tokens, seed=1000)
    print(f"{sum(map(len, texts))} tokens of {options.rows} texts; prompts of {sum(map(len, prompts[:8])) // 8} tokens")
    print(f"typical acceptance: total variation of a next token {bias_of(llm, texts):.3f}; 0 under all other rules")
    for kind in ("medusa", "hydra"):
        heads, steps = fitted(llm, kind, texts, options.seconds)
        base = {"method": kind, "model": heads, "max_draft_nodes": options.nodes}
        for temperature in (1.0, 0.0):
            params = SamplingParams(temperature=temperature, max_tokens=options.new_tokens, ignore_eos=True, seed=7)
            found = {
                how: rate(llm, {**base, "draft_sample_method": how}, prompts[:8], params)
                for how in ("probabilistic", "greedy")
            }
            found["typical"] = rate(llm, {**base, "rejection_sample_method": "typical"}, prompts[:8], params)
            shown = ", ".join(f"{how} {value:.3f}" for how, value in found.items())
            print(f"{kind} ({steps} steps), temperature {temperature:g}, {options.nodes} nodes: {shown}", flush=True)


if __name__ == "__main__":
    main()
