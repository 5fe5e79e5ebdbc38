"""Where foretoken keeps what it makes once and uses again: converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "FORETOKEN_CACHE"


def cache_folder(*parts: str) -> Path:
    """A folder inside the cache: ``$FORETOKEN_CACHE``, else ``$XDG_CACHE_HOME/foretoken``, else ``~/.cache/foretoken``.

    The folder need not exist.
    """
    chosen, standard = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        root = Path(os.path.expanduser(chosen))
    elif standard and os.path.isabs(standard):  # a relative one is to be ignored, says the standard
        root = Path(standard) / "foretoken"
    else:
        root = Path(os.path.expanduser("~/.cache/foretoken"))
    return root.joinpath(*parts)
