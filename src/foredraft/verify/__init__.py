"""Verification of a decoder: comparison with plain decoding, and tests against the model's enumerated distribution.

`verify` checks an `LLM` or any other decoder. ``foredraft verify`` is the same check on the command line.
"""

from __future__ import annotations

from foredraft.verify.subjects import (
    Answer,
    FunctionSubject,
    LLMSubject,
    Sample,
    ServerSubject,
    Subject,
    TransformersSubject,
)
from foredraft.verify.verdict import Finding, Verdict
from foredraft.verify.verifying import verify

__all__ = [
    "Answer",
    "Finding",
    "FunctionSubject",
    "LLMSubject",
    "Sample",
    "ServerSubject",
    "Subject",
    "TransformersSubject",
    "Verdict",
    "verify",
]
