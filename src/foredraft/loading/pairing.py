"""Choice, loading and checks of the drafter for a target, from one `SpeculativeConfig`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from transformers import PreTrainedTokenizerBase

from foredraft import zoo
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import DrafterFactory, drafter_factory
from foredraft.drafters.context import DrafterContext
from foredraft.engine import governor as governing
from foredraft.engine.costs import facts_of
from foredraft.engine.drafter import Drafter
from foredraft.engine.profiles import Profile
from foredraft.errors import ConfigError, ForedraftError, TokenizerMismatchError
from foredraft.loading.companions import drafters_beside
from foredraft.loading.info import Loaded, ModelInfo, describe
from foredraft.loading.models import adapter_of, load_model, tokenizer_beside
from foredraft.loading.sources import resolve
from foredraft.methods import Method, methods, recognized
from foredraft.methods.compose import FREE
from foredraft.model.execution.execution import Execution
from foredraft.model.lm import CausalLM

_PADDING_MULTIPLES = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Drafting:
    """A drafting method that is loaded and ready to use.

    Args:
      config: the config, with the drafters that method ``auto`` chooses from and without a loaded draft model.
      new_drafter: function that makes a new drafter without state.
      model, info: draft model of the method ``draft_model`` and its description.
      heads: names of the heads that draft, for methods with heads.
      is_governed: whether measured costs decide the draft size.
      profile: profile that the governor starts with.
    """

    config: SpeculativeConfig
    new_drafter: DrafterFactory
    model: CausalLM | None = None
    info: ModelInfo | None = None
    heads: tuple[str, ...] = ()
    is_governed: bool = False
    profile: Profile | None = None
    _governor_of: WeakKeyDictionary[Execution, governing.Governor | None] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    def governor(self, target: CausalLM, drafter: Drafter) -> governing.Governor | None:
        """Return the governor shared by all engines with this drafting, one per execution; None if not governed."""
        if not self.is_governed:
            return None
        if target.execution not in self._governor_of:
            self._governor_of[target.execution] = governing.new_governor(target, drafter, self.profile)
        return self._governor_of[target.execution]

    def refresh(self) -> None:
        """Update the drafter after changes by the owner of its model; see `CausalLM.refresh`."""
        if self.model is not None:
            self.model.refresh()


@dataclass(frozen=True)
class Pairing:
    """A target and the options for loading its drafter.

    Args:
      loaded, target: the model and its adapter.
      tokenizer: tokenizer of the target, if it is known.
      zoo_name: name of a target of the zoo, which may include drafters.
      execution, trust_remote_code: options for a drafter that is a model.
      dtype: dtype that the user chose for all models. "auto" is the drafter's own dtype, but not a wider one than the
        target's.
      profile: costs and acceptance rates measured before.
    """

    loaded: Loaded
    target: CausalLM
    tokenizer: PreTrainedTokenizerBase | None
    zoo_name: str | None = None
    execution: str = "auto"
    trust_remote_code: bool = False
    dtype: str | torch.dtype = "auto"
    profile: Profile | None = None
    _in_use: WeakValueDictionary[Any, CausalLM] = field(default_factory=WeakValueDictionary, repr=False)
    _sources: WeakKeyDictionary[CausalLM, Loaded] = field(default_factory=WeakKeyDictionary, repr=False)

    def drafting(self, config: SpeculativeConfig) -> Drafting:
        """Load the drafter that the config describes, and check that it fits the target.

        Raises: CheckpointError, TokenizerMismatchError, UnsupportedModelError, ConfigError.
        """
        if self.profile is not None:  # refuses a profile of another model, even if nothing is governed
            self.profile.difference(facts_of(self.target))
        zoo_name = self.zoo_name or zoo.name_of(self.loaded.model.name_or_path)
        config = self._with_companions(config, zoo_name)
        context = DrafterContext(self.target, tokenizer=self.tokenizer, zoo_name=zoo_name)
        part = config.model_part
        name = None if part is None else part.model if part.model is not None else self._own_drafter(zoo_name)
        heads = head_names(config, zoo_name)
        _check_rounded(config, has_model=name is not None)
        if part is None or name is None:
            make = drafter_factory(config, context)
            return Drafting(config, make, heads=heads, is_governed=config.is_governed, profile=self.profile)
        check_no_head(name, part)
        draft, lm = self._draft_model(name, part)
        nameless = config.without_model()  # the stored config must not keep the user's model alive
        make = drafter_factory(nameless, replace(context, draft_model=lm))
        return Drafting(nameless, make, lm, describe(draft, lm), heads, config.is_governed, self.profile)

    def _with_companions(self, config: SpeculativeConfig, zoo_name: str | None) -> SpeculativeConfig:
        """Return the config; for method ``auto`` with default drafters, add the drafters included with the model."""
        if config.method != "auto" or config.model is not None:
            return config
        if tuple(part.method for part in config.parts) != FREE:
            return config
        others = drafters_beside(zoo_name or self.loaded.model.name_or_path)
        return SpeculativeConfig(**{**config.as_dict(), "drafters": [*config.parts, *others]}) if others else config

    def _own_drafter(self, zoo_name: str | None) -> str | None:
        """Return the name under which a target of the zoo includes a draft model, or None."""
        return zoo_name if zoo_name is not None and zoo.includes(zoo_name, "draft") else None

    def _draft_model(self, name: Any, config: SpeculativeConfig) -> tuple[Loaded, CausalLM]:
        """Return a draft model and its adapter. One that is in use already is not loaded again."""
        if isinstance(name, torch.nn.Module):
            draft = self._load(name, config)
            self._check(draft)
            return draft, adapter_of(draft, self.execution)
        key = str(name), _stamps(name), config.dtype, config.revision, config.quantization
        lm = self._in_use.get(key)
        if lm is None:
            draft = self._load(name, config)
            self._check(draft)
            self._in_use[key] = lm = adapter_of(draft, self.execution)
            self._sources[lm] = draft
        return self._sources[lm], lm

    def _load(self, name: Any, config: SpeculativeConfig) -> Loaded:
        """Load a draft model.

        Raises: ConfigError for ``quantization`` of a GGUF file; the errors of `load_model`.
        """
        if isinstance(name, torch.nn.Module):
            return load_model(name, quantization=config.quantization)
        if config.quantization is not None and resolve(name, part="draft", revision=config.revision).is_gguf:
            raise ConfigError(
                f"quantization is {config.quantization!r}, but the weights of {name} are integers already, which are "
                "used as they are in the file; leave quantization out"
            )
        return load_model(
            name,
            part="draft",
            quantization=config.quantization,
            dtype=config.dtype or self.dtype,
            widest_dtype=self.target.dtype,
            device=self.target.device,
            revision=config.revision,
            trust_remote_code=self.trust_remote_code,
        )

    def _check(self, draft: Loaded) -> None:
        ours = self.tokenizer if self.tokenizer is not None else tokenizer_beside(self.loaded.model)
        theirs = draft.tokenizer if draft.is_owned else tokenizer_beside(draft.model)
        if ours is not None and theirs is not None:
            check_same_tokenizer(ours, theirs, self.loaded.name, draft.name)
            return
        num_tokens = None if ours is None else len(ours)
        drafter_size = draft.model.config.get_text_config(decoder=True).vocab_size
        check_vocab_sizes(self.target.vocab_size, drafter_size, self.loaded.name, draft.name, num_tokens)


def _check_rounded(config: SpeculativeConfig, *, has_model: bool) -> None:
    """Check that ``quantization`` concerns a draft model or a head.

    Args:
      has_model: True if a part of the config drafts with a model besides the target.

    Raises: ConfigError.
    """
    given = [part for part in (config, *config.parts) if part.quantization is not None]
    if given and not has_model and not any(part.definition.drafts_with_heads for part in given):
        raise ConfigError(
            f"quantization is {given[0].quantization!r}, but {config.title} drafts without a model or head of its own; "
            "leave quantization out, or set model. Method 'quantized_self' drafts with a rounded copy of the target"
        )


def _stamps(name: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and modification time of a local model's files, by which a changed one is told."""
    place = Path(name)
    files = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
    stats = [(str(file), file.stat()) for file in files]
    return tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


