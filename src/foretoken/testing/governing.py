"""Drafts as long as they may be, whatever they cost on the machine that runs the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from foretoken.engine import governing


@contextmanager
def ungoverned() -> Iterator[None]:
    """Let engines that are made meanwhile draft and verify as much as their configs allow.

    For tests, which want drafts whatever the machine; users force drafts of one length by ``length_policy="fixed"``.
    """
    with patch.object(governing, "new_governor", _no_governor):
        yield


@contextmanager
def governed() -> Iterator[None]:
    """The opposite, within `ungoverned`: engines that are made meanwhile are governed, as they are for users."""
    with patch.object(governing, "new_governor", _NEW_GOVERNOR):
        yield


def _no_governor(*args: Any) -> None:
    """Instead of `foretoken.engine.governing.new_governor`."""


_NEW_GOVERNOR = governing.new_governor
