"""Conversion of zoo models with weights in another distribution: search, checks, and one conversion into the cache.

A conversion is made in a scratch folder, which is then renamed. A folder under the final name is therefore complete, or
is recognised as damaged (a file has another SHA-256 than recorded) and made again. No code of the other distribution is
imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.errors import CheckpointError, ForedraftError, error_in_words
from foredraft.folders import (
    CACHE_VARIABLE,
    cache_folder,
    is_private,
    known_sha256,
    locked,
    make_private,
    sha256_of,
    temporary_folder,
)
from foredraft.zoo.manifest import Manifest, Package

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("foredraft")

FORMAT = 3
"""Version of the written files. It is increased when the files change, so that versions of foredraft do not share
conversions."""
RECORD = "conversion.json"
WEIGHTS = "model.safetensors"
SECONDS = 20  # approximate duration of a conversion
LONGEST_WAIT_SECONDS = 600


def why_missing(manifest: Manifest) -> str | None:
    """Return the reason why the model cannot be loaded on this machine, with the remedy; None if it can."""
    if found(manifest) is not None:
        return None
    package = _package(manifest)
    if weights_file(package) is None:
        return f"zoo:{manifest.name} is not installed; install it with: {package.install}"
    from foredraft.extras import install_command
    from foredraft.gguf import missing_packages

    missing = missing_packages()
    if missing:
        needed, remedy = " and ".join(missing), install_command("gguf")
        return f"zoo:{manifest.name} has to be converted once, which needs {needed}; install with: {remedy}"
    return None


def converted(manifest: Manifest) -> Path:
    """Return the folder of the converted model, and convert it if the folder does not exist.

    Raises: CheckpointError.
    """
    existing = found(manifest)
    if existing is not None:
        return existing
    reason = why_missing(manifest)
    if reason is not None:
        raise CheckpointError(reason)
    package = _package(manifest)
    folder = _writable_parent(manifest) / folder_name(manifest)
    _check_space(folder.parent, package, manifest)
    with locked(folder.parent / f".{folder.name}.lock", LONGEST_WAIT_SECONDS) as is_alone:
        if is_converted(folder):  # another process was faster
            return folder
        if is_alone:
            _remove_scraps(folder)
        if folder.exists():
            logger.warning("zoo:%s in %s is damaged: files have changed since the conversion", manifest.name, folder)
        # a warning, so that the pause is explained even without INFO messages
        logger.warning("converting zoo:%s once, in about %d s; result is kept in %s", manifest.name, SECONDS, folder)
        with _becoming(folder) as scratch:
            _convert(manifest, scratch)
    return folder


def is_converted(folder: Path) -> bool:
    """Whether a conversion exists and is complete: every file in its record is unchanged.

    A file with the recorded size and modification time is not hashed again, since that takes tenths of a second.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        digests, versions = record["sha256"], record.get("versions", {})
        return WEIGHTS in digests and all(
            _version(folder / name) == versions.get(name) or known_sha256(folder / name) == digest
            for name, digest in digests.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def weights_file(package: Package) -> Path | None:
    """Return the file inside the installed distribution, or None."""
    try:
        distribution = metadata.distribution(package.distribution)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file(package.file)))
    return file if file.is_file() else None


def checked_file(manifest: Manifest) -> Path:
    """Return the file inside the installed distribution, after a check that it is the published file.

    Raises: CheckpointError.
    """
    package = _package(manifest)
    file = weights_file(package)
    if file is None:
        raise CheckpointError(f"zoo:{manifest.name} is no longer installed; install it with: {package.install}")
    _check_source(file, package)
    return file


