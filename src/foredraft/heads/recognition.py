"""Tensor names of published heads, and recognition of a checkpoint's kind from its names, without reading tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

FIRST = "layers.0."
"""Prefix of the tensor names of the first decoder layer."""

_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), FIRST),
    (re.compile(r"^transformer\."), FIRST),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^(embedding_layernorm|embed_layernorm)\."), "embed_norm."),
    (re.compile(r"^(pre_lm_head_layernorm|lm_head_layernorm)\."), "norm."),
    (re.compile(r"^(post_embedding_layernorm|hidden_layernorm)\."), f"{FIRST}input_layernorm."),
)
"""Replacements, applied in order, from the names in other layouts of EAGLE heads to foredraft's names."""


def eagle_name(name: str) -> str:
    """Return foredraft's name of a tensor from any layout of EAGLE heads."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def eagle_generation(config: Mapping[str, Any], names: frozenset[str]) -> int | None:
    """Return the generation of a head, 1 (EAGLE and EAGLE-2) or 3 (EAGLE-3), or None if it is not an EAGLE head.

    Args:
      config: content of config.json.
      names: names of the head's tensors; if empty, only the config is used.
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
"""Prefix of the tensor names of heads that are stored inside a model."""

MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
MEDUSA_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
MEDUSA_SERVED = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight")
"""Tensor names in vLLM's layout."""

TOKEN_MAP = "token_map"
"""Name of vLLM's map of a reduced vocabulary, from rows of the output layers to tokens."""

SHARED_OUTPUT = "foredraft_shared_output"
"""Config key of a head without its own output layer, which uses rows of the target's."""

HYDRA_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
HYDRA_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)")
HYDRA_PREFIX = "prefix_embeding_layer."
"""Prefix of the prefix layer's tensor names, spelt as in the published checkpoints."""

HYDRA_COPIES = re.compile(
    r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)"
)
"""Tensors that are not read: copies of the target's embedding, and tables that follow from the config."""


def is_medusa(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Return whether these are Medusa heads. The config decides, or the tensor names if the config has no answer.

    A model that was trained with its heads (Medusa-2) counts, because it contains both.
    """
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return True
    known = [name for name in names if name != TOKEN_MAP]
    own = [name.removeprefix(MEDUSA_PREFIX) for name in known if name.startswith(MEDUSA_PREFIX)] or known
    kinds = (MEDUSA_BLOCK, MEDUSA_OUTPUT, MEDUSA_SERVED)
    return bool(own) and all(any(kind.fullmatch(name) for kind in kinds) for name in own)


def is_hydra(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Return whether these are heads of Hydra or Hydra++, by the config or by the tensor names."""
    return "hydra_num_heads" in config or any(map(HYDRA_MLP.fullmatch, names))


def has_prefix(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Return whether Hydra heads have a prefix layer, which makes them Hydra++ heads."""
    return config.get("hydra_head_arch") == "prefix-mlp" or any(name.startswith(HYDRA_PREFIX) for name in names)
