"""`foredraft bench`: what a comparison says, when it is silent, and that its advice can be used."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from foredraft.bench import report
from foredraft.bench.arms import EngineArm
from foredraft.bench.candidates import read_candidates, split_outside_brackets
from foredraft.bench.equality import Departure, Equality
from foredraft.bench.methods import Methods, MethodsSettings
from foredraft.bench.outcome import MethodRow, MethodsOutcome, RefusedMethod, advise, by_kind, governor_note, ranked
from foredraft.bench.trial import Comparison, Run, Sampling, bootstrap
from foredraft.cli import bench as cli
from foredraft.config.speculative import SpeculativeConfig
from foredraft.errors import ConfigError
from foredraft.testing.divergence import NEAR_TIES

SETTINGS = MethodsSettings(num_prompts=2, max_new_tokens=8, sampling=Sampling(ignore_eos=True))


# -- candidates --------------------------------------------------------------------------------------------------


def test_candidates_are_names_compositions_and_json() -> None:
    text = 'ngram, suffix+draft_model,ngram>nasd,{"method": "suffix", "num_speculative_tokens": 4},ngram'
    found = read_candidates(text, "zoo:tiny", None)
    assert [*found] == [
        "ngram",
        "suffix+draft_model",
        "ngram>nasd",
        "suffix num_speculative_tokens=4",
    ]
    assert found["suffix+draft_model"] == {"method": "suffix+draft_model", "model": "zoo:tiny"}, (
        "the drafter goes where one is used"
    )
    assert "model" not in found["ngram"]
    assert found["suffix num_speculative_tokens=4"]["num_speculative_tokens"] == 4
    lengths = read_candidates('ngram,{"method": "suffix", "num_speculative_tokens": 4}', None, 7)
    assert [given["num_speculative_tokens"] for given in lengths.values()] == [7, 4]
    assert len(read_candidates("all", None, None)) > 10


def test_commas_inside_of_json_do_not_split() -> None:
    text = 'a,{"b": [1, 2], "c": "x,}\\",y"}, d'
    assert split_outside_brackets(text) == ["a", '{"b": [1, 2], "c": "x,}\\",y"}', "d"]


@pytest.mark.parametrize("text", ["", "ngrm", "none", '{"method": "ngram"', '{"method": "ngram", "nonsense": 1}'])
def test_what_is_not_a_method_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_candidates(text, None, None)


def test_forced_methods_have_fixed_lengths() -> None:
    """Only lengths that the governor would choose are fixed; the recommended config then repeats what was measured."""
    text = 'ngram,suffix+draft_model,{"method": "draft_model", "length_policy": "egag"}'
    plain, egag = {"ngram": "fixed", "suffix+draft_model": "fixed"}, "draft_model length_policy=egag"
    found = read_candidates(text, None, None, is_forced=True)
    assert {name: given["length_policy"] for name, given in found.items()} == {**plain, egag: "egag"}
    assert not any(SpeculativeConfig.parse(given).is_governed for given in found.values())
    with pytest.raises(ConfigError, match=r"--forced turns the governor off, and method 'auto'"):
        read_candidates("ngram,auto", None, None, is_forced=True)


# -- advice ------------------------------------------------------------------------------------------------------


def row(method: str, *ratios: float | None) -> MethodRow:
    timed = [ratio for ratio in ratios if ratio is not None]
    middle = sorted(timed)[len(timed) // 2] if timed else float("nan")
    low, high = bootstrap(timed, statistics.median) if timed else (middle, middle)
    found = Comparison(method, "plain", middle, low, high, middle, middle, len(timed))
    return MethodRow(method, {"method": method}, 10.0, found, ratios, 2.0, 0.5, 3.0, 0.001, 1_000_000, None)


def outcome(*rows: MethodRow, kinds: tuple[str, ...] | None = None, **changes: Any) -> MethodsOutcome:
    num_prompts = len(rows[0].prompt_ratios) if rows else 7
    found = MethodsOutcome(
        sampling="greedy",
        kinds=kinds or ("chat",) * num_prompts,
        num_prompts_planned=num_prompts,
        runs_per_prompt=2,
        other_cpu_share=0.0,
        guarantee="bit-identical to plain decoding",
        repeated_share=0.0,
        plain=replace(row("plain"), comparison=None),
        rows=rows,
        different=(),
        refused=(),
    )
    return replace(found, **changes)


def test_the_fastest_method_is_recommended_and_ties_are_named() -> None:
    fast = row("suffix", 1.5, 1.6, 1.4, 1.6, 1.7, 1.6, 1.5)
    near = row("ngram", 1.5, 1.5, 1.5, 1.5, 1.6, 1.7, 1.4)
    slow = row("jacobi", 0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.5)
    advice = advise(outcome(slow, near, fast))
    assert advice.config == {"method": "suffix"}
    assert "1.60" in advice.reason
    (note,) = advice.notes
    assert "too few to separate suffix from ngram" in note
    assert "jacobi" not in note
    assert [one.method for one in ranked(outcome(slow, near, fast))] == ["suffix", "ngram", "jacobi"]


def test_plain_decoding_is_recommended_where_nothing_beats_it() -> None:
    slow = row("jacobi", 0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.5)
    advice = advise(outcome(slow))
    assert advice.config == {"method": "none"}
    assert "no method beats plain decoding: the best, jacobi" in advice.reason
    doubtful = row("ngram", 0.9, 1.1, 0.8, 1.2, 1.05, 0.9, 1.1)
    advice = advise(outcome(doubtful))
    assert advice.config == {"method": "none"}
    assert "may be chance" in advice.reason
    assert any("--num-prompts 14" in note for note in advice.notes)


def test_a_small_sample_and_a_looping_model_are_named() -> None:
    advice = advise(outcome(row("ngram", 2.0, 2.1, 1.9), repeated_share=0.6))
    assert advice.config == {"method": "ngram"}
    assert any("3 prompts are too few" in note for note in advice.notes)
    assert any("60%" in note and "repeats itself" in note for note in advice.notes)
    assert any(
        "interrupted after 3 of 9" in note for note in advise(outcome(row("a", 2, 2, 2), num_prompts_planned=9)).notes
    )


def test_methods_that_the_governor_held_back_are_named() -> None:
    busy, idle = (replace(row("ngram", 1.0), governed_share=share) for share in (0.4, 0.6))
    rare = replace(row("suffix", 1.0), drafted_share=0.31, governed_share=0.6)
    assert governor_note([busy]) is None
    assert governor_note([busy, rare]).startswith("suffix drafted in 31% of the steps: the governor")
    assert "ngram drafted in 0% of the steps, suffix drafted in 31%: the" in governor_note([idle, rare])
    assert "--forced measures it without" in governor_note([rare])
    console = Console(width=140, record=True, file=io.StringIO())
    report.show(console, outcome(rare).shown("zoo:tiny"))
    report.show(console, outcome(busy, is_forced=True).shown("zoo:tiny"))
    text = " ".join(console.export_text().split())
    assert text.count("note: suffix drafted in 31% of the steps") == 1
    assert text.count("methods without the governor: greedy") == 1


def test_nothing_timed_is_nothing_recommended() -> None:
    advice = advise(outcome(row("ngram", None, None)))
    assert advice.config == {"method": "none"}
    assert "nothing was timed" in advice.reason


def test_kinds_are_told_apart() -> None:
    rows = (row("ngram", 1.0, 3.0, 1.2, None), row("suffix", 1.1, 2.0, 1.0, 2.0))
    chat, code = by_kind(outcome(*rows, kinds=("chat", "code", "chat", "code")))
    assert (chat.kind, chat.num_prompts, chat.ratios) == ("chat", 2, (("ngram", 1.1), ("suffix", 1.05)))
    assert code.ratios == (("ngram", 3.0), ("suffix", 2.0)), "of one prompt where the other was over at once"


# -- what people see ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 140])
def test_everything_fits_and_the_config_can_be_copied(width: int) -> None:
    divergence = Departure("ngram", "chat-1", 5, 1, 2, 0.125)
    loose = Equality("ngram", "plain", 3, 2, (divergence,))
    best = replace(row("ngram>token_recycling", 12.11, 12.11, 12.11), equality=loose)
    untimed = row("suffix", None, None, None)
    wrong = Equality("lookahead", "plain", 3, 2, (replace(divergence, arm="lookahead"),))
    found = outcome(
        best,
        untimed,
        kinds=("chat", "code", "chat"),
        guarantee="same tokens as plain decoding up to rounding",
        different=(wrong,),
        refused=(RefusedMethod("rest", "method 'rest' needs a datastore [and a reason]"),),
    )
    console = Console(width=width, record=True, file=io.StringIO())
    report.show(console, found.shown("zoo:tiny", ("a note",)))
    text = console.export_text()
    flat = " ".join(text.split())
    assert "nan" not in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert flat.count("methods that cannot be used with this model") == 1
    usage = [line for line in text.splitlines() if "--speculative-config" in line or "LLM(" in line]
    assert len(usage) == 2, "each on one line, whatever the width"
    config = usage[0].split("'")[1]
    assert SpeculativeConfig.parse(config).title == "ngram>token_recycling"
    others = [line.rstrip() for line in text.splitlines() if line not in usage]
    assert max(map(len, others)) <= width
    for part in (
        "12.11 (12.11-12.11)",
        "guarantee: same tokens as plain decoding up to rounding. Outputs with the tokens of plain decoding: 2 of 3; "
        "1 differ, with gaps of at most 0.12 in logits",
        "lookahead differs from plain decoding on 1 of 3 prompts, first on chat-1 at token 5 (gap 0.125)",
        "needs a datastore [and a reason]",
        "3 prompts are too few",
        "note: a note",
        "raise --max-new-tokens",
    ):
        assert part in flat, part


def test_notes_of_the_zoo_are_shown_beside_the_methods_they_are_about() -> None:
    quantized, lookup = {"method": "quantized_self"}, {"method": "ngram"}
    assert any("too good" in note for note in cli.model_notes("zoo:smollm2", [lookup, quantized]))
    assert cli.model_notes("zoo:smollm2", [lookup]) == ()
    assert cli.model_notes("somewhere/else", [quantized]) == ()


# -- the comparison itself ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def methods(request: pytest.FixtureRequest) -> Methods:
    return Methods("zoo:tiny", request.param, SETTINGS)


def test_methods_are_compared_with_plain_decoding(methods: Methods) -> None:
    """In the runs that are timed; what does not apply is listed with its reason."""
    seen: list[int] = []
    candidates = read_candidates('ngram,draft_model,{"method": "rest", "datastore": "/nowhere"}', None, None)
    found = methods.run(candidates, lambda outcome: seen.append(outcome.num_prompts))
    assert seen == [1, 2]
    assert [one.method for one in found.rows] == ["ngram", "draft_model"]
    assert [one.method for one in found.refused] == ["rest datastore=/nowhere"]
    assert found.guarantee == methods.target.guarantee("default").describe()
    for one in found.rows:
        assert one.equality.num_identical == one.equality.num_prompts == 2
        assert one.tokens_per_step >= 1
    assert found.plain.tokens_per_step == 1.0
    assert SpeculativeConfig.parse(advise(found).config)
    data = json.loads(json.dumps(report.plain_data(found)))
    assert data["rows"][0]["equality"]["num_identical"] == 2


def test_methods_are_compared_on_rounded_weights_and_caches() -> None:
    found = Methods("zoo:tiny", "float32", SETTINGS, quantization="int8", kv_cache_dtype="int8")
    assert (found.target.quantization, found.target.kv_dtype) == ("int8", torch.int8)
    (row,) = found.run(read_candidates("ngram", None, None), lambda outcome: None).rows
    assert row.equality.num_identical == 2


def says(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    """Let an arm say something else than what was decoded."""
    honest = EngineArm.run

    def lying(self: EngineArm, *args: Any) -> Run:
        run = honest(self, *args)
        return run if self.name != name else replace(run, token_ids=change(run.token_ids))

    monkeypatch.setattr(EngineArm, "run", lying)


def test_a_method_whose_tokens_differ_gets_no_figures(methods: Methods, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "ngram", lambda tokens: (*tokens[:-1], 0))
    found = methods.run(read_candidates("ngram,suffix", None, None), lambda outcome: None)
    assert [one.method for one in found.rows] == ["suffix"]
    assert [one.arm for one in found.different] == ["ngram"]
    assert advise(found).config["method"] != "ngram"


def test_forced_methods_run_without_the_governor(methods: Methods) -> None:
    text = '{"method": "draft_model", "num_speculative_tokens": 4}'
    (forced,) = methods.run(read_candidates(text, None, None, is_forced=True), lambda outcome: None).rows
    assert forced.governed_share == 0.0
    assert forced.drafted_share > 0.5, "all but the last step of an answer, which has no room for a draft"
    assert forced.given["length_policy"] == "fixed"
    assert forced.equality.num_identical == 2


@pytest.mark.full
def test_partings_are_counted_up_to_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parting at a gap that rounding explains is counted where tokens are promised up to rounding."""
    methods = Methods("zoo:tiny", "bfloat16", replace(SETTINGS, execution="eager"))
    limit = NEAR_TIES[torch.bfloat16]
    says(monkeypatch, "ngram", lambda tokens: (*tokens[:-1], tokens[-1] + 1))
    for gap, is_near in ((0.5 * limit, True), (2.0 * limit, False)):
        monkeypatch.setattr("foredraft.bench.methods.gap_of", lambda *_, gap=gap: lambda *_: gap)
        found = methods.run(read_candidates("ngram,suffix", None, None), lambda outcome: None)
        assert "up to rounding" in found.guarantee
        assert [one.method for one in found.rows] == (["ngram", "suffix"] if is_near else ["suffix"])
        (judged,) = [found.rows[0].equality] if is_near else found.different
        assert [one.gap for one in judged.divergences] == [gap] * 2


