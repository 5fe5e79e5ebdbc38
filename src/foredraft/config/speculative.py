"""Configuration of drafting: `SpeculativeConfig`. A config has the keys of its method. Unknown keys raise errors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from foredraft.config.acceptance import RULES, AcceptanceRule, TypicalLimits
from foredraft.config.keywords import nearest, own_keys, spelling
from foredraft.config.options import Key, Options
from foredraft.config.other_systems import METHODS_NOT_HERE, method_not_here
from foredraft.config.written import read_text
from foredraft.errors import ConfigError
from foredraft.methods import Method, method_aliases, methods, recognized

NAME = "speculative_config"

LOADED = "(a loaded model)"
"""Placeholder for the model, in a config that must not refer to a loaded model."""


@dataclass(frozen=True, init=False, repr=False)
class SpeculativeConfig:
    """Configuration of drafting: a method, and the keys of that method.

    Keys have vLLM's names if vLLM has the key. Names of other systems are aliases. Every key of the method is an
    attribute. A key of another method reads as None. docs/speculative_config.md and ``foredraft info --keys --method
    NAME`` list the keys of every method with their ranges and defaults.

    Args:
      method: name of a method such as "ngram", or several as in "ngram+suffix". If it is left out, the other keys
        decide: a folder with a head selects that head's method. Any other model selects ``draft_model``. A key that
        only one method has selects that method. Without any key, the method is ``auto``.
      options: options of the same method to start from. The other keys override these options.
      keys: options of the method, under their own names or aliases. A key that is left out or None takes its default.

    Raises: ConfigError for an unknown key, a value out of range, or a key that does not belong to the method.
    """

    method: str
    options: Options

    def __init__(self, method: str | None = None, options: Options | None = None, **keys: Any) -> None:
        given = {**({} if options is None else options.given()), **_own_keys({**_if(method=method), **keys})}
        given = _if(**given)
        chosen, drafters = _chosen(given.pop("method", None), given)
        if drafters is not None:
            given["drafters"] = drafters
        _check_keys(chosen, given)
        object.__setattr__(self, "method", chosen.name)
        object.__setattr__(self, "options", chosen.options.read(given))

    def __getattr__(self, name: str) -> Any:
        """Return a key of the method, or None for a key of another method.

        Raises: AttributeError for any other name, and for all names while a copy is being made and has no options yet.
        """
        options = self.__dict__.get("options")
        if options is not None and name in vars(options):
            return getattr(options, name)
        if options is not None and name in all_keys():
            return getattr(options, name, None)
        known = "" if options is None else f"; the keys of method {self.method!r} are {', '.join(options.keys())}"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{known}")

    def __repr__(self) -> str:
        values = self.as_dict()
        if values.get("model") is not None and not isinstance(values["model"], (str, os.PathLike)):
            values["model"] = type(values["model"])  # the repr of a loaded model lists all of its layers
        return f"SpeculativeConfig({', '.join(f'{name}={_shown(value)}' for name, value in values.items())})"

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """Read a config from None, a mapping, JSON, ``@file`` with JSON, a method's name, or a config.

        Raises: ConfigError if the value is none of these, or not valid.
        """
        if value is None:
            return cls(method="none")
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            value = read_text(value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative config is {value!r}; give a JSON object, a mapping, @FILE or None")
        return cls(**{str(name): item for name, item in value.items()})

    @property
    def definition(self) -> Method:
        """The description of the method."""
        return methods()[self.method]

    @property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule."""
        return RULES[self.rejection_sample_method]

    @property
    def is_governed(self) -> bool:
        """Whether measured costs decide the draft size."""
        return bool(getattr(self.options, "is_governed", False))

    @property
    def typical_limits(self) -> TypicalLimits:
        """Limits of the rule "typical"."""
        given = {"threshold": self.posterior_threshold, "alpha": self.posterior_alpha}
        return TypicalLimits(**_if(**given))

    @property
    def is_speculative(self) -> bool:
        return self.method != "none"

    @property
    def parts(self) -> tuple[SpeculativeConfig, ...]:
        """The configs of the drafters that this config combines; otherwise this config alone."""
        return tuple(self.drafters) if self.definition.combines else (self,)

    @property
    def title(self) -> str:
        """The method as a user would write it: ``ngram``, ``suffix+draft_model``."""
        sign = self.definition.sign
        return sign.join(part.title for part in self.parts) if sign else self.method

    @property
    def drafters_title(self) -> str:
        """The title, with the drafters that ``auto`` chooses from: ``auto (suffix, eagle3)``."""
        if not self.definition.combines or self.definition.sign:
            return self.title
        return f"{self.title} ({', '.join(part.title for part in self.parts)})"

    def as_dict(self) -> dict[str, Any]:
        """The method and every key that has a value."""
        return {"method": self.method, **self.options.given()}

    @property
    def model_part(self) -> SpeculativeConfig | None:
        """The config whose drafter is a model: this config or the first such part; None if there is none."""
        if not self.definition.combines:
            is_self = self.definition.model_is_optional and self.model is None
            return self if self.definition.takes_model and not is_self else None
        return next((part.model_part for part in self.parts if part.model_part is not None), None)

    def without_model(self) -> SpeculativeConfig:
        """Return the same config without a reference to a loaded model.

        Heads stay. For self-drafting methods a placeholder records that a model was given.
        """
        keeps = self.definition.drafts_with_heads
        values = {name: value for name, value in self.as_dict().items() if keeps or name != "model"}
        if self.definition.model_is_optional and self.model is not None:
            values["model"] = LOADED
        if self.definition.combines:
            values["drafters"] = [part.without_model() for part in self.parts]
        return SpeculativeConfig(**values)


