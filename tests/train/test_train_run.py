"""``foredraft train``: from prompts to a head that drafts, also over a kill, and what is refused before it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams, zoo
from foredraft.cli import app
from foredraft.errors import CheckpointError, PromptError, UnsupportedModelError
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.loading.info import eos_token_ids
from foredraft.testing import toy_model
from foredraft.train.examples import evaluation_digests, is_evaluation
from foredraft.train.plan import Plan
from foredraft.train.run import Training
from foredraft.train.start import frequent_tokens, parts_of
from foredraft.zoo.manifest import HEADS, root
from programs import started
from toy_heads import narrow_opt

PROMPTS = [f"Once there was a {one} who {other}" for one in ("dog", "girl", "king", "cow") for other in ("ran", "sang")]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
TRIED = 2 * 2
"""Prompts that a trial makes, and has answered, where two rows run at once."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The toy, which drafts nothing."""
    return LLM("zoo:tiny", "none", dtype="float32", execution="packed", max_num_seqs=2)


def options(folder: Path, *more: str) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    given = ["--target", "zoo:tiny", "--prompts", str(prompts), "--raw", "--out", str(folder / "head")]
    small = ["--max-new-tokens", "12", "--batch-tokens", "24", "--draft-vocabulary-size", "256", "--held-out", "8"]
    return ["train", *more, *given, *small, "--dtype", "float32", "--execution", "packed"]


def test_prompts_become_a_head_that_drafts(tmp_path: Path) -> None:
    """Answers, training, measurement and what is left beside the weights; the same again finds nothing to do."""
    more = ["--features", str(tmp_path / "kept"), "--max-num-seqs", "3", "--forward-tokens", "64"]
    command = options(tmp_path, "medusa", "--evaluate-tokens", "60", "--json", *more)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert measured[-1]["tau"] >= 1.0
    assert len(measured[-1]["by_position"]) >= 4
    head = tmp_path / "head"
    told = json.loads((head / "training.json").read_text())
    assert (told["method"], told["target"]) == ("medusa", "zoo:tiny")
    assert told["provenance"]["versions"]["torch"]
    answers = [json.loads(line) for line in (head / "answers.jsonl").read_text().splitlines()]
    assert {answer["prompt"] for answer in answers} < set(PROMPTS)
    llm = LLM("zoo:tiny", {"model": str(head)}, dtype="float32", execution="packed")
    assert llm.speculative_config.method == "medusa"
    (text,) = llm.generate(PROMPTS[0], GREEDY)
    (plain,) = llm.with_speculative_config("none").generate(PROMPTS[0], GREEDY)
    assert text.outputs[0].text == plain.outputs[0].text
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert "is complete" in again.output


def test_a_dry_run_says_what_training_takes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*options(tmp_path, "eagle3", "--dry-run", "--json")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["num_examples"] == len(PROMPTS) - 1
    assert found["memory_bytes"] == 16 * found["num_parameters"] > 0
    assert found["seconds"] > 0
    assert found["answer_seconds"] > 0
    assert not (tmp_path / "head" / "checkpoint.pt").exists()


