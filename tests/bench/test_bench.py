"""The benchmark: prompts, arms, counting, ratios, where outputs differ, and what is kept."""

from __future__ import annotations

import io
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, load_pair, padded
from race import MAX_FLOAT32_GAP
from rich.console import Console
from workers.transformers_worker import TransformersArm

from drafting import made
from foredraft import zoo
from foredraft.bench import equality, report, workload
from foredraft.bench.arms import EngineArm
from foredraft.bench.methods import MethodsSettings
from foredraft.bench.trial import Arm, Comparison, Run, Sampling, Trial, bootstrap, compare, interleave
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.engine import EngineConfig
from foredraft.errors import ConfigError, PromptError
from foredraft.model.lm import CausalLM
from foredraft.prompts.prompt_files import PromptLine

PROMPT = tuple(range(40, 60))
GREEDY = Sampling(ignore_eos=True)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("zoo:tiny", None, "float32")


@pytest.fixture(scope="module")
def target(pair: Pair) -> CausalLM:
    return CausalLM(pair.target)


@pytest.fixture(scope="module")
def drafter(pair: Pair) -> CausalLM:
    return CausalLM(pair.drafter)


def plain_arm(target: CausalLM) -> EngineArm:
    return EngineArm("plain", target, EmptyDrafter(), (0, 3))


def draft_arm(target: CausalLM, drafter: CausalLM, num_tokens: int = 3) -> EngineArm:
    made = DraftModelDrafter(drafter, target_vocab_size=target.vocab_size, num_speculative_tokens=num_tokens)
    return EngineArm("draft_model", target, made, (0, 3))


# -- prompts -----------------------------------------------------------------------------------------------------


def test_the_shipped_prompts_cover_the_kinds_of_spec_bench() -> None:
    questions = workload.read_questions()
    kinds = {question.category for question in questions}
    tasks = {"chat", "maths", "code", "command", "story", "summary", "translation", "qa", "rewrite"}
    assert kinds == {*tasks, "copy"}
    prompts = workload.load_prompts(zoo.load("tiny")[2], questions)
    assert len({prompt.name for prompt in prompts}) == len(questions) >= 36
    few = workload.select(questions, 6)
    assert len({question.category for question in few}) == 6
    assert {question.category for question in workload.select(questions, 3, copying=True)} == {"copy"}


def test_prompts_are_padded_with_text_to_the_very_length() -> None:
    _, _, tokenizer = zoo.load("tiny")
    bare = workload.load_prompts(tokenizer, workload.select(workload.read_questions(), 4))
    for context in (256, 1500):
        prompts = padded(tokenizer, bare, context, None)
        assert [len(prompt.token_ids) for prompt in prompts] == [context] * 4
        assert len({prompt.token_ids[:50] for prompt in prompts}) == 4, "every prompt has padding of its own"
    for short, long in zip(bare, padded(tokenizer, bare, 256, 256), strict=True):
        assert long.token_ids[-len(short.token_ids) :] == short.token_ids
    assert padded(tokenizer, bare, 256, 255) == []


def test_a_copying_prompt_is_a_passage_and_its_beginning() -> None:
    words = " ".join(f"w{i}" for i in range(30))
    assert workload.copying_text(words) == words + "\n\n" + " ".join(f"w{i}" for i in range(16))
    assert workload.copying_text("one  two") == "one  two\n\none  two"


def test_a_question_asked_again_stands_behind_its_answer() -> None:
    _, _, tokenizer = zoo.load("tiny")
    question = PromptLine("here", 1, "Hello!")
    (prompt,) = workload.asked_again(tokenizer, [question], lambda ids: (7, 8, 3))
    (bare,) = workload.load_prompts(tokenizer, [question])
    newline = tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
    assert prompt.token_ids == (*bare.token_ids, 7, 8, 3, *newline, *bare.token_ids)


