"""Keys of methods that combine others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.config.drafting import DraftOptions, ModelOptions
from foretoken.config.options import anything, option
from foretoken.config.speculative import SpeculativeConfig
from foretoken.errors import ConfigError

HANDED_ON = ("model", "revision", "dtype", "num_speculative_tokens")
"""Keys that are passed on to those of the parts that know them."""


@dataclass(frozen=True, kw_only=True)
class CompositeOptions(DraftOptions, ModelOptions):
    """Drafters, each with keys of its own; a model or length that is given beside them is passed on to them."""

    drafters: Any = option(anything("list of names, mappings or configs"), help="what is combined, most trusted first")

    def check(self) -> None:
        """Make configs of the drafters.

        Raises: ConfigError for fewer than two, for a rule other than "match", and for what a drafter does not take.
        """
        super().check()
        name = self.method
        if isinstance(self.drafters, (str, Mapping)) or not isinstance(self.drafters, Sequence):
            raise ConfigError(f"method {name!r} needs drafters, a list of two or more; got {self.drafters!r}")
        handed_on = {key: getattr(self, key) for key in HANDED_ON if getattr(self, key) not in (None, 0)}
        parts = tuple(_part(part, handed_on) for part in self.drafters)
        rules = [self.rule, *(part.rule for part in parts)]
        other = sorted({rule.name for rule in rules if rule.needs_law or not rule.is_lossless})
        if other:
            raise ConfigError(
                f"method {name!r} is exact under rejection_sample_method='match' only; it got {', '.join(other)}"
            )
        if len(parts) < 2 or any(part.method == "none" for part in parts):
            names = ", ".join(part.method for part in parts)
            raise ConfigError(f"method {name!r} combines two or more drafters; got {names or 'none'}")
        object.__setattr__(self, "drafters", parts)
        object.__setattr__(self, "num_speculative_tokens", max(part.num_speculative_tokens for part in parts))


def _part(value: Any, handed_on: Mapping[str, Any]) -> SpeculativeConfig:
    """The config of one drafter of several, with those keys of the whole that its method knows and it was not given."""
    if isinstance(value, SpeculativeConfig):
        return value
    given = {"method": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ConfigError(f"drafters holds {value!r}; every one is a method's name, a mapping or a config")
    known = SpeculativeConfig.parse(given).definition.keys
    return SpeculativeConfig.parse({**{name: item for name, item in handed_on.items() if name in known}, **given})
