"""Options that several verbs take, in groups; what a group means to the library is a method of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from foredraft.cli.running import choose_model, read_text
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams, UnsetFloat, UnsetInt
from foredraft.config.speculative import SpeculativeConfig
from foredraft.config.structured import StructuredOutputs
from foredraft.config.written import by_comma, tuned
from foredraft.errors import ConfigError
from foredraft.methods import methods

N = TypeVar("N")

DEFAULTS = SamplingParams(temperature=UnsetFloat(0.0), max_tokens=UnsetInt(256))
"""Defaults of the command line: greedy, long enough for an answer. All others are those of `SamplingParams`. The
model's own go before them, and options before both."""

NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        metavar="K",
        help="Longest draft. Aliases: --num-assistant-tokens, --num-draft-tokens, --draft-max, ...",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH|HUB_ID|zoo:NAME",
        show_default=False,
        help="The model whose text is wanted; zoo:smollm2 where it is installed, else the toy zoo:tiny.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, one line per result.")]


def takes_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb that takes groups of options, as typer reads one: with every option on its own.

    A parameter whose type is a dataclass takes the fields of it, and ``Annotated[Group, "seed", ...]`` those alone.
    """
    options: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    signature = inspect.signature(verb, eval_str=True)
    for parameter in signature.parameters.values():
        group, *names = get_args(parameter.annotation) or (parameter.annotation,)
        if isinstance(group, type) and is_dataclass(group):
            hints = get_type_hints(group, include_extras=True)  # each in the file of the class that has it
            own = inspect.signature(group).parameters
            groups[parameter.name] = group, names or list(own)
            options += [own[name].replace(annotation=hints[name]) for name in names or own]
        else:
            options.append(parameter)

    @wraps(verb)
    def command(**given: Any) -> None:
        for name, (group, names) in groups.items():
            given[name] = group(**{option: given.pop(option) for option in names})
        verb(**given)

    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    command.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    return command


@dataclass(frozen=True)
class ModelChoice:
    """The model whose text is wanted."""

    model: Target = None
    gguf_file: Annotated[
        str | None,
        typer.Option(metavar="FILE.gguf", help="In a directory or at a hub id; --model takes a path of one as it is."),
    ] = None

    def named(self, argument: str | None) -> ModelChoice:
        """The choice where a model may also be named as an argument.

        Raises: BadParameter for two names.
        """
        if argument is None:
            return self
        if self.model is not None:
            raise typer.BadParameter(f"the model is named twice, {argument} and --model {self.model}; leave one out")
        return replace(self, model=argument)

    def chosen(self) -> str:
        """The model that was named, else the best one available."""
        return choose_model(self.model)


@dataclass(frozen=True)
class TargetOptions:
    """Options of loading a target, under the names that `LLM` takes."""

    dtype: Annotated[
        str, typer.Option(help="auto: the checkpoint's where the device computes in it, else float32.")
    ] = "auto"
    execution: Annotated[
        str, typer.Option(help="auto (compiled or packed on x86, else eager), eager, packed or compiled.")
    ] = "auto"
    quantization: Annotated[
        str | None,
        typer.Option(metavar="int8|int4", help="Round the model's weights to so many bits when they are loaded."),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(metavar="stored", help="stored: multiply by the blocks of a GGUF file as they lie in it."),
    ] = None
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="auto|bfloat16|int8", help="Round keys and values; auto is the dtype of the model.")
    ] = "auto"

    def loading(self) -> dict[str, Any]:
        """These options alone, of whatever has more."""
        return {each.name: getattr(self, each.name) for each in fields(TargetOptions)}


@dataclass(frozen=True)
class LoadingOptions(TargetOptions):
    """Options of loading and running the model, under the names that `LLM` takes."""

    device: Annotated[str, typer.Option(help="auto is the GPU where there is one.")] = "auto"
    cache_packed: Annotated[
        bool,
        typer.Option("--cache-packed", help="Keep packed weights in the cache folder, and read them there next time."),
    ] = False
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="auto|none|FOLDER",
            help="Defaults of sampling: those of the model's generation_config.json, or none.",
        ),
    ] = "auto"
    exactness: Annotated[
        str, typer.Option(help="relaxed lets drafts exceed 64 nodes, and near-ties differ from plain decoding.")
    ] = "default"
    profile_file: Annotated[
        str | None,
        typer.Option(metavar="FILE.json", help="From foredraft tune: the method if none is named, costs, acceptance."),
    ] = None


Loading = Annotated[
    LoadingOptions, "dtype", "device", "execution", "quantization", "weights", "kv_cache_dtype", "cache_packed"
]
"""Options of verbs that load a model and decide themselves how it is run."""


@dataclass(frozen=True)
class EngineOptions:
    """Limits of rows and memory: fields of `EngineConfig`."""

    max_num_seqs: Annotated[int, typer.Option(help="Rows that run at once.")] = EngineConfig.max_num_seqs
    max_model_len: Annotated[int | None, typer.Option(help="Limit of prompt and output in tokens.")] = None
    max_kv_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of keys and values: 500MB, 2GB, or 40% of what is available."),
    ] = None
    prefill_chunk_size: Annotated[int, typer.Option(help="Prompt tokens that running rows wait for at once.")] = (
        EngineConfig.prefill_chunk_size
    )


@dataclass(frozen=True)
class SamplingOptions:
    """Fields of `SamplingParams`, and of its `StructuredOutputs`, of which one may be given."""

    temperature: Annotated[float | None, typer.Option(help="By default the model's, else 0, which is greedy.")] = None
    top_k: Annotated[int | None, typer.Option(help="By default the model's, else 0, which is off.")] = None
    top_p: Annotated[float | None, typer.Option(help="By default the model's, else 1, which is off.")] = None
    min_p: Annotated[float | None, typer.Option(help="By default the model's, else 0, which is off.")] = None
    typical_p: Annotated[float, typer.Option(help="1 is off.")] = DEFAULTS.typical_p
    repetition_penalty: Annotated[float | None, typer.Option(help="By default the model's, else 1, which is off.")] = (
        None
    )
    presence_penalty: Annotated[float, typer.Option(help="0 is off.")] = DEFAULTS.presence_penalty
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.")] = DEFAULTS.frequency_penalty
    seed: Annotated[int | None, typer.Option(help="Drawn, and reported, when left out.")] = DEFAULTS.seed
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None
    n: Annotated[int, typer.Option("-n", help="Samples per prompt.")] = DEFAULTS.n
    min_tokens: Annotated[int, typer.Option(help="Tokens before which the output may not end.")] = DEFAULTS.min_tokens
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past EOS.")] = DEFAULTS.ignore_eos

    json_schema: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="JSON schema that every output must match.")
    ] = None
    regex: Annotated[str | None, typer.Option(help="Regular expression that every output must match.")] = None
    grammar: Annotated[
        str | None, typer.Option(metavar="TEXT|@FILE", help="Grammar in Lark's form or EBNF that it must match.")
    ] = None
    choice: Annotated[list[str] | None, typer.Option(help="Text that an output may be; may be repeated.")] = None

    def params(self, **more: Any) -> SamplingParams:
        """Parameters from these options and further fields; None leaves a default to the model.

        Raises: ConfigError for several structures.
        """
        given = {**vars(self), **more}
        structure = {key: given.pop(option) for key, option in _STRUCTURES.items()}
        structure = {key: value for key, value in structure.items() if value is not None}
        for key, value in structure.items():
            if key in ("json", "grammar") and value.startswith("@"):
                structure[key] = read_text(value.removeprefix("@"))
        if structure:
            given["structured_outputs"] = StructuredOutputs.of(structure)
        return replace(DEFAULTS, **{name: value for name, value in given.items() if value is not None})


_STRUCTURES = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
"""Options of structures by the fields of `StructuredOutputs`."""


@dataclass(frozen=True)
class DraftingOptions:
    """Options of drafting."""

    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|HUB_ID|zoo:NAME",
            help="A smaller model with the same tokenizer, or a head. Aliases: --assistant-model, --model-draft, ...",
        ),
    ] = None
    method: Annotated[str | None, typer.Option(help=f"{', '.join(methods())}; a+b is both. By default auto.")] = None
    num_speculative_tokens: NumSpeculativeTokens = None
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="All keys of speculation, as in vLLM.")
    ] = None

    def config(self, profile_file: str | None = None) -> SpeculativeConfig:
        """Config of drafting; method `auto` by default.

        Args:
          profile_file: output of ``foredraft tune``, if any: its choice goes before the default.

        Raises: ConfigError; BadParameter for a config beside other options.
        """
        given: dict[str, Any] = {
            "method": self.method,
            "model": self.draft_model,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        given = {key: value for key, value in given.items() if value is not None}
        if self.speculative_config is not None:
            if given:
                raise typer.BadParameter(f"leave out {_options(given)}, or put it into --speculative-config")
            return SpeculativeConfig.parse(self.speculative_config)
        chosen = None if profile_file is None or given.keys() - {"num_speculative_tokens"} else tuned(profile_file)
        if chosen is not None:
            return SpeculativeConfig.parse({**chosen, **given})
        return SpeculativeConfig.parse(given)


def numbers(option: str, text: str, kind: Callable[[str], N]) -> tuple[N, ...]:
    """``1,8`` -> 1 and 8.

    Raises: ConfigError, naming the option.
    """
    try:
        return tuple(map(kind, by_comma(text)))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"--{option} is {text!r}; give {what} by comma, such as 1,8") from None


def _options(given: Mapping[str, Any]) -> str:
    names = {"method": "--method", "model": "--draft-model", "num_speculative_tokens": "--num-speculative-tokens"}
    return ", ".join(names[key] for key in given)
