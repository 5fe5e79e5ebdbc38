"""Load a target and its drafter for the scripts of this folder, made wider, and pad prompts to a length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from foredraft import zoo
from foredraft.bench.methods import describe
from foredraft.bench.workload import BenchPrompt
from foredraft.loading.info import eos_token_ids
from foredraft.loading.models import is_zoo, load_model
from foredraft.testing.inflation import inflate
from foredraft.tune.scale import sizes

TOPIC_CHARACTERS = 4000
"""Length to which topics are cut: some alone are longer than a context."""


@dataclass(frozen=True)
class Pair:
    """A target, its drafter (None where there is none) and their tokenizer, as transformers objects.

    Args:
      zoo_name: of a target of the zoo, inflated or not.
    """

    target: Any
    drafter: Any
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    zoo_name: str | None = None

    @property
    def label(self) -> str:
        """For tables; says so when a model is inflated."""
        return " + ".join(describe(model) for model in (self.target, self.drafter) if model is not None)


def load_pair(model: str, draft_model: str | None, dtype: str) -> Pair:
    """Load a target and its drafter; a model of the zoo may bring its own.

    Raises: CheckpointError, ConfigError.
    """
    target = load_model(model, dtype=dtype)
    zoo_name = model if is_zoo(model) else None
    name = draft_model or (zoo_name if zoo_name is not None and zoo.includes(zoo_name, "draft") else None)
    drafter = None if name is None else load_model(name, part="draft", dtype=target.model.dtype).model
    return Pair(target.model, drafter, target.tokenizer, tuple(eos_token_ids(target.model)), zoo_name)


def scaled(pair: Pair, scale: str, vocab_size: int | None = None) -> Pair:
    """The pair with its target inflated (width only), and both vocabularies padded where that is asked for.

    Raises: ConfigError for an unknown scale.
    """
    hidden, ffn = sizes(scale) or (0, 0)
    if not hidden and vocab_size is None:
        return pair
    config = pair.target.config
    target = inflate(
        pair.target,
        hidden_size=hidden or config.hidden_size * 2,
        intermediate_size=ffn or config.intermediate_size,
        vocab_size=vocab_size,
    )
    return replace(pair, target=target, drafter=widened(pair.drafter, 1 if vocab_size is None else 2, vocab_size))


def widened(drafter: Any, factor: int, vocab_size: int | None = None) -> Any:
    """A drafter of so many times the width."""
    if drafter is None or (factor == 1 and vocab_size is None):
        return drafter
    config = drafter.config
    hidden, ffn = config.hidden_size * factor, config.intermediate_size * factor
    return inflate(drafter, hidden_size=hidden, intermediate_size=ffn, vocab_size=vocab_size)


def padded(tokenizer: Any, prompts: Iterable[BenchPrompt], context: int, room: int | None) -> list[BenchPrompt]:
    """Prompts with real text in front of them, up to ``context`` tokens; a longer one stays as it is.

    Args:
      room: longest prompt; others are left out.
    """
    found = []
    for place, prompt in enumerate(prompts):
        ids = (*padding(tokenizer, context - len(prompt.token_ids), place), *prompt.token_ids)
        if room is None or len(ids) <= room:
            found.append(replace(prompt, token_ids=ids))
    return found


def padding(tokenizer: Any, length: int, offset: int) -> tuple[int, ...]:
    """``length`` tokens of English prose: the Python reference that every CPython carries, from a place of its own."""
    if length <= 0:
        return ()
    from pydoc_data.topics import topics

    texts: list[str] = [topics[name][:TOPIC_CHARACTERS] for name in sorted(topics)]
    start = 7 * offset % len(texts)
    ids: list[int] = []
    for text in cycle([*texts[start:], *texts[:start]]):
        ids += tokenizer(f"{text}\n\n", add_special_tokens=False)["input_ids"]
        if len(ids) >= length:
            break
    return tuple(ids[:length])
