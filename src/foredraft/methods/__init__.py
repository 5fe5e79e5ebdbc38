"""Drafting methods: their descriptions, their discovery (in foredraft or in other packages), and the reference of
their keys.

No module of this package imports torch. The code of a drafter is imported when the drafter is made."""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.config.options import Key, Options
from foredraft.errors import ConfigError, error_with_type
from foredraft.folders import parsed_json

if TYPE_CHECKING:
    from foredraft.drafters.context import DrafterContext
    from foredraft.engine.drafter import Drafter


GROUP = "foredraft.drafters"
"""Entry point group through which other packages add methods."""

FAMILIES = ("lm", "lookup", "iterate", "selfdraft", "heads", "compose")
"""Modules of this package that define ``METHODS``, in the order of listings. Methods of other packages come last."""


@dataclass(frozen=True)
class Method:
    """Description of one drafting method.

    Args:
      options: options class, the only place that defines the method's name and its keys with kinds, defaults and help.
      build: function that makes a drafter without state from the options and a `DrafterContext`, or the address of
        that function as "package.module:name". With the address, describing a method imports none of its drafter's
        code. Raises: ConfigError if something that the options refer to is missing.
      summary: source of the drafts, as a phrase that follows the word "drafts".
      aliases: other names of the method: older ones, and those of other tools.
      sign: operator that joins the parts of a combined method in a name, as in "a+b"; empty for other methods.
      recognizes: function that returns whether a folder contains a drafter of this method, so that naming the folder is
        enough. The arguments of the function are the content of config.json, and the names of the tensors where these
        can be read without loading the weights.
      sample: keys for trying whether a model can draft this way, where the defaults are not enough.
      head: kind of heads that ``model`` names ("eagle2" uses the heads of "eagle"). Empty if ``model`` is a causal
        language model, or if the method has no such key.
      model_is_optional: True if the method drafts with the target itself when the config names no model.
    """

    options: type[Options]
    build: Callable[[Any, DrafterContext], Drafter] | str
    summary: str
    aliases: tuple[str, ...] = ()
    sign: str = ""
    sample: Mapping[str, Any] = field(default_factory=dict)
    recognizes: Callable[[Mapping[str, Any], frozenset[str]], bool] | None = None
    head: str = ""
    model_is_optional: bool = False

    @property
    def name(self) -> str:
        """Name of the method in a config."""
        return self.options.method

    @property
    def keys(self) -> dict[str, Key]:
        """All keys by name."""
        return self.options.keys()

    @property
    def drafts_trees(self) -> bool:
        """True if the drafts are trees for every value of the keys."""
        return self.options.drafts_trees

    @property
    def takes_model(self) -> bool:
        """True if the method can draft with a causal language model that the config names."""
        return "model" in self.keys and not self.head

    @property
    def drafts_with_heads(self) -> bool:
        """True if ``model`` names heads over the target's features."""
        return bool(self.head)

    @property
    def combines(self) -> bool:
        """True if the method combines other methods."""
        return "drafters" in self.keys


@cache
def methods() -> Mapping[str, Method]:
    """Return every method by name: those of foredraft, and those of other installed packages.

    An entry point that cannot be loaded is skipped with a warning.
    """
    found: dict[str, Method] = {}
    for method in _own():
        _add(found, method)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            _add(found, entry.load())
        except Exception as error:
            warnings.warn(
                f"the method at entry point {entry.name} = {entry.value} is skipped: {error_with_type(error)}; repair "
                "or uninstall its package",
                RuntimeWarning,
                stacklevel=2,
            )
    return found


def _add(found: dict[str, Method], method: Method) -> None:
    """Add a method to the methods that have been found.

    Raises: ConfigError if the object is not a method, or if another method has one of its names.
    """
    if not isinstance(method, Method):
        raise ConfigError(f"the object is {method!r}; it must be a foredraft.drafting.Method")
    for name in (method.name, *method.aliases):
        owner = next((one for one in found.values() if name in (one.name, *one.aliases)), None)
        if owner is not None:
            raise ConfigError(f"the name {name!r} already belongs to the method {owner.name!r}; choose another name")
    found[method.name] = method


