"""What is said when a model has been loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken import zoo
from foretoken.loading.info import load_line

if TYPE_CHECKING:
    from foretoken.loading.info import Loaded, ModelInfo
    from foretoken.loading.pairing import Drafting

logger = logging.getLogger("foretoken")


def announce(info: ModelInfo, title: str | None, loaded: Loaded, drafting: Drafting, *, is_dtype_chosen: bool) -> None:
    """Log in one line what was loaded and how it decodes; see `load_line`."""
    line = load_line(
        info,
        title,
        stored_dtype=loaded.stored_dtype,
        is_dtype_chosen=is_dtype_chosen,
        drafter=drafting.info,
        heads=drafting.heads,
    )
    logger.info("%s", line)


def announce_notes(name: str, methods: Seq[str]) -> None:
    """Log what people should know of a model of the zoo and these methods."""
    for note in zoo.manifest(name).notes_about(methods):
        logger.info("%s: %s", name, note)