# -- heads -------------------------------------------------------------------------------------------------------


def head_names(config: SpeculativeConfig, zoo_name: str | None = None) -> tuple[str, ...]:
    """Return the names of a config's heads for messages, and of heads that a target of the zoo includes."""
    names = []
    for part in config.parts:
        if not part.definition.drafts_with_heads:
            continue
        asset = part.definition.head
        if isinstance(part.model, torch.nn.Module):
            names.append(type(part.model).__name__)
        elif part.model is not None:
            names.append(str(part.model))
        elif zoo_name is not None and zoo.includes(zoo_name, asset):
            names.append(f"{zoo_name}, {asset} (included)")
    return tuple(names)


def check_no_head(name: Any, config: SpeculativeConfig) -> None:
    """Refuse a head in the place of a causal language model.

    Raises: ConfigError, which names the method for that head.
    """
    found = recognized(name)
    if found is not None:
        raise ConfigError(
            f"{name} contains a head that reads a target's features, not a model that method {config.method!r} could "
            f"draft with; use method {found.name!r}"
        )


# -- one tokenizer for two models --------------------------------------------------------------------------------


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, target_name: str, drafter_name: str
) -> None:
    """Compare vocabularies, ids and special tokens. Padding of the embedding matrix is ignored.

    Raises: TokenizerMismatchError, which names both models and the first token that differs.
    """
    ours, theirs = _by_id(target), _by_id(drafter)
    for token_id in sorted(ours.keys() | theirs.keys()):
        if ours.get(token_id) != theirs.get(token_id):
            raise TokenizerMismatchError(
                f"the tokenizers of {target_name} and {drafter_name} differ: id {token_id} is "
                f"{_quoted(ours.get(token_id))} in the first and {_quoted(theirs.get(token_id))} in the second; "
                "use a drafter that was trained with the target's tokenizer, or method 'ngram', which needs none"
            )
    for name in ("bos_token", "unk_token"):  # EOS may differ between a base model and its chat model
        first, second = getattr(target, name, None), getattr(drafter, name, None)
        if first is not None and second is not None and first != second:
            raise TokenizerMismatchError(
                f"the tokenizers of {target_name} and {drafter_name} differ: {name} is {first!r} in the first and "
                f"{second!r} in the second; use a drafter that was trained with the target's tokenizer"
            )


