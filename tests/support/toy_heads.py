"""Heads that were fitted to what a toy target says, so that drafts are accepted at every depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM

from foredraft.drafters.none import EmptyDrafter
from foredraft.heads.layers import LayerShape
from foredraft.heads.medusa_hydra import HeadsShape, HydraHeads, MedusaHeads
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.nodes import Wanted
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, decode
from toys import VOCAB_SIZE, target

HIDDEN, NUM_HEADS = 32, 4
LAYER = LayerShape(HIDDEN, 48, 4, 2, 8)


def narrow_opt() -> OPTForCausalLM:
    """A target that projects its last hidden states to half their width, as OPT-350m does."""
    config = OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN // 2,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        do_layer_norm_before=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return OPTForCausalLM(config).double().eval()


@cache
def texts() -> tuple[tuple[int, ...], ...]:
    """Prompts with what plain decoding makes of them, greedy and sampled."""
    found = []
    for params in (GREEDY, SAMPLED):
        requests = [(prompt, replace(params, max_tokens=20)) for prompt in PROMPTS]
        outputs = decode(target(), EmptyDrafter(), requests).outputs
        found += [(*PROMPTS[int(key.split(".")[0])], *output) for key, output in outputs.items()]
    return tuple(dict.fromkeys(found))


def states_along(lm: CausalLM, text: tuple[int, ...]) -> Tensor:
    """The input of the output embedding at every token, (T, H)."""
    output = lm.forward_with(Wanted(last_hidden=True), Nodes.from_chains([text]), lm.new_cache(1), keep=slice(0, 0))
    return output.last_hidden[0].clone()


def fit(module: nn.Module, loss: Callable[[], Tensor], num_steps: int, rate: float = 0.02) -> None:
    optimiser = torch.optim.Adam(module.parameters(), lr=rate)
    for _ in range(num_steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    module.requires_grad_(False)


@cache
def medusa_heads(has_outputs: bool = True, num_steps: int = 120) -> MedusaHeads:
    """With output layers of their own or over the target's."""
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsShape(HIDDEN, VOCAB_SIZE if has_outputs else 0, NUM_HEADS, 2, is_shared=False)).double()
    weight = target().shadow.get_output_embeddings().weight.detach().clone()
    pairs = [(states_along(target(), text), torch.tensor(text)) for text in texts()]
    hidden = torch.cat([states[: -2 - NUM_HEADS + 1] for states, _ in pairs])
    answers = torch.stack(
        [torch.cat([ids[2 + k : len(ids) - NUM_HEADS + 1 + k] for _, ids in pairs]) for k in range(NUM_HEADS)],
        dim=1,
    )

    def loss() -> Tensor:
        logits = heads(hidden, output=lambda states: states @ weight.T)
        return nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())

    fit(heads, loss, num_steps)
    return heads


@cache
def hydra_heads(has_prefix: bool, num_steps: int = 60) -> HydraHeads:
    """Without and with a prefix layer, as Hydra++ has it."""
    torch.manual_seed(1)
    shape = HeadsShape(HIDDEN, VOCAB_SIZE, NUM_HEADS, 3, prefix=LAYER if has_prefix else None)
    heads = HydraHeads(shape).double()
    table = target().shadow.get_input_embeddings().weight.detach().clone()
    pairs = [(states_along(target(), text), torch.tensor(text)) for text in texts()]

    def loss() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        contexts = [heads.contexts(states) for states, _ in pairs]
        for head in range(NUM_HEADS):
            logits = [heads.along(head, one, table[ids])[:-1] for one, (_, ids) in zip(contexts, pairs, strict=True)]
            answers = [ids[2 + head :] for _, ids in pairs]
            total = total + nn.functional.cross_entropy(torch.cat(logits), torch.cat(answers))
        return total

    fit(heads, loss, num_steps)
    return heads
