"""EAGLE-3: a head that fuses three layers of the target, and a tree that grows where it is sure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foretoken.config.method import Method
from foretoken.drafters.parts.eagle_options import DynamicTreeOptions, eagle_head
from foretoken.drafters.parts.grown_eagle import GrownEagleDrafter
from foretoken.drafters.parts.reduced_output import chosen_vocabulary
from foretoken.heads.recognition import eagle_generation

if TYPE_CHECKING:
    from foretoken.config.contents import Contents
    from foretoken.drafters.context import DrafterContext


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(DynamicTreeOptions):
    """Keys of drafting as EAGLE-3 does."""

    method: ClassVar[str] = "eagle3"


class Eagle3Drafter(GrownEagleDrafter):
    """A dynamic tree from a head that fuses what enters three layers of the target.

    Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840). See `GrownEagleDrafter` for arguments, deviations, exactness and
    cost.
    """

    name = "eagle3"


def build(options: Eagle3Options, context: DrafterContext) -> Eagle3Drafter:
    """Drafts with the head that the config names."""
    head = eagle_head(options, context, generation=3)
    vocabulary = chosen_vocabulary(options, context)
    growth = options.growth(context.target.vocab_size)
    return Eagle3Drafter(head, context.target, vocabulary=vocabulary, **growth)


def recognizes(contents: Contents) -> bool:
    """Whether this is a head of EAGLE-3."""
    return eagle_generation(contents.config, contents.names) == 3


METHOD = Method(
    Eagle3Options,
    build,
    summary="with a head that fuses three layers of the target, in a tree that grows where it is sure",
    aliases=("draft_eagle3", "eagle_3"),
    recognizes=recognizes,
)
