"""Pictures: places and formats that are refused before anything is drawn, and a matplotlib that is not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foredraft.errors import ConfigError
from foredraft.pictures import check_picture


def test_pictures_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"no known format; name it .png"):
        check_picture(tmp_path / "out.txt")
    with pytest.raises(ConfigError, match="it needs to be a file in a folder that exists"):
        check_picture(tmp_path / "none" / "out.png")
    assert check_picture(tmp_path / "out.svg") == tmp_path / "out.svg"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="python -m pip install 'matplotlib"):
        check_picture(tmp_path / "out.svg")
