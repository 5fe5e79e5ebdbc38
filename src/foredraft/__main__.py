"""Entry point of ``foredraft`` and ``python -m foredraft``."""

from __future__ import annotations

import atexit
import gc
import sys


def main() -> None:
    """Run the command line. Ctrl-C ends the command line without a traceback, even during the import."""
    atexit.register(gc.freeze)  # otherwise the interpreter ends by looking for garbage in all modules, for a second
    try:
        from foredraft.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # Dataclasses create methods by `exec` of text. If Ctrl-C arrives inside such an `exec`, `python -m` ends by the
        # signal even if the exception is caught. Another `exec` resets that.
        exec("")


if __name__ == "__main__":
    main()
