"""Which head a checkpoint holds, by the names of its tensors, without reading these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FIRST = "layers.0."
"""What the names of the first decoder layer's tensors begin with."""

_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), FIRST),
    (re.compile(r"^transformer\."), FIRST),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^(embedding_layernorm|embed_layernorm)\."), "embed_norm."),
    (re.compile(r"^(pre_lm_head_layernorm|lm_head_layernorm)\."), "norm."),
    (re.compile(r"^(post_embedding_layernorm|hidden_layernorm)\."), f"{FIRST}input_layernorm."),
)
"""Names of other layouts of EAGLE's heads -> ours, applied one after the other."""


def eagle_name(name: str) -> str:
    """The name that a tensor of any layout of EAGLE's heads has here."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def eagle_generation(config: Mapping[str, Any], names: frozenset[str]) -> int | None:
    """The generation of the head with these tensors: 1 (EAGLE and EAGLE-2), 3 (EAGLE-3); None where it is neither.

    Args:
      names: of its tensors; without any, the config alone decides.
    """
    if names:
        own = {eagle_name(name) for name in names}
        if "fc.weight" not in own or not any(name.startswith(FIRST) for name in own):
            return None
        return 3 if f"{FIRST}hidden_norm.weight" in own else 1
    kind = str(config.get("speculators_model_type", "")).lower()
    titles = " ".join(map(str, config.get("architectures") or ())).lower()
    if kind == "eagle3" or "eagle3" in titles:
        return 3
    return 1 if kind == "eagle" or "eagle" in titles else None
