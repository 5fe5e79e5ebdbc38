"""Complete prompts and answer them with SmolLM2, thousands at a time, on a GPU.

It samples with a bare forward pass of Llama, since training needs millions of tokens that no user reads. Half of the
answers are greedy. The others are drawn at temperature 0.8 with min-p 0.05.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from prompts import load_tokenizer, packed, shingles
from safetensors.torch import load_file
from torch import Tensor

from foredraft import zoo
from foredraft.heads.layers import rotated

EOS = 2
MIN_P = 0.05


@dataclass(frozen=True)
class Weights:
    """SmolLM2's, products that share an input side by side."""

    embedding: Tensor
    norm: Tensor
    layers: list[tuple[Tensor, ...]]
    heads: int = 9
    kv_heads: int = 3
    size: int = 64
    theta: float = 100_000.0
    eps: float = 1e-5

    @classmethod
    def load(cls, device: torch.device, dtype: torch.dtype) -> Weights:
        found = load_file(Path(zoo.path("smollm2")) / "model.safetensors")
        found = {name.removeprefix("model."): tensor.to(device, dtype) for name, tensor in found.items()}
        layers = []
        for number in range(30):
            own = {name: found[f"layers.{number}.{name}.weight"] for name in LAYER}
            attention, mlp = (
                [own[f"self_attn.{part}_proj"] for part in "qkv"],
                [own[f"mlp.{part}_proj"] for part in ("gate", "up")],
            )
            layers.append(
                (
                    own["input_layernorm"],
                    torch.cat(attention),
                    own["self_attn.o_proj"],
                    own["post_attention_layernorm"],
                    torch.cat(mlp),
                    own["mlp.down_proj"],
                )
            )
        return cls(found["embed_tokens.weight"], found["norm.weight"], layers)


