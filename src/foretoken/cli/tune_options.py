"""What the searches below ``foretoken tune`` take alike: a target, and prompts like those to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import TargetOptions
from foretoken.cli.prompts import Raw, ask
from foretoken.errors import ConfigError
from foretoken.sessions.prompt_files import STDIN, read_prompts_file

if TYPE_CHECKING:
    from foretoken.bench.workload import BenchPrompt

BUILT_IN = "built-in"
NumPrompts = Annotated[int, typer.Option(help="Use only this many of them, from the first.", min=1)]


@dataclass(frozen=True)
class TuneOptions(TargetOptions):
    """For what target, and on which texts of its."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH|HUB_ID|zoo:NAME", help="The target; zoo:smollm2 where it is installed, else zoo:tiny."
        ),
    ] = None
    prompts: Annotated[str, typer.Option(help="JSONL or .txt file with prompts like those to come, or built-in.")] = (
        BUILT_IN
    )
    raw: Raw = False
    num_prompts: NumPrompts = 16
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that the target writes per prompt.", min=4)] = 64

    def check_prompts(self) -> None:
        """Raises: PromptError, before anything is loaded, for a file that cannot be read."""
        if self.prompts not in (BUILT_IN, STDIN):
            read_prompts_file(self.prompts)

    def read_prompts(self, model: str, tokenizer: Any) -> list[BenchPrompt]:
        """Token ids to continue: those of a file as `generate` would have them, built-in questions in chat format.

        Raises: PromptError, ConfigError.
        """
        from foretoken.bench.workload import BenchPrompt, load_prompts, read_questions, select
        from foretoken.sessions.prompts import read_prompt

        if self.prompts != BUILT_IN:
            given = [one.given for one in read_prompts_file(self.prompts)[: self.num_prompts]]
            asked = ask(tokenizer, model, given, raw=self.raw)
            ids = (read_prompt(one.prompt, tokenizer, place).token_ids for place, one in enumerate(asked))
            return [BenchPrompt(str(place), "file", one) for place, one in enumerate(ids)]
        if tokenizer is None:
            raise ConfigError("the built-in prompts are text, and the model has no tokenizer; give --prompts with ids")
        return load_prompts(tokenizer, select(read_questions(), self.num_prompts))
