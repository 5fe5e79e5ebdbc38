"""Models of the zoo whose weights another distribution carries: found, checked, and converted once into the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from foretoken.engine.errors import CheckpointError
from foretoken.folders import cache_folder
from foretoken.zoo.manifest import Manifest, Package

logger = logging.getLogger("foretoken")

FORMAT = 1
"""Raised when the converter writes something else than before, so that older conversions are left alone."""
RECORD = "conversion.json"
SECONDS = 20


def why_missing(manifest: Manifest) -> str | None:
    """What stands between this machine and the model, with the command that helps; None when it can be loaded."""
    package = _package(manifest)
    if is_converted(folder_of(manifest)):
        return None
    if _weights_file(package) is None:
        return f"zoo:{manifest.name} is not installed; install it with: {package.install}"
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        return (
            f"zoo:{manifest.name} has to be converted once, which needs {' and '.join(missing)}; install them with: "
            'python -m pip install "foretoken[gguf]"'
        )
    return None


def converted(manifest: Manifest) -> Path:
    """The folder of the converted model, which is made where it is missing.

    Raises: CheckpointError.
    """
    folder = folder_of(manifest)
    if is_converted(folder):
        return folder
    reason = why_missing(manifest)
    if reason is not None:
        raise CheckpointError(reason)
    package = _package(manifest)
    file = _weights_file(package)
    assert file is not None
    logger.info("converting zoo:%s once, about %d s (kept in %s)", manifest.name, SECONDS, folder)
    _check_sum(file, package)
    with _fresh_folder(folder) as scratch:
        _convert(file, scratch)
        _write_record(scratch)
    return folder


def folder_of(manifest: Manifest) -> Path:
    """Where the conversion is, or will be."""
    return cache_folder("zoo", f"{manifest.name}-{_package(manifest).sha256[:12]}-{FORMAT}")


def is_converted(folder: Path) -> bool:
    """Whether a conversion is there and whole: every file of its record has the size it was written with."""
    try:
        sizes = json.loads((folder / RECORD).read_text(encoding="utf-8"))["num_bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _package(manifest: Manifest) -> Package:
    assert manifest.package is not None
    return manifest.package


def _weights_file(package: Package) -> Path | None:
    """The file inside the installed distribution, which is not imported."""
    try:
        distribution = metadata.distribution(package.distribution)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file(package.file)))
    return file if file.is_file() else None


def _check_sum(file: Path, package: Package) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise CheckpointError(
            f"{file} has the SHA-256 {found}, and {package.distribution} {package.version} was published with "
            f"{package.sha256}: the file is damaged or of another version. Install it again with: {package.install} "
            "--force-reinstall"
        )


@contextmanager
def _fresh_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes ``folder`` when all went well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield scratch
        with suppress(OSError):
            os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not is_converted(folder):
        raise CheckpointError(f"{folder} could not be written")


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {}
    with suppress(ImportError):
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    where = str(file.parent)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=file.name, dtype=torch.bfloat16, **options)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=file.name).save_pretrained(folder)


def _write_record(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / RECORD).write_text(json.dumps({"num_bytes": sizes}, indent=1) + "\n", encoding="utf-8")
