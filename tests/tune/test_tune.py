"""The search for layer sets: finds, resumes, can be interrupted, refuses; and what its scores mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from foredraft.bench.workload import BenchPrompt
from foredraft.cli import app
from foredraft.cli.layer_search import SearchOptions
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.errors import ConfigError, NothingAcceptedError
from foredraft.llm import LLM
from foredraft.loading.models import load_tokenizer
from foredraft.methods.lengths import LengthPolicy
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.tree import DraftSize
from foredraft.tune.layer_sets import Space
from foredraft.tune.objective import Costs, Score, Task

pytest.importorskip("optuna")

from foredraft.tune.layer_sets import LayerSearch

COSTS = Costs(attention=0.1, mlp=0.2, verify=(1.0, 1.1, 1.2, 1.3))


class Distance:
    """Scores sets by their distance from a hidden one: quick, and its best is known."""

    def __init__(self, hidden: LayerSet, interrupt_at: int | None = None) -> None:
        self.hidden = hidden
        self.scored: list[LayerSet] = []
        self._interrupt_at = interrupt_at

    def __call__(self, layer_set: LayerSet) -> Score:
        if len(self.scored) == self._interrupt_at:
            raise KeyboardInterrupt
        self.scored.append(layer_set)
        wrong = len(set(layer_set.attention) ^ set(self.hidden.attention))
        wrong += len(set(layer_set.mlp) ^ set(self.hidden.mlp))
        return Score(layer_set, float(wrong), 0.5, 2.0, len(layer_set), float(wrong), float(wrong))


HIDDEN = LayerSet((1, 2, 4), (3,), 6)


def searched(space: Space, score: Distance, num_trials: int, **options: Any) -> LayerSearch:
    search = LayerSearch(space, **options)
    search.run(score, num_trials)
    return search


def test_the_search_finds_the_best_set_in_far_fewer_trials_than_there_are_sets() -> None:
    """4,096 sets. Random choice finds the hidden one within 120 with probability 0.03."""
    result = searched(Space.of(6), Distance(HIDDEN), 120, seed=1)
    assert result.best.layer_set == HIDDEN
    assert len({(t.layer_set.attention, t.layer_set.mlp) for t in result.trials}) == 120


@pytest.mark.full
def test_on_a_deep_model_the_best_single_sublayers_are_tried_together() -> None:
    """2^60 sets, of which few sublayers make the best; 4 patterns, every sublayer alone, then the best of them."""
    hidden = LayerSet((3, 7, 20), (5,), 30)
    objective = Distance(hidden)
    result = searched(Space.of(30), objective, 170)
    assert hidden in objective.scored[:70]
    assert [len(one) for one in objective.scored[64:70]] == [2, 3, 4, 6, 8, 12]
    assert result.best.layer_set == hidden


def test_leaving_out_nothing_is_no_result() -> None:
    result = searched(Space.of(2), Distance(LayerSet((), (), 2)), 16)
    assert len(result.trials) == 16
    assert len(result.best.layer_set) == 1


def test_pinned_layers_are_never_left_out() -> None:
    objective = Distance(HIDDEN)
    searched(Space.of(6, [0, -1, 2]), objective, 30)
    touched = {layer for one in objective.scored for layer in (*one.attention, *one.mlp)}
    assert touched == {1, 3, 4}


def test_a_small_space_is_tried_out_and_then_the_search_ends() -> None:
    objective = Distance(LayerSet((1,), (), 3))
    result = searched(Space.of(3, [0, 2]), objective, 50)
    assert len(objective.scored) == 4
    assert result.best.layer_set == LayerSet((1,), (), 3)


def test_an_interrupted_search_keeps_its_best_and_goes_on(tmp_path: Path) -> None:
    journal = tmp_path / "set.trials"
    first = searched(Space.of(6), Distance(HIDDEN, interrupt_at=9), 30, journal=journal)
    assert first.is_interrupted
    assert len(first.trials) == 9
    with pytest.raises(ConfigError, match="--resume"):
        LayerSearch(Space.of(6), journal=journal)
    objective = Distance(HIDDEN)
    second = searched(Space.of(6), objective, 30, journal=journal, resume=True)
    assert not second.is_interrupted
    assert [trial.layer_set for trial in second.trials[:9]] == [trial.layer_set for trial in first.trials]
    assert len(objective.scored) == 21
    assert second.best.value <= first.best.value


def test_a_search_that_goes_on_computes_with_the_costs_it_began_with(tmp_path: Path) -> None:
    journal = tmp_path / "search.trials"
    LayerSearch(Space.of(6), journal=journal).costs(COSTS)
    again = LayerSearch(Space.of(6), journal=journal, resume=True).costs(Costs(0.3, 0.3, (1.0, 2.0)))
    assert replace(again, seconds=0.0) == replace(COSTS, seconds=0.0)


def test_a_journal_of_another_search_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "set.trials"
    searched(Space.of(6), Distance(HIDDEN), 2, journal=journal, identity={"prompts": "a"})
    with pytest.raises(ConfigError, match="prompts is 'a', not 'b'"):
        LayerSearch(Space.of(6), journal=journal, resume=True, identity={"prompts": "b"})
    with pytest.raises(ConfigError, match="num_layers is 6"):
        LayerSearch(Space.of(4), journal=journal, resume=True, identity={"prompts": "a"})


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "set.trials"
    journal.write_text("what is this\nand this\n")
    with pytest.raises(ConfigError, match="not the journal of a search"):
        LayerSearch(Space.of(6), journal=journal, resume=True)


def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written to"):
        LayerSearch(Space.of(6), journal=tmp_path / "no" / "folder" / "set.trials")


@pytest.mark.parametrize(
    ("kept", "message"), [([6], r"contains \[6\]"), ([-7], "0..5"), (range(6), "nothing to search")]
)
def test_wrong_pins_are_refused(kept: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Space.of(6, kept)


# -- scores ------------------------------------------------------------------------------------------------------


def drafter_of(lm: CausalLM, length: int) -> Callable[[LayerSet], SelfDrafter]:
    return lambda layer_set: SelfDrafter(
        "layer_skip", layer_set=layer_set, target_vocab_size=lm.vocab_size, policy=LengthPolicy(length)
    )


def task(length: int = 3, max_new_tokens: int = 13, num_prompts: int = 2) -> Task:
    lm = CausalLM(toy_model(64), execution="eager")
    prompts = tuple(BenchPrompt(str(i), "toy", (i + 1, 5, 9, 2)) for i in range(num_prompts))
    return Task(lm, prompts, max_new_tokens, drafter_of(lm, length))


def test_expected_time_of_a_perfect_draft_is_what_arithmetic_says() -> None:
    """Nothing left out: 13 tokens are 3 steps of 3 drafts and a bonus, and one plain step for the last token."""
    score = task().expected(LayerSet((), (), 2), COSTS)
    assert score.value == pytest.approx((3 * (3 * 1.0 + 1.3) + 1.0) / 13)
    assert (score.acceptance_rate, score.acceptance_length, score.num_sublayers) == (1.0, 4.0, 0)


def test_expected_time_counts_drafts_by_what_they_cost() -> None:
    layer_set = LayerSet((0, 1), (0, 1), 2)
    assert COSTS.draft(layer_set) == pytest.approx(0.4)
    first, second = (task().expected(layer_set, COSTS) for _ in range(2))
    assert first == second
    assert first.acceptance_rate < 1.0
    dearer = task().expected(layer_set, Costs(0.0, 0.0, COSTS.verify))
    assert dearer.value > first.value
    assert dearer.acceptance_rate == first.acceptance_rate


def test_measured_costs_are_shares_of_a_forward() -> None:
    costs = Costs.measured(CausalLM(toy_model(64), execution="eager"), 2, repeats=3)
    assert 0.0 <= costs.attention < 0.5
    assert 0.0 <= costs.mlp < 0.5
    assert len(costs.verify) == 3
    assert costs.verify[0] == 1.0


def test_time_is_measured_against_plain_decoding_in_turns() -> None:
    score = task(length=2, max_new_tokens=8, num_prompts=1).measured([LayerSet((1,), (), 2)])[0]
    assert score.low <= score.value <= score.high
    assert score.value > 0.0
    assert 0.0 <= score.acceptance_rate <= 1.0


@pytest.mark.parametrize(("prompts", "message"), [(0, "no prompts"), (1, "context of .* is 256")])
def test_impossible_tasks_are_refused(prompts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(num_prompts=prompts, max_new_tokens=300)


# -- the verb ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    toy_model(64, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt_token_ids": [i, 5, 9]}) for i in range(1, 4)))
    return str(path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", "layer-skip", *arguments])


def options(model: str, prompts: str, out: Path, *more: str) -> list[str]:
    short = ["--num-prompts", "2", "--max-new-tokens", "6", "--dtype", "float32", "-k", "2"]
    return [model, "--prompts", prompts, "--out", str(out), *short, *more]


@pytest.mark.sample(1)
@pytest.mark.parametrize("objective", ["time", "acceptance"])
def test_the_verb_writes_a_set_that_the_method_loads(objective: str, model: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "set.json"
    result = run(*options(model, prompts, out, "--trials", "5", "--objective", objective, "--json"))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    loaded = LayerSet.load(out)
    assert list(loaded.attention) == report["skipped_attention"]
    assert loaded.num_layers == 2
    assert loaded.details["num_trials"] == 5
    assert loaded.details["search"]["objective"] == objective
    assert loaded.details["conditions"]["versions"]["torch"]
    assert LLM(model, {"method": "layer_skip", "layer_set": str(out)}).drafting is not None
    again = run(*options(model, prompts, out, "--trials", "7", "--objective", objective, "--resume"))
    assert again.exit_code == 0, again.output
    assert "best of 7 sets" in again.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize("objective", ["time", "acceptance"])
def test_a_set_under_which_nothing_is_accepted_is_never_written(
    objective: str, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts were cut to nothing, the best of the useless sets was once written, with 0.00 accepted."""
    cut = DraftSize.cut
    monkeypatch.setattr(DraftSize, "cut", lambda budget, tree: cut(budget, tree).cut(0))
    out = tmp_path / "set.json"
    result = run(*options(model, prompts, out, "--trials", "3", "--objective", objective))
    assert result.exit_code == 2
    assert result.stdout == ""
    said = " ".join(result.stderr.split())
    assert "error: none of 0 drafted tokens was accepted under any of the 3 sets" in said
    assert re.search(r"cut \d+ drafted tokens and left \d+ steps without a draft", said)
    assert "no set is written" in said
    assert not out.exists()
    monkeypatch.undo()  # its trials are of use to no later search, which goes on
    again = run(*options(model, prompts, out, "--trials", "5", "--objective", objective, "--resume", "--json"))
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["num_accepted"] > 0
    assert LayerSet.load(out).details["num_accepted"] > 0


