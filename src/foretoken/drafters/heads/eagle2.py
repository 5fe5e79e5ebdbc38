"""EAGLE-2: a head that extrapolates the target's last hidden state, and a tree that grows where it is sure."""

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
class Eagle2Options(DynamicTreeOptions):
    """Keys of drafting as EAGLE-2 does."""

    method: ClassVar[str] = "eagle2"
    head: ClassVar[str] = "eagle"


class Eagle2Drafter(GrownEagleDrafter):
    """A dynamic tree from a head that extrapolates the target's last hidden state.

    Source: EAGLE-2 (Li et al. 2024, arXiv:2406.16858) over heads of EAGLE (Li et al. 2024, arXiv:2401.15077). See
    `GrownEagleDrafter` for arguments, deviations, exactness and cost.
    """

    name = "eagle2"


def build(options: Eagle2Options, context: DrafterContext) -> Eagle2Drafter:
    """Drafts with the head that the config names."""
    head = eagle_head(options, context, generation=1)
    vocabulary = chosen_vocabulary(options, context)
    growth = options.growth(context.target.vocab_size)
    return Eagle2Drafter(head, context.target, vocabulary=vocabulary, **growth)


def recognizes(contents: Contents) -> bool:
    """Whether this is a head of EAGLE or EAGLE-2, which are the same; a tree that grows is the better use of it."""
    return eagle_generation(contents.config, contents.names) == 1


METHOD = Method(
    Eagle2Options,
    build,
    summary="with a head that extrapolates the target's features, in a tree that grows where it is sure",
    aliases=("eagle_2",),
    recognizes=recognizes,
)
