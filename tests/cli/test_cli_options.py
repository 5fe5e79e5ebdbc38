"""Groups of options: a verb names them, and the command line shows and passes every option on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from foredraft.cli import VERBS
from foredraft.cli import app as foredraft_app
from foredraft.cli.options import SamplingOptions, takes_groups
from foredraft.config.sampling import SamplingParams


@dataclass(frozen=True)
class Fruit:
    """A group, as verbs declare them."""

    apples: Annotated[int, typer.Option("--apples", "-a", help="How many.")] = 1
    pears: Annotated[int, typer.Option(help="How many.", min=2)] = 3
    stem: Annotated[bool, typer.Option("--stem")] = False


def run(verb: Any, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, list(arguments))


def test_options_of_a_group_arrive_together_and_are_listed_in_their_place() -> None:
    got: list[Any] = []

    @takes_groups
    def verb(*, first: str = "x", fruit: Fruit, last: int = 0) -> None:
        """What it does."""
        got.append((first, fruit, last))

    assert run(verb).exit_code == 0
    assert run(verb, "-a", "7", "--stem", "--last", "5").exit_code == 0
    assert got == [("x", Fruit(), 0), ("x", Fruit(7, 3, True), 5)]
    text = run(verb, "--help").stdout
    places = [text.index(word) for word in ("What it does", "--first", "--apples", "--pears", "--stem", "--last")]
    assert places == sorted(places)
    assert run(verb, "--pears", "1").exit_code == 2


def test_a_verb_may_take_a_part_of_a_group() -> None:
    got: list[Fruit] = []

    @takes_groups
    def verb(fruit: Annotated[Fruit, "stem", "apples"]) -> None:
        got.append(fruit)

    assert run(verb, "--apples", "2").exit_code == 0
    assert got == [Fruit(apples=2)]
    assert run(verb, "--pears", "4").exit_code == 2
    text = run(verb, "--help").stdout
    assert text.index("--stem") < text.index("--apples")


def test_a_part_that_does_not_exist_shows_when_the_verb_is_made() -> None:
    def verb(fruit: Annotated[Fruit, "plums"]) -> None: ...

    with pytest.raises(KeyError, match="plums"):
        takes_groups(verb)


def test_sampling_options_are_fields_of_sampling_params() -> None:
    params = SamplingOptions(top_k=5, stop=["."]).params(max_tokens=7, seed=3)
    assert params == SamplingParams(temperature=0.0, top_k=5, stop=(".",), max_tokens=7, seed=3)


def test_every_verb_that_loads_a_target_can_be_told_in_what_weights() -> None:
    """`quantize`, which writes them, names its target and its bits otherwise; `datastore` loads tokenizers alone."""
    verbs: dict[str, set[str]] = {}

    def note(command: Any, name: str) -> None:
        verbs[name] = {parameter.name for parameter in command.params}
        for child in getattr(command, "commands", {}):
            note(command.get_command(None, child), f"{name} {child}".strip())

    note(typer.main.get_command(foredraft_app), "")
    loading = {name for name, options in verbs.items() if "dtype" in options} - {"quantize"}
    assert loading == {
        *("generate", "chat", "serve", "demo", "info", "bench", "verify", "train", "trajectory"),
        *("tune", "tune layer-skip", "tune tree", "tune profile"),
    }
    for name in loading:
        assert verbs[name] >= {"dtype", "execution", "quantization", "weights", "kv_cache_dtype"}, name


def test_the_list_of_verbs_has_the_beginnings_of_their_help() -> None:
    for name in VERBS:
        command = typer.main.get_command(foredraft_app).get_command(None, name)
        about = command.callback.__doc__ if command.help is None else command.help
        assert " ".join(about.split("\n\n")[0].split()) == VERBS[name]
