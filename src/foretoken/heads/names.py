"""Names of tensors in published heads of Medusa and Hydra, and which of these heads a checkpoint holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MEDUSA_PREFIX = "medusa_head."
"""Before the names of heads that lie inside of a model."""

MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
MEDUSA_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
MEDUSA_SERVED = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight")
"""Names in vLLM's layout."""

TOKEN_MAP = "token_map"
"""vLLM's map of a reduced vocabulary: row of the output layers -> token."""

HYDRA_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
HYDRA_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)")
HYDRA_PREFIX = "prefix_embeding_layer."
"""As it is spelt in the published checkpoints."""

HYDRA_COPIES = re.compile(
    r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)"
)
"""Copies of the target's embedding, and what follows from the config: not read."""


def is_medusa(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Whether these are Medusa's heads, by the names of their tensors, or by the config where no names are known.

    A model that was trained with its heads (Medusa-2) counts: it has both.
    """
    known = list(names)
    if known:
        inside = [name.removeprefix(MEDUSA_PREFIX) for name in known if name.startswith(MEDUSA_PREFIX)]
        own = inside or [name for name in known if name != TOKEN_MAP]
        return all(
            MEDUSA_BLOCK.fullmatch(name) or MEDUSA_OUTPUT.fullmatch(name) or MEDUSA_SERVED.fullmatch(name)
            for name in own
        )
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def is_hydra(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Whether these are heads of Hydra or Hydra++, by the names of their tensors, or by the config."""
    known = list(names)
    return any(map(HYDRA_MLP.fullmatch, known)) if known else "hydra_num_heads" in config
