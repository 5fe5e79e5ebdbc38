"""Texts end where plain `generate` ends them: stop strings at every offset of a block, time, criteria of one's own."""

from __future__ import annotations

import copy
import string
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from foredraft import speculate, zoo
from foredraft.errors import ConfigError
from foredraft.testing import perturbed, toy_model

BUDGET = 24


@cache
def target() -> PreTrainedModel:
    model = toy_model()
    model.generation_config.pad_token_id = 3
    return model


CHARACTERS = string.ascii_letters + string.digits + "._"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the i-th of 64 characters, so that every token can be asked for by a string."""
    letters = Tokenizer(BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    letters.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters)


def inputs(*rows: list[int]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[3] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])}


def new(output: torch.Tensor, prompt: dict[str, torch.Tensor]) -> list[list[int]]:
    rows: list[list[int]] = output[:, prompt["input_ids"].shape[1] :].tolist()
    return rows


@cache
def twin() -> PreTrainedModel:
    return perturbed(target(), 0.0)


def hook(**options: Any) -> Any:
    """Drafts of six that are always accepted."""
    return speculate("draft_model", model=twin(), num_speculative_tokens=6, **options)


def test_a_stop_string_ends_the_text_at_every_offset_of_a_block() -> None:
    prompt = inputs([10, 11, 12])
    (text,) = new(target().generate(**prompt, max_new_tokens=BUDGET, do_sample=False), prompt)
    firsts = [place for place, token in enumerate(text) if token not in text[:place]]
    offsets = set()
    for place in firsts:
        stop = CHARACTERS[text[place]]
        drafted = hook(tokenizer=tokenizer(), stop_strings=stop)
        output = target().generate(**prompt, max_new_tokens=BUDGET, do_sample=False, custom_generate=drafted)
        assert new(output, prompt) == [text[: place + 1]]
        theirs = target().generate(
            **prompt, max_new_tokens=BUDGET, do_sample=False, stop_strings=stop, tokenizer=tokenizer()
        )
        assert torch.equal(output, theirs)
        offsets.add(place % 7)
    assert offsets == set(range(7))
    assert drafted.stats.tokens_per_step > 3


@pytest.mark.parametrize("eos", [None, 24])
def test_stop_strings_in_a_batch(eos: int | None) -> None:
    """Rows end alone and are padded; without an end-of-sequence token transformers lets them talk on."""
    prompt = inputs([10, 11, 12], [20, 21], [30, 31, 32, 33])
    stops = [CHARACTERS[44], CHARACTERS[58] * 2]
    options = {**prompt, "max_new_tokens": BUDGET, "do_sample": False, "eos_token_id": eos}
    theirs = target().generate(**options, stop_strings=stops, tokenizer=tokenizer())
    ours = target().generate(**options, custom_generate=hook(tokenizer=tokenizer(), stop_strings=stops))
    assert torch.equal(ours, theirs)
    assert theirs.shape[1] < 4 + BUDGET
    assert (3 in theirs[1, 8:].tolist()) or eos is None


def test_a_row_that_has_ended_costs_nothing_more() -> None:
    """The second row ends with its fifth token, within a block of seven; the first one goes on to the budget."""
    prompt, drafted = inputs([10, 11, 12], [20, 21]), hook(tokenizer=tokenizer(), stop_strings=CHARACTERS[44])
    target().generate(
        **prompt, max_new_tokens=BUDGET, do_sample=False, eos_token_id=63, pad_token_id=3, custom_generate=drafted
    )
    assert drafted.stats.num_emitted_tokens <= BUDGET + 5 + 7


class AllHaveSaid(StoppingCriteria):
    """As lm-evaluation-harness stops: only when every row of the batch has said the string; it keeps count itself."""

    def __init__(self, stop: str, start: int, rows: int) -> None:
        self.stop, self.start = stop, start
        self.has_said = [False] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        texts = tokenizer().batch_decode(input_ids[:, self.start :][:, -3:])
        self.has_said = [said or self.stop in text for said, text in zip(self.has_said, texts, strict=True)]
        return all(self.has_said)


@pytest.mark.parametrize(("stop", "eos"), [(CHARACTERS[53], None), (CHARACTERS[28], 24)])
def test_the_call_of_the_evaluation_harness(stop: str, eos: int | None) -> None:
    """Left padding, `max_length`, one stateful criterion for the whole batch, no `max_new_tokens`."""
    prompt = inputs([10, 11, 12], [20, 21], [30, 31, 32, 33])

    def call(**options: Any) -> torch.Tensor:
        width = prompt["input_ids"].shape[1]
        result: torch.Tensor = target().generate(
            **prompt,
            max_length=width + BUDGET,
            stopping_criteria=StoppingCriteriaList([AllHaveSaid(stop, width, 3)]),
            pad_token_id=3,
            eos_token_id=eos,
            use_cache=True,
            do_sample=False,
            **options,
        )
        return result

    assert torch.equal(call(custom_generate=hook()), call())


def test_a_criterion_of_ones_own_sees_every_length_once() -> None:
    seen: list[int] = []

    class Sum(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            seen.append(input_ids.shape[1])
            return input_ids[:, 3:].sum(-1) > 300

    prompt = inputs([10, 11, 12])
    options = {**prompt, "max_new_tokens": BUDGET, "do_sample": False}
    theirs = target().generate(**options, stopping_criteria=[Sum()])
    plain, seen[:] = list(seen), []
    ours = target().generate(**options, stopping_criteria=[Sum()], custom_generate=hook())
    assert torch.equal(ours, theirs)
    assert seen == plain == list(range(4, theirs.shape[1] + 1))


def test_time_runs_out() -> None:
    """Checked after every token, and `generate`'s own max_time comes as a criterion too."""
    prompt = inputs([10, 11, 12])
    ended = MaxTimeCriteria(max_time=1.0, initial_timestamp=time.time() - 2)
    output = target().generate(
        **prompt, max_new_tokens=200, stopping_criteria=[ended], custom_generate=hook(), do_sample=False
    )
    assert output.shape == (1, 4)
    short = target().generate(**prompt, max_new_tokens=200, max_time=1e-4, custom_generate=hook(), do_sample=False)
    assert short.shape == (1, 4)


