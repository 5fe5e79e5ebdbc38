"""Hydra++: Hydra's heads, deeper, over a layer that attends to the whole text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foretoken.config.method import Method
from foretoken.drafters.heads.hydra import HydraOptions, build
from foretoken.heads.names import has_prefix, is_hydra

if TYPE_CHECKING:
    from foretoken.config.contents import Contents


@dataclass(frozen=True, kw_only=True)
class HydraPlusPlusOptions(HydraOptions):
    """Keys of drafting with heads of Hydra++: those of Hydra."""

    method: ClassVar[str] = "hydra++"


def recognizes(contents: Contents) -> bool:
    """Whether these are heads of Hydra with a prefix layer."""
    return is_hydra(contents.config, contents.names) and has_prefix(contents.config, contents.names)


METHOD = Method(
    HydraPlusPlusOptions,
    build,
    summary="with Hydra's heads, four layers deep, over a layer that attends to the text",
    aliases=("hydra_plus_plus",),
    recognizes=recognizes,
)