def test_prompts_are_read_from_files_as_people_have_them(tmp_path: Path) -> None:
    """With a byte order mark, other line ends, line separators inside of strings, and text, JSON strings and ids."""
    file = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "one\u2028and\x85on"}',
        '"two"',
        '{"text": "three", "category": "x"}',
        '{"turns": ["four", "5"]}',
    ]
    file.write_bytes(("\ufeff" + "\r\n".join([*lines, "", '{"prompt_token_ids": [7, 8]}'])).encode())
    found = workload.read_questions(file)
    assert [question.text for question in found] == ["one\u2028and\x85on", "two", "three", "four", ""]
    assert [question.category for question in found] == ["prompt", "prompt", "x", "prompt", "prompt"]
    assert found[-1].token_ids == (7, 8)
    assert workload.load_prompts(None, found[-1:])[0].token_ids == (7, 8)
    with pytest.raises(ConfigError, match="no tokenizer"):
        workload.load_prompts(None, found)
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\ntwo\x0cand on\n", encoding="utf-8")
    assert [question.text for question in workload.read_questions(text)] == ["one", "two\x0cand on"]
    text.write_text("\n")
    with pytest.raises(PromptError, match="is empty"):
        workload.read_questions(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"question_id": 1}', "line 2 contains no prompt"),
        ("7", "line 2"),
        ('{"category": "a", "turns": []}', "line 2"),
        ('{"turns": [1]}', "line 2"),
    ],
)
def test_a_bad_line_of_a_prompts_file_is_named(tmp_path, line: str, message: str) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text('{"question_id": 1, "category": "a", "turns": ["x"]}\n' + line + "\n")
    with pytest.raises(PromptError, match=message):
        workload.read_questions(file)
    with pytest.raises(PromptError, match="cannot be read"):
        workload.read_questions(tmp_path / "missing")


def test_repeats_are_counted_by_token() -> None:
    assert workload.repeated_share([(1, 2, 1, 2, 3)], 2) == 0.8
    assert workload.repeated_share([(1, 2, 3, 4), (1, 2, 3, 4)], 2) == 0.0, "only within one output"
    assert workload.repeated_share([(5,) * 20]) == 1.0
    assert workload.repeated_share([(), (1, 2, 3)]) == 0.0


# -- arms --------------------------------------------------------------------------------------------------------


def test_every_arm_gives_the_same_greedy_tokens(pair: Pair, target: CausalLM, drafter: CausalLM) -> None:
    """And counts its decoding from the first emission on."""
    arms: list[Arm] = [
        plain_arm(target),
        draft_arm(target, drafter),
        EngineArm("ngram", target, made("ngram", 4), (0, 3)),
        TransformersArm("plain", pair.target, (0, 3)),
        TransformersArm("static", pair.target, (0, 3), {"cache_implementation": "static"}),
        TransformersArm("lookup", pair.target, (0, 3), {"prompt_lookup_num_tokens": 3}),
        TransformersArm("assisted", pair.target, (0, 3), assistant=pair.drafter),
    ]
    for ignore_eos in (True, False):
        runs = [arm.run(PROMPT, 24, replace(GREEDY, ignore_eos=ignore_eos)) for arm in arms]
        assert len({run.token_ids for run in runs}) == 1
        for run in runs:
            assert 1 <= run.num_first <= len(run.token_ids)
            assert run.num_decoded == len(run.token_ids) - run.num_first
            assert run.first_seconds > 0
            assert run.decode_seconds > 0 or run.num_decoded == 0
            assert sum(run.step_seconds) == pytest.approx(run.decode_seconds)
    assert runs[0].num_first == runs[3].num_first == 1


def test_transformers_is_given_tokens_where_its_model_is() -> None:
    """They stayed on the CPU beside a model on a GPU."""
    given: dict[str, torch.device] = {}

    class Elsewhere:
        device = torch.device("meta")

        def generate(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, streamer: Any, **_: Any) -> Any:
            given.update(ids=input_ids.device, mask=attention_mask.device)
            streamer.put(torch.tensor([PROMPT]))
            streamer.put(torch.tensor([7]))
            streamer.end()
            return torch.tensor([[*PROMPT, 7]])

    assert TransformersArm("hf", Elsewhere()).run(PROMPT, 1, GREEDY).token_ids == (7,)
    assert given == {"ids": Elsewhere.device, "mask": Elsewhere.device}


