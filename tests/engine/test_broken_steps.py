"""A step that breaks off ends the calls that had rows in it, and no other: rows that waited get the plain tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foredraft import LLM, SamplingParams
from foredraft.engine.drafter import listens
from foredraft.engine.drafts import Drafts
from foredraft.heads.checkpoint import write_checkpoint
from foredraft.heads.eagle import EagleHead, EagleShape, default_streams
from foredraft.heads.eagle_layouts import write_eagle
from foredraft.heads.layers import LayerShape
from foredraft.heads.medusa_hydra import HeadsShape, HydraHeads, MedusaHeads
from foredraft.heads.medusa_hydra_layouts import write_hydra, write_medusa
from foredraft.methods import methods
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.retrieval.build import from_tokens
from foredraft.testing import toy_model

PROMPTS = ["Once upon a time there was a", "How many apples does Tom have? Tom has", "A lion", "The", "Once upon a"]
PARAMS = SamplingParams(temperature=1, max_tokens=8, seed=5)
CONFIGS: list[Any] = [
    *(({"method": name, **method.sample}) for name, method in methods().items()),
    {"method": "draft_model", "num_draft_branches": 2, "num_speculative_tokens": 3},
    {"method": "first", "drafters": ["ngram", "draft_model"]},
    {"method": "union", "drafters": ["token_recycling", "draft_model"]},
]
TOY_PARAMS = SamplingParams(temperature=1, max_tokens=12, seed=5)
TOY_IDS = [[5, 6, 7, 5, 6], [9, 3, 9, 3, 9, 3, 9], [11], [2, 4], [5, 6, 7]]
HEADS = ("medusa", "hydra", "hydra++", "eagle", "eagle2", "eagle3")


def mark_of(name: str) -> Any:
    """Mark of an entry, which begins with its method: one of each way to keep state belongs to `make test`."""
    if name in ("ngram", "draft_model"):
        return ()
    return pytest.mark.slow if name.startswith(("layer_skip", "eagle3", "union")) else pytest.mark.full


def entries() -> list[Any]:
    names = ["-".join(map(str, config.values())) for config in CONFIGS]
    return [pytest.param(config, id=name, marks=mark_of(name)) for config, name in zip(CONFIGS, names, strict=True)]


def head_of(method: str, folder: Path) -> str:
    """A head with random weights for the toy, in a folder; breaking off does not depend on what it has learned."""
    target = toy().target.config
    size, vocabulary = target.hidden_size, target.vocab_size
    torch.manual_seed(0)
    if method == "medusa":
        write_checkpoint(folder, *write_medusa(MedusaHeads(HeadsShape(size, vocabulary, 3))))
    elif method.startswith("hydra"):
        prefix = LayerShape(size, 2 * size, 4, 2, size // 4) if method == "hydra++" else None
        write_checkpoint(folder, *write_hydra(HydraHeads(HeadsShape(size, vocabulary, 3, prefix=prefix))))
    else:
        layer = LayerShape(size, 2 * size, 4, 2, size // 4)
        depth = target.num_hidden_layers
        streams = default_streams(depth) if method == "eagle3" else (depth,)
        shape = EagleShape(3 if method == "eagle3" else 1, layer, size, streams, depth)
        write_checkpoint(folder, *write_eagle(EagleHead(shape)))
    return str(folder)


class Interrupt(BaseException):
    """What Ctrl-C does, at a chosen place."""


def breaking(function: Callable[..., Any], num_calls: int, *, after: bool) -> Callable[..., Any]:
    """The function, raising on its n-th call, before or after its work, and sound otherwise."""
    calls = [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == num_calls and not after:
            raise Interrupt
        result = function(*args, **kwargs)
        if calls[0] == num_calls:
            raise Interrupt
        return result

    return broken


@cache
def plain() -> LLM:
    return LLM("zoo:tiny", dtype="float32", max_num_seqs=2)


@cache
def toy() -> LLM:
    """What every method is tried on: a step of it costs a fraction of one of zoo:tiny."""
    return LLM(toy_model(64, dtype=torch.float32), max_num_seqs=2)


@cache
def drafter_of_toy() -> PreTrainedModel:
    return toy_model(64, dtype=torch.float32, seed=1)


@cache
def expected_of_toy() -> list[Any]:
    return tokens(toy().generate(given(TOY_IDS), TOY_PARAMS))


def given(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def completed(config: Any, folder: Path) -> Any:
    """A config with what it needs beside the toy: a draft model, a head, texts, layers to leave out."""
    if not isinstance(config, dict):
        return completed({"method": config}, folder) if config in ("draft_model", *HEADS) else config
    method = config["method"]
    if "drafters" in config:
        return {**config, "drafters": [completed(part, folder) for part in config["drafters"]]}
    if method in HEADS:
        return {**config, "model": head_of(method, folder / "head")}
    if method == "draft_model":
        return {**config, "model": drafter_of_toy()}
    if method == "rest":
        from_tokens(TOY_IDS, folder / "texts", vocab_size=64)
        return {**config, "datastore": str(folder / "texts")}
    return {**config, "exit_layer": 1} if method == "layer_skip" else config


@cache
def expected() -> list[Any]:
    return tokens(plain().generate(PROMPTS, PARAMS))


def tokens(outputs: list[Any]) -> list[Any]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def places(llm: LLM) -> list[tuple[Any, str, int]]:
    """Where a step may be cut off: owner, name, and at which call."""
    made = llm.drafting.new_drafter()
    drafter = type(made)
    verbs = [(drafter, name, 2) for name in (("propose", "observe") if listens(made) else ("propose",))]
    forwards = [(CausalLM, "forward", number) for number in (1, 2, 4)]  # of the target or of a draft model
    return [*verbs, (drafter, "start", 1), (Drafts, "end", 1), *forwards]


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", entries())
def test_who_only_waited_finishes_with_the_plain_tokens(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two rows run at once, so those of the second call wait, as does the third row of the first call."""
    llm = toy().with_speculative_config(completed(config, tmp_path))
    prompts, wanted = given(TOY_IDS), expected_of_toy()
    for number, (owner, name, num_calls) in enumerate(places(llm)):
        setting = f"{owner.__name__}.{name}, call {num_calls}"
        first = llm.stream(prompts[:3], TOY_PARAMS)
        second = llm.stream(prompts[3:], TOY_PARAMS)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, breaking(getattr(owner, name), num_calls, after=number % 2 == 0))
            with pytest.raises(Interrupt):
                list(first)
        assert [sample.outputs[0].finish_reason for sample in first.outputs()].count("abort") >= 1, setting
        assert llm.num_unfinished <= 2, setting  # the third row of the first call does not wait any more
        list(second)
        assert tokens(second.outputs()) == wanted[3:], setting
        assert llm.num_unfinished == 0, setting
    assert tokens(llm.generate(prompts[:3], TOY_PARAMS)) == wanted[:3]


