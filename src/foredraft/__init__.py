"""Lossless, batched speculative decoding for unmodified Hugging Face causal language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foredraft.machine import wait_briefly

if TYPE_CHECKING:
    from foredraft.config.sampling import SamplingParams
    from foredraft.config.speculative import SpeculativeConfig
    from foredraft.config.structured import StructuredOutputs
    from foredraft.engine.frontend import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Stream, StreamOutput
    from foredraft.errors import ForedraftError
    from foredraft.hf import speculate
    from foredraft.llm import LLM
    from foredraft.loading.info import ModelInfo
    from foredraft.views.trajectory import Trajectory, trajectory

wait_briefly()  # before anything imports torch

__version__ = "0.1.0.dev0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ForedraftError",
    "Logprob",
    "ModelInfo",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "Stream",
    "StreamOutput",
    "StructuredOutputs",
    "Trajectory",
    "speculate",
    "trajectory",
]

_HOME = {
    "LLM": "llm",
    "CompletionOutput": "engine.frontend",
    "ForedraftError": "errors",
    "Logprob": "engine.frontend",
    "ModelInfo": "loading.info",
    "RequestMetrics": "engine.frontend",
    "RequestOutput": "engine.frontend",
    "SamplingParams": "config.sampling",
    "SpeculativeConfig": "config.speculative",
    "Stream": "engine.frontend",
    "StreamOutput": "engine.frontend",
    "StructuredOutputs": "config.structured",
    "Trajectory": "views.trajectory",
    "speculate": "hf",
    "trajectory": "views.trajectory",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``foredraft --help`` need not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
