"""Groups of options that several verbs take, with methods that turn them into arguments of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from foredraft.cli.help import BASICS, DRAFTING, LIMITS, LOADING, OUTPUT, SAMPLING
from foredraft.cli.running import be_quiet, be_verbose, choose_model, read_text
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams, UnsetFloat, UnsetInt
from foredraft.config.speculative import SpeculativeConfig
from foredraft.config.structured import StructuredOutputs
from foredraft.config.written import by_comma, tuned
from foredraft.errors import ConfigError

N = TypeVar("N")

DEFAULTS = SamplingParams(temperature=UnsetFloat(0.0), max_tokens=UnsetInt(256))
"""Defaults of the command line: greedy decoding, long enough for an answer. All other defaults are those of
`SamplingParams`. Defaults of the model override these, and options override both."""

METHODS = "auto, none, ngram, suffix, draft_model, eagle3"
"""The methods that are used most; ``foredraft info --keys`` lists all."""

NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        metavar="K",
        rich_help_panel=DRAFTING,
        help="Longest draft in tokens. Default: the method's.",
    ),
]
Exactness = Annotated[
    str,
    typer.Option(
        metavar="default|relaxed",
        hidden=True,
        rich_help_panel=DRAFTING,
        help="relaxed: allow drafts of more than 64 tokens. Tokens of nearly equal probability may then differ "
        "from plain decoding.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        show_default=False,
        rich_help_panel=BASICS,
        help="Folder, hub id, GGUF file or zoo:NAME. Default: zoo:smollm2, or zoo:tiny if that is not installed.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print results as JSON, one per line.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", rich_help_panel=OUTPUT, help="Show kernels, packing, parameters and threads."),
]
_VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""Placeholders of values in the help, by type."""