def all_keys() -> dict[str, Key]:
    """The keys of all methods by their names."""
    return {name: key for method in methods().values() for name, key in method.keys.items()}


def _if(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _own_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keys under their own names, with the keys that aliases imply.

    Some keys of `speculative_generate` have no effect and are dropped. With ``use_egag``, ``gamma_max`` is the longest
    draft and ``gamma`` is unused; without it, ``gamma`` is the length of every draft.
    """
    said = {spelling(key): value for key, value in keys.items()}
    unused: set[str] = set()
    if said.get("use_egag") is False:
        unused = {"gamma_min", "gamma_max", "egag_ema_beta"}
    elif said.get("use_egag") is True:
        unused = {"gamma_max"} if said.get("gamma_max") is None else {"gamma"}
    used = {key: value for key, value in keys.items() if spelling(key) not in unused}
    return own_keys(NAME, used, {"method", *all_keys()}, spelling)


def _chosen(name: Any, given: Mapping[str, Any]) -> tuple[Method, list[str] | None]:
    """Return the method, given by name or inferred from the keys, and the parts of a composed name (else None)."""
    if name is None:
        return _inferred(given), None
    if not isinstance(name, str):
        raise ConfigError(f"method is {name!r}; choose one of {', '.join(methods())}")
    spelled = spelling(name).lower()
    if spelled.startswith(("{", "@")):
        raise ConfigError(
            f"method is {name!r}, which is a config; give it as speculative_config (--speculative-config)"
        )
    _check_available(spelled)
    is_whole = spelled in methods() or spelled in method_aliases()  # the name "hydra++" contains a sign
    for method in methods().values():
        sign = method.sign
        if sign and sign in spelled and not is_whole:
            if given.get("drafters") is not None:
                raise ConfigError(f"method {name!r} names its drafters, and drafters is given as well; give only one")
            parts = _parted(spelled, sign)
            if not all(parts):
                raise ConfigError(f"method {name!r} names nothing on one side of {sign!r}; write 'ngram{sign}suffix'")
            return method, parts
    spelled = method_aliases().get(spelled, spelled)
    if spelled not in methods():
        near = nearest(spelled, [*methods(), *method_aliases(), *METHODS_NOT_HERE])
        hint = f"did you mean {near[0]!r}? " if near else ""
        if near and near[0] in METHODS_NOT_HERE:
            hint += "That is not available in this version; "
        raise ConfigError(f"method {name!r} is not known; {hint}choose one of {', '.join(methods())}")
    return methods()[spelled], None


def _parted(spelled: str, sign: str) -> list[str]:
    """Split a composed name at its sign: "suffix+hydra++" -> suffix, hydra++. A method's name may contain the sign."""
    for name in (*methods(), *method_aliases()):
        spelled = spelled.replace(name, name.replace(sign, "\0"))
    return [part.strip().replace("\0", sign) for part in spelled.split(sign)]


def method_named(name: str) -> Method:
    """Return the method with this name or alias.

    Raises: ConfigError for an unknown name; the message suggests the nearest one.
    """
    return _chosen(name, {})[0]


def _inferred(given: Mapping[str, Any]) -> Method:
    """Infer the method from the keys.

    The result is the method of the head in the folder ``model``; else the only method that has one of the keys; else
    the only method that has all keys. Without a key, or with only a draft length, the method is `auto`.
    """
    if given.keys() <= {"num_speculative_tokens", "quantization"}:
        return methods()["auto"]
    found = recognized(given["model"]) if "model" in given else None
    if found is not None:
        return found
    single = [method for method in methods().values() if not method.combines]
    owners = {key: [method for method in single if key in method.keys] for key in given}
    fitting = list({owner[0].name: owner[0] for owner in owners.values() if len(owner) == 1}.values())
    if not fitting:
        fitting = [
            method
            for method in single
            if given
            and given.keys() <= method.keys.keys()
            and not (method.drafts_with_heads or method.model_is_optional)
        ]
    if len(fitting) != 1:
        raise ConfigError(
            f"the method does not follow from the keys {sorted(given)}; add method, one of {', '.join(methods())}"
        )
    return fitting[0]


def _check_keys(method: Method, given: Iterable[str]) -> None:
    for key in sorted(set(given) - method.keys.keys()):
        owners = [other.name for other in methods().values() if key in other.keys]
        remedy = "leave it out"
        if method.combines:
            remedy += f", or give it to one of the drafters: drafters=[{{'method': {owners[0]!r}, {key!r}: ...}}, ...]"
        raise ConfigError(
            f"key {key!r} has no meaning for method {method.name!r}, only for {', '.join(owners)}; {remedy}"
        )


def _check_available(name: str) -> None:
    """Refuse well-known methods that this version of foredraft does not have."""
    what = method_not_here(name)
    if what is not None and name not in methods():
        raise ConfigError(
            f"method {name!r} ({what}) is not available in this version; choose one of {', '.join(methods())}; "
            "foredraft bench --methods all --model MODEL compares the methods that work with your model"
        )


def _shown(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


SpeculativeLike: TypeAlias = SpeculativeConfig | Mapping[str, Any] | str | None
"""A config, or any value that `SpeculativeConfig.parse` reads."""
