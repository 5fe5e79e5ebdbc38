"""Models that are available by name, ``zoo:NAME``: a toy pair that ships with the package, and real ones by recipe.

A model of the zoo is a folder beside this file with a ``manifest.json`` (`Manifest`) and whatever it brings along:

    tiny/target/     the target, with the tokenizer that all parts share
    tiny/draft/      its drafter
    tiny/README.md   provenance, licence, measured figures
    smollm2/         a manifest and heads: another distribution carries the weights, converted once into a cache
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
    "brings",
    "default",
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
    """Return the manifest of a model: the facts known before it is loaded.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.

    Raises:
        ConfigError: no such model; the message names the nearest one.
    """
    name = _known(name.removeprefix(PREFIX), names(), "model of the zoo")
    return read_manifest(root() / name / MANIFEST)


def is_available(name: str) -> bool:
    """Whether `load` would find the model here, after a conversion where that is still to be done."""
    return why_missing(name) is None


def why_missing(name: str) -> str | None:
    """Why a model cannot be loaded here, with the command that helps; None when it can."""
    described = manifest(name)
    return None if described.package is None else conversion.why_missing(described)


def default() -> str:
    """The model to take where none is named: a real one where it is installed, else the toy that always is.

    Example:
        >>> default() in ("zoo:smollm2", "zoo:tiny")
        True
    """
    return PREFIX + (_FIRST_CHOICE if is_available(_FIRST_CHOICE) else _TOY)


def brings(name: str, what: str) -> bool:
    """Whether a model brings something along: a drafter, a datastore, a layer set (see `Manifest.brings`)."""
    return what in manifest(name).brings


def path(name: str, part: str = "target") -> Path:
    """The directory of one part, in the layout that ``from_pretrained`` reads.

    A model that another distribution carries is converted by the first call, which takes a while.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.
        part: ``"target"``, ``"draft"`` or ``"tokenizer"`` (which lies in the target's directory).

    Raises:
        ConfigError: no such model, or it brings no such part; the message says what there is.
        CheckpointError: the model is not installed, or cannot be converted here; the message says what helps.
    """
    described = manifest(name)
    part = _known(part, sorted(_PARTS), f"part of zoo:{described.name}")
    return _located(described, part)


def name_of(folder: str) -> str | None:
    """Name of the model of the zoo whose target lies in a folder, as `path` returns it; None for another folder.

    Example:
        >>> name_of(str(path("tiny")))
        'zoo:tiny'
    """
    for name in names():
        described = manifest(name)
        if described.package is None:
            found: Path | None = root() / name / described.brings["target"]
        else:
            found = conversion.found(described) if conversion.folder_name(described) in folder else None
        if found is not None and Path(folder) == found:
            return PREFIX + name
    return None


def stored_file(name: str) -> Path | None:
    """The GGUF file that a model was converted from, checked; None for one that ships with the package."""
    described = manifest(name)
    return None if described.package is None else conversion.checked_file(described)


def asset(name: str, file: str) -> Path:
    """A file or folder that a model brings along, such as the layer set that ``layer_skip`` starts from.

    Args:
        file: its name, or what it is: ``"layer_set"`` and ``"layer_set.json"`` are the same.

    Raises:
        ConfigError: no such model, or it brings no such thing; the message says what there is.
        CheckpointError: the package was installed without its data.
    """
    described = manifest(name)
    by_file = {place: what for what, place in described.brings.items()}
    return _located(described, by_file.get(file, file))


def _located(described: Manifest, what: str) -> Path:
    if what not in described.brings:
        raise ConfigError(
            f"zoo:{described.name} brings no {what!r} along; it brings {', '.join(sorted(described.brings))}"
        )
    is_here = described.package is None or what in HEADS
    folder = root() / described.name if is_here else conversion.converted(described)
    found = folder / described.brings[what]
    if not found.exists():
        raise CheckpointError(f"{found} is missing: foredraft was installed without its data; reinstall it")
    return found


def load(name: str = _TOY, *, dtype: torch.dtype | None = None) -> tuple[Any, Any, Any]:
    """Load a model as plain transformers objects: ``(target, drafter, tokenizer)``.

    Nothing is downloaded. The models are in evaluation mode on the CPU and belong to the caller.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.
        dtype: of the weights, float32 by default. They are stored in bfloat16, which float32 holds exactly.

    Returns: the drafter is None where the model brings none.
    Raises:
        ConfigError: no such model; the message names the nearest one.
        CheckpointError: the model is not installed, or cannot be converted here; the message says what helps.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from foredraft.progress import no_progress_bars

    options = {"dtype": dtype or torch.float32, "local_files_only": True}
    with no_progress_bars():
        target, drafter = (
            AutoModelForCausalLM.from_pretrained(path(name, part), **options).eval() if brings(name, part) else None
            for part in ("target", "draft")
        )
        tokenizer = AutoTokenizer.from_pretrained(path(name, "tokenizer"), local_files_only=True)
    return target, drafter, tokenizer


def _known(value: str, allowed: list[str], what: str) -> str:
    if value in allowed:
        return value
    raise ConfigError(f"{value!r} is not a {what}; {did_you_mean(value, allowed) if allowed else 'there is none.'}")
