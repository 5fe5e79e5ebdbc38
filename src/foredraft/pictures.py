"""Picture files, drawn by matplotlib, an optional dependency."""

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
    """Import `matplotlib.figure`, which draws into files without a display.

    Raises: ConfigError if it is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError:
        raise ConfigError(f"pictures need matplotlib, which is not installed: {install_command('plot')}") from None
    figure: ModuleType = matplotlib.figure
    return figure


def check_picture(file: str | Path) -> Path:
    """Return the path of a file to which a picture can be written.

    Raises: ConfigError for a file that cannot be written, for a format that matplotlib does not support, or without
      matplotlib.
    """
    path = Path(file).expanduser()
    supported = sorted(require_matplotlib().Figure().canvas.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in supported:
        raise ConfigError(
            f"the picture {str(file)!r} has no known format; name it .png, or one of {', '.join(supported)}"
        )
    return check_place(path)


def keep_picture(figure: Figure, file: Path) -> None:
    """Write a picture atomically, in the format given by the extension of the file.

    Raises: ConfigError if it cannot be written; an existing file is then unchanged.
    """
    part = part_of(file)
    try:
        with replacing(file, part):
            figure.savefig(part, dpi=120, format=file.suffix.lstrip(".").lower())
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another place") from None
