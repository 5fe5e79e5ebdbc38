"""Lossless, batched speculative decoding for unmodified Hugging Face causal language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foretoken.machine import wait_briefly

if TYPE_CHECKING:
    from foretoken.config.sampling import SamplingParams
    from foretoken.config.speculative import SpeculativeConfig
    from foretoken.config.structured import StructuredOutputs
    from foretoken.errors import ForetokenError
    from foretoken.hf import speculate
    from foretoken.llm import LLM
    from foretoken.loading.info import ModelInfo
    from foretoken.sessions.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamOutput
    from foretoken.sessions.runner import Stream
    from foretoken.views.trajectory import Trajectory, trajectory

wait_briefly()  # before anything imports torch

__version__ = "0.1.0.dev0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ForetokenError",
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
    "CompletionOutput": "sessions.outputs",
    "ForetokenError": "errors",
    "Logprob": "sessions.outputs",
    "ModelInfo": "loading.info",
    "RequestMetrics": "sessions.outputs",
    "RequestOutput": "sessions.outputs",
    "SamplingParams": "config.sampling",
    "SpeculativeConfig": "config.speculative",
    "Stream": "sessions.runner",
    "StreamOutput": "sessions.outputs",
    "StructuredOutputs": "config.structured",
    "Trajectory": "views.trajectory",
    "speculate": "hf",
    "trajectory": "views.trajectory",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for, so that ``foretoken --help`` need not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
