"""Outputs that must match a grammar: those of plain decoding under the same masks, whatever drafts, and cheaper."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

import foredraft
from engines import engine_of
from foredraft import LLM, RequestOutput, SamplingParams, StructuredOutputs
from foredraft.cli.options import SamplingOptions
from foredraft.config.structured import MAX_CHARACTERS
from foredraft.errors import ConfigError, GrammarError, NumericsError
from foredraft.structured import grammars as grammars_module
from foredraft.structured.forcing import Vocabulary
from foredraft.structured.grammars import Grammars, written
from foredraft.testing import toy_model
from foredraft.tree import DraftTree
from schemas import HOSTILE, is_valid, random_schema

llguidance = pytest.importorskip("llguidance", reason="the extra [structured] is not installed")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "dark blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
WANTED = {
    "json": StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputs(regex=r"(the|a) [a-z]{3,9}( and [a-z]{3,9})*\."),
    "choice": StructuredOutputs(choice=["yes", 'no "maybe"', "nowhere", "ünï\n"]),
    "grammar": StructuredOutputs(grammar='start: (WORD " ")+ "end"\nWORD: /[a-c]{2,4}/'),
}
PROMPTS = ["Once upon a time", "The farmer had", "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=2)
PARAMS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=1.0, seed=5, n=2),
    "truncated": replace(GREEDY, temperature=0.8, seed=5, top_p=0.9, top_k=20, repetition_penalty=1.1, min_p=0.01),
}
METHODS = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "tree": {"method": "token_recycling", "max_draft_nodes": 24},
    "draft_model": {"method": "draft_model", "model": "zoo:tiny", "num_speculative_tokens": 4},
    "lookahead": "lookahead",
    "union": "token_recycling+ngram",
}


@cache
def base() -> LLM:
    return LLM("zoo:tiny", max_num_seqs=5)


@cache
def llm(method: str) -> LLM:
    return base().with_speculative_config(METHODS[method])


@cache
def vocabulary() -> Any:
    from llguidance.hf import from_tokenizer

    made = base()
    return from_tokenizer(made.tokenizer, n_vocab=made.target.vocab_size, eos_token=list(made.eos_token_ids))


def mask_after(wanted: StructuredOutputs, tokens: list[int]) -> np.ndarray:
    """By a matcher of its own, which has taken in the whole output and nothing else."""
    matcher = llguidance.LLMatcher(vocabulary(), written(wanted), log_level=0)
    if tokens and tokens[-1] in base().eos_token_ids:
        only = np.zeros(base().target.vocab_size, dtype=bool)
        only[list(base().eos_token_ids)] = True
        return only
    if not matcher.consume_tokens(tokens):
        return np.zeros(base().target.vocab_size, dtype=bool)
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little", count=base().target.vocab_size).view(bool)


def masking(wanted: StructuredOutputs, prompt_length: int) -> Callable[..., Any]:
    """The same masks as a processor of logits, over prefixes that are given whole."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = [mask_after(wanted, row[prompt_length:].tolist()) for row in ids]
        return scores.masked_fill(torch.from_numpy(~np.stack(allowed)), -torch.inf)

    return process