def check_vocab_sizes(
    target_size: int, drafter_size: int, target_name: str, drafter_name: str, num_tokens: int | None = None
) -> None:
    """Compare vocabulary sizes if the tokenizers are not known. One size may be the other, rounded up by padding.

    Args:
      num_tokens: size of the target's tokenizer, if it is known.

    Raises: TokenizerMismatchError.
    """
    small, large = sorted((target_size, drafter_size))
    if _is_padded(small, large) or (num_tokens is not None and _is_padded(num_tokens, drafter_size)):
        return
    raise TokenizerMismatchError(
        f"{target_name} has {target_size} token ids and its drafter, {drafter_name}, has {drafter_size}. These "
        "cannot be one vocabulary with different padding; use a drafter with the target's tokenizer"
    )


def _is_padded(size: int, padded: int) -> bool:
    """Whether ``padded`` is ``size`` rounded up to a usual multiple, such as 50257 and 50304 (64)."""
    return size == padded or any(-(-size // multiple) * multiple == padded for multiple in _PADDING_MULTIPLES)


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    vocab: dict[str, Any] = tokenizer.get_vocab()
    return {int(token_id): token for token, token_id in vocab.items()}


def _quoted(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def applicable(attempt: Callable[[SpeculativeConfig], object]) -> list[tuple[str, str | None]]:
    """Return every method with None, or with the reason why the model cannot use it.

    A method is applicable if its drafter can be made with the default options.

    Args:
      attempt: function that makes the drafter of a config, such as ``partial(drafter_factory, context=...)``.
    """
    return [(name, _refusal(method, attempt)) for name, method in methods().items() if name != "none"]


def _refusal(method: Method, attempt: Callable[[SpeculativeConfig], object]) -> str | None:
    try:
        attempt(SpeculativeConfig(method.name, **method.sample))
    except ForedraftError as error:
        return str(error)
    return None
