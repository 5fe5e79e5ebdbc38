"""The recipe that extends the drafter's context: its rows, its schedule, and going on after a stop."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

RECIPE = Path(__file__).resolve().parents[2] / "training"


@pytest.fixture(scope="module", autouse=True)
def recipe():
    sys.path.insert(0, str(RECIPE))
    yield
    sys.path.remove(str(RECIPE))
    for name in ("data", "train_tiny", "extend_drafter", "measure_context"):
        sys.modules.pop(name, None)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    for seed, (name, layers) in enumerate((("target", 2), ("draft", 1))):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
            max_position_embeddings=64, initializer_range=0.2, eos_token_id=[0, 3], pad_token_id=0, bos_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    (tmp_path / "shards").mkdir()
    ids = np.random.default_rng(0).integers(0, 64, 900).astype(np.uint16)
    np.save(tmp_path / "shards" / "a.train.npy", ids)
    return [
        "--shards", str(tmp_path / "shards"), "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"),
        "--weights", '{"a": 1}', "--length", "16", "--long-length", "48", "--steps", "6", "--warmup-steps", "2",
        "--learning-rate", "0.01",
    ]  # fmt: skip


def test_long_rows_are_spread_evenly() -> None:
    from extend_drafter import is_long

    assert "".join(str(int(is_long(number, 0.7))) for number in range(10)) == "0110110111"
    assert sum(is_long(number, 0.7) for number in range(1000)) == 700


def test_both_kinds_of_rows_hold_as_many_tokens_and_the_rate_falls_to_zero(
    arguments: list[str], tmp_path: Path
) -> None:
    from extend_drafter import Extension, parse, rate_at

    options = parse([*arguments, "--out", str(tmp_path / "run")])
    run = Extension(options)
    assert [tuple(run.rows(long).shape) for long in (True, False)] == [(1, 48), (3, 16)]
    assert [rate_at(step, options) for step in (0, 1, 3, 6)] == pytest.approx([0.005, 0.01 * 5 / 6, 0.005, 0.0])


def test_a_stopped_run_ends_where_an_uninterrupted_one_ends_and_only_the_drafter_learns(
    arguments: list[str], tmp_path: Path
) -> None:
    """Weights bit for bit. The first start stops after two steps, as `--seconds` would stop it."""
    from extend_drafter import Extension, extend, parse

    assert extend(parse([*arguments, "--out", str(tmp_path / "whole")]))
    (tmp_path / "halves").mkdir()
    options = parse([*arguments, "--out", str(tmp_path / "halves")])
    first = Extension(options)
    first.update()
    first.update()
    first.save()
    assert extend(options)
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=False) for name in ("whole", "halves")]
    assert all(torch.equal(value, states[1]["draft"][name]) for name, value in states[0]["draft"].items())
    given = LlamaForCausalLM.from_pretrained(tmp_path / "draft").state_dict()
    assert not torch.equal(given["model.norm.weight"], states[0]["draft"]["model.norm.weight"])
    assert not any(parameter.grad is not None for parameter in first.target.parameters())
    assert LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "model").dtype == torch.bfloat16


def test_a_bounded_start_says_that_it_is_not_at_the_end(arguments: list[str], tmp_path: Path) -> None:
    from extend_drafter import extend, parse

    assert not extend(parse([*arguments, "--out", str(tmp_path / "run"), "--seconds", "0"]))
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert not (tmp_path / "run" / "model").exists()


def test_measured_blocks_are_whole_and_distinct() -> None:
    import measure_context

    ids = np.arange(5 * measure_context.BLOCK + 7, dtype=np.uint16)
    starts = [int(block[0, 0]) for block in measure_context.blocks(ids, 2)]
    assert starts == [0, 2 * measure_context.BLOCK]
    assert len(measure_context.blocks(ids, 9)) == 5
    assert measure_context.blocks(ids[:100], 9) == []
