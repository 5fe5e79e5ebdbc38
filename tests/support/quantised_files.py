"""Checkpoints whose linear layers are stored in whole numbers, as tests write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

Stored = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""The tensors of a layer, whose weight (out, in) it changes to what they stand for."""


def write_quantised(folder: Path, model: PreTrainedModel, settings: dict[str, Any], stored: Stored) -> None:
    """Write a checkpoint with its output embedding in full, and all other linear layers as ``stored`` has them."""
    tensors: dict[str, torch.Tensor] = {}
    modules = dict(model.named_modules())
    for key, weight in model.state_dict().items():
        name = key.removesuffix(".weight")
        if type(modules.get(name)) is not torch.nn.Linear or name == "lm_head":
            tensors[key] = weight.clone()
        else:
            tensors |= {f"{name}.{part}": tensor for part, tensor in stored(weight).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))


UP = "model.layers.0.mlp.up_proj"
"""One of the layers."""


def parts_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of `UP`, by the names of its parts."""
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{UP}."): tensor for name, tensor in tensors.items() if name.startswith(f"{UP}.")}


def change_parts(folder: Path, **parts: torch.Tensor | None) -> None:
    """Let the file hold other tensors of `UP`, or none."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for part, tensor in parts.items():
        tensors.pop(f"{UP}.{part}", None)
        if tensor is not None:
            tensors[f"{UP}.{part}"] = tensor.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def change_settings(folder: Path, **changes: Any) -> None:
    """Let the configuration say something else of the weights."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"].update(changes)
    file.write_text(json.dumps(config))


def assert_close(model: PreTrainedModel, wanted: PreTrainedModel, most: float = 1e-3) -> None:
    """Logits are those of the weights that whole numbers stand for; activations have 16 bits."""
    ids = torch.arange(40)[None] * 37 % 512
    with torch.inference_mode():
        got, want = model(ids).logits, wanted(ids).logits
    assert float((got - want).norm() / want.norm()) < most
