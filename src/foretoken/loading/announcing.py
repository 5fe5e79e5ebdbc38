"""What is said when a model has been loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken import zoo
from foretoken.loading.info import load_line
from foretoken.loading.threads import threads_note

if TYPE_CHECKING:
    from foretoken.loading.info import Loaded, ModelInfo
    from foretoken.loading.pairing import Drafting
    from foretoken.model.promise import Promise

logger = logging.getLogger("foretoken")


def announce(
    info: ModelInfo,
    title: str | None,
    loaded: Loaded,
    drafting: Drafting,
    promise: Promise | None,
    *,
    is_dtype_chosen: bool,
) -> None:
    """Log in one line what was loaded and how it decodes; see `load_line`.

    Args:
      promise: of texts with drafts; None where there are none, or the rule of acceptance keeps no tokens.
    """
    line = load_line(
        info,
        title,
        stored_dtype=loaded.stored_dtype,
        is_dtype_chosen=is_dtype_chosen,
        drafter=drafting.info,
        heads=drafting.heads,
        promise="" if promise is None else promise.describe(),
        threads=threads_note(),
    )
    logger.info("%s", line)


def announce_notes(name: str, methods: Seq[str]) -> None:
    """Log what people should know of a model of the zoo and these methods."""
    for note in zoo.manifest(name).notes_about(methods):
        logger.info("%s: %s", name, note)