def weights_digest(file: Path) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bits of the tensors in a safetensors file, in order of names."""
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(file, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor: torch.Tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- where ---------------------------------------------------------------------------------------------------------


def _package(manifest: Manifest) -> Package:
    assert manifest.package is not None
    return manifest.package


def folder_name(manifest: Manifest) -> str:
    """Return the name of the folder of a conversion, which depends on the source file and on `FORMAT`."""
    return f"{manifest.name}-{_package(manifest).sha256[:12]}-{FORMAT}"


def found(manifest: Manifest) -> Path | None:
    """Return the folder of an existing conversion, even in a read-only cache; None if there is none."""
    name = folder_name(manifest)
    return next((parent / name for parent in _parents() if is_converted(parent / name)), None)


def _parents() -> list[Path]:
    """Return the folders that may contain conversions: the cache, and its substitute if the cache is read-only."""
    instead = temporary_folder("zoo")
    return [cache_folder("zoo"), *([instead] if is_private(instead.parent) else [])]


def _writable_parent(manifest: Manifest) -> Path:
    """Return the cache or, if it cannot be written (a container, a service account), a folder for temporary files.

    A cache folder that the user has chosen is not replaced. The chosen folder must be wrong, and the user has to
    correct it.
    """
    wanted, instead = cache_folder("zoo"), temporary_folder("zoo")
    try:
        _try_to_write(wanted)
        return wanted
    except OSError as error:
        reason = error.strerror or str(error)
    if os.environ.get(CACHE_VARIABLE):
        raise CheckpointError(
            f"zoo:{manifest.name} cannot be converted into {wanted}, the folder in {CACHE_VARIABLE}, which cannot be "
            f"written ({reason}); set {CACHE_VARIABLE} to another folder"
        )
    try:
        make_private(instead.parent)
        _try_to_write(instead)
    except OSError as error:
        raise CheckpointError(
            f"zoo:{manifest.name} cannot be converted, since neither {wanted} ({reason}) nor {instead} "
            f"({error.strerror}) can be written; set {CACHE_VARIABLE} to a folder that can"
        ) from None
    logger.warning(
        "%s cannot be written (%s), so the converted model goes to %s, which may be deleted; set %s to another folder",
        wanted,
        reason,
        instead,
        CACHE_VARIABLE,
    )
    return instead


def _try_to_write(folder: Path) -> None:
    """Create the folder and write a file into it.

    Raises: OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _check_space(folder: Path, package: Package, manifest: Manifest) -> None:
    free = shutil.disk_usage(folder).free
    if free < package.converted_bytes:
        raise CheckpointError(
            f"converting zoo:{manifest.name} takes {package.converted_bytes / 1e6:.0f} MB, but {folder} has only "
            f"{free / 1e6:.0f} MB left; free some, or set {CACHE_VARIABLE} to a folder with more space"
        )


# -- how -----------------------------------------------------------------------------------------------------------


def _convert(manifest: Manifest, folder: Path) -> None:
    """Write the model into an empty folder, as ``save_pretrained`` does, with a record of its files.

    Raises: CheckpointError.
    """
    package = _package(manifest)
    file = checked_file(manifest)
    import transformers

    from foredraft.gguf import model as gguf_model
    from foredraft.gguf.header import read_header
    from foredraft.gguf.tokenizer import read_tokenizer
    from foredraft.progress import no_progress_bars

    try:
        header = read_header(file)
        gguf_model.check_readable(header)
        with no_progress_bars():
            model, _ = gguf_model.load(header, _dtype(manifest.stored_dtype))
            model.save_pretrained(folder)
        tokenizer = read_tokenizer(header)
        assert tokenizer is not None
        tokenizer.save_pretrained(folder)
    except (ForedraftError, MemoryError):
        raise
    except Exception as error:  # such as a full disk, or a transformers that reads GGUF differently
        raise CheckpointError(
            f"zoo:{manifest.name} could not be converted into {folder.parent} ({error_in_words(error)}); "
            "check the space there, or try another version than transformers "
            f"{transformers.__version__}"
        ) from error
    found = weights_digest(folder / WEIGHTS)
    if found != package.weights_sha256:
        raise CheckpointError(
            f"transformers {transformers.__version__} reads other weights from {file.name} ({found[:12]}...) than "
            f"zoo:{manifest.name} should have ({package.weights_sha256[:12]}...), so the model is refused; install a "
            "version that foredraft was tested with"
        )
    _finish(folder)


def _check_source(file: Path, package: Package) -> None:
    found = sha256_of(file)
    if found != package.sha256:
        raise CheckpointError(
            f"{file} is not the file that {package.distribution} {package.version} was published with (SHA-256 "
            f"{found[:12]}... instead of {package.sha256[:12]}...): it is damaged or of another version. Install it "
            f"again with: {package.install} --force-reinstall"
        )


def _finish(folder: Path) -> None:
    """Record the files, make them readable for others, and flush them to disk before the folder is renamed."""
    files = sorted(folder.iterdir())
    found = {
        "sha256": {file.name: sha256_of(file) for file in files},
        "versions": {file.name: _version(file) for file in files},
    }
    record = folder / RECORD
    record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    mode = record.stat().st_mode & 0o777  # mode of the user's new files; scratch folders have a stricter one
    folder.chmod(mode | (mode & 0o444) >> 2)
    for file in folder.iterdir():
        file.chmod(mode)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _version(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


@contextmanager
def _becoming(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder that is renamed to ``folder`` after success and deleted after an error."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield scratch
        try:
            os.rename(scratch, folder)
        except OSError:
            if not is_converted(folder):  # damaged, or from elsewhere: move it out of the way
                os.rename(folder, scratch / "broken")
                os.rename(scratch, folder)
                shutil.rmtree(folder / "broken", ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_scraps(folder: Path) -> None:
    """Remove scratch folders of processes that were killed during a conversion."""
    for scrap in folder.parent.glob(f".{folder.name}.*"):
        if scrap.is_dir():
            shutil.rmtree(scrap, ignore_errors=True)


def _dtype(name: str) -> torch.dtype:
    from foredraft.model.dtypes import DTYPES

    return DTYPES[name]
