"""The recipe of zoo:tiny in `examples/tiny_pair`: formats of texts, and a target whose training was killed."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from foredraft import zoo

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "tiny_pair"


@pytest.fixture(scope="module", autouse=True)
def recipe():
    sys.path.insert(0, str(RECIPE))
    yield
    sys.path.remove(str(RECIPE))
    for name in ("texts", "target", "datastore", "eight_bits"):
        sys.modules.pop(name, None)


def test_formats() -> None:
    import texts

    assert list(texts.dialogue("A: Hi\nA: there\nB: Hello\nB:\nA: Bye\n")) == [
        "<|user|>Hi there\n<|assistant|>Hello<|end|>\n"
    ]
    assert list(texts.arithmetic("Question: 1+1?\nAnswer: It is\n#### 2\n")) == [
        "<|user|>1+1?\n<|assistant|>It is\n#### 2<|end|>\n"
    ]
    page = "# ls\n\n> List files.\n> More information: <https://x>.\n\n- List:\n\n`ls`\n"
    assert list(texts.command(page)) == [
        "<|user|>How do I use the command ls?\n<|assistant|>List files.\n\n- List:\n`ls`<|end|>\n"
    ]
    assert list(texts.book("# One\n\nA _word_ here\nand there.\n")) == ["One\n\nA word here and there.\n"]


def test_records_joins_what_a_raw_line_break_cut_and_refuses_a_cut_file(tmp_path: Path) -> None:
    import texts

    path = tmp_path / "x.jsonl.xz"
    with lzma.open(path, "wt", encoding="utf8") as out:
        out.write('{"text": "a"}\n{"text": "b \nc"}\n')
    assert list(texts.records(path)) == ["a", "b \nc"]
    with lzma.open(path, "at", encoding="utf8") as out:
        out.write('{"text": "d')
    with pytest.raises(ValueError, match="is the file cut"):
        list(texts.records(path))


def test_texts_become_files_by_source_and_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import texts

    found = [("stories", f"A story of dog {i}." + " It ran." * 40) for i in range(400)]
    monkeypatch.setattr(texts, "documents", lambda _: iter(found))
    texts.write(tmp_path, tmp_path, 60)
    lines = {
        split: [json.loads(line)["text"] for line in (tmp_path / f"stories.{split}.jsonl").read_text().splitlines()]
        for split in ("train", "valid")
    }
    assert sorted(lines["train"] + lines["valid"]) == sorted(text + texts.END_OF_TEXT for _, text in found)
    assert lines["valid"]
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "beginnings.jsonl").read_text().splitlines()]
    assert len(prompts) == 10
    assert all(len(prompt) <= 200 and any(text.startswith(prompt) for text in lines["train"]) for prompt in prompts)


def test_blocks_are_mixed_by_weight() -> None:
    import target

    from foredraft.train.examples import Example

    made = {name: [Example((i,), 0, f"{name} {i}") for i in range(count)] for name, count in (("a", 90), ("b", 10))}
    chosen = target.mixed(made, {"a": 0.5, "b": 0.5, "absent": 1.0}, 0)
    assert len(chosen) == 100
    assert [sum(one.key.startswith(name) for one in chosen) for name in "ab"] == [50, 50]
    assert len({one.key for one in chosen if one.key.startswith("a")}) == 50
    assert len({one.key for one in chosen if one.key.startswith("b")}) == 10


def test_matrices_of_heads_are_rounded_to_eight_bits_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import eight_bits

    from foredraft.heads.checkpoint import read_checkpoint, write_checkpoint

    matrix, vector, ids = torch.tensor([[1.0, 0.3]]), torch.tensor([0.3]), torch.tensor([7])
    tensors = {"a.weight": matrix.bfloat16(), "a.bias": vector.bfloat16(), "token_map": ids}
    write_checkpoint(tmp_path / "heads", {"x": 1}, tensors)
    command = ["eight_bits.py", "--heads", str(tmp_path / "heads"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    eight_bits.main()
    found = read_checkpoint(tmp_path / "out")
    assert found.config == {"x": 1}
    assert found.tensors["a.weight"].tolist() == [[1.0, 0.3125]]  # 0.3 lies between 0.28125 and 0.3125
    assert torch.equal(found.tensors["a.bias"], tensors["a.bias"])
    assert torch.equal(found.tensors["token_map"], ids)


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, eos_token_id=[0, 3], pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[0, 3], pad_token_id=0, bos_token_id=0)
    model.save_pretrained(tmp_path / "init")
    folder = tmp_path / "texts"
    folder.mkdir()
    for split, count in (("train", 60), ("valid", 8)):
        lines = [json.dumps({"text": f"The {i}th dog ran to the park and sat.<|endoftext|>"}) for i in range(count)]
        (folder / f"books.{split}.jsonl").write_text("\n".join(lines))
    return [
        "--texts", str(folder), "--init", str(tmp_path / "init"), "--tokenizer", str(zoo.path("tiny", "target")),
        "--batch-tokens", "64", "--length", "32", "--learning-rate", "1e-2", "--save-seconds", "0",
        "--evaluate-every", "4", "--tokens", "620",
    ]  # fmt: skip


def test_a_killed_run_ends_where_an_uninterrupted_one_ends(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import target

    from foredraft.train.trainer import Trainer

    target.main([*small, "--out", str(tmp_path / "whole")])
    real = Trainer.save

    def killed(self: Trainer) -> None:
        real(self)
        if self.progress.step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        target.main([*small, "--out", str(tmp_path / "halves")])
    monkeypatch.setattr(Trainer, "save", real)
    target.main([*small, "--out", str(tmp_path / "halves")])
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "halves")]
    assert states[0]["progress"]["step"] == states[1]["progress"]["step"] > 5
    assert all(torch.equal(value, states[1]["module"][name]) for name, value in states[0]["module"].items())
    shipped = LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert shipped.dtype == torch.bfloat16
    assert shipped.generation_config.eos_token_id == [0, 3]
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["held_out"]["books"] for record in records if "held_out" in record]
    assert losses[-1] < losses[0]