def test_several_rules_at_once() -> None:
    prompt = inputs([10, 11, 12], [20, 21])
    criteria = [StopStringCriteria(tokenizer(), [CHARACTERS[28]]), AllHaveSaid(CHARACTERS[58], 3, 2)]
    options = {**prompt, "max_new_tokens": BUDGET, "do_sample": False, "eos_token_id": [24, 41]}
    theirs = target().generate(**options, stopping_criteria=criteria)
    criteria = [StopStringCriteria(tokenizer(), [CHARACTERS[28]]), AllHaveSaid(CHARACTERS[58], 3, 2)]
    assert torch.equal(target().generate(**options, stopping_criteria=criteria, custom_generate=hook()), theirs)


# -- on real text -----------------------------------------------------------------------------------------------------

KING = "The king said:"
WARM_UP, LENGTHS, NUM_NEW, NUM_DRAFT_TOKENS = 120, range(1, 15), 40, 6

Generate = Callable[..., int]


def generators_of(model: Any, tokenizer: Any, ids: torch.Tensor) -> dict[str, Generate]:
    """Ways of generating with a stop string, each of which returns the number of new tokens."""
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = NUM_DRAFT_TOKENS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0

    def run(**options: Any) -> int:
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, **options)
        return int(output.shape[1] - ids.shape[1])

    def stop_of_transformers(stop: str) -> dict[str, Any]:
        return {"stop_strings": stop, "tokenizer": tokenizer}

    def as_criterion(stop: str) -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])}

    def ours(stop: str) -> int:
        options = {"num_speculative_tokens": NUM_DRAFT_TOKENS, "tokenizer": tokenizer, "stop_strings": stop}
        return run(custom_generate=speculate("ngram", **options))

    return {
        "plain": lambda stop: run(**stop_of_transformers(stop)),
        "foredraft ngram": ours,
        "prompt lookup": lambda stop: run(prompt_lookup_num_tokens=NUM_DRAFT_TOKENS, **stop_of_transformers(stop)),
        "assistant": lambda stop: run(assistant_model=assistant, **as_criterion(stop)),
    }


def stop_string(tokenizer: Any, tokens: list[int], length: int, plain: Generate) -> str:
    """The text of the last tokens up to this one, as few as make plain decoding end here."""
    for count in range(1, length + 4):
        text = tokenizer.decode(tokens[: WARM_UP + length][-count:])
        if plain(text) == length:
            return str(text)
    raise ValueError(f"no stop string ends after {length} tokens")


def table_of_lengths() -> list[dict[str, Any]]:
    """One row per length: the stop string, and the length that each way gives."""
    model, _, tokenizer = zoo.load()
    model.generation_config.eos_token_id = None
    prompt = tokenizer(KING, return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=WARM_UP + 20, do_sample=False)[0]
    new = text[prompt["input_ids"].shape[1] :].tolist()
    ids = text[None, : prompt["input_ids"].shape[1] + WARM_UP]
    generators = generators_of(model, tokenizer, ids)
    rows = []
    for length in LENGTHS:
        stop = stop_string(tokenizer, new, length, generators["plain"])
        rows.append({"stop": stop} | {name: generate(stop) for name, generate in generators.items()})
    return rows


@pytest.mark.full
def test_stop_strings_inside_blocks_on_real_text_beside_transformers() -> None:
    """On real text: ours right at all 14 lengths; transformers' prompt lookup and assistant at few of them."""
    rows = table_of_lengths()
    right = {name: sum(row[name] == row["plain"] for row in rows) for name in rows[0] if name != "stop"}
    assert right["plain"] == right["foredraft ngram"] == len(rows) == 14
    assert [row["plain"] for row in rows] == list(range(1, 15))
    assert right["prompt lookup"] < 14
    assert right["assistant"] < 14


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (["\ud83d"], r"speculate\.stop_strings is not valid Unicode: character 0 is '\\ud83d'"),
        (5, "speculate.stop_strings is 5; it must be a list"),
        ([], r"speculate.stop_strings is \[\]; give one string, or several"),
        (["a", ""], "speculate.stop_strings contains ''"),
        (["a", 5], "speculate.stop_strings contains 5"),
    ],
    ids=repr,
)
def test_stop_strings_that_are_none_are_refused_by_name(strings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculate("ngram", tokenizer=tokenizer(), stop_strings=strings)
    assert speculate("ngram", tokenizer=tokenizer(), stop_strings=iter(["a", "b"])) is not None
