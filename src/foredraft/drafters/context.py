"""Inputs from which drafters are made."""

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
    """Models and files from which drafters are made.

    Args:
      target: target of the engine that runs the drafter.
      draft_model: draft model, for methods that use one.
      tokenizer: tokenizer of the target, if known.
      zoo_name: name of a zoo target ("zoo:tiny"), which may include files for drafters.
      kept: objects that several drafters share and later drafters reuse, such as open datastores and histories. Filled
        on first use.
    """

    target: CausalLM
    draft_model: CausalLM | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    zoo_name: str | None = None
    kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def asset(self, what: str) -> Path | None:
        """Return the file or folder of this kind that is included with a zoo target, or None for any other target."""
        from foredraft import zoo

        if self.zoo_name is None or not zoo.includes(self.zoo_name, what):
            return None
        return zoo.asset(self.zoo_name, what)

    @property
    def without_asset(self) -> str:
        """Clause for error messages about a missing file, if the zoo target does not include one; else empty."""
        return "" if self.zoo_name is None else f", and {self.zoo_name} does not include one"

    def keep(self, name: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return the object stored under this name, made on first use."""
        if name not in self.kept:
            self.kept[name] = make()
        made: T = self.kept[name]
        return made

    def check_trees(self, method: str) -> None:
        """Check that the target can verify trees.

        Raises: ConfigError if the target can only verify chains.
        """
        if not self.target.supports_trees:
            raise ConfigError(
                f"method {method!r} drafts trees, and {self.target.name} can only verify chains; use a method that "
                "drafts chains: ngram, nasd, jacobi or draft_model"
            )
