"""Switchable low-rank adapters that behave as PEFT's do: all that tells them apart is plain attributes of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from foredraft.testing import strengthen

RANK = 4


class LoraLinear(nn.Module):
    """A linear with any number of adapters, some of them active, merged into the weight or not."""

    def __init__(self, base_layer: nn.Linear, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a = nn.ModuleDict()
        self.lora_b = nn.ModuleDict()
        for name in names:
            self.lora_a[name] = nn.Linear(base_layer.in_features, RANK, bias=False, dtype=base_layer.weight.dtype)
            self.lora_b[name] = nn.Linear(RANK, base_layer.out_features, bias=False, dtype=base_layer.weight.dtype)
        self.scaling = dict.fromkeys(names, 2.0)
        self.active_adapters = list(names[:1])
        self.disable_adapters = False
        self.merged_adapters: list[str] = []

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    def delta(self, name: str) -> torch.Tensor:
        return self.lora_b[name].weight @ self.lora_a[name].weight * self.scaling[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()  # PEFT does so in the forward, too
        result = self.base_layer(x)
        if not (self.disable_adapters or self.merged):
            for name in self.active_adapters:
                result = result + self.lora_b[name](self.lora_a[name](x)) * self.scaling[name]
        return result

    def merge(self) -> None:
        """As PEFT writes: through ``.data``, which no version counter counts."""
        for name in self.active_adapters:
            self.base_layer.weight.data += self.delta(name)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        for name in self.merged_adapters:
            self.base_layer.weight.data -= self.delta(name)
        self.merged_adapters = []


def layers(model: nn.Module) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def set_adapter(model: nn.Module, *names: str) -> None:
    for layer in layers(model):
        layer.active_adapters = list(names)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    for layer in layers(model):
        layer.disable_adapters = True
    try:
        yield
    finally:
        for layer in layers(model):
            layer.disable_adapters = False


def lora_model(names: tuple[str, ...] = ("one", "two"), dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A small Llama, some of whose linears are large enough to be packed, with adapters that change what it says."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,  # 256 x 1024 is the smallest weight that is packed
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = strengthen(LlamaForCausalLM(config), 1, scale=0.1).to(dtype)
    torch.manual_seed(2)
    for layer in model.model.layers:
        for parent, name in ((layer.self_attn, "q_proj"), (layer.mlp, "up_proj"), (layer.mlp, "down_proj")):
            setattr(parent, name, LoraLinear(getattr(parent, name), names))
    return model.eval()