@cache
def masked(kind: str, name: str) -> list[RequestOutput]:
    """Plain decoding under masks that the user applies."""
    made = base()
    lengths = [len(made.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    return made.generate(
        PROMPTS, [replace(PARAMS[kind], logits_processors=[masking(WANTED[name], length)]) for length in lengths]
    )


def check_equal(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        for text, other in zip(output.outputs, want.outputs, strict=True):
            assert text.token_ids == other.token_ids
            assert text.finish_reason == other.finish_reason
            assert text.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def check_matches(name: str, output: RequestOutput) -> None:
    for text in output.outputs:
        if name == "json" and text.finish_reason == "stop":
            found = json.loads(text.text)
            assert list(found) == ["name", "age", "colours"]
            assert len(found["name"]) <= 12
            assert set(found["colours"]) <= {"red", "green", "dark blue"}
        if name == "choice" and text.finish_reason == "stop":
            assert text.text in (WANTED["choice"].choice or ())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("method", "kind", "name"),
    [
        pytest.param(method, kind, name, marks=() if i == (4 * j + k) % len(METHODS) else pytest.mark.full)
        for i, method in enumerate(METHODS)
        for j, kind in enumerate(PARAMS)
        for k, name in enumerate(WANTED)
    ],
)
def test_outputs_are_those_of_plain_decoding_under_the_same_masks(method: str, kind: str, name: str) -> None:
    """In a batch, beside a row without a grammar."""
    params = replace(PARAMS[kind], structured_outputs=WANTED[name])
    free = replace(GREEDY, max_tokens=12)
    outputs = llm(method).generate([*PROMPTS, PROMPTS[0]], [params] * len(PROMPTS) + [free])
    check_equal(outputs[:-1], masked(kind, name))
    check_equal(outputs[-1:], base().generate(PROMPTS[:1], free))
    for output in outputs[:-1]:
        check_matches(name, output)


@pytest.mark.parametrize("method", ["plain", "tree"])
def test_forced_tokens_are_drafted_and_always_right(method: str) -> None:
    params = replace(GREEDY, structured_outputs=WANTED["json"])
    for output in llm(method).generate(PROMPTS, params):
        (text,), metrics = output.outputs, output.metrics.speculative_decoding
        assert text.finish_reason == "stop"
        assert metrics["num_steps"] * 1.5 <= len(text.token_ids)
        if method == "plain":
            assert metrics["num_accepted_draft_tokens"] == metrics["num_draft_tokens"] > 5
        else:
            of_grammar = metrics["by_drafter"]["grammar"]
            assert of_grammar["num_accepted_draft_tokens"] == of_grammar["num_draft_tokens"] > 5


@pytest.mark.parametrize("rule", ["standard", pytest.param("block", marks=pytest.mark.full)])
def test_rules_that_keep_the_distribution_alone_keep_to_the_grammar(rule: str) -> None:
    config = {"method": "draft_model", "model": "zoo:tiny", "rejection_sample_method": rule}
    made = base().with_speculative_config(config)
    greedy = made.generate(PROMPTS, replace(GREEDY, structured_outputs=WANTED["json"]))
    check_equal(greedy, masked("greedy", "json"))
    for name in ("json", "choice"):
        params = replace(PARAMS["sampled"], n=4, structured_outputs=WANTED[name])
        outputs = made.generate(PROMPTS, params)
        for output in outputs:
            check_matches(name, output)
            assert {text.finish_reason for text in output.outputs} <= {"stop", "length"}
        assert any(output.metrics.speculative_decoding["num_accepted_draft_tokens"] for output in outputs)


def test_a_prediction_goes_with_a_grammar() -> None:
    (known,) = masked("greedy", "json")[:1]
    params = replace(GREEDY, structured_outputs=WANTED["json"], prediction=known.outputs[0].token_ids[:-1])
    (output,) = base().generate(PROMPTS[:1], params)
    check_equal([output], [known])
    metrics = output.metrics.speculative_decoding
    assert metrics["accepted_prediction_tokens"] > 5
    assert metrics["num_steps"] <= 5


@pytest.mark.usefixtures("_governed")
def test_a_governor_leaves_forced_tokens_in() -> None:
    outputs = llm("ngram").generate(PROMPTS, replace(GREEDY, structured_outputs=WANTED["json"]))
    check_equal(outputs, masked("greedy", "json"))
    for output in outputs:
        assert output.metrics.speculative_decoding["num_steps"] * 1.5 <= len(output.outputs[0].token_ids)


def test_the_budget_ends_within_forced_tokens() -> None:
    for limit in (1, 2, 5, 11):
        params = replace(GREEDY, max_tokens=limit, structured_outputs=WANTED["json"])
        (output,) = base().generate(PROMPTS[:1], params)
        (text,) = output.outputs
        assert text.token_ids == masked("greedy", "json")[0].outputs[0].token_ids[:limit]
        assert text.finish_reason == "length"


# -- one output and its grammar --------------------------------------------------------------------------------------


def grammars() -> Grammars:
    return Grammars(base().tokenizer, base().target.vocab_size, base().eos_token_ids)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WANTED)
def test_masks_on_a_tree_are_those_of_its_paths(name: str) -> None:
    """Asked for in any order, again and again, between outputs that grow."""
    rng = random.Random(name)
    wanted = WANTED[name]
    matching = grammars().matching(wanted)
    ends = {*base().eos_token_ids}
    output: list[int] = []
    for _ in range(12):
        tokens, parents = [1], [-1]
        for _ in range(12):
            parent = rng.randrange(len(tokens))
            path = DraftTree(tuple(tokens), tuple(parents)).path_tokens(parent)
            allowed = np.flatnonzero(mask_after(wanted, [*output, *path]))
            token = int(rng.choice(allowed)) if len(allowed) and rng.random() < 0.7 else rng.randrange(4096)
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
        tree = DraftTree(tuple(tokens), tuple(parents))
        nodes = rng.sample(range(len(tree)), len(tree))
        for node in nodes:
            want = mask_after(wanted, [*output, *tree.path_tokens(node)])
            got = matching.allowed(tree.path_tokens(node))
            assert got is not None
            if not ends.intersection(tree.path_tokens(node)[:-1]):
                assert (got == want).all()
        legal = matching.legal(tree)
        expected = [0]
        for node in range(1, len(tree)):
            above = tree.path_tokens(tree.parents[node])
            is_open = tree.parents[node] in expected and not ends.intersection(above)
            if is_open and mask_after(wanted, [*output, *above])[tree.tokens[node]]:
                expected.append(node)
        assert legal.tokens == tree.restricted(expected).tokens
        assert legal.parents == tree.restricted(expected).parents
        step = [int(rng.choice(np.flatnonzero(mask_after(wanted, output))))]
        copied = matching.copy()
        matching.extend(step)
        output += step
        copied.extend(step)
        assert (matching.allowed(()) == copied.allowed(())).all()
        if ends.intersection(output):
            assert matching.forced(9) == ()
            assert {*np.flatnonzero(matching.allowed(()))} == ends
            break


def test_masks_of_one_draft_are_not_those_of_another() -> None:
    """Matchers that went back kept the mask of the draft that they left, where the same words may come at one place.

    So a draft could change a text, and an answer was told that it "does not match its grammar", now and then.
    """
    wanted = StructuredOutputs(grammar='start: "a" WORD "h" | "b" WORD "x"\nWORD: "t" | "u"')
    ids = base().tokenizer.get_vocab()
    following = {"a": {"t", "u", "th"}, "b": {"t", "u", "ux"}}
    matching = grammars().matching(wanted)
    for token in "abab":
        allowed = matching.allowed((ids[token],))
        assert allowed is not None
        assert {*np.flatnonzero(allowed)} == {ids[text] for text in following[token]}


REPEATING = StructuredOutputs(
    json={
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"kind": {"enum": ["red", "rough", "blue"]}, "on": {"type": "boolean"}},
            "required": ["kind", "on"],
            "additionalProperties": False,
        },
        "minItems": 6,
        "maxItems": 6,
    },
    disable_any_whitespace=True,
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=pytest.mark.full if (method == "plain") == (kind == "sampled") else ())
        for method in ("plain", "union")
        for kind in PARAMS
    ],
)
def test_what_came_of_a_choice_is_drafted_when_it_comes_again(method: str, kind: str) -> None:
    """Under a name of its own: it may be wrong, and what is forced never is where what comes before it was right.

    The text is that of plain decoding.
    """
    params = replace(PARAMS[kind], structured_outputs=REPEATING, max_tokens=100)
    outputs = llm(method).generate(PROMPTS, params)
    check_equal(outputs, base().generate(PROMPTS, replace(params, num_speculative_tokens=0)))
    counts = [output.metrics.speculative_decoding["by_drafter"] for output in outputs]
    for name in ("grammar", "grammar_guess"):
        drafted, accepted = (
            sum(each.get(name, {}).get(f"num_{what}_tokens", 0) for each in counts)
            for what in ("draft", "accepted_draft")
        )
        least = 0 if (name, kind) == ("grammar_guess", "sampled") else 10  # of those, most would be wrong
        assert least < accepted <= drafted
    acceptance = engine_of(llm(method)).acceptance
    assert all(acceptance.rate("grammar", depth, 1.0) > 0.99 for depth in range(1, 9))


