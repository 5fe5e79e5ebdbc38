"""The shipped pair loads offline, speaks, agrees with itself, and is described."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from foretoken import zoo
from foretoken.engine.errors import ConfigError


@pytest.fixture(scope="module")
def pair():
    return zoo.load("tiny")


def test_names_and_paths() -> None:
    assert zoo.names() == ["smollm2", "tiny"]
    for part in ("target", "draft"):
        assert (zoo.path("tiny", part) / "model.safetensors").is_file()
    assert (zoo.path("zoo:tiny", "tokenizer") / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("tinny", "target", "'tinny' is not a model of the zoo; did you mean 'tiny'"),
        ("tiny", "drafter", "'drafter' is not a part of zoo:tiny; did you mean 'draft'"),
        ("../tiny", "target", "is not a model of the zoo"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, part: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zoo.path(name, part)


def test_plain_transformers_objects(pair) -> None:
    target, drafter, tokenizer = pair
    for model in (target, drafter):
        assert model.dtype == torch.float32
        assert not model.training
        assert model.generation_config.eos_token_id == [0, 3]
        assert model.config.vocab_size == len(tokenizer) == 4096
    assert sum(p.numel() for p in target.parameters()) <= 12_000_000
    assert zoo.load("zoo:tiny", dtype=torch.bfloat16)[1].dtype == torch.bfloat16


def test_the_chat_template_gives_the_training_format(pair) -> None:
    tokenizer = pair[2]
    turns = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == "<|user|>Hi there\n<|assistant|>Hello<|end|>\n"
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|user|>Hi there\n<|assistant|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


STORY = (
    "Once upon a time there was a little girl who lived in a small house near the forest. Every morning she went "
    "to the river with her brother to fetch water. One day they saw a big bird sitting on a stone."
)


def test_both_models_know_simple_english_and_the_target_knows_it_better(pair) -> None:
    """Loss in nats per token on a text that is in no corpus: far below chance (8.3), and better with more layers."""
    target, drafter, tokenizer = pair
    ids = torch.tensor([tokenizer.encode(STORY)])
    with torch.no_grad():
        losses = [float(model(input_ids=ids, labels=ids).loss) for model in (target, drafter)]
    assert losses[0] < losses[1] < 0.6 * math.log(4096)
    assert losses[0] < 3.6


def test_the_drafter_agrees_with_the_target_often_enough_to_draft(pair) -> None:
    """Greedy agreement on the target's own text: 0.63 was measured; a mismatched pair would give a few per cent."""
    target, drafter, tokenizer = pair
    prompts = ["<|user|>What is your favourite movie?\n<|assistant|>", "Once upon a time"]
    agreed = total = 0
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt)])
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False
        )
        with torch.no_grad():
            guess = drafter(input_ids=text).logits.argmax(-1)
        agreed += int((guess[:, ids.shape[1] - 1 : -1] == text[:, ids.shape[1] :]).sum())
        total += text.shape[1] - ids.shape[1]
    assert agreed / total > 0.35


def test_provenance_is_described() -> None:
    readme = (Path(zoo.path("tiny")).parent / "README.md").read_text(encoding="utf8")
    for needed in ("CC-BY-4.0", "gsm8k", "held-out", "inflate"):
        assert needed.lower() in readme.lower()


@pytest.mark.slow
def test_the_wheel_carries_the_models(tmp_path: Path) -> None:
    """Built, unpacked and loaded from an empty directory, with nothing of the checkout on the path."""
    pytest.importorskip("hatchling")
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=root, env=environment, check=True)
    unpacked, empty = tmp_path / "unpacked", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(next(tmp_path.glob("foretoken-*.whl"))).extractall(unpacked)
    program = f"""
import sys
sys.path[:] = [{str(unpacked)!r}] + [p for p in sys.path if p and not p.startswith({str(root / "src")!r})]
from foretoken import zoo
target, drafter, tokenizer = zoo.load("tiny")
print(zoo.path("tiny"), target.num_parameters(), drafter.num_parameters(), len(tokenizer))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=empty, env=environment, check=True, capture_output=True, text=True
    )
    assert found.stdout.split() == [str(unpacked / "foretoken/zoo/tiny/target"), "5475584", "708992", "4096"]
