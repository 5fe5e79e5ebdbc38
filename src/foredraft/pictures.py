"""Files of pictures, drawn by matplotlib, an optional dependency."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from foredraft.errors import ConfigError
from foredraft.extras import install_command
from foredraft.folders import check_place, part_of, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> ModuleType:
    """`matplotlib.figure`, which draws into files without a display.

    Raises: ConfigError when it is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError:
        raise ConfigError(f"pictures need matplotlib, which is not installed: {install_command('plot')}") from None
    figure: ModuleType = matplotlib.figure
    return figure


def check_picture(file: str | Path) -> Path:
    """The path of a file that a picture can be written to.

    Raises: ConfigError for a file that cannot be written, a format that matplotlib does not write, or no matplotlib.
    """
    path = Path(file).expanduser()
    supported = sorted(require_matplotlib().Figure().canvas.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in supported:
        raise ConfigError(
            f"the picture {str(file)!r} has no known format; name it .png, or one of {', '.join(supported)}"
        )
    return check_place(path)


def keep_picture(figure: Figure, file: Path) -> None:
    """Write a picture that others see whole or not at all; the ending of the file is its format.

    Raises: ConfigError where it cannot be written; a file is then what it was before.
    """
    part = part_of(file)
    try:
        with replacing(file, part):
            figure.savefig(part, dpi=120, format=file.suffix.lstrip(".").lower())
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another place") from None