@pytest.mark.full
def test_a_dry_run_has_the_first_prompts_answered_alone_and_a_training_makes_the_rest(tmp_path: Path) -> None:
    """It once answered all of them: for 5,000 prompts a quarter of an hour, of which it said nothing."""
    command = options(tmp_path, "medusa", "--json", "--max-num-seqs", "2")
    done = CliRunner().invoke(app, [*command, "--dry-run"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    file = tmp_path / "head" / "answers.jsonl"
    tried = file.read_text().splitlines()
    assert len(tried) == TRIED < found["num_examples"] < len(PROMPTS)
    assert found["num_tokens"] > 2 * found["num_examples"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    whole = [json.loads(line) for line in file.read_text().splitlines()]
    assert [json.loads(line) for line in tried] == whole[:TRIED]
    told = json.loads((tmp_path / "head" / "training.json").read_text())
    assert told["num_examples"] == found["num_examples"] == len(whole)


@pytest.mark.full
def test_a_dry_run_after_the_answers_counts_them_all(tmp_path: Path) -> None:
    command = options(tmp_path, "medusa", "--dry-run", "--json")
    first, again = (json.loads(CliRunner().invoke(app, command).stdout) for _ in range(2))
    assert first["answer_seconds"] > 0 == again["answer_seconds"]
    assert first["num_tokens"] == again["num_tokens"]


@pytest.mark.full
def test_a_dry_run_lets_the_target_ask_few_prompts_and_keeps_none(llm: LLM, tmp_path: Path) -> None:
    plan = Plan(method="medusa", out=tmp_path, own_prompts=2 * TRIED, draft_vocabulary=64, max_answer_tokens=8)
    said: list[str] = []
    run = Training(llm, plan, said.append, is_trial=True)
    assert f"the target invents {TRIED} prompts" in said
    assert not (tmp_path / "own_prompts.jsonl").exists()
    estimate = run.estimate()
    assert TRIED < estimate.num_examples <= 2 * TRIED
    assert estimate.answer_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hydra", pytest.param("draft_model", marks=pytest.mark.full)])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(method: str, tmp_path: Path) -> None:
    """kill -9 as soon as a checkpoint lies there, wherever the process is then. What is not killed runs in this one."""
    weights = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        command = options(folder, method, "--evaluate-tokens", "30")
        if name == "killed":
            process = started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not (folder / "head" / "checkpoint.pt").exists() and process.poll() is None:
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        weights.append(torch.load(folder / "head" / "checkpoint.pt", weights_only=True)["module"])
    for key, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][key]), key


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["eagle9"], "'eagle9' cannot be trained"),
        (["medusa", "--held-out", "1"], "is held out"),
        (["medusa", "--epochs", "0"], "epochs is 0.0"),
        (["eagle3", "--num-layers", "2"], "it is for medusa, hydra, hydra++, draft_model"),
        (["hydra++", "--num-layers", "0"], "must be 1 or more"),
        (["draft_model", "--num-layers", "2", "--from-layers", "0,1"], "use one of them"),
        (["medusa", "--intermediate-size", "64"], "it is for hydra++, eagle, eagle2, eagle3"),
        (["medusa", "--prompts", "no/such"], "no/such does not exist"),
    ],
)
def test_what_cannot_be_trained_is_refused(more: list[str], message: str, tmp_path: Path) -> None:
    command = options(tmp_path, *more)
    command = [*command, *more[1:]]  # what stands last counts
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
    assert "loading" not in done.output  # nothing is loaded before


def biased_output() -> PreTrainedModel:
    model = toy_model(64)
    model.lm_head = torch.nn.Linear(32, 64, bias=True, dtype=model.dtype)
    return model


def capped_logits() -> PreTrainedModel:
    model = toy_model(64)
    model.config.final_logit_softcapping = 30.0
    return model


