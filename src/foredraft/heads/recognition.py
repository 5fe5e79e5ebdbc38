"""Names of tensors in published heads, and which head a checkpoint holds by them, without reading any."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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


# -- Medusa and Hydra ------------------------------------------------------------------------------------------------

MEDUSA_PREFIX = "medusa_head."
"""Before the names of heads that lie inside of a model."""

MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
MEDUSA_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
MEDUSA_SERVED = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight")
"""Names in vLLM's layout."""

TOKEN_MAP = "token_map"
"""vLLM's map of a reduced vocabulary: row of the output layers -> token."""

SHARED_OUTPUT = "foredraft_shared_output"
"""In the config of a head: that it has no output layer of its own, and reads rows of the target's."""

HYDRA_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
HYDRA_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)")
HYDRA_PREFIX = "prefix_embeding_layer."
"""As it is spelt in the published checkpoints."""

HYDRA_COPIES = re.compile(
    r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)"
)
"""Copies of the target's embedding, and what follows from the config: not read."""


def is_medusa(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Whether these are Medusa's heads, by the config, or where it does not say so by the names of their tensors.

    A model that was trained with its heads (Medusa-2) counts: it has both.
    """
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return True
    known = [name for name in names if name != TOKEN_MAP]
    own = [name.removeprefix(MEDUSA_PREFIX) for name in known if name.startswith(MEDUSA_PREFIX)] or known
    kinds = (MEDUSA_BLOCK, MEDUSA_OUTPUT, MEDUSA_SERVED)
    return bool(own) and all(any(kind.fullmatch(name) for kind in kinds) for name in own)


def is_hydra(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Whether these are heads of Hydra or Hydra++, by the config, or by the names of their tensors."""
    return "hydra_num_heads" in config or any(map(HYDRA_MLP.fullmatch, names))


def has_prefix(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Whether heads of Hydra have the layer that makes them those of Hydra++."""
    return config.get("hydra_head_arch") == "prefix-mlp" or any(name.startswith(HYDRA_PREFIX) for name in names)
