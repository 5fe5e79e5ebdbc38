"""`speculate`: a callable for ``model.generate(..., custom_generate=...)`` that runs foredraft's engine."""

from __future__ import annotations

from foredraft.hf.hook import Speculation, speculate

__all__ = ["Speculation", "speculate"]
