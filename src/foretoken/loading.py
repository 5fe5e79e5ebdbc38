"""From what a user names to models and tokenizers in memory, with typed errors for everything that can go wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from foretoken import zoo
from foretoken.engine.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.engine.execution import cpu_has_bfloat16
from foretoken.modelinfo import Loaded, model_name

ZOO = zoo.PREFIX
DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "double": torch.float64,
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


@dataclass(frozen=True)
class Source:
    """Where a model is loaded from.

    Args:
      location: a directory or a hub id.
      name: how it is called in messages.
      revision: of a hub id.
      trust_remote_code: run modelling code that comes with the checkpoint.
    """

    location: str
    name: str
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def is_local(self) -> bool:
        return os.path.isdir(self.location)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for every ``from_pretrained``."""
        return {
            "revision": self.revision or "main",
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": self.is_local,
        }


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    part: str = "target",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """Load a model, or take one that is loaded already.

    Args:
      model: a directory, a hub id, ``zoo:NAME``, or a model, which keeps its dtype and device.
      part: "target" or "draft", of a model of the zoo.
      dtype: "auto" is bfloat16 where the device computes in it, else float32.
      device: "auto" is the GPU where there is one.

    Raises: CheckpointError, UnsupportedModelError, ConfigError.
    """
    if isinstance(model, PreTrainedModel):
        _check_kept(model, dtype, device)
        return Loaded.of(model, model_name(model), False)
    source = resolve(model, part=part, revision=revision, trust_remote_code=trust_remote_code)
    place = choose_device(device)
    loaded, stored_dtype = _load_weights(source, choose_dtype(dtype, place))
    return Loaded.of(loaded.to(place).eval(), source.name, True, load_tokenizer_of(source, part), stored_dtype)


def resolve(
    model: str | os.PathLike[str],
    *,
    part: str = "target",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Source:
    """Decide what a name means.

    Raises: CheckpointError for a path that does not exist, or a file; ConfigError for what is no name at all.
    """
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise ConfigError(f"model is {model!r}; give a directory, a hub id, zoo:NAME or a loaded PreTrainedModel")
    name = os.fspath(model)
    if name.startswith(ZOO):
        return Source(str(zoo.path(name, part)), name if part == "target" else f"{name} ({part})")
    location = os.path.expanduser(name)
    if os.path.isfile(location):
        raise CheckpointError(f"{name} is a file; give the directory that holds config.json and the weights")
    if not os.path.isdir(location) and _looks_like_path(name):
        raise CheckpointError(f"{name} does not exist; give a directory, a hub id (owner/name) or zoo:NAME")
    return Source(location, name, revision, trust_remote_code)


def is_zoo(model: object) -> bool:
    """Whether a model is named by the zoo, whose manifest says what it brings along."""
    return isinstance(model, str) and model.startswith(ZOO)


def load_tokenizer(tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer by name, or the one given."""
    if isinstance(tokenizer, (str, os.PathLike)):
        source = resolve(tokenizer, part="tokenizer")
        found = load_tokenizer_of(source, "tokenizer")
        if found is None:
            raise CheckpointError(f"{source.name} holds no tokenizer (looked for {', '.join(_TOKENIZER_FILES)})")
        return found
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"tokenizer is {type(tokenizer).__name__}; give a directory, a hub id or a loaded tokenizer")
    return tokenizer


def load_tokenizer_of(source: Source, part: str = "target") -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a model; None where a directory holds none."""
    if source.name.startswith(ZOO):
        source = Source(str(zoo.path(source.name.split(" ")[0], "tokenizer")), source.name)
    if source.is_local and not any((Path(source.location) / file).exists() for file in _TOKENIZER_FILES):
        return None
    with _as_checkpoint_error(source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.location, **source.options)
    return tokenizer


def tokenizer_beside(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the directory a loaded model came from, if it is still there. Asks no hub."""
    location = str(getattr(model, "name_or_path", "") or "")
    return load_tokenizer_of(Source(location, location)) if location and os.path.isdir(location) else None


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device to load to; "auto" and None mean the GPU where there is one."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}: {error}; write cpu, cuda or cuda:0") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch sees no GPU here; use cpu")
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to load in."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or cpu_has_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _check_kept(model: PreTrainedModel, dtype: str | torch.dtype, device: str | torch.device | None) -> None:
    """A loaded model is not converted or moved behind its owner's back."""
    if dtype != "auto" and choose_dtype(dtype, model.device) != model.dtype:
        raise ConfigError(
            f"dtype is {dtype!r}, but the loaded model is in {model.dtype}; convert it with model.to(...)"
        )
    if device not in (None, "auto") and choose_device(device).type != model.device.type:
        raise ConfigError(
            f"device is {device!r}, but the loaded model is on {model.device}; move it with model.to(...)"
        )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or (os.sep != "/" and os.sep in name)


def _load_weights(source: Source, dtype: torch.dtype) -> tuple[Any, torch.dtype | None]:
    """The model in this dtype, every weight from the checkpoint; and the dtype that the checkpoint says it has."""
    with _as_checkpoint_error(source, "configuration"):
        config = AutoConfig.from_pretrained(source.location, **source.options)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{source.name} is an encoder-decoder model ({config.model_type}); foretoken decodes causal language models"
        )
    stored = config.get_text_config(decoder=True).dtype
    stored_dtype = stored if isinstance(stored, torch.dtype) else None
    with _as_checkpoint_error(source, "weights"), _quiet(source.name.startswith(ZOO)):
        model, report = AutoModelForCausalLM.from_pretrained(
            source.location, config=config, dtype=dtype, output_loading_info=True, **source.options
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{source.name} lacks {len(missing)} weights of its configuration ({', '.join(missing[:3])}, ...), which "
            "would start out random; download or save the checkpoint again"
        )
    return model, stored_dtype


@contextmanager
def _as_checkpoint_error(source: Source, what: str) -> Iterator[None]:
    """Everything that loaders raise becomes a CheckpointError that says where, what and what to do."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        detail = " ".join(str(error).split())
        raise CheckpointError(
            f"the {what} of {source.name} cannot be loaded ({type(error).__name__}: {detail[:300]}); "
            f"{_remedy(source, error)}"
        ) from error


def _remedy(source: Source, error: Exception) -> str:
    if not source.is_local:
        return (
            "it is no directory here and could not be fetched as a hub id: check the spelling and the network, or "
            "give a directory or zoo:tiny"
        )
    if isinstance(error, SafetensorError):
        return "a weight file is truncated or damaged: download or copy it again"
    return "the directory needs config.json and the weights as save_pretrained writes them"


@contextmanager
def _quiet(is_quiet: bool) -> Iterator[None]:
    """Small files need no progress bar; the user's setting is put back."""
    shown = is_quiet and transformers_logging.is_progress_bar_enabled()
    if shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