def test_an_ignored_end_does_not_end_any_arm(pair: Pair, target: CausalLM) -> None:
    """The tenth greedy token is declared to be the end."""
    tokens = plain_arm(target).run(PROMPT, 16, GREEDY).token_ids
    place = next(i for i, token in enumerate(tokens) if i >= 5 and token not in tokens[:i])
    for arm in (
        EngineArm("own", target, EmptyDrafter(), [tokens[place]]),
        TransformersArm("hf", pair.target, [tokens[place]]),
    ):
        assert arm.run(PROMPT, 16, GREEDY).token_ids == tokens
        assert arm.run(PROMPT, 16, replace(GREEDY, ignore_eos=False)).token_ids == tokens[: place + 1]


def test_transformers_samples_by_the_seed_and_leaves_the_assistant_as_it_was(pair: Pair) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
    before = pair.drafter.generation_config.to_dict()
    options = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}
    arm = TransformersArm("assisted", pair.target, (0, 3), assistant=pair.drafter, assistant_options=options)
    assert arm.run(PROMPT, 12, sampling).token_ids == arm.run(PROMPT, 12, sampling).token_ids
    other = arm.run(PROMPT, 12, replace(sampling, seed=6)).token_ids
    assert other != arm.run(PROMPT, 12, sampling).token_ids
    assert pair.drafter.generation_config.to_dict() == before


def test_a_batch_counts_all_its_tokens(target: CausalLM) -> None:
    """Every token after the rows have entered, a first token per row at most left out."""
    arm = EngineArm("plain", target, EmptyDrafter(), (), EngineConfig(max_num_seqs=3))
    found = arm.run([PROMPT, PROMPT[:5], PROMPT[:9]], 6, GREEDY)
    assert 3 * 5 <= found.num_decoded <= 3 * 6
    assert found.decode_seconds > 0
    alone = EngineArm("plain", target, EmptyDrafter(), (), EngineConfig(max_num_seqs=1))
    assert alone.run([PROMPT, PROMPT[:5], PROMPT[:9]], 6, GREEDY).texts == found.texts
    assert found.token_ids == tuple(token for text in found.texts for token in text)


def test_a_batch_whose_first_rows_end_before_the_last_enters_is_timed(target: CausalLM) -> None:
    """Prompts enter between decode steps, so short rows are done early; the wait for all of them used to be endless."""
    arm = EngineArm("plain", target, EmptyDrafter(), (), EngineConfig(max_num_seqs=3, prefill_chunk_size=2))
    found = arm.run([PROMPT[:3], PROMPT, PROMPT], 2, GREEDY)
    assert [len(text) for text in found.texts] == [2, 2, 2]
    assert found.num_decoded < 3 * 2 - 1


# -- measuring ---------------------------------------------------------------------------------------------------


class Fake(Arm):
    """Takes a fixed time per token, and says in which order it was called."""

    def __init__(self, name: str, seconds: float, tokens: tuple[int, ...] = (1, 2, 3), calls: Any = None) -> None:
        self.name, self._seconds, self._tokens = name, seconds, tokens
        self._calls = [] if calls is None else calls

    def run(self, prompt_ids, max_new_tokens, sampling) -> Run:
        self._calls.append(self.name)
        return Run(self._tokens, 1, 0.0, self._seconds * (len(self._tokens) - 1) * prompt_ids[0])


def trial_of(*arms: Arm, repeats: int = 1) -> Trial:
    prompts = [workload.BenchPrompt(f"p{i}", "chat", (i,)) for i in (1, 2, 3)]
    return interleave(arms, prompts, GREEDY, 8, repeats)


def test_arms_run_forwards_and_backwards() -> None:
    calls: list[str] = []
    trial_of(Fake("a", 1.0, calls=calls), Fake("b", 2.0, calls=calls), repeats=2)
    assert calls[:2] == ["a", "b"], "warm-up"
    assert calls[2:] == list("abba" * 2) * 3


def test_a_ratio_is_the_median_of_the_prompts() -> None:
    trial = trial_of(Fake("slow", 3.0), Fake("fast", 2.0))
    found = compare(trial, "fast", "slow")
    assert found.ratio == found.low == found.high == found.worst == found.best == 1.5
    assert found.num_prompts == 3
    assert trial.tokens_per_second("slow") == pytest.approx(1 / 6), "12 tokens in 2 * (6 + 12 + 18) seconds"


def test_prompts_without_decoding_are_left_out() -> None:
    trial = trial_of(Fake("slow", 3.0), Fake("one token", 2.0, (1,)))
    found = compare(trial, "one token", "slow")
    assert found.num_prompts == 0
    assert math.isnan(found.ratio)


