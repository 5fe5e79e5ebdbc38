"""Plain decoding, and drafting with a smaller model: their options and entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foredraft.config.drafting import ModelOptions, VocabularyOptions, draft_length
from foredraft.config.options import Options
from foredraft.methods import Method
from foredraft.methods.growth import GrowthOptions


@dataclass(frozen=True, kw_only=True)
class NoOptions(Options):
    """Options of plain decoding, which has no keys."""

    method: ClassVar[str] = "none"
    num_speculative_tokens: ClassVar[int] = 0
    rejection_sample_method: ClassVar[str] = "match"


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(GrowthOptions, ModelOptions, VocabularyOptions):
    """Keys of drafting with a smaller model."""

    method: ClassVar[str] = "draft_model"
    num_speculative_tokens: int = draft_length(5)


METHODS = (
    Method(
        NoOptions,
        "foredraft.drafters.none:build",
        summary="nothing: plain decoding",
        aliases=("off", "disabled"),
    ),
    Method(
        DraftModelOptions,
        "foredraft.drafters.lm.draft_model:build",
        summary="with a smaller model of the same tokenizer",
        aliases=("draft", "draft_simple", "assisted", "standalone"),
    ),
)
