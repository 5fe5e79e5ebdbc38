"""Lossless, batched speculative decoding for unmodified Hugging Face causal language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.config.sampling import SamplingParams
    from foretoken.config.speculative import SpeculativeConfig
    from foretoken.errors import ForetokenError
    from foretoken.hf import speculate
    from foretoken.llm import LLM
    from foretoken.modelinfo import ModelInfo
    from foretoken.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamOutput
    from foretoken.runner import Stream
    from foretoken.trajectories import Trajectory, trajectory

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
    "Trajectory",
    "speculate",
    "trajectory",
]

_HOME = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "ForetokenError": "errors",
    "Logprob": "outputs",
    "ModelInfo": "modelinfo",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "config.sampling",
    "SpeculativeConfig": "config.speculative",
    "Stream": "runner",
    "StreamOutput": "outputs",
    "Trajectory": "trajectories",
    "speculate": "hf",
    "trajectory": "trajectories",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for, so that ``foretoken --help`` need not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