LAYER = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def angles(weights: Weights, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (B, N): (B, 1, N, size)."""
    powers = torch.arange(0, weights.size, 2, device=positions.device, dtype=torch.float32) / weights.size
    turned = positions[:, None, :, None].float() * (weights.theta**-powers)
    turned = torch.cat([turned, turned], dim=-1)
    dtype = weights.embedding.dtype
    return turned.cos().to(dtype), turned.sin().to(dtype)


def forward(
    weights: Weights,
    token_ids: Tensor,
    positions: Tensor,
    cache: list[tuple[Tensor, Tensor]] | None = None,
    *,
    column: int = 0,
    mask: Tensor | None = None,
    wanted: tuple[int, ...] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """Last hidden states before the final norm (B, N, H), and what enters the wanted layers.

    Args:
      token_ids, positions: (B, N).
      cache: by layer keys and values (B, kv_heads, room, size), written from ``column`` on.
      mask: bool (B, 1, 1, columns): which columns the only token sees; None where tokens see those before them.
    """
    x = F.embedding(token_ids, weights.embedding)
    rows, num = token_ids.shape
    cos, sin = angles(weights, positions)
    kept: dict[int, Tensor] = {}
    for number, (norm, qkv, out, norm_2, gate_up, down) in enumerate(weights.layers):
        if number in wanted:
            kept[number] = x
        both = (
            F.linear(F.rms_norm(x, norm.shape, norm, weights.eps), qkv)
            .view(rows, num, -1, weights.size)
            .transpose(1, 2)
        )
        turned = rotated(both[:, : weights.heads + weights.kv_heads], cos, sin)
        query, key, value = (
            turned[:, : weights.heads],
            turned[:, weights.heads :],
            both[:, weights.heads + weights.kv_heads :],
        )
        if cache is not None:
            keys, values = cache[number]
            keys[:, :, column : column + num] = key
            values[:, :, column : column + num] = value
        if mask is None:
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:  # the heads of a group as if they were tokens, so that keys and values are read once
            size = mask.shape[-1]
            grouped = query.reshape(rows, weights.kv_heads, -1, weights.size)
            seen = F.scaled_dot_product_attention(grouped, keys[:, :, :size], values[:, :, :size], attn_mask=mask)
            seen = seen.reshape(rows, weights.heads, 1, weights.size)
        x = x + F.linear(seen.transpose(1, 2).flatten(2), out)
        gate, up = F.linear(F.rms_norm(x, norm_2.shape, norm_2, weights.eps), gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, down)
    return x, kept


def chosen(logits: Tensor, temperatures: Tensor, generator: torch.Generator, min_p: float) -> Tensor:
    """One token of every row; temperature 0 is greedy. float32 (B, V) -> (B,)."""
    greedy = logits.argmax(-1)
    scaled = logits / temperatures.clamp(min=1e-3)[:, None]
    scaled -= scaled.amax(-1, keepdim=True)
    scaled = scaled.masked_fill_(scaled < float(np.log(min_p)), -torch.inf) if min_p else scaled
    noise = torch.empty_like(scaled).exponential_(generator=generator)
    return torch.where(temperatures > 0, (scaled - noise.log_()).argmax(-1), greedy)


@torch.no_grad()
def generate(
    weights: Weights,
    prompts: list[list[int]],
    temperatures: list[float],
    num_new: int,
    generator: torch.Generator,
    min_p: float = MIN_P,
) -> list[list[int]]:
    """What follows prompts, with EOS where it came."""
    device = weights.embedding.device
    lengths = torch.tensor([len(row) for row in prompts], device=device)
    width = -(-max(map(len, prompts)) // 8) * 8
    ids = torch.full((len(prompts), width), EOS)
    for place, row in enumerate(prompts):
        ids[place, : len(row)] = torch.tensor(row)
    ids = ids.to(device)
    room = -(-(width + num_new) // 8) * 8
    shape = (len(prompts), weights.kv_heads, room, weights.size)
    cache = [
        (ids.new_zeros(shape, dtype=weights.norm.dtype), ids.new_zeros(shape, dtype=weights.norm.dtype))
        for _ in weights.layers
    ]
    heat = torch.tensor(temperatures, device=device)
    last = torch.empty(len(prompts), weights.embedding.shape[1], device=device, dtype=weights.norm.dtype)
    part = max(1, 300_000 // width)
    for start in range(0, len(prompts), part):
        rows = slice(start, start + part)
        own = [(keys[rows], values[rows]) for keys, values in cache]
        x, _ = forward(weights, ids[rows], torch.arange(width, device=device).expand(len(ids[rows]), -1), own)
        last[rows] = x[torch.arange(len(x), device=device), lengths[rows] - 1]
    sees = torch.arange(room, device=device)[None] < lengths[:, None]
    said = torch.full((len(prompts), num_new), EOS, device=device)
    is_open = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(num_new):
        logits = F.linear(F.rms_norm(last, weights.norm.shape, weights.norm, weights.eps), weights.embedding).float()
        token = chosen(logits, heat, generator, min_p)
        said[:, step] = torch.where(is_open, token, EOS)
        is_open &= token != EOS
        if step == num_new - 1 or (step % 16 == 15 and not bool(is_open.any())):
            break
        column = width + step
        sees[:, column] = True
        size = -(-(column + 1) // 8) * 8
        x, _ = forward(
            weights,
            said[:, step : step + 1],
            (lengths + step)[:, None],
            cache,
            column=column,
            mask=sees[:, None, None, :size],
        )
        last = x[:, 0]
    found = said.tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in found]


def batches(rows: list[list[int]], num_new: int, budget: int, most: int) -> list[list[int]]:
    """Places of rows of like lengths, ``most`` at most, so that keys and values of a batch have ``budget`` columns."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    found: list[list[int]] = [[]]
    for place in reversed(order):
        longest = len(rows[found[-1][0]]) if found[-1] else len(rows[place])
        if len(found[-1]) == most or (found[-1] and (len(found[-1]) + 1) * (longest + num_new) > budget):
            found.append([])
        found[-1].append(place)
    return found


def rows_of(data: Any, name: str) -> list[list[int]]:
    parts = np.split(data[f"{name}_tokens"], np.cumsum(data[f"{name}_lengths"])[:-1])
    return [part.tolist() for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=Path, required=True, help="of prompts.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further batch is begun")
    parser.add_argument("--num-new", type=int, default=256)
    parser.add_argument("--own-tokens", type=int, default=160, help="of a prompt that the model completes")
    parser.add_argument("--columns", type=int, default=1_200_000, help="of keys and values that fit into memory")
    parser.add_argument(
        "--rows", type=int, default=4096, help="of a batch: in a short time many lengths should have one"
    )
    parser.add_argument("--most", type=int, default=10**9, help="prompts and beginnings, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun = time.monotonic()
    data = np.load(options.prompts)
    weights = Weights.load(device, torch.bfloat16)
    print(f"weights after {time.monotonic() - begun:.1f} s", flush=True)
    generator = torch.Generator(device).manual_seed(options.seed)
    prompts, kinds = rows_of(data, "prompt")[: options.most], data["prompt_kinds"].tolist()[: options.most]
    beginnings = rows_of(data, "beginning")[: options.most]
    known, closing, before = set(data["shingles"].tolist()), data["closing"].tolist(), int(data["num_before"])
    tokenizer = load_tokenizer()
    num_left_out = 0
    for places in batches(beginnings, options.own_tokens, options.columns, options.rows):
        made = generate(
            weights, [beginnings[i] for i in places], [1.0] * len(places), options.own_tokens, generator, min_p=0.0
        )
        for place, row in zip(places, made, strict=True):
            turn = beginnings[place][before:] + [token for token in row if token != EOS]
            text = tokenizer.decode(turn)
            words = len(re.findall(r"\w+", text))
            if (row[-1] != EOS and words > 250) or words < 3 or shingles(text) & known:
                num_left_out += 1
                continue
            prompts.append(beginnings[place][:before] + turn + closing)
            kinds.append(str(data["beginning_kinds"][place]))
    print(f"{len(prompts)} prompts, {num_left_out} left out, after {time.monotonic() - begun:.1f} s", flush=True)
    rng = np.random.default_rng(options.seed)
    heat = [0.0 if is_greedy else 0.8 for is_greedy in rng.random(len(prompts)) < 0.5]
    work = batches(prompts, options.num_new, options.columns, options.rows)
    rng.shuffle(work)  # if time is up, what is missing is of all lengths
    answered: list[int] = []
    answers: list[list[int]] = []
    for places in work:
        if time.monotonic() - begun > options.seconds:
            break
        answered += places
        answers += generate(
            weights, [prompts[i] for i in places], [heat[i] for i in places], options.num_new, generator
        )
        num = sum(map(len, answers))
        print(f"{len(answered)} answers, {num} tokens after {time.monotonic() - begun:.1f} s", flush=True)
    arrays = {f"prompt_{key}": value for key, value in packed([prompts[i] for i in answered]).items()}
    arrays |= {f"answer_{key}": value for key, value in packed(answers).items()}
    np.savez(
        options.out,
        **arrays,
        kinds=np.asarray([kinds[i] for i in answered]),
        temperatures=np.asarray([heat[i] for i in answered], np.float16),
    )


if __name__ == "__main__":
    main()
