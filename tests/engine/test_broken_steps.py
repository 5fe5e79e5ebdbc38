"""A step that breaks off ends the calls that had rows in it, and no other: rows that waited get the plain tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cuts import cut_at, spread
from foredraft import LLM, SamplingParams
from foredraft.heads.checkpoint import write_checkpoint
from foredraft.heads.eagle import EagleHead, EagleShape, default_streams
from foredraft.heads.eagle_layouts import write_eagle
from foredraft.heads.layers import LayerShape
from foredraft.heads.medusa_hydra import HeadsShape, HydraHeads, MedusaHeads
from foredraft.heads.medusa_hydra_layouts import write_hydra, write_medusa
from foredraft.methods import methods
from foredraft.model.cache.ragged import KVCache
from foredraft.retrieval.build import from_tokens
from foredraft.testing import toy_model

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


NAMED = {"-".join(map(str, config.values())): config for config in CONFIGS}


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


def tokens(outputs: list[Any]) -> list[Any]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark_of(name)) for name in NAMED])
def test_who_only_waited_finishes_with_the_plain_tokens(name: str, tmp_path: Path) -> None:
    """Two rows run at once, so those of the second call wait, as does the third row of the first call."""
    llm = toy().with_speculative_config(completed(NAMED[name], tmp_path))
    prompts, wanted = given(TOY_IDS), expected_of_toy()

    def streams() -> list[Any]:
        return [llm.stream(prompts[:3], TOY_PARAMS), llm.stream(prompts[3:], TOY_PARAMS)]

    first, second = streams()
    num_lines = cut_at(None, lambda: [next(first) for _ in range(4)])
    first.close(), second.close()
    left = []
    for number in spread(num_lines, 8):
        first, second = streams()
        cut_at(number, partial(list, first))
        left.append(llm.num_unfinished)
        first.close()
        assert [sample.outputs[0].finish_reason for sample in first.outputs()].count("abort") >= 1, number
        list(second)
        assert tokens(second.outputs()) == wanted[3:], number
        assert llm.num_unfinished == 0, number
    assert set(left) <= {2, 5}  # all rows of the first call, or none where it was cut off outside of a step
    assert left.count(2) > 4
    assert tokens(llm.generate(prompts[:3], TOY_PARAMS)) == wanted[:3]


@pytest.mark.full
def test_whoever_steps_is_spared_the_error_of_others() -> None:
    """The processor of the first call raises while the second one, which waits, steps the engine."""
    llm, prompts = toy().with_speculative_config("ngram"), given(TOY_IDS)

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    first = llm.stream(prompts[:3], replace(TOY_PARAMS, logits_processors=[broken]))
    assert tokens(llm.generate(prompts[3:], TOY_PARAMS)) == expected_of_toy()[3:]
    with pytest.raises(RuntimeError, match="broken"):
        list(first)


def test_an_error_that_belongs_to_no_row_ends_whoever_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy().with_speculative_config("none")

    def full(self: KVCache, *args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "add_rows", full)
        with pytest.raises(MemoryError):
            llm.generate(given(TOY_IDS), TOY_PARAMS)
    assert llm.num_unfinished == 0
    assert tokens(llm.generate(given(TOY_IDS), TOY_PARAMS)) == expected_of_toy()


def test_a_close_that_is_cut_off_tells_those_whose_rows_it_ends(tmp_path: Path) -> None:
    """They would step for ever, waiting for rows that the engine does not have any more."""
    llm, prompts = toy().with_speculative_config(completed("draft_model", tmp_path)), given(TOY_IDS)

    def begun() -> list[Any]:
        streams = [llm.stream(prompt, TOY_PARAMS) for prompt in prompts[:3]]
        next(streams[0]), next(streams[1])
        return streams

    sound = begun()
    num_lines = cut_at(None, sound[0].close)
    for stream in sound:
        stream.close()
    num_ended = 0
    for number in spread(num_lines, 12):
        streams = begun()
        cut_at(number, streams[0].close)
        for stream, want in zip(streams, expected_of_toy(), strict=False):
            try:
                list(stream)
            except KeyboardInterrupt:
                num_ended += 1
            (said,) = tokens(stream.outputs())
            assert said == want[: len(said)], number
        assert said == expected_of_toy()[2], number  # of the one that waited
        assert llm.num_unfinished == 0, number
    assert num_ended > 0
    assert tokens(llm.generate(prompts, TOY_PARAMS)) == expected_of_toy()


def test_a_text_that_cannot_be_taken_in_ends_the_calls_with_rows_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step itself was sound, but what it gave did not reach those who wait for it."""
    llm = LLM("zoo:tiny", "draft_model", dtype="float32", max_num_seqs=2)
    prompts = ["Once upon a time there was a", "How many apples? Tom has", "A lion", "The", "Once upon a"]
    expected = tokens(llm.generate(prompts, TOY_PARAMS))
    first, second = llm.stream(prompts[:3], TOY_PARAMS), llm.stream(prompts[3:], TOY_PARAMS)
    decode, calls = type(llm.tokenizer).decode, count()

    def broken(*args: Any, **keys: Any) -> str:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return str(decode(*args, **keys))

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.tokenizer), "decode", broken)
        with pytest.raises(KeyboardInterrupt):
            list(first)
    list(second)
    assert tokens(second.outputs()) == expected[3:]
    assert tokens(llm.generate(prompts, TOY_PARAMS)) == expected
