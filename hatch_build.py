"""What builds of the package add to it: the long description, and compiled kernels in platform wheels.

The description is the README as it reads where its relative links lead nowhere. A wheel has kernels where
``FOREDRAFT_WHEEL=x86_64`` is set (``make wheels``), and is for every Python and every platform otherwise.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PLATFORM_VARIABLE = "FOREDRAFT_WHEEL"
ZIG = "ziglang==0.17.1"
GLIBC = "2.28"  # the oldest that torch's own wheels run on
COMPILER = ("-m", "ziglang", "c++", "-target", f"x86_64-linux-gnu.{GLIBC}")
"""Clang with the libraries of an old system: what it makes is the same on every machine, and links to glibc alone."""
EXPORTED = "{ global: foredraft_*; local: *; };\n"
"""What a library shows to others: nothing of the C++ library inside it."""

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


class Kernels(BuildHookInterface):
    """Called by hatchling for every build of a wheel."""

    def dependencies(self) -> list[str]:
        """Packages that a build in an environment of its own installs for it."""
        return [ZIG] if os.environ.get(PLATFORM_VARIABLE) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels for every instruction set, if they are asked for.

        Raises: ValueError for another platform than x86_64, and whatever the compiler raises: there is no wheel then.
        """
        platform = os.environ.get(PLATFORM_VARIABLE, "")
        if version == "editable" or not platform:
            return
        if platform != "x86_64":
            raise ValueError(
                f"{PLATFORM_VARIABLE}={platform}: kernels are written for x86_64 alone; unset it elsewhere"
            )
        self.folder = tempfile.TemporaryDirectory(prefix="foredraft-wheel-")
        for file in precompile(Path(self.root, "src"), Path(self.folder.name)):
            build_data["force_include"][str(file)] = f"foredraft/native/precompiled/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC.replace('.', '_')}_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def precompile(source: Path, folder: Path) -> list[Path]:
    """Libraries for every instruction set, and what they were made from, as files of a folder.

    Args:
      source: folder of the package, of which nothing is needed but compiler.py and the sources of the kernels.
    """
    sys.path.insert(0, str(source))
    try:
        from foredraft.native.compiler import OPTIONS, SOURCES, compile_library, file_digest, library_digest, options_of
    finally:
        sys.path.remove(str(source))
    made, exported = {}, folder / "exported.map"
    exported.write_text(EXPORTED)
    for instruction in OPTIONS:
        objects = folder / f"{instruction.lower()}.made"
        objects.mkdir()
        options, linked = [*options_of(instruction), "-s"], ["-O3", "-s", f"-Wl,--version-script={exported}"]
        file = folder / f"{instruction.lower()}.so"
        compile_library(objects, SOURCES, options, (sys.executable, *COMPILER), linked).replace(file)
        made[instruction] = {"made_from": library_digest(instruction), "sha256": file_digest(file)}
    notes = folder / "libraries.json"
    content = {"compiler": f"zig {version('ziglang')}", "glibc": GLIBC, "libraries": made}
    notes.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return [notes, *sorted(folder.glob("*.so"))]
