"""`speculate`: a callable for ``model.generate(..., custom_generate=...)``, over the same engine as everything else."""

from __future__ import annotations

from foredraft.hf.hook import Speculation, speculate

__all__ = ["Speculation", "speculate"]
