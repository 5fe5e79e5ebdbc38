"""Texts end where plain `generate` ends them: stop strings at every offset of a block, time, criteria of one's own."""

from __future__ import annotations

import copy
import random
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
    EosTokenCriteria,
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


class Watching(StoppingCriteria):
    """Ends all rows at once when each of them has said a token of every eighth; remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []
        self.has_said: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(input_ids.tolist())
        self.has_said |= {row for row, ids in enumerate(input_ids.tolist()) if ids[-1] % 8 == 7}
        return len(self.has_said) == len(input_ids)


class Rowwise(StoppingCriteria):
    """Ends each row when the sum of its tokens passes a limit."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, 5:].sum(-1) > 400


class Recorder:
    """A streamer."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def criteria_of(kind: str) -> list[Any]:
    made: dict[str, Callable[[], Any]] = {
        "eos": lambda: EosTokenCriteria(torch.tensor([24, 41])),
        "watching": Watching,
        "rowwise": Rowwise,
        "stops": lambda: StopStringCriteria(tokenizer(), [CHARACTERS[28]]),
    }
    return [made[name]() for name in kind.split()]


@pytest.mark.parametrize("kind", ["", "eos", "watching", "eos watching", "rowwise", "eos rowwise", "stops watching"])
def test_criteria_and_streamers_see_whole_columns_in_order(kind: str) -> None:
    """However far rows run ahead of each other, each ends where plain `generate` ends it."""
    draw, hook = random.Random(kind), speculate("draft_model", model=perturbed(target(), 0.3), num_speculative_tokens=6)
    for _ in range(6):
        prompt = inputs(*([draw.randrange(9, 64) for _ in range(draw.randint(1, 5))] for _ in range(3)))

        def call(**options: Any) -> Any:
            criteria, streamer = criteria_of(kind), Recorder()
            options |= {"max_new_tokens": BUDGET, "do_sample": False, "stopping_criteria": criteria}
            output = target().generate(**prompt, streamer=streamer, **options)  # noqa: B023
            return output.tolist(), streamer.values, [getattr(each, "seen", None) for each in criteria]

        assert call(custom_generate=hook) == call()
    assert 0 < hook.stats.num_accepted_draft_tokens < hook.stats.num_draft_tokens


def test_a_row_that_ends_early_needs_a_padding_token() -> None:
    prompt, model = inputs([10, 11, 12], [20, 21]), toy_model()
    model.generation_config.pad_token_id = None
    plain = new(model.generate(**prompt, max_new_tokens=BUDGET, do_sample=False), prompt)
    early = next(token for token in plain[0] if token not in plain[1])
    with pytest.raises(ConfigError, match="pad_token_id"):
        model.generate(
            **prompt,
            max_new_tokens=BUDGET,
            do_sample=False,
            stopping_criteria=[EosTokenCriteria(early)],
            custom_generate=speculate("ngram"),
        )


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


# -- on real text -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_stop_strings_inside_blocks_on_real_text_beside_transformers() -> None:
    """Ours end the text at all 14 lengths; transformers' prompt lookup and assistant at few of them."""
    model, _, tokenizer = zoo.load()
    model.generation_config.eos_token_id = None
    prompt = tokenizer("The king said:", return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=140, do_sample=False)[0]
    start = prompt["input_ids"].shape[1] + 120
    ids = text[None, :start]
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = 6
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0

    def length(**options: Any) -> int:
        options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
        return int(model.generate(ids, **options).shape[1]) - start

    wrong = {"prompt lookup": 0, "assistant": 0}
    for wanted in range(1, 15):
        ends = (tokenizer.decode(text[: start + wanted][-count:]) for count in range(1, wanted + 4))
        stop = next(end for end in ends if length(stop_strings=end, tokenizer=tokenizer) == wanted)
        ours = speculate("ngram", num_speculative_tokens=6, tokenizer=tokenizer, stop_strings=stop)
        assert length(custom_generate=ours) == wanted
        lookup = length(prompt_lookup_num_tokens=6, stop_strings=stop, tokenizer=tokenizer)
        criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
        wrong["prompt lookup"] += lookup != wanted
        wrong["assistant"] += length(assistant_model=assistant, stopping_criteria=criteria) != wanted
    assert all(wrong.values())


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (["\ud83d"], r"stop_strings is not valid Unicode: character 0 is '\\ud83d'"),
        (5, "stop_strings is 5; it must be a list"),
        ([], r"stop_strings is \[\]; give one string, or several"),
        (["a", ""], "stop_strings contains ''"),
        (["a", 5], "stop_strings contains 5"),
    ],
    ids=repr,
)
def test_stop_strings_that_are_none_are_refused_by_name(strings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculate("ngram", tokenizer=tokenizer(), stop_strings=strings)
    assert speculate("ngram", tokenizer=tokenizer(), stop_strings=iter(["a", "b"])) is not None
