"""Methods of drafting: the description of one, where they are found (here or in another package), and all their keys as
people read them. No module of this package imports torch: what drafts is imported when a drafter is made."""

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
from foredraft.errors import ConfigError, described
from foredraft.folders import parsed_json

if TYPE_CHECKING:
    from foredraft.drafters.context import DrafterContext
    from foredraft.engine.drafter import Drafter


GROUP = "foredraft.drafters"
"""The entry point group by which other packages add methods."""

FAMILIES = ("lm", "lookup", "iterate", "selfdraft", "heads", "compose")
"""Modules of this package, each with its ``METHODS``, in the order of listings. Those of other packages come last."""


@dataclass(frozen=True)
class Method:
    """One way of drafting.

    Args:
      options: its name and its keys, with kinds, defaults and help; the only place where they are defined.
      build: makes a drafter without state, from options and from what belongs to the target; or where that function
        is, as "package.module:name", so that describing a method imports none of what it drafts with.
        Raises: ConfigError if something that the options ask for is missing.
      summary: its source of drafts, in a few words that follow "drafts".
      aliases: names of other tools and older ones.
      sign: of a method that combines others: how they are joined in a name, as in "a+b".
      recognizes: whether a folder holds a drafter of this method, so that naming the folder is enough; by the content
        of config.json, and by the names of tensors, where these can be had without reading them.
      sample: keys with which to try whether a model can draft this way, where the defaults are not enough.
      head: the kind of heads that ``model`` names ("eagle2" drafts with those of "eagle"); empty where ``model`` is a
        causal language model, and where there is no such key.
      model_is_optional: whether it drafts with the target itself where the config names no model.
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
        """The name by which it is chosen."""
        return self.options.method

    @property
    def keys(self) -> dict[str, Key]:
        """Every key by its name."""
        return self.options.keys()

    @property
    def drafts_trees(self) -> bool:
        """Whether its drafts are trees whatever its keys say."""
        return self.options.drafts_trees

    @property
    def takes_model(self) -> bool:
        """Whether it drafts with a causal language model that the config may name."""
        return "model" in self.keys and not self.head

    @property
    def drafts_with_heads(self) -> bool:
        """Whether ``model`` names heads over the target's features."""
        return bool(self.head)

    @property
    def combines(self) -> bool:
        """Whether it is made of other methods."""
        return "drafters" in self.keys


@cache
def methods() -> Mapping[str, Method]:
    """Every method by its name: those in this package, and those of other packages that are installed.

    An entry point that cannot be used is left out with a warning.
    """
    found: dict[str, Method] = {}
    for method in _own():
        _add(found, method)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            _add(found, entry.load())
        except Exception as error:
            warnings.warn(
                f"the method of {entry.name} = {entry.value} is left out: {described(error)}; repair or "
                "uninstall the package that brings it",
                RuntimeWarning,
                stacklevel=2,
            )
    return found


def _add(found: dict[str, Method], method: Method) -> None:
    """Raises: ConfigError for anything that is not a method, and for a name that another one has."""
    if not isinstance(method, Method):
        raise ConfigError(f"it is {method!r}, not a foredraft.drafting.Method")
    for name in (method.name, *method.aliases):
        owner = next((one for one in found.values() if name in (one.name, *one.aliases)), None)
        if owner is not None:
            raise ConfigError(f"{name!r} is a name of the method {owner.name!r}; rename it")
    found[method.name] = method


def method_aliases() -> dict[str, str]:
    """Other names of methods."""
    return {alias: method.name for method in methods().values() for alias in method.aliases}


def _own() -> Iterator[Method]:
    for name in FAMILIES:
        yield from import_module(f"{__name__}.{name}").METHODS


@dataclass(frozen=True)
class KeyEntry:
    """One key, of all methods that have it.

    Args:
      name: of the key.
      values: what it takes.
      defaults: by method; None where nothing is set unless it is given.
      help: what it means.
    """

    name: str
    values: str
    defaults: Mapping[str, Any]
    help: str

    @property
    def default(self) -> str:
        """The default, or the most frequent one and those that differ: ``5; ngram 10``."""
        shown = {method: _shown(value) for method, value in self.defaults.items()}
        usual = max(shown.values(), key=list(shown.values()).count)
        others = [f"{method} {value or 'none'}" for method, value in shown.items() if value != usual]
        return "; ".join([usual or "none" if others else usual, *others])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"key": self.name, "values": self.values, "defaults": dict(self.defaults), "meaning": self.help}


def key_entries(chosen: str | None = None) -> list[KeyEntry]:
    """Every key, those of most methods first; of one method, where one is chosen, its own first."""
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
    """The method whose drafter lies in a folder, or in that of a hub id that has been fetched before.

    None for anything else, and for a drafter that no method knows. No hub is asked.
    """
    folder = _folder(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else None
    if folder is None:
        return None
    config = _json(folder / "config.json")
    if not isinstance(config, Mapping):
        return None
    return recognized_in(config, frozenset[str]().union(*map(_names_in, sorted(folder.iterdir()))))


def recognized_in(config: Mapping[str, Any], names: frozenset[str]) -> Method | None:
    """The method whose drafter has this config and these tensors; None for a drafter that no method knows."""
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
    except ValueError:  # not the form of a hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _names_in(file: Path) -> set[str]:
    """Names of tensors in a file of weights, or in the index of several."""
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
            return {name.decode() for name in _NAMES.findall(text)}  # read as text, never unpickled
    except (OSError, ValueError, TypeError, zipfile.BadZipFile):
        return set()
    return set()


def _json(file: Path) -> Any:
    try:
        return parsed_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