def test_useless_sets_come_last() -> None:
    def trial(value: float, rate: float, *attention: int) -> Score:
        return Score(LayerSet(attention, (), 4), value, rate, 1.0 + rate, len(attention), value, value)

    trials = [trial(0.5, 0.0, 1, 2), trial(1.2, 0.4, 2), trial(1.0, 1.0), trial(1.1, 0.3, 1)]
    search = LayerSearch(Space.of(4))
    search.trials = trials[:1]
    with pytest.raises(NothingAcceptedError):
        search.check()
    search.trials = trials
    assert search.ranking(4) == [trials[3], trials[1], trials[2], trials[0]]
    search.check()


def test_the_search_is_drawn(model: str, prompts: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "search.png"
    arguments = options(model, prompts, tmp_path / "set.json", "--trials", "3", "--objective", "acceptance")
    result = run(*arguments, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_the_best_set_and_says_so(
    model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, count = Task.expected, iter(range(9))

    def interrupted(self: Task, layer_set: LayerSet, costs: Costs) -> Score:
        if next(count) == 2:
            raise KeyboardInterrupt
        return score(self, layer_set, costs)

    monkeypatch.setattr(Task, "expected", interrupted)
    out = tmp_path / "set.json"
    result = run(*options(model, prompts, out, "--trials", "8", "--objective", "acceptance"))
    assert result.exit_code == 130
    assert "interrupted after 2 sets" in result.stdout
    assert "--resume" in result.stdout.replace("\n", " ")
    assert LayerSet.load(out).details["is_interrupted"] is True


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--objective", "speed"], "choose one of time, acceptance"),
        (["--keep-layers", "0,x"], "whole numbers by comma"),
        (["--keep-layers", "0,1"], "nothing to search"),
        (["--keep-layers", "5"], "contains [5]"),
        (["--speculative-config", '{"method": "ngram"}'], "leave out ngram"),
        (["--speculative-config", '{"exit_layer": 1}'], "leave out ['exit_layer']"),
        (["--speculative-config", "[1"], "not valid JSON"),
        (["--speculative-config", "@/nowhere.json"], "cannot be read"),
        (["--speculative-config", '{"num_draft_branches": 2}'], "decodes chains"),
        (["--prompts", "built-in"], "no tokenizer"),
    ],
)
def test_wrong_options_are_refused(more: list[str], message: str, model: str, prompts: str, tmp_path: Path) -> None:
    result = run(*options(model, prompts, tmp_path / "set.json", *more))
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_text_of_a_prompts_file_is_given_as_generate_gives_it(tmp_path: Path) -> None:
    """To an instruct model as a message; a layer set is searched on what the model will see."""
    tokenizer = load_tokenizer("zoo:tiny")
    path = tmp_path / "prompts.jsonl"
    path.write_text('"Hi"\n' + json.dumps({"prompt_token_ids": [5, 6]}))
    given = SearchOptions(prompts=str(path))
    message, ids = given.read_prompts("owner/model", tokenizer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert message.token_ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert ids.token_ids == (5, 6)
    raw, _ = replace(given, raw=True).read_prompts("owner/model", tokenizer)
    assert raw.token_ids == tuple(tokenizer("Hi")["input_ids"])


def test_sets_are_searched_for_the_weights_that_are_asked_for(model: str, prompts: str, tmp_path: Path) -> None:
    """Rounded after inflating, where that is asked for; what no file holds is refused."""
    out = tmp_path / "set.json"
    few = options(model, prompts, out, "--trials", "1", "--finalists", "0", "--execution", "eager", "--json")
    for more in ([], ["--scale", "128x256"]):
        out.with_suffix(".trials").unlink(missing_ok=True)
        result = run(*few, "--quantization", "int8", "--kv-cache-dtype", "int8", *more)
        assert result.exit_code == 0, result.output
        search = json.loads(result.stdout)["search"]
        assert (search["quantization"], search["kv_cache_dtype"]) == ("int8", "int8")
    result = run(*few, "--weights", "stored", "--scale", "128x256")
    assert result.exit_code == 2
    assert "leave one of the two out" in result.stderr