@pytest.mark.parametrize(
    ("make", "method", "message"),
    [
        (biased_output, "medusa", "output layer"),
        (narrow_opt, "medusa", "have width 32, and its output layer has input width 16"),
        (narrow_opt, "eagle3", "have width 32, and its output layer has input width 16"),
        (capped_logits, "medusa", "final_logit_softcapping"),
        (capped_logits, "draft_model", "final_logit_softcapping"),
    ],
)
def test_a_target_that_no_head_can_be_trained_for_is_refused(
    make: Callable[[], PreTrainedModel], method: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("a\nb\nc")
    with pytest.raises(UnsupportedModelError, match=message):
        Training(LLM(make(), tokenizer="zoo:tiny"), Plan(method=method, out=tmp_path, prompts=tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "one", "answer": "two"}', "1 prompts are too few"),
        ("".join(f'{{"prompt": "{i}", "answer": "", "ended": false}}\n' for i in range(9)), "nothing to learn"),
        ('{"prompt": "a\\ud800"}\n{"prompt": "b"}\n{"prompt": "c"}', "line 1"),
    ],
)
def test_prompts_that_nothing_can_be_learned_from_are_refused(
    llm: LLM, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(PromptError, match=message):
        Training(llm, Plan(method="medusa", out=tmp_path / "out", prompts=tmp_path, raw=True))


def test_prompts_of_evaluation_sets_alone_are_refused(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("a\nb\nc")
    monkeypatch.setattr("foredraft.train.run.is_evaluation", lambda _: True)
    with pytest.raises(PromptError, match="every prompt is in an evaluation set"):
        Training(llm, Plan(method="medusa", out=tmp_path / "out", prompts=tmp_path, raw=True))


@pytest.mark.parametrize("method", ["medusa", "draft_model"])
def test_the_end_of_a_text_can_always_be_drafted(
    llm: LLM, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer here has ended, so no count names EOS; a map that leaves it out all the same is refused."""
    lines = [json.dumps({"prompt": f"A {i}", "answer": " big dog ran to the park", "ended": False}) for i in range(9)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    plan = Plan(method=method, out=tmp_path / "out", prompts=tmp_path, raw=True, draft_vocabulary=64)
    run = Training(llm, plan)
    vocabulary = frequent_tokens(run.examples, 64, parts_of(llm.target, eos_token_ids(llm.target.shadow)))
    assert {0, 3} <= set(vocabulary.target_ids.tolist())
    without = DraftVocabulary.of(range(10, 74), vocabulary.target_size)
    monkeypatch.setattr("foredraft.train.run.frequent_tokens", lambda *_: without)
    with pytest.raises(CheckpointError, match="none of the target's EOS tokens"):
        Training(llm, plan)


def test_evaluation_sets_are_never_trained_on(tmp_path: Path) -> None:
    """The first question of Spec-Bench, GSM8K's test split and HumanEval are known by their hashes; heads on board were
    trained on prompts of which none is."""
    question = (
        "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her "
        "friends every day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck egg. "
        "How much in dollars does she make every day at the farmers' market?"
    )
    assert is_evaluation(question)
    assert is_evaluation(question.upper().replace(" ", "  "))
    assert not is_evaluation("What is the capital of France?")
    assert len(evaluation_digests()) > 2500
    for name in zoo.names():
        trained_on = root() / name / "trained_on.txt"
        if trained_on.exists():
            digests = set(trained_on.read_text().split())
            assert not {digest[:8] for digest in evaluation_digests()} & digests


def test_heads_on_board_of_the_toy_draft_and_change_nothing(llm: LLM) -> None:
    """No more than the name of the method is said; a head of another target would have nearly nothing accepted."""
    plain = llm.generate(PROMPTS[:4], GREEDY)
    for method in ("medusa", "hydra", "hydra++", "eagle", "eagle2", "eagle3"):
        drafting = llm.with_speculative_config(method)
        assert drafting.drafting.heads == (f"zoo:tiny, {'eagle' if method == 'eagle2' else method} (included)",)
        found = drafting.generate(PROMPTS[:4], GREEDY)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain], method
        counted = [one.metrics.speculative_decoding for one in found]
        drafted = sum(one["num_draft_tokens"] for one in counted)
        assert drafted > 0
        assert sum(one["num_accepted_draft_tokens"] for one in counted) >= 0.04 * drafted, method


def test_weights_are_shipped_in_bfloat16_and_matrices_of_hydra_in_half_of_that() -> None:
    for method in HEADS:
        tensors = load_file(zoo.asset("tiny", method) / "model.safetensors").values()
        eights = {tensor.dtype for tensor in tensors if tensor.dtype == torch.float8_e4m3fn}
        assert bool(eights) == method.startswith("hydra")
        assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} - eights == {torch.bfloat16}


def test_the_head_of_hydra_plus_plus_on_board_is_as_the_survey_describes_it(llm: LLM) -> None:
    """MLPs of four layers, no two the same, over a layer of attention."""
    heads = llm.with_speculative_config("hydra++").drafting.new_drafter().heads
    assert heads.prefix is not None
    assert heads.shape.num_layers == 4
    for later in heads.later:
        assert len({block.linear.weight.data_ptr() for block in later}) == 3
