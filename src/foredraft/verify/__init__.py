"""The verdict on a decoder: equality with plain decoding, and tests against the model's enumerated distribution.

`verify` judges an `LLM`, or anything that generates. ``foredraft verify`` is the same on the command line.
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