def test_no_method_at_all_is_an_error(methods: Methods) -> None:
    with pytest.raises(ConfigError, match=r"none of the methods can be used.*datastore"):
        methods.run(read_candidates('{"method": "rest", "datastore": "/nowhere"}', None, None), lambda outcome: None)


def test_kinds_come_in_turn_and_unknown_ones_are_refused(methods: Methods) -> None:
    methods.settings = replace(SETTINGS, num_prompts=5, kinds=("code", "again"))
    methods.__dict__.pop("prompts", None)
    assert [prompt.category for prompt in methods.prompts] == ["code", "again"] * 2 + ["code"]
    methods.settings = replace(SETTINGS, kinds=("poetry",))
    methods.__dict__.pop("prompts", None)
    with pytest.raises(ConfigError, match=r"'poetry'.*chat"):
        _ = methods.prompts
    methods.settings = SETTINGS
    methods.__dict__.pop("prompts", None)
    assert "copy" not in {prompt.category for prompt in methods.prompts}


# -- the verb ----------------------------------------------------------------------------------------------------

QUICK = ["--model", "zoo:tiny", "--quick", "--dtype", "float32"]


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(cli.bench)
    return CliRunner().invoke(app, list(arguments))


def test_the_verb_writes_a_config_that_the_library_takes(tmp_path: Path) -> None:
    results, config = tmp_path / "deep" / "results.json", tmp_path / "config.json"
    found = invoke(
        *QUICK, "--methods", "ngram,layer_skip", "--output", str(results), "--save-config", str(config), "--json"
    )
    assert found.exit_code == 0, found.output
    written = json.loads(results.read_text())
    assert json.loads(found.stdout) == written
    assert SpeculativeConfig.parse(f"@{config}") == SpeculativeConfig.parse(written["recommended_config"])
    assert written["dtype"] == "float32"
    assert {one["method"] for one in written["methods"]["rows"]} == {"ngram", "layer_skip"}


