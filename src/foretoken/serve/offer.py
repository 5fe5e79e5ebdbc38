"""What a server offers: its model under several names, each a way of drafting for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from foretoken.config.speculative import SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.loading.sources import check_parts

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.serve.served import Served


@dataclass(frozen=True)
class Offer:
    """Names that requests may ask for, read before any weight is.

    Args:
      names: of the model, the first for answers too.
      draftings: further ways of drafting, by their names.
      chat_template: in place of the model's own.
    """

    names: tuple[str, ...]
    draftings: Mapping[str, SpeculativeConfig]
    chat_template: str | None = None

    @classmethod
    def of(cls, names: Sequence[str], given: Sequence[str] = (), chat_template: str | None = None) -> Offer:
        """What a user gave.

        Args:
          given: ``NAME=METHOD``, or JSON in place of the method.

        Raises: ConfigError for names that are empty or given twice, a drafting that is not of that form or not valid,
          and a template that is none.
        """
        for place, name in enumerate(names):
            if not name.strip() or name in names[:place]:
                what = "twice" if name.strip() else "and says nothing"
                raise ConfigError(f"served_model_name {name!r} is given {what}; give each name once")
        draftings: dict[str, SpeculativeConfig] = {}
        for one in given:
            name, equals, config = one.partition("=")
            if not equals or not name.strip() or not config:
                raise ConfigError(f"drafting is {one!r}; give NAME=METHOD or NAME=JSON, such as lookup=ngram")
            if name in names or name in draftings:
                raise ConfigError(f"drafting is {one!r}, and {name!r} is served already; give it another name")
            try:
                draftings[name] = SpeculativeConfig.parse(config)
            except ConfigError as error:
                raise ConfigError(f"drafting {name!r}: {error}") from None
        if chat_template is not None:
            _check_template(chat_template)
        return cls(tuple(names), draftings, chat_template)

    def check_files(self) -> None:
        """Raises: CheckpointError, ConfigError for a file of a drafting that is not on this machine."""
        for config in self.draftings.values():
            check_parts(config)

    def over(self, llm: LLM) -> Served:
        """What is served, over a model in memory.

        Raises: ConfigError and the like for a drafting that the model does not have.
        """
        from foretoken.serve.served import Served

        if self.chat_template is not None and llm.tokenizer is not None:
            llm.tokenizer.chat_template = self.chat_template
        drafting = {name: llm.with_speculative_config(config) for name, config in self.draftings.items()}
        return Served({self.names[0]: llm, **drafting}, self.names[1:])


def _check_template(text: str) -> None:
    """Raises: ConfigError for a template that cannot be read."""
    try:
        render_jinja_template([], chat_template=text)  # reads it, and renders no conversation
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat_template cannot be read: {error} (line {error.lineno}); give a template of Jinja"
        ) from None