def test_the_interval_of_a_median_covers_it() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 5.0]
    low, high = bootstrap(values, statistics.median)
    assert 1.0 <= low <= statistics.median(values) <= high <= 5.0
    assert low < high
    assert bootstrap(values, statistics.median) == (low, high), "no chance between two calls"


# -- the gate ----------------------------------------------------------------------------------------------------


def test_a_wrong_token_closes_the_gate_and_shows_its_gap(pair: Pair, target: CausalLM) -> None:
    """An arm that replaces its sixth token fails by the model's own preference; a shorter one by infinity."""
    arm = plain_arm(target)

    class Wrong(Arm):
        name = "wrong"

        def run(self, prompt_ids, max_new_tokens, sampling) -> Run:
            run = arm.run(prompt_ids, max_new_tokens, sampling)
            return replace(run, token_ids=(*run.token_ids[:5], run.token_ids[5] + 1, *run.token_ids[6:]))

    class Short(Wrong):
        name = "short"

        def run(self, prompt_ids, max_new_tokens, sampling) -> Run:
            run = arm.run(prompt_ids, max_new_tokens, sampling)
            return replace(run, token_ids=run.token_ids[:-1])

    prompts = [workload.BenchPrompt("p", "chat", PROMPT)]
    for sampling in (GREEDY, Sampling(temperature=1.0, seed=2, ignore_eos=True)):
        trial = interleave([arm, Wrong(), Short()], prompts, sampling, 10)
        wrong, short, right = equality.check(
            trial, equality.gap_of(target, sampling), "plain", ["wrong", "short", "plain"]
        )
        assert wrong.divergences[0].position == 5
        assert MAX_FLOAT32_GAP < wrong.largest_gap < 100
        assert math.isinf(short.largest_gap)
        assert right.num_identical == right.num_prompts == 1
        assert right.passes(0.0)
        assert wrong.passes(2 * wrong.largest_gap)
        assert not wrong.passes(MAX_FLOAT32_GAP)
        assert not short.passes(1e9), "no rounding ends a text"


def test_the_gap_knows_what_was_drawn(pair: Pair, target: CausalLM) -> None:
    """Seen with its noise, the token that was drawn is the preferred one, at every position."""
    sampling = Sampling(temperature=1.0, seed=11, ignore_eos=True)
    tokens = plain_arm(target).run(PROMPT, 6, sampling).token_ids
    logits = pair.target(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 :]
    for place, token in enumerate(tokens):
        likeliest = [int(other) for other in logits[place].topk(3).indices if int(other) != token]
        gap = equality.gap_of(target, sampling)
        gaps = [gap(PROMPT, tokens[:place], token, other) for other in likeliest]
        assert min(gaps) > 0


# -- results -----------------------------------------------------------------------------------------------------


def test_plain_data_is_json() -> None:
    found = Comparison("a", "b", float("nan"), 1.0, float("inf"), 0.0, 1.0, 2)
    data = report.plain_data({"x": (found, None)})
    assert json.loads(json.dumps(data))["x"][0]["ratio"] is None
    assert data["x"][0]["high"] is None
    assert data["x"][0]["low"] == 1.0


def test_results_are_kept_as_json_or_as_lines_of_it(tmp_path: Path) -> None:
    """Whatever was kept last; a file that cannot be written loses nothing."""
    found, said = Comparison("a", "b", 1.5, 1.0, 2.0, 1.0, 2.0, 2), list[str]()
    for name in ("found.jsonl", "found.json", "found.json/below"):
        made = report.Report(Console(file=io.StringIO()), tmp_path / name, said.append)
        made.begin(MethodsSettings(), models="a", dtype="float32", execution="eager")
        made.keep(methods=found)
        made.keep(by_kind=[found, found], reason="none")
        assert made.results["methods"]["ratio"] == 1.5
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [line["result"] for line in lines] == ["conditions", "methods", "by_kind", "by_kind", "reason"]
    assert lines[0]["provenance"]["num_threads"] >= 1
    assert lines[0]["settings"]["prompts_file"] == "own"
    whole = json.loads((tmp_path / "found.json").read_text())
    assert whole.keys() == made.results.keys()
    assert whole["methods"] == made.results["methods"]
    assert len(said) == 2
    assert "cannot be written" in said[0]
