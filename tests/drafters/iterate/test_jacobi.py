"""Jacobi iteration: the guesses, convergence, and the trajectory with its views."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import foredraft
from drafting import made
from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.drafters.iterate.jacobi import Guesses
from foredraft.engine.stats import CAUSES
from foredraft.errors import ConfigError, PromptError
from foredraft.model.lm import CausalLM
from foredraft.sampling.distribution import Sampler, choose
from foredraft.sampling.noise import mix
from foredraft.testing import PROMPTS, decode, perturbed, toy_model
from foredraft.tree import DraftSize
from foredraft.views.trajectory import Block, Trajectory

MODEL = toy_model(64)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=21),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=21, seed=5, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL)


def guesses(prompt: list[int], initial_guess: str = "repeat", seed: int = 3) -> Guesses:
    row: Any = type(
        "Row", (), {"token_ids": prompt, "num_prompt_tokens": len(prompt), "seed": seed, "pending": prompt[-1]}
    )
    return Guesses(row, initial_guess, 64)


def test_guesses_are_refreshed_from_the_choices_behind_what_was_emitted() -> None:
    several = guesses([1, 2])
    assert several.first(4) == [2, 2, 2, 2]
    several.refresh([5, 6, 9, 2, 1], 3)
    assert several.first(2) == [2, 1]
    assert several.first(4) == [2, 1, 1, 1]
    several.refresh([7], 1)  # a step without a draft: the other guesses move up
    assert several.first(3) == [1, 1, 1]
    several.refresh([3, 4, -1, 8], 1)  # nothing behind a place without a distribution
    assert several.first(2) == [4, 4]


def test_random_initial_guesses_are_a_function_of_seed_and_position() -> None:
    """Of 400 draws of 64 tokens each is missing with a chance of 0.2 %: 12 of them with less than 1e-12."""
    prompt = [11, 12, 13, 14]
    first = guesses(prompt, "random").first(400)
    assert set(first) <= set(range(64))
    assert len(set(first)) > 64 - 12
    longer = guesses([*prompt, 15, 16], "random").first(398)
    assert longer == first[2:]
    assert guesses(prompt, "random", seed=4).first(400) != first


def test_random_initial_guesses_end_in_the_same_text(llm: LLM) -> None:
    random, repeated = (
        foredraft.trajectory(llm, list(PROMPTS[0]), 6, initial_guess=name) for name in ("random", "repeat")
    )
    assert random.token_ids == repeated.token_ids
    with pytest.raises(ConfigError, match="needs the vocabulary size"):
        made("jacobi", initial_guess="random")


def test_a_target_that_is_easy_to_predict_converges_far_sooner_than_its_tokens() -> None:
    model = perturbed(MODEL, 0.0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[7] = 1e-3  # nearly always token 7 or 0, whatever stands before
    easy = decode(CausalLM(model), made("jacobi", 8), [(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=18))])
    assert easy.num_steps < 10


@cache
def next_token(text: tuple[int, ...], mode: str) -> int:
    """The choice of the row's sampler after a text."""
    sampler = Sampler(PARAMS[mode], vocab_size=64, prompt_ids=PROMPTS[0])
    sampler.seed = mix(sampler.seed, 0)
    sampler.extend(text[len(PROMPTS[0]) :])
    with torch.no_grad():
        logits = MODEL(input_ids=torch.tensor([text])).logits[0, -1:]
    return int(choose(logits, [sampler], [()], [len(text)])[0])


