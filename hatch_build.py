"""The long description of the package: the README as it reads where its relative links lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

WHERE = (
    "*Pages that are named here with their path (`docs/index.md` and the like) are in the source distribution of this "
    "package.*"
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
RELATIVE = r"(?!https?:|mailto:)"
IMAGE = re.compile(rf"!\[[^\]]*\]\({RELATIVE}[^)]*\)|<img\b[^>]*?\bsrc=[\"']{RELATIVE}[^>]*>")
LINK = re.compile(rf"\[((?:[^\[\]]|\[[^\]]*\])*)\]\({RELATIVE}([^)\s]*)\)")


def long_description(readme: str) -> str:
    """The README with relative links as plain paths, without relative pictures, and a line about where those paths are.

    >>> long_description("# T\\n\\nSee [how](docs/a.md#b) and `[x](y)`.").splitlines()[-1]
    'See how (docs/a.md) and `[x](y)`.'
    """
    title, _, rest = readme.partition("\n")
    pieces, end = [], 0
    for fence in FENCE.finditer(rest):
        pieces += [_plain(rest[end : fence.start()]), fence.group()]
        end = fence.end()
    return f"{title}\n\n{WHERE}\n{''.join(pieces)}{_plain(rest[end:])}"


def _plain(text: str) -> str:
    """Code between backticks stays as it is, also where it looks like a link."""
    code = CODE.findall(text)
    hidden = CODE.sub("\0", text)
    shown = LINK.sub(_path, IMAGE.sub("", hidden))
    return re.sub("\0", lambda _: code.pop(0), shown)


def _path(link: re.Match[str]) -> str:
    label, target = link.group(1), link.group(2).partition("#")[0]
    return label if target in ("", label) else f"{label} ({target})"


class LongDescription(MetadataHookInterface):
    """Called by hatchling for every build."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = long_description(Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