@pytest.mark.full
def test_whoever_steps_is_spared_the_error_of_others() -> None:
    """The processor of the first call raises while the second one, which waits, steps the engine."""
    llm = plain().with_speculative_config("draft_model")

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    first = llm.stream(PROMPTS[:3], replace(PARAMS, logits_processors=[broken]))
    assert tokens(llm.generate(PROMPTS[3:], PARAMS)) == expected()[3:]
    with pytest.raises(RuntimeError, match="broken"):
        list(first)


def test_an_error_that_belongs_to_no_row_ends_whoever_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = plain().with_speculative_config("none")

    def full(self: KVCache, *args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "add_rows", full)
        with pytest.raises(MemoryError):
            llm.generate(PROMPTS, PARAMS)
    assert llm.num_unfinished == 0
    assert tokens(llm.generate(PROMPTS, PARAMS)) == expected()


def test_a_close_that_is_cut_off_tells_those_whose_rows_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would step for ever, waiting for rows that the engine does not have any more."""
    llm = plain().with_speculative_config("draft_model")
    first, second, third = (llm.stream(prompt, PARAMS) for prompt in PROMPTS[:3])
    next(first)
    next(second)
    with monkeypatch.context() as patch:
        patch.setattr(Drafts, "end", breaking(Drafts.end, 1, after=False))
        with pytest.raises(Interrupt):
            first.close()
    assert list(first) == []
    with pytest.raises(Interrupt):
        list(second)
    list(third)
    assert tokens(third.outputs()) == expected()[2:3]
    assert llm.num_unfinished == 0
    assert tokens(llm.generate(PROMPTS, PARAMS)) == expected()


def test_a_text_that_cannot_be_taken_in_ends_the_calls_with_rows_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step itself was sound, but what it gave did not reach those who wait for it."""
    llm = plain().with_speculative_config("draft_model")
    assert llm.tokenizer is not None
    first, second = llm.stream(PROMPTS[:3], PARAMS), llm.stream(PROMPTS[3:], PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.tokenizer), "decode", breaking(type(llm.tokenizer).decode, 3, after=False))
        with pytest.raises(Interrupt):
            list(first)
    list(second)
    assert tokens(second.outputs()) == expected()[3:]
    assert tokens(llm.generate(PROMPTS, PARAMS)) == expected()
