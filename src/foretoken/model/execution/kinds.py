"""The ways to execute a model, and which of them a device can."""

from __future__ import annotations

import logging
import platform
from typing import TYPE_CHECKING

import torch

from foretoken.config.keywords import did_you_mean
from foretoken.errors import ConfigError
from foretoken.machine import available_memory_bytes
from foretoken.model.execution.packing import can_pack, packable, packed_dtype, packing_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("foretoken")

KINDS = ("eager", "packed", "compiled")


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype that a model computes in, even if its embedding is stored in blocks of bytes."""
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype if dtype.is_floating_point else model.dtype


def choose_execution(kind: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """Resolve "auto" and check what the device can run.

    Returns: "packed" for "auto" on CPUs that can pack ``dtype``, else "eager". `apply_execution` compiles the model,
      too, where it is large enough and there is a C++ compiler.
    Raises: ConfigError for an unknown kind, or one that the device cannot run.
    """
    check_kind(kind)
    is_cpu = torch.device(device).type == "cpu"
    if kind == "auto":
        return "packed" if is_cpu and packed_dtype(dtype) else "eager"
    if kind != "eager" and not is_cpu:
        raise ConfigError(f"execution={kind!r} runs on CPUs, and the model is on {device}; use execution='eager'")
    if kind == "packed" and not can_pack():
        raise ConfigError(
            f"execution='packed' needs oneDNN on x86, which torch does not have here ({platform.machine()}); use "
            "execution='eager', or 'auto', which takes it"
        )
    return kind


def check_kind(kind: str) -> None:
    """Raises: ConfigError for an unknown kind."""
    if kind != "auto" and kind not in KINDS:
        raise ConfigError(f"execution={kind!r} is unknown; {did_you_mean(kind, ('auto', *KINDS), 0.6)}")


def fits_in_memory(model: PreTrainedModel, release_originals: bool) -> bool:
    """Whether packed weights leave a tenth of the available memory; tells the user when they do not."""
    needed = packing_bytes(packable(model), release_originals)
    available = available_memory_bytes()
    if available is None or needed <= 0.9 * available:
        return True
    logger.warning(
        "packed weights of %s need %.1f GB and %.1f GB are available, so it runs eagerly, several times slower on "
        "drafts; pass execution='packed' to pack all the same.",
        type(model).__name__,
        needed / 1e9,
        available / 1e9,
    )
    return False
