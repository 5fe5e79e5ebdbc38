"""Methods that combine other methods: their options and entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from foredraft.config.drafting import DraftOptions, ModelOptions, node_limit
from foredraft.config.options import anything, number, option
from foredraft.config.speculative import SpeculativeConfig
from foredraft.errors import ConfigError
from foredraft.methods import Method, recognized

HANDED_ON = ("model", "revision", "dtype", "quantization", "num_speculative_tokens")
"""Keys of a combined method that are passed on to every part that has them."""

FREE = ("suffix",)
"""Drafters that `auto` uses by default: they need no model, and draft text that repeats."""


@dataclass(frozen=True, kw_only=True)
class CompositeOptions(DraftOptions, ModelOptions):
    """Options of a combination of drafters, each with its own keys.

    A model or draft length that is given for the combination is passed on to the drafters that have this key.
    """

    fewest: ClassVar[int] = 2
    drafters: Any = option(
        anything("list of names, mappings or configs"), help="drafters to combine, the most trusted first"
    )

    def check(self) -> None:
        """Parse the configs of the drafters.

        Raises: ConfigError for too few drafters, for a rule other than "match", and for keys that a drafter does not
        have.
        """
        super().check()
        name = self.method
        if isinstance(self.drafters, (str, Mapping)) or not isinstance(self.drafters, Sequence):
            raise ConfigError(
                f"method {name!r} needs drafters, a list of names, mappings or configs; got {self.drafters!r}"
            )
        handed_on = {key: getattr(self, key) for key in HANDED_ON if getattr(self, key) not in (None, 0)}
        parts = tuple(_part(part, handed_on) for part in self.drafters)
        rules = [self.rule, *(part.rule for part in parts)]
        other = sorted({rule.name for rule in rules if rule.needs_probs or not rule.is_lossless})
        if other:
            raise ConfigError(
                f"method {name!r} is exact under rejection_sample_method='match' only; it got {', '.join(other)}"
            )
        if len(parts) < self.fewest or any(part.method == "none" for part in parts):
            names, fewest = ", ".join(part.method for part in parts), "two" if self.fewest > 1 else "one"
            raise ConfigError(f"method {name!r} combines {fewest} or more drafters; got {names or 'none'}")
        object.__setattr__(self, "drafters", parts)
        object.__setattr__(self, "num_speculative_tokens", max(part.num_speculative_tokens for part in parts))


def _part(value: Any, handed_on: Mapping[str, Any]) -> SpeculativeConfig:
    """Parse the config of one drafter. Keys of the combination are used for keys that the drafter's method has and that
    were not given.
    """
    if isinstance(value, SpeculativeConfig):
        return value
    given = {"method": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ConfigError(f"drafters contains {value!r}; each entry must be a method name, a mapping or a config")
    known = SpeculativeConfig.parse(given).definition.keys
    return SpeculativeConfig.parse({**{name: item for name, item in handed_on.items() if name in known}, **given})


@dataclass(frozen=True, kw_only=True)
class AutoOptions(CompositeOptions):
    """Keys of "auto", which chooses among drafters and plain decoding by measured time."""

    method: ClassVar[str] = "auto"
    fewest: ClassVar[int] = 1
    drafters: Any = option(
        anything("list of names, mappings or configs"),
        help="drafters to choose from; by default suffix, and the draft model or head that is given as model or comes "
        "with the target",
    )
    max_draft_nodes: int = node_limit(32)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> AutoOptions:
        """Read the options; a draft model or head that is given as ``model`` becomes one more drafter."""
        drafters: tuple[str, ...] = FREE
        if given.get("model") is not None:
            found = recognized(given["model"])
            drafters = (*FREE, "draft_model" if found is None else found.name)
        return super().read({"drafters": drafters, **given})

    def check(self) -> None:
        super().check()
        if not self.is_governed:
            raise ConfigError(
                f"method 'auto' chooses by measured time, and length_policy is {self.length_policy!r}; leave "
                "length_policy out, or name one method"
            )


@dataclass(frozen=True, kw_only=True)
class FirstOptions(CompositeOptions):
    """Keys of "first", which uses the first drafter that expects enough tokens; "a>b" falls back from a to b."""

    method: ClassVar[str] = "first"
    min_expected_tokens: float = option(
        number(0.0), 0.5, "expected accepted tokens, from past steps, that a draft needs"
    )


@dataclass(frozen=True, kw_only=True)
class UnionOptions(CompositeOptions):
    """Keys of "union", which merges the drafts of several drafters; "a+b" is the union of a and b."""

    method: ClassVar[str] = "union"
    drafts_trees: ClassVar[bool] = True
    max_draft_nodes: int = node_limit(32)


METHODS = (
    Method(
        AutoOptions,
        "foredraft.drafters.compose:auto",
        summary="with the fastest of several methods, as measured while decoding",
        aliases=("default",),
    ),
    Method(
        FirstOptions,
        "foredraft.drafters.compose:first",
        summary="with the first of several methods that expects enough accepted tokens",
        sign=">",
        sample={"drafters": ("ngram", "nasd")},
    ),
    Method(
        UnionOptions,
        "foredraft.drafters.compose:union",
        summary="with several methods at once, their trees merged",
        sign="+",
        sample={"drafters": ("token_recycling", "ngram")},
    ),
)