def test_guesses_are_what_came_after_the_same_mask_and_tokens() -> None:
    ids = base().tokenizer.get_vocab()
    a, b, x, y = (ids[letter] for letter in "abxy")
    matching = grammars().matching(StructuredOutputs(regex="((a|b)(x|y))*"))

    def say(*tokens: int) -> None:
        for token in tokens:
            assert matching.allowed(()) is not None
            matching.extend([token])

    assert not [*matching.guessed(9)]
    say(a, x, b, y)
    assert not [*matching.guessed(9)]  # nothing has come after b y
    say(a, x)
    assert [*matching.guessed(3)] == [(b, True), (y, True), (a, True)]
    assert [*matching.guessed(2)] == [(b, True), (y, True)]
    say(a)
    assert not [*matching.copy().guessed(9)]  # another row has chosen nothing


def test_what_a_guess_forces_is_no_guess() -> None:
    ids = base().tokenizer.get_vocab()
    a, b, x, y = (ids[letter] for letter in "abxy")
    matching = grammars().matching(StructuredOutputs(regex="(ax|by)*"))
    for token in (a, x, b, y, a, x):
        assert matching.allowed(()) is not None
        matching.extend([token])
    assert [*matching.guessed(4)] == [(b, True), (y, False), (a, True), (x, False)]


