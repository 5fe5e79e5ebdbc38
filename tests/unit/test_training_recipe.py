"""The recipe in `training/`: the data formats, and a run that was killed ends where an uninterrupted one ends."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

RECIPE = Path(__file__).resolve().parents[2] / "training"


@pytest.fixture(scope="module", autouse=True)
def recipe():
    sys.path.insert(0, str(RECIPE))
    yield
    sys.path.remove(str(RECIPE))
    for name in ("data", "train_tiny", "measure_pair"):
        sys.modules.pop(name, None)


def test_formats() -> None:
    import data

    assert list(data.dialogue("A: Hi\nA: there\nB: Hello\nB:\nA: Bye\n")) == [
        "<|user|>Hi there\n<|assistant|>Hello<|end|>\n"
    ]
    assert list(data.arithmetic("Question: 1+1?\nAnswer: It is\n#### 2\n")) == [
        "<|user|>1+1?\n<|assistant|>It is\n#### 2<|end|>\n"
    ]
    page = "# ls\n\n> List files.\n> More information: <https://x>.\n\n- List:\n\n`ls`\n"
    assert list(data.command(page)) == [
        "<|user|>How do I use the command ls?\n<|assistant|>List files.\n\n- List:\n`ls`<|end|>\n"
    ]
    assert list(data.book("# One\n\nA _word_ here\nand there.\n")) == ["One\n\nA word here and there.\n"]


def test_records_joins_what_a_raw_line_break_cut_and_refuses_a_cut_file(tmp_path: Path) -> None:
    import data

    path = tmp_path / "x.jsonl.xz"
    with lzma.open(path, "wt", encoding="utf8") as out:
        out.write('{"text": "a"}\n{"text": "b \nc"}\n')
    assert list(data.records(path)) == ["a", "b \nc"]
    with lzma.open(path, "at", encoding="utf8") as out:
        out.write('{"text": "d')
    with pytest.raises(ValueError, match="is the file cut"):
        list(data.records(path))


def test_repeated_marks_tokens_that_complete_a_known_gram_but_not_the_format() -> None:
    import train_tiny

    tokens = torch.tensor([[9, 8, 7, 9, 8, 7, 9, 3], [9, 8, 3, 9, 8, 3, 9, 8]])
    assert train_tiny.repeated(tokens, 3, 2).tolist() == [
        [False, False, False, False, False, True, True, False],
        [False, False, False, False, False, False, True, True],
    ]


def test_loop_share() -> None:
    import measure_pair

    assert measure_pair.loop_share(list(range(40))) == 0.0
    assert measure_pair.loop_share([1, 2, 3, 4] * 10) == 1.0
    assert measure_pair.loop_share([*range(8), 50, *range(8), 60, 61, 62]) == 16 / 20


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, eos_token_id=[0, 3], pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[0, 3], pad_token_id=0, bos_token_id=0)
    model.save_pretrained(tmp_path / "init")
    (tmp_path / "shards").mkdir()
    for index, name in enumerate(("a", "b")):
        ids = np.random.default_rng(index).integers(0, 256, 900).astype(np.uint16)
        np.save(tmp_path / "shards" / f"{name}.train.npy", ids)
        np.save(tmp_path / "shards" / f"{name}.valid.npy", ids[:80])
    return [
        "--shards", str(tmp_path / "shards"), "--init", str(tmp_path / "init"), "--weights", '{"a": 1, "b": 2}',
        "--tokens-per-step", "64", "--length", "32", "--long-length", "48", "--long-every", "3", "--warmup-steps", "2",
        "--decay-steps", "3", "--repeat-rate", "0.5", "--repeat-rows", "2", "--repeat-prompt", "8",
        "--repeat-tokens", "12", "--repeat-order", "2", "--save-seconds", "0", "--evaluate-every", "4",
    ]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str], out: Path) -> None:
    import train_tiny

    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "ignored_marker", *arguments, "--out", str(out)])
    train_tiny.train(train_tiny.parse())


def test_a_killed_run_ends_where_an_uninterrupted_one_ends(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights bit for bit: optimizer, schedule, data position and random state all come back."""
    import train_tiny

    run(monkeypatch, [*small, "--steps", "8"], tmp_path / "whole")
    real = train_tiny.save_checkpoint

    def killed(out, state):
        real(out, state)
        if state["step"] == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_tiny, "save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, [*small, "--steps", "8"], tmp_path / "halves")
    monkeypatch.setattr(train_tiny, "save_checkpoint", real)
    run(monkeypatch, [*small, "--steps", "8"], tmp_path / "halves")
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=False) for name in ("whole", "halves")]
    assert states[0]["step"] == states[1]["step"] == 8
    assert all(torch.equal(value, states[1]["model"][name]) for name, value in states[0]["model"].items())
    start = LlamaForCausalLM.from_pretrained(tmp_path / "init").state_dict()
    assert not torch.equal(start["model.norm.weight"], states[0]["model"]["model.norm.weight"])
    shipped = LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert shipped.dtype == torch.bfloat16
    assert shipped.generation_config.eos_token_id == [0, 3]


def test_a_drafter_taught_by_a_teacher_moves_towards_it(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    teacher = LlamaForCausalLM.from_pretrained(tmp_path / "init")
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    teacher.save_pretrained(tmp_path / "teacher")
    taught = [
        *small,
        "--repeat-rate",
        "0",
        "--teacher-share",
        "1",
        "--teacher",
        str(tmp_path / "teacher"),
        "--learning-rate",
        "1e-2",
    ]
    run(monkeypatch, [*taught, "--steps", "150"], tmp_path / "draft")
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def divergence(path: Path) -> float:
        wanted, found = (
            m(input_ids=ids).logits.log_softmax(-1) for m in (teacher, LlamaForCausalLM.from_pretrained(path))
        )
        return float((wanted.exp() * (wanted - found.float())).sum(-1).mean())

    assert divergence(tmp_path / "draft" / "model") < 0.8 * divergence(tmp_path / "init")


def test_pause_and_log(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pause file exists the run sleeps; every held-out source is in the log."""
    import train_tiny

    pause, naps = tmp_path / "pause", []
    pause.touch()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            pause.unlink()

    monkeypatch.setattr(train_tiny.time, "sleep", nap)
    run(monkeypatch, [*small, "--steps", "4", "--pause-file", str(pause)], tmp_path / "out")
    assert len(naps) == 3
    notes = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    held_out = [note for note in notes if "held_out" in note]
    assert [note["step"] for note in held_out] == [0, 4]
    assert set(held_out[0]["held_out"]) == {"a", "b"}