def method_aliases() -> dict[str, str]:
    """Return the alias -> name mapping of all methods."""
    return {alias: method.name for method in methods().values() for alias in method.aliases}


def _own() -> Iterator[Method]:
    for name in FAMILIES:
        yield from import_module(f"{__name__}.{name}").METHODS


@dataclass(frozen=True)
class KeyEntry:
    """One key of the reference, for all methods that have it.

    Args:
      name: name of the key.
      values: description of the allowed values.
      defaults: default by method; None where the key is unset by default.
      help: meaning of the key.
    """

    name: str
    values: str
    defaults: Mapping[str, Any]
    help: str

    @property
    def default(self) -> str:
        """The default, or the most frequent default followed by the ones that differ: ``5; ngram 10``."""
        shown = {method: _shown(value) for method, value in self.defaults.items()}
        usual = max(shown.values(), key=list(shown.values()).count)
        others = [f"{method} {value or 'none'}" for method, value in shown.items() if value != usual]
        return "; ".join([usual or "none" if others else usual, *others])

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        return {"key": self.name, "values": self.values, "defaults": dict(self.defaults), "meaning": self.help}


def key_entries(chosen: str | None = None) -> list[KeyEntry]:
    """List the keys of all methods, or of one method.

    Args:
      chosen: name of one method; None for all methods.

    Returns: entries sorted by their number of methods: the most shared keys first, or last where one method is chosen.
    """
    num_owners = Counter(name for method in methods().values() for name in method.keys)
    defaults: dict[tuple[str, str, str], dict[str, Any]] = {}
    for method in methods().values() if chosen is None else [methods()[chosen]]:
        for key in method.keys.values():
            is_of_parts = method.combines and key.name == "num_speculative_tokens"  # the length of the longest part
            found = defaults.setdefault((key.name, key.kind.text, key.help), {})
            found[method.name] = None if is_of_parts else key.default
    entries = [KeyEntry(name, values, of, help) for (name, values, help), of in defaults.items()]
    return sorted(entries, key=lambda entry: num_owners[entry.name] * (-1 if chosen is None else 1))


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- folders -----------------------------------------------------------------------------------------------------------

_NAMES = re.compile(rb"[A-Za-z_][\w.]*\.(?:weight|bias)|d2t|t2d")
_MAX_HEADER_BYTES = 1 << 26


def recognized(model: object) -> Method | None:
    """Return the method whose drafter is in a folder, or in the local cache under a hub id.

    Returns None for anything else, and for a drafter of an unknown kind. No request is sent to the hub.
    """
    folder = _folder(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else None
    if folder is None:
        return None
    config = _json(folder / "config.json")
    if not isinstance(config, Mapping):
        return None
    return recognized_in(config, frozenset[str]().union(*map(_names_in, sorted(folder.iterdir()))))


def recognized_in(config: Mapping[str, Any], names: frozenset[str]) -> Method | None:
    """Return the method whose drafter has this config and these tensors, or None if no method recognizes them."""
    known = (method for method in methods().values() if method.recognizes is not None)
    return next((method for method in known if method.recognizes and method.recognizes(config, names)), None)


def _folder(name: str) -> Path | None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder if (folder / "config.json").is_file() else None
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # the name is not a valid hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _names_in(file: Path) -> set[str]:
    """Return the tensor names in a weight file, or in the index of a sharded checkpoint."""
    if file.name.endswith(".index.json"):
        index = _json(file)
        files = index.get("weight_map") if isinstance(index, Mapping) else None
        return set(files) if isinstance(files, Mapping) else set()
    try:
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = parsed_json(stream.read(size)) if size <= _MAX_HEADER_BYTES else {}
            return set(header) - {"__metadata__"}
        if file.suffix in (".bin", ".pt") and zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                pickled = [name for name in archive.namelist() if name.endswith("data.pkl")]
                text = b"".join(archive.read(name) for name in pickled)
            return {name.decode() for name in _NAMES.findall(text)}  # scanned as bytes, never unpickled
    except (OSError, ValueError, TypeError, zipfile.BadZipFile):
        return set()
    return set()


def _json(file: Path) -> Any:
    try:
        return parsed_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
