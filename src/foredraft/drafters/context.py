"""What drafters are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM

T = TypeVar("T")


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter can be made from.

    Args:
      target: of the engine that they will run in.
      draft_model: of methods that draft with a model of their own.
      tokenizer: of the target, where one is known.
      zoo_name: of a target of the zoo ("zoo:tiny"), which brings along what drafters need.
      kept: what several drafters share and a new one goes on with: opened datastores, histories. Filled on first use.
    """

    target: CausalLM
    draft_model: CausalLM | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    zoo_name: str | None = None
    kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def asset(self, what: str) -> Path | None:
        """The file or folder of this kind that a target of the zoo brings along; None for any other target."""
        from foredraft import zoo

        if self.zoo_name is None or not zoo.brings(self.zoo_name, what):
            return None
        return zoo.asset(self.zoo_name, what)

    @property
    def brings_none(self) -> str:
        """For messages about something that is missing."""
        return "" if self.zoo_name is None else f", and {self.zoo_name} brings none along"

    def keep(self, name: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The object that is kept under this name, made on first use."""
        if name not in self.kept:
            self.kept[name] = make()
        made: T = self.kept[name]
        return made

    def check_trees(self, method: str) -> None:
        """Refuse a method whose drafts are trees where only chains can be verified."""
        if not self.target.supports_trees:
            raise ConfigError(
                f"method {method!r} drafts trees, and {self.target.name} verifies chains only; use one that drafts "
                "chains: ngram, nasd, jacobi or draft_model"
            )