def test_guesses_that_fail_end_until_they_would_have_been_right() -> None:
    """Nothing else governs them: without a drafter nothing is measured."""
    made = base()
    x, y = (made.tokenizer.get_vocab()[letter] for letter in "xy")
    said, last = [x, y], dict[tuple[int, ...], int]()
    for is_as_before in [True] * 12 + [False] * 40 + [True] * 40:  # what follows two tokens is what did last, or is not
        before = tuple(said[-2:])
        last[before] = last.get(before, x) if is_as_before else x + y - last.get(before, x)
        said.append(last[before])
    start = len(made.tokenizer(PROMPTS[0])["input_ids"])

    def dictated(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        return allowed.index_fill(1, torch.tensor([said[input_ids.shape[1] - start]]), 0.0)

    params = SamplingParams(temperature=0, max_tokens=len(said), logits_processors=[dictated])
    (output,) = made.generate(PROMPTS[:1], replace(params, structured_outputs=StructuredOutputs(regex="(x|y)*")))
    assert output.outputs[0].token_ids == said
    drafted = [(step.position - start - 2, step.drafted) for step in output.metrics.trace]
    assert max(count for place, count in drafted if place < 12) >= 3
    assert {count for place, count in drafted if 32 <= place < 52} == {0}
    again = [count for place, count in drafted if place >= 52]
    assert again[:3] == [0, 0, 0]
    assert max(again) >= 3


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets limits of llguidance."""
    limits = llguidance.LLParserLimits
    return lambda **low: monkeypatch.setattr(llguidance, "LLParserLimits", lambda **given: limits(**{**given, **low}))


def test_a_draft_at_which_a_grammar_gives_up_is_no_fault(limited: Callable[..., None]) -> None:
    """It may never be chosen, and then the row ended in an error that plain decoding does not have."""
    limited(step_max_items=400)
    costly = 'start: "Well " s | "No " /[a-z]+/\ns: s s s | s s | /[a-z ]/ | "the" | "t" "h" "e"'
    matching = grammars().matching(StructuredOutputs(grammar=costly))
    tokens = base().tokenizer("Well the the the the the the the the", add_special_tokens=False)["input_ids"]
    failing = next(length for length in range(1, len(tokens)) if matching.allowed(tokens[:length]) is None)
    assert matching.fault is None
    assert matching.allowed(()) is not None
    other = matching.copy()
    other.extend(base().tokenizer("No", add_special_tokens=False)["input_ids"])
    assert other.allowed(()) is not None
    matching.extend(tokens[:failing])
    assert matching.allowed(()) is None
    assert "matching the grammar failed" in str(matching.fault)


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["masks", "tokens", "forced"])
def test_what_others_asked_for_ends_no_text(limited: Callable[..., None], how: str) -> None:
    """Rows of a grammar share an automaton: when it was full, no text of this grammar came any more, for good."""
    limited(max_lexer_states=1200)
    wanted, made = StructuredOutputs(regex="(a|b)*a(a|b){16}c"), grammars()
    tokens = base().tokenizer.convert_tokens_to_ids(["a", "b"])
    rng = random.Random(3)
    for _ in range(24):
        rows = [made.matching(wanted) for _ in range(2)]  # side by side
        texts: list[list[int]] = [[], []]
        for length in range(40):
            for row, text in zip(rows, texts, strict=True):
                if how == "masks":
                    assert (allowed := row.allowed(())) is not None, row.fault
                    assert length % 8 or (allowed == mask_after(wanted, text)).all()
                elif how == "forced":
                    assert row.forced(9) == (), row.fault
                text.append(rng.choice(tokens))
                row.extend(text[-1:])
                assert row.fault is None


def test_an_output_that_is_too_much_alone_is_a_fault(limited: Callable[..., None]) -> None:
    limited(max_lexer_states=300)
    matching = grammars().matching(StructuredOutputs(regex="(a|b)*a(a|b){16}c"))
    tokens, rng = base().tokenizer.convert_tokens_to_ids(["a", "b"]), random.Random(3)
    for _ in range(2000):
        matching.extend([rng.choice(tokens)])
        if matching.allowed(()) is None:
            break
    assert matching.fault is not None
    assert "matching the grammar failed" in str(matching.fault)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutputs]:
    """Grammars as they are compiled."""
    found: list[StructuredOutputs] = []
    monkeypatch.setattr(grammars_module, "written", lambda one, **keys: found.append(one) or written(one, **keys))
    return found


def test_a_grammar_that_was_much_used_is_compiled_anew(
    compiled: list[StructuredOutputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its matchers share grows with every mask; a server that had 64 such grammars kept gigabytes."""
    monkeypatch.setattr(grammars_module, "MOST_MASKS", 50)
    made, rng, ends = grammars(), random.Random(1), {*base().eos_token_ids}
    for _ in range(10):
        row = made.matching(WANTED["regex"])
        for _ in range(20):
            allowed = row.allowed(())
            assert allowed is not None
            following = sorted({*np.flatnonzero(allowed)} - ends) or [*ends]
            row.extend([int(rng.choice(following))])
    assert 1 < len(compiled) < 10


@pytest.mark.parametrize(
    ("limit", "most", "asked", "made"),
    [
        ("MOST_KEPT", 2, (1, 2, 1, 3, 1, 2), (1, 2, 3, 2)),
        ("MOST_KEPT_CHARACTERS", 1000, (400, 500, 400, 300, 400, 500, 2000, 400), (400, 500, 300, 500, 2000, 400)),
    ],
)
def test_grammars_are_compiled_once_and_not_all_kept(
    limit: str, most: int, asked: tuple[int, ...], made: tuple[int, ...],
    compiled: list[StructuredOutputs], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the number of grammars, and of their characters: the least recently used one is dropped."""
    monkeypatch.setattr(grammars_module, limit, most)
    ours = grammars()
    for length in asked:
        ours.matching(StructuredOutputs(choice=["x" * length]))
    assert [len((one.choice or [""])[0]) for one in compiled] == [*made]


def test_forced_tokens_end_with_eos() -> None:
    """Where there is one that it can be; else the model chooses."""
    wanted = StructuredOutputs(choice=["nothing else"])
    matching = Grammars(base().tokenizer, base().target.vocab_size, [3]).matching(wanted)
    forced = matching.forced(9)
    assert base().tokenizer.decode(forced[:-1]) == "nothing else"
    assert forced[-1:] == (3,)
    assert grammars().matching(wanted).forced(9) == forced[:-1]
    matching.extend(forced)
    assert matching.forced(9) == ()
    assert matching.fault is None


def long_text(length: int) -> str:
    draw = random.Random(length)
    return "".join(draw.choice("abcdefgh ijk 0123456789") for _ in range(length))


LONG: dict[str, Callable[[str], dict[str, Any]]] = {
    "choice": lambda text: {"choice": [text]},
    "const": lambda text: {"json": {"const": text}},
    "enum": lambda text: {"json": {"enum": [text, f"no {text}"]}},
    "regex": lambda text: {"regex": text},
    "repeated": lambda text: {"regex": f"(a{{{len(text) // 10}}}){{10}}"},
    "lark": lambda text: {"grammar": f'start: T\nT: "{text}"'},
    "rules": lambda text: {"grammar": f'start: a{{{len(text)}}}\na: "x"'},
    "gbnf": lambda text: {"grammar": f'root ::= "{text[:10_000]}"'},
    "json in lark": lambda text: {"grammar": f'start: "<tool_call>" %json {json.dumps({"const": text})}'},
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way in ("choice", "const", "rules") else pytest.mark.full) for way in LONG],
)
def test_a_step_costs_what_a_draft_takes_however_long_the_forced_text_is(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """It was computed to its end in every step, in time and memory that grew with the square of its length."""
    looked_at, written_out = [], []
    forced_byte, text = Vocabulary.forced_byte, Vocabulary.text
    monkeypatch.setattr(Vocabulary, "forced_byte", lambda *given: looked_at.append(1) or forced_byte(*given))

    def counted(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes | None:
        found = text(vocabulary, tokens)
        written_out.append(len(found or b""))
        return found

    monkeypatch.setattr(Vocabulary, "text", counted)
    made = grammars()
    for length in (1_000, 10_000, 100_000):
        row = made.matching(StructuredOutputs(**LONG[way](long_text(length))))
        for _ in range(3):
            forced = row.forced(16) or (int(np.flatnonzero(row.allowed(()))[-1]),)  # type: ignore[arg-type]
            row.extend(forced)
            assert row.fault is None
            assert len(forced) <= 16
        assert len(looked_at) <= 3 * 16 * 20
        assert sum(written_out) <= 3 * 16 * 100
        looked_at.clear()
        written_out.clear()


def test_forced_tokens_are_those_of_the_tokenizer() -> None:
    """By windows of a text they are those that llguidance makes of the whole, at every token of it."""
    text = " ".join(random.Random(0).sample(sorted(base().tokenizer.get_vocab()), 60))
    wanted = StructuredOutputs(choice=["".join(character for character in text if character.isprintable())])
    row, said = grammars().matching(wanted), []
    while forced := row.forced(1):
        assert np.flatnonzero(mask_after(wanted, said)).tolist() == [forced[0]]
        said += forced
        row.extend(forced)
    assert len(said) > 60


def test_grammars_that_count_tokens_force_none() -> None:
    """Forced text is found by the byte, and a byte is a token there."""
    wanted = StructuredOutputs(grammar='start: word "END"\nword[max_tokens=2]: /[a-z]+/')
    row = grammars().matching(wanted)
    row.extend(base().tokenizer("the", add_special_tokens=False)["input_ids"])
    assert row.forced(9) == ()
    assert row.allowed(()) is not None


def test_a_choice_may_be_among_thousands() -> None:
    """Of which one begins another: llguidance gave up beyond 2,000 at the first mask, as alternatives of a rule."""
    made = grammars()
    texts = ["yes", "yes or no", *(f"choice {i}" for i in range(10_000))]
    matching = made.matching(StructuredOutputs(choice=texts))
    for text in ("yes", "yes or no", "choice 17", "choice 9999"):
        row = matching.copy()
        row.extend(base().tokenizer(text, add_special_tokens=False)["input_ids"])
        allowed = row.allowed(())
        assert allowed is not None, row.fault
        assert allowed[list(base().eos_token_ids)].all()


def test_an_output_that_does_not_match_is_a_fault() -> None:
    matching = grammars().matching(StructuredOutputs(choice=["nothing else"]))
    matching.extend([50, 51])
    assert matching.allowed(()) is None
    assert "does not match" in str(matching.fault)


# -- what is refused, and what it may cost ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "[a"}, "regex is refused: .*unclosed character class"),
        ({"grammar": "start: foo"}, "grammar is refused: .*unknown name"),
        ({"json": '{"type": "strin"}'}, "json is refused: Invalid type: strin"),
        ({"json": "{"}, "json is refused: it is not JSON"),
        ({"json": {"$ref": "#"}}, "json is refused: no text matches it"),
        ({"json": {"$ref": "http://example.com/x"}}, "json is refused: .*does not fetch"),
        ({}, "nothing; give exactly one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "regex, choice; give exactly one"),
        ({"rgex": "a"}, "did you mean 'regex'"),
        ({"choice": []}, "choice is empty"),
        ({"regex": 3}, "regex is 3; it must be non-empty text"),
        ({"json": {1: ...}}, "cannot be written as JSON"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "262145 characters"),
    ],
    ids=str,
)
def test_bad_grammars_are_refused_before_anything_runs(given: dict[str, Any], message: str) -> None:
    before = base().num_unfinished
    with pytest.raises(ConfigError, match=message):
        base().generate(PROMPTS, SamplingParams(structured_outputs=given))
    assert base().num_unfinished == before


def test_what_it_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs={"regex": "a+"})
    with pytest.raises(GrammarError, match="needs a tokenizer; put its files"):
        LLM(toy_model()).generate([[1, 2]], params)
    with pytest.raises(GrammarError, match="needs an EOS token"):
        Grammars(base().tokenizer, 4096, ()).compile(StructuredOutputs(regex="a"))
    with pytest.raises(GrammarError, match="cannot read the tokenizer"):
        Grammars(base().tokenizer, 10, [3]).compile(StructuredOutputs(regex="a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"python -m pip install .*llguidance"):
        grammars().compile(StructuredOutputs(regex="ab"))


def test_a_grammar_that_costs_too_much_ends_its_row_alone(limited: Callable[..., None]) -> None:
    limited(step_max_items=400)
    made = LLM("zoo:tiny")
    costly = StructuredOutputs(grammar='start: "Well " s\ns: s s s | s s | /[a-z ]/ | "the" | "t" "h" "e"')
    params = [replace(GREEDY, structured_outputs=costly), replace(GREEDY, max_tokens=8)]
    failed, fine = made.generate(PROMPTS[:2], params)
    assert failed.outputs[0].finish_reason == "error"
    assert "matching the grammar failed" in str(failed.outputs[0].stop_reason)
    check_equal([fine], base().generate(PROMPTS[1:2], replace(GREEDY, max_tokens=8)))


@pytest.mark.parametrize("pattern", [None, r"[ \t\n\r]+"])
def test_white_space_between_parts_of_json_ends(pattern: str | None) -> None:
    """A model that says nothing else would say it until its budget ends."""
    tokenizer = base().tokenizer
    (space,) = tokenizer.encode(" ", add_special_tokens=False)
    wanted = StructuredOutputs(json={"const": [1, 2]}, whitespace_pattern=pattern)
    params = SamplingParams(temperature=0, max_tokens=400, logit_bias={space: 100.0}, structured_outputs=wanted)
    (output,) = llm("ngram").generate(["Answer:"], params, use_tqdm=False)
    if pattern is None:
        assert output.outputs[0].text == "[ 1 , 2 ]"
    else:
        assert output.outputs[0].text.startswith("[" + " " * 64)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.full)])
def test_answers_to_random_schemas_validate(count: int) -> None:
    """What ends fits, and is what plain decoding says, with less than half of its forwards; every second one greedy."""
    draw = random.Random(count)
    schemas = [random_schema(draw) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=seed % 2,
            max_tokens=200,
            seed=seed,
            structured_outputs={"json": schema, "disable_any_whitespace": True},
        )
        for seed, schema in enumerate(schemas)
    ]
    drafted = llm("ngram").generate(["Answer:"] * count, params, use_tqdm=False)
    plain = base().generate(["Answer:"] * count, [replace(one, num_speculative_tokens=0) for one in params])
    check_equal(drafted, plain)
    ended = [
        (output.outputs[0].text, schema)
        for output, schema in zip(drafted, schemas, strict=True)
        if output.outputs[0].finish_reason == "stop"
    ]
    assert len(ended) >= 0.9 * count
    assert [text for text, schema in ended if not is_valid(text, schema)] == []
    steps = [
        sum(output.metrics.speculative_decoding["num_steps"] for output in outputs) for outputs in (drafted, plain)
    ]
    assert 2 * steps[0] < steps[1] == sum(len(output.outputs[0].token_ids) for output in plain)


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    assert SamplingOptions().params().structured_outputs is None
    assert SamplingOptions(json_schema=f"@{schema}").params().structured_outputs == StructuredOutputs(json=SCHEMA)
    assert SamplingOptions(choice=["yes", "no"]).params().structured_outputs == StructuredOutputs(choice=["yes", "no"])
    with pytest.raises(ConfigError, match="cannot be read"):
        SamplingOptions(grammar=f"@{schema}x").params()
    with pytest.raises(ConfigError, match="json, regex; give exactly one"):
        SamplingOptions(json_schema="{}", regex="a").params()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_bounded_in_time(name: str) -> None:
    """Each is refused, or gives text; both within seconds, and other requests go on."""
    start = perf_counter()
    params = SamplingParams(temperature=0, max_tokens=6, structured_outputs=HOSTILE[name])
    with suppress(GrammarError, NumericsError):
        (output,) = base().generate(PROMPTS[:1], params)
        assert len(output.outputs[0].token_ids) in range(1, 7)
    assert perf_counter() - start < 20


ENDED_THE_PROCESS = """
import json
from foredraft import LLM, SamplingParams, StructuredOutputs
from foredraft.errors import GrammarError

def chain(kind, count):
    if kind == "json":
        links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
        return {"json": {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "integer"}}}}
    first, link = ("r", "{0}{1}: {0}{2}") if kind == "rules" else ("T", '{0}{1}: "a" {0}{2}')
    lines = [link.format(first, i, i + 1) for i in range(count)]
    return {"grammar": "\\n".join([f"start: {first}0", *lines, f'{first}{count}: "a"'])}