def test_an_interrupted_comparison_shows_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 0
    honest = EngineArm.run

    def interrupted(self: EngineArm, *args: Any) -> Run:
        nonlocal runs
        runs += 1
        if runs > 10:  # warm-ups, four runs of the first prompt, and into the second
            raise KeyboardInterrupt
        return honest(self, *args)

    monkeypatch.setattr(EngineArm, "run", interrupted)
    results = tmp_path / "results.json"
    found = invoke(*QUICK, "--methods", "ngram", "--output", str(results))
    assert found.exit_code == 130, found.output
    assert "interrupted after 1 of 2 prompts" in " ".join(found.stdout.split())
    assert len(json.loads(results.read_text())["methods"]["kinds"]) == 1


def test_the_model_that_is_taken_by_default_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.zoo.default", lambda: "zoo:tiny")
    found = invoke("--quick", "--dtype", "float32", "--methods", "ngram", "--kinds", "poetry")
    assert found.exit_code == 2
    assert "measuring zoo:tiny" in found.stderr


def test_a_difference_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "ngram", lambda tokens: tokens[:-1])
    found = invoke(*QUICK, "--methods", "ngram")
    assert found.exit_code == 3, found.output
    assert "no speed is shown" in " ".join(found.stdout.split())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "arguments",
    [["--methods", "ngrm"], ["--methods", "ngram", "--kinds", "poetry"], ["--prompts-file", "/nowhere"]],
)
def test_mistakes_end_with_2(arguments: list[str]) -> None:
    assert invoke(*QUICK, *arguments).exit_code == 2