def takes_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """Turn a verb that takes groups of options into one that takes every option separately, as typer needs it.

    A parameter whose type is a dataclass takes all fields, and ``Annotated[Group, "seed", ...]`` only those named.
    Verbs that load a model also get ``--verbose``.
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

    if any(option.name == "dtype" for option in options):
        options.append(inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose))
    for option in options:
        _name_value(option.annotation)

    @wraps(verb)
    def command(**given: Any) -> None:
        if given.pop("verbose", False):
            be_verbose()
        if given.get("as_json"):
            be_quiet()
        for name, (group, names) in groups.items():
            given[name] = group(**{option: given.pop(option) for option in names})
        verb(**given)

    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    command.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    return command


def _name_value(annotation: Any) -> None:
    """Give an option without a placeholder for its value the placeholder of its type."""
    types, options = get_args(annotation)[:1], get_args(annotation)[1:]
    for option in options:
        if isinstance(option, OptionInfo) and option.metavar is None:
            found = [_VALUES[kind] for kind in (*types, *get_args(types[0])) if kind in _VALUES]
            option.metavar = next(iter(found), None)


@dataclass(frozen=True)
class ModelChoice:
    """The model that generates."""

    model: Target = None
    gguf_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.gguf",
            hidden=True,
            rich_help_panel=LOADING,
            help="GGUF file inside the folder or hub id of --model. The path of a single file can be given as --model.",
        ),
    ] = None

    def named(self, argument: str | None) -> ModelChoice:
        """Combine with a model that was given as an argument.

        Raises: BadParameter for two names.
        """
        if argument is None:
            return self
        if self.model is not None:
            raise typer.BadParameter(f"the model is given twice, {argument} and --model {self.model}; leave one out")
        return replace(self, model=argument)

    def chosen(self) -> str:
        """Name of the model that was given, else of the best one available."""
        return choose_model(self.model)


@dataclass(frozen=True)
class TargetOptions:
    """Options of loading a target, under the names that `LLM` takes."""

    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|float32|bfloat16|float16",
            rich_help_panel=LOADING,
            show_default=False,
            help="auto: the checkpoint's if the device supports it.",
        ),
    ] = "auto"
    execution: Annotated[
        str,
        typer.Option(
            metavar="auto|eager|packed|compiled",
            hidden=True,
            rich_help_panel=LOADING,
            help="How layers run. auto: compiled or packed on x86 CPUs, eager elsewhere.",
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        typer.Option(metavar="int8|int4", rich_help_panel=LOADING, help="Round weights to 8 or 4 bits on loading."),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="stored|dequantized",
            hidden=True,
            rich_help_panel=LOADING,
            help="stored: compute with the quantised weights of a GGUF file as they are in the file, the default on"
            " CPUs with kernels. dequantized: convert them to the dtype.",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|bfloat16|int8",
            hidden=True,
            rich_help_panel=LOADING,
            help="Precision of keys and values. auto: that of the model.",
        ),
    ] = "auto"
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="int8",
            hidden=True,
            rich_help_panel=LOADING,
            help="int8: round the inputs of integer weights to 8 bits instead of 16.",
        ),
    ] = None

    def loading(self) -> dict[str, Any]:
        """Arguments of `LLM`, without the fields of subclasses."""
        return {each.name: getattr(self, each.name) for each in fields(TargetOptions)}


@dataclass(frozen=True)
class LoadingOptions(TargetOptions):
    """Options of loading and running the model, under the names that `LLM` takes."""

    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda",
            rich_help_panel=LOADING,
            show_default=False,
            help="Where the model runs. auto: the GPU if there is one.",
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="auto|none|FOLDER",
            hidden=True,
            rich_help_panel=SAMPLING,
            help="Source of sampling defaults. auto: the generation_config.json of the model.",
        ),
    ] = "auto"
    exactness: Exactness = "default"
    profile_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.json",
            rich_help_panel=DRAFTING,
            help="Take method and settings from foredraft tune.",
        ),
    ] = None


Loading = Annotated[
    LoadingOptions, "dtype", "device", "execution", "quantization", "weights", "kv_cache_dtype", "activations"
]
"""Options of verbs that load a model and set the other options themselves."""


@dataclass(frozen=True)
class EngineOptions:
    """Limits of rows and memory: fields of `EngineConfig`."""

    max_num_seqs: Annotated[int, typer.Option(rich_help_panel=LIMITS, help="Limit on sequences decoded at once.")] = (
        EngineConfig.max_num_seqs
    )
    max_model_len: Annotated[
        int | None, typer.Option(rich_help_panel=LIMITS, help="Limit on tokens of prompt and output together.")
    ] = None
    max_kv_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=LIMITS,
            help="Memory for keys and values: 500MB, 2GB or 40%.",
        ),
    ] = None
    prefill_chunk_size: Annotated[
        int,
        typer.Option(
            hidden=True,
            rich_help_panel=LIMITS,
            help="Prompt tokens that are read in one pass while other sequences wait.",
        ),
    ] = EngineConfig.prefill_chunk_size


@dataclass(frozen=True)
class SamplingOptions:
    """Fields of `SamplingParams` and of its `StructuredOutputs`, of which one may be given."""

    temperature: Annotated[
        float | None,
        typer.Option(rich_help_panel=SAMPLING, help="0 is greedy. Default: the model's, else 0."),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            hidden=True,
            rich_help_panel=SAMPLING,
            help="Sample from the N likeliest tokens only; 0 is off. Default: the model's.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=SAMPLING,
            help="Keep the likeliest tokens of this total share.",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            hidden=True,
            rich_help_panel=SAMPLING,
            help="Drop tokens below this share of the highest probability; 0 is off. Default: the model's.",
        ),
    ] = None
    typical_p: Annotated[
        float,
        typer.Option(
            hidden=True, rich_help_panel=SAMPLING, help="Keep the locally typical tokens of this mass; 1 is off."
        ),
    ] = DEFAULTS.typical_p
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            hidden=True,
            rich_help_panel=SAMPLING,
            help="Factor that makes tokens of prompt and output less likely; 1 is off. Default: the model's.",
        ),
    ] = None
    presence_penalty: Annotated[
        float,
        typer.Option(
            hidden=True, rich_help_panel=SAMPLING, help="Penalty for tokens that the output contains; 0 is off."
        ),
    ] = DEFAULTS.presence_penalty
    frequency_penalty: Annotated[
        float,
        typer.Option(hidden=True, rich_help_panel=SAMPLING, help="Penalty per occurrence in the output; 0 is off."),
    ] = DEFAULTS.frequency_penalty
    seed: Annotated[
        int | None,
        typer.Option(rich_help_panel=SAMPLING, help="Seed of sampling. Default: drawn and reported."),
    ] = DEFAULTS.seed
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", rich_help_panel=SAMPLING, help="Text that ends the output; may be repeated."),
    ] = None
    n: Annotated[int, typer.Option("-n", rich_help_panel=SAMPLING, help="Samples per prompt.")] = DEFAULTS.n
    min_tokens: Annotated[
        int, typer.Option(hidden=True, rich_help_panel=SAMPLING, help="Fewest tokens before the output may end.")
    ] = DEFAULTS.min_tokens
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", hidden=True, rich_help_panel=SAMPLING, help="Continue after the model ends the output."
        ),
    ] = DEFAULTS.ignore_eos

    json_schema: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE", rich_help_panel=OUTPUT, help="JSON schema that every output must match."),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(hidden=True, rich_help_panel=OUTPUT, help="Regular expression that every output must match."),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|@FILE",
            hidden=True,
            rich_help_panel=OUTPUT,
            help="Grammar, in the format of Lark or EBNF, that every output must match.",
        ),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            hidden=True,
            rich_help_panel=OUTPUT,
            help="A permitted output; repeat it for each choice.",
        ),
    ] = None

    def params(self, **more: Any) -> SamplingParams:
        """Parameters from these options and further fields. None leaves the default to the model.

        Raises: ConfigError for several structures, GrammarError for one that cannot be compiled.
        """
        given = {**vars(self), **more}
        structure = {key: given.pop(option) for key, option in _STRUCTURES.items()}
        structure = {key: value for key, value in structure.items() if value is not None}
        for key, value in structure.items():
            if key in ("json", "grammar") and value.startswith("@"):
                structure[key] = read_text(value.removeprefix("@"))
        if structure:
            given["structured_outputs"] = wanted = StructuredOutputs.of(structure)
            from foredraft.structured.grammars import check_grammar  # which loads NumPy

            check_grammar(wanted)
        return replace(DEFAULTS, **{name: value for name, value in given.items() if value is not None})


_STRUCTURES = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
"""Options of output formats by field of `StructuredOutputs`."""


@dataclass(frozen=True)
class DraftingOptions:
    """Options of drafting."""

    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=DRAFTING,
            help=f"{METHODS}, ... or a+b; foredraft info --keys lists all. By default auto.",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            rich_help_panel=DRAFTING,
            help="Smaller model with the same tokenizer, or a head.",
        ),
    ] = None
    draft_quantization: Annotated[
        str | None,
        typer.Option(
            metavar="int8|int4",
            hidden=True,
            rich_help_panel=DRAFTING,
            help="Round the weights of the draft model or head to 8 or 4 bits on loading.",
        ),
    ] = None
    num_speculative_tokens: NumSpeculativeTokens = None
    speculative_config: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE", rich_help_panel=DRAFTING, help="All drafting settings, with vLLM's keys."),
    ] = None

    def config(self, profile_file: str | None = None) -> SpeculativeConfig:
        """Config of drafting; the default method is `auto`.

        Args:
          profile_file: output of ``foredraft tune``, if any. The method of that profile replaces the default.

        Raises: ConfigError; BadParameter for ``speculative_config`` together with another option.
        """
        given: dict[str, Any] = {
            "method": self.method,
            "model": self.draft_model,
            "quantization": self.draft_quantization,
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
    """Numbers of a list with commas: ``1,8`` -> 1 and 8.

    Raises: ConfigError, naming the option.
    """
    try:
        return tuple(map(kind, by_comma(text)))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"--{option} is {text!r}; give {what} separated by commas, such as 1,8") from None


def _options(given: Mapping[str, Any]) -> str:
    names = {"model": "--draft-model", "quantization": "--draft-quantization"}
    return ", ".join(names.get(key, f"--{key.replace('_', '-')}") for key in given)