llm = LLM("zoo:tiny", "ngram")
for kind, count in (("rules", 15_000), ("words", 11_000), ("json", 6_500)):
    wanted = StructuredOutputs(**chain(kind, count))
    llm.generate("Once", SamplingParams(temperature=0, max_tokens=6, structured_outputs=wanted))
refused = 0
for number in ("-9223372036854775808", "-9223372036854775296"):
    for given in (
        {"json": '{"const": %s}' % number},
        {"json": {"enum": ["a", {"b": [int(number)]}]}},
        {"grammar": 'start: %%json {"const": %s}' % number},
    ):
        try:
            llm.generate("Once", SamplingParams(structured_outputs=StructuredOutputs(**given)))
        except GrammarError as error:
            refused += f"the integer {number} cannot be compiled; write it as {number}.0" in str(error)
print("alive", refused)
"""


@pytest.mark.full
@pytest.mark.slow
def test_no_grammar_ends_the_process(tmp_path: Path) -> None:
    """Chains of 5,000 rules and the integer -2**63 overran the stack of llguidance and ended the server."""
    done = subprocess.run(
        [sys.executable, "-c", ENDED_THE_PROCESS],
        env={**os.environ, "PYTHONPATH": str(Path(foredraft.__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["alive", "6"]), done.stderr[-2000:]
