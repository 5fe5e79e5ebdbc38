"""Models that are available by name, ``zoo:NAME``: a toy pair that ships with the package, and converted real models.

A model of the zoo is a folder beside this file with a ``manifest.json`` (`Manifest`) and the files that it includes:

    tiny/target/     the target, with the tokenizer that all parts share
    tiny/draft/      its draft model
    tiny/README.md   provenance, licence, measured figures
    smollm2/         a manifest and heads; the weights are in another distribution and are converted once into a cache
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.config.keywords import did_you_mean
from foredraft.errors import CheckpointError, ConfigError
from foredraft.zoo import conversion
from foredraft.zoo.manifest import HEADS, MANIFEST, Manifest, Package, names, read_manifest, root

if TYPE_CHECKING:
    import torch

__all__ = [
    "Manifest",
    "Package",
    "asset",
    "default",
    "includes",
    "is_available",
    "load",
    "manifest",
    "name_of",
    "names",
    "path",
    "stored_file",
    "why_missing",
]

PREFIX = "zoo:"
_FIRST_CHOICE = "smollm2"
_TOY = "tiny"
_PARTS = ("target", "draft", "tokenizer")


def manifest(name: str) -> Manifest:
    """Return the manifest of a model, with the facts known before it is loaded.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.

    Raises:
        ConfigError: no such model; the message suggests the nearest name.
    """
    name = _known(name.removeprefix(PREFIX), names(), "model of the zoo")
    return read_manifest(root() / name / MANIFEST)


def is_available(name: str) -> bool:
    """Whether `load` would find the model on this machine, possibly after a conversion."""
    return why_missing(name) is None


def why_missing(name: str) -> str | None:
    """Return the reason why a model cannot be loaded on this machine, with the remedy; None if it can."""
    entry = manifest(name)
    return None if entry.package is None else conversion.why_missing(entry)


def default() -> str:
    """Return the model to use if the user names none: a real one if it is installed, else the toy.

    Example:
        >>> default() in ("zoo:smollm2", "zoo:tiny")
        True
    """
    return PREFIX + (_FIRST_CHOICE if is_available(_FIRST_CHOICE) else _TOY)


def includes(name: str, what: str) -> bool:
    """Whether a model includes something: a drafter, a datastore, a layer set (see `Manifest.assets`)."""
    return what in manifest(name).assets


def path(name: str, part: str = "target") -> Path:
    """Return the directory of one part, in the layout that ``from_pretrained`` reads.

    A model whose weights are in another distribution is converted by the first call, which takes a while.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.
        part: ``"target"``, ``"draft"`` or ``"tokenizer"`` (which is in the target's directory).

    Raises:
        ConfigError: no such model or part; the message lists what is available.
        CheckpointError: the model is not installed or cannot be converted; the message contains the remedy.
    """
    entry = manifest(name)
    part = _known(part, sorted(_PARTS), f"part of zoo:{entry.name}")
    return _located(entry, part)


def name_of(folder: str) -> str | None:
    """Return the name of the zoo model whose target is in a folder returned by `path`; None for another folder.

    Example:
        >>> name_of(str(path("tiny")))
        'zoo:tiny'
    """
    for name in names():
        entry = manifest(name)
        if entry.package is None:
            found: Path | None = root() / name / entry.assets["target"]
        else:
            found = conversion.found(entry) if conversion.folder_name(entry) in folder else None
        if found is not None and Path(folder) == found:
            return PREFIX + name
    return None


def stored_file(name: str) -> Path | None:
    """Return the GGUF file that a model was converted from, after a check; None for a model in this package."""
    entry = manifest(name)
    return None if entry.package is None else conversion.checked_file(entry)


def asset(name: str, file: str) -> Path:
    """Return a file or folder that a model includes, such as the initial layer set of ``layer_skip``.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.
        file: name of the file, or its kind: ``"layer_set"`` and ``"layer_set.json"`` are the same.

    Raises:
        ConfigError: no such model or file; the message lists what is available.
        CheckpointError: the package was installed without its data.
    """
    entry = manifest(name)
    by_file = {place: what for what, place in entry.assets.items()}
    return _located(entry, by_file.get(file, file))


def _located(entry: Manifest, what: str) -> Path:
    if what not in entry.assets:
        raise ConfigError(f"zoo:{entry.name} does not include {what!r}; it includes {', '.join(sorted(entry.assets))}")
    is_here = entry.package is None or what in HEADS
    folder = root() / entry.name if is_here else conversion.converted(entry)
    found = folder / entry.assets[what]
    if not found.exists():
        raise CheckpointError(f"{found} is missing: foredraft was installed without its data; reinstall it")
    return found


def load(name: str = _TOY, *, dtype: torch.dtype | None = None) -> tuple[Any, Any, Any]:
    """Load a model as plain transformers objects: ``(target, drafter, tokenizer)``.

    Nothing is downloaded. The models are in evaluation mode on the CPU and belong to the caller.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.
        dtype: dtype of the weights, float32 by default. The weights are stored in bfloat16, which float32 represents
          exactly.

    Returns: target, drafter (None if the model includes none) and tokenizer.
    Raises:
        ConfigError: no such model; the message suggests the nearest name.
        CheckpointError: the model is not installed or cannot be converted; the message contains the remedy.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from foredraft.progress import no_progress_bars

    options = {"dtype": dtype or torch.float32, "local_files_only": True}
    with no_progress_bars():
        target, drafter = (
            AutoModelForCausalLM.from_pretrained(path(name, part), **options).eval() if includes(name, part) else None
            for part in ("target", "draft")
        )
        tokenizer = AutoTokenizer.from_pretrained(path(name, "tokenizer"), local_files_only=True)
    return target, drafter, tokenizer


def _known(value: str, allowed: list[str], what: str) -> str:
    if value in allowed:
        return value
    raise ConfigError(f"{value!r} is not a {what}; {did_you_mean(value, allowed) if allowed else 'there is none.'}")
