"""The plain functions of the original description, as thin wrappers around the engine. See docs/classic.md."""

from foretoken.classic.installing import install
from foretoken.classic.trace import DraftedToken, Step, Trace, last_trace

__all__ = ["DraftedToken", "Step", "Trace", "install", "last_trace"]
