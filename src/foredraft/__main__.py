"""``foredraft``, and ``python -m foredraft``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback while it is imported, too."""
    try:
        from foredraft.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # Ctrl-C inside of an `exec` of text, by which dataclasses make methods, ends `python -m` by the signal, caught
        # or not; the next such `exec` takes that back
        exec("")


if __name__ == "__main__":
    main()