def next_tokens(text: list[int], num_tokens: int, mode: str) -> tuple[int, ...]:
    """The Jacobi map: the choice at each of the last places of a text, every place seeing all before it."""
    return tuple(next_token(tuple(text[:end]), mode) for end in range(len(text) - num_tokens, len(text)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("block", "mode"),
    [
        pytest.param(block, mode, marks=() if (number + len(mode)) % 2 else pytest.mark.full)
        for number, block in enumerate((1, 4, 8, 50))
        for mode in PARAMS
    ],
)
def test_the_trajectory_is_the_jacobi_iteration_and_ends_in_its_fixed_point(llm: LLM, block: int, mode: str) -> None:
    found = foredraft.trajectory(llm, list(PROMPTS[0]), block, PARAMS[mode])
    plain = llm.generate(list(PROMPTS[0]), PARAMS[mode])[0].outputs[0].token_ids
    assert found.token_ids == tuple(plain)
    assert [len(one) for one in found.blocks] == [min(block, 21 - start) for start in range(0, 21, block)]
    text = list(PROMPTS[0])
    for one in found.blocks:
        assert one.start == len(text)
        assert one.num_iterations <= len(one)
        assert one.states[-1] == one.states[-2] == one.fixed_point
        states = [one.initial, *one.iterates, one.fixed_point]
        for before, after in pairwise(states):
            assert after == next_tokens([*text, *before], len(one), mode)
        text += one.fixed_point
    assert text == [*PROMPTS[0], *plain]


def test_a_text_that_ends_inside_a_block_cuts_it(llm: LLM) -> None:
    plain = foredraft.trajectory(llm, list(PROMPTS[0]), 8, PARAMS["greedy"])
    stop = plain.token_ids[10]
    length = plain.token_ids.index(stop) + 1
    params = SamplingParams(temperature=0.0, max_tokens=21, stop_token_ids=(stop,))
    found = foredraft.trajectory(llm, list(PROMPTS[0]), 8, params)
    assert found.finish_reason == "stop"
    assert found.token_ids == plain.token_ids[:length]
    assert all(len(iterate) == len(one) for one in found.blocks for iterate in one.iterates)


def test_settled_and_right_early() -> None:
    block = Block(5, (1, 2, 0, 0), ((1, 9, 3, 0), (1, 2, 3, 9), (1, 2, 3, 4)))
    assert block.fixed_point == (1, 2, 3, 4)
    assert block.states == (block.initial, *block.iterates, (1, 2, 3, 4))
    assert Block(5, (1, 2), ((1, 3), (1, 3))).states == ((1, 2), (1, 3), (1, 3))
    assert Block(5, (1, 2), ((1, 2),)).states == ((1, 2), (1, 2))
    assert block.settled == (0, 2, 1, 3)
    assert block.right_early == (True, False, True, True)
    both = Trajectory((7,), (block, Block(9, (6,), ((8,),))), "length", 0)
    assert both.token_ids == (1, 2, 3, 4, 8)
    assert (both.num_iterations, both.num_right_early, both.tokens_per_iteration) == (4, 3, 1.25)


@pytest.mark.parametrize("block", [9, pytest.param(17, marks=pytest.mark.full)])
def test_a_trajectory_follows_what_was_verified(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Where steps took fewer tokens than a block has, iterates became shorter than it, and the views crashed."""
    width, limited, cut = 4, LLM(MODEL), DraftSize.cut
    monkeypatch.setattr(DraftSize, "cut", lambda budget, tree: cut(budget, tree).cut(width - 1))
    found = foredraft.trajectory(limited, list(PROMPTS[0]), block, PARAMS["greedy"])
    plain = limited.generate([list(PROMPTS[0])], PARAMS["greedy"])[0].outputs[0].token_ids
    assert found.token_ids == plain
    assert sum(map(len, found.blocks)) == len(plain)
    for one in found.blocks:
        assert {len(iterate) for iterate in one.iterates} == {len(one)}
        assert len(one.verified) == one.num_iterations <= len(one)
        newest = one.initial
        for iterate, reach in zip(one.iterates, one.verified, strict=True):
            assert iterate[reach:] == newest[reach:]
            newest = iterate
    first, text = found.blocks[0], found.text()
    assert first.verified[0] == width
    (cause,) = first.cuts.keys() - {"budget"}
    assert first.cuts[cause] >= block - width
    assert f"{first.cuts[cause]} guesses cut off by {CAUSES[cause]}" in text
    assert "  '-' cut off: not verified in this iteration" in text
    assert 'class="cut"' in found.html()
    assert [record["verified"] for record in found.records()] == [list(one.verified) for one in found.blocks]


def test_a_trajectory_of_wide_blocks_runs_where_nothing_keeps_bits() -> None:
    """Eager bfloat16, where steps once took few nodes and the command crashed."""
    llm = LLM("zoo:tiny", "none", dtype="bfloat16", execution="eager")
    found = foredraft.trajectory(llm, "Once upon a time", 24, SamplingParams(temperature=0.0, max_tokens=40))
    assert len(found.token_ids) == sum(map(len, found.blocks)) <= 40
    assert all(len(iterate) == len(one) for one in found.blocks for iterate in one.iterates)
    assert not any(one.cuts for one in found.blocks)
    assert "cut off" not in found.text()
    assert 'class="cut"' not in found.html()


def test_views_show_every_iterate() -> None:
    block = Block(1, (1, 2, 0), ((1, 9, 3), (1, 2, 3)))
    found = Trajectory((7,), (block,), "length", 0)
    assert found.text().splitlines()[-5:] == [
        "block 0, positions 1 to 3: 2 iterations for 3 tokens",
        "   0 =1 =2  0",
        "   1 =1  9 +3",
        "   2 =1 =2 =3",
        "   3 =1 =2 =3",
    ]
    assert found.text(10).splitlines()[-10:] == [
        "     positions 1 to 2",
        "   0 =1 =2",
        "   1 =1  9",
        "   2 =1 =2",
        "   3 =1 =2",
        "     positions 3 to 3",
        "   0  0",
        "   1 +3",
        "   2 =3",
        "   3 =3",
    ]
    assert found.text(13) == found.text()
    page = found.html()
    assert page.count("<tr>") == 4
    assert '<td class="wrong">9</td><td class="early">3</td>' in page


def test_a_page_shows_tokens_as_text_and_escapes_them() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return {1: "<b>", 2: "\n"}[ids[0]]

    tokenizer: Any = Tokenizer()
    found = Trajectory((7,), (Block(1, (1,), ((2,),)),), "length", 0, tokenizer)
    assert "&lt;b&gt;" in found.html()
    assert "<b>" not in found.html()
    assert "\\n" in found.text()


def test_records_are_lines_of_json(llm: LLM, tmp_path: Path) -> None:
    found = foredraft.trajectory(llm, list(PROMPTS[0]), 8, PARAMS["sampled"])
    found.write_jsonl(tmp_path / "found.jsonl")
    records = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert records == list(found.records())
    assert [record["prefix_token_ids"] for record in records] == [
        [*PROMPTS[0], *found.token_ids[:start]] for start in (0, 8, 16)
    ]
    assert records[1]["iterates"][-1] == records[1]["fixed_point"]
    with pytest.raises(ConfigError, match="cannot be written"):
        found.write_jsonl(tmp_path / "no" / "where.jsonl")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block": 0}, ConfigError, "block is 0"),
        ({"initial_guess": "oracle"}, ConfigError, "initial_guess is 'oracle'; choose one of repeat, prompt"),
        ({"prompt": [[1], [2]]}, PromptError, "takes one prompt"),
        ({"prompt": []}, PromptError, "no tokens|empty|one prompt"),
        ({"sampling_params": SamplingParams(n=2)}, ConfigError, "n is 2"),
    ],
)
def test_bad_input_of_a_trajectory_is_refused(
    llm: LLM, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        foredraft.trajectory(llm, **{"prompt": [1, 2], **options})


def test_the_command_line_shows_and_writes_a_trajectory(tmp_path: Path) -> None:
    command = ["trajectory", "--model", "zoo:tiny"]
    files = ["--html", str(tmp_path / "page.html"), "--jsonl", str(tmp_path / "lines.jsonl")]
    shown = CliRunner().invoke(app, [*command, "Once upon a time", "--block", "4", "--max-new-tokens", "8", *files])
    assert shown.exit_code == 0, shown.output
    assert "8 tokens in" in shown.output
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 2
    assert CliRunner().invoke(app, [*command, "Hi", "--block", "0"]).exit_code == 2
