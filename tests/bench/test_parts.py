"""`benchmarks/parts.py`: replayed forwards, efficiency and profile, and its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pairs
import parts
import pytest
import torch
from test_bench import GREEDY, PROMPT, draft_arm, plain_arm

from foredraft.bench.trial import Run
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.tune.scale import sizes


@pytest.fixture(scope="module")
def pair() -> pairs.Pair:
    return pairs.load_pair("zoo:tiny", None, "float32")


@pytest.fixture(scope="module")
def target(pair: pairs.Pair) -> CausalLM:
    return CausalLM(pair.target)


@pytest.fixture(scope="module")
def drafter(pair: pairs.Pair) -> CausalLM:
    return CausalLM(pair.drafter)


def test_replayed_forwards_are_those_of_the_run(target: CausalLM, drafter: CausalLM) -> None:
    """One target forward per step; tokens add up; the lengths of the cache grow by what was committed."""
    arm = draft_arm(target, drafter)
    noted, run = parts.record(arm, PROMPT, 16, GREEDY)
    ours = [forward for forward in noted.forwards if forward.is_target]
    assert len(ours) == noted.num_steps == arm_steps(run) - 1, "the first step emits first"
    assert run.token_ids == plain_arm(target).run(PROMPT, 16, GREEDY).token_ids
    lengths = [forward.lengths[0] for forward in ours]
    assert lengths[0] == len(PROMPT) + run.num_first - 1
    assert lengths == sorted(set(lengths))
    assert "forward" not in vars(target), "the models are as they were"


def arm_steps(run: Run) -> int:
    return run.stats.num_steps


@torch.inference_mode()
def test_a_replay_gives_the_logits_shapes_of_the_run_and_moves_no_cache(target: CausalLM, drafter: CausalLM) -> None:
    arm = draft_arm(target, drafter)
    noted, _ = parts.record(arm, PROMPT, 16, GREEDY)
    replay = parts.Replay([noted])
    seconds = replay.seconds(noted)
    assert len(seconds) == len(noted.forwards)
    assert min(seconds) > 0
    assert arm.run(PROMPT, 16, GREEDY).token_ids == plain_arm(target).run(PROMPT, 16, GREEDY).token_ids


@torch.inference_mode()
def test_efficiency_is_speed_up_over_what_is_allowed(target: CausalLM, drafter: CausalLM) -> None:
    (found,) = parts.efficiencies(plain_arm(target), [draft_arm(target, drafter)], [PROMPT], 24, GREEDY)
    allowed = found.tokens_per_step * found.plain_seconds / (found.target_seconds + found.drafter_seconds)
    assert found.allowed == pytest.approx(allowed)
    assert found.efficiency == pytest.approx(found.speedup / allowed)
    assert found.nodes_per_step <= 4
    assert found.drafter_seconds > 0, "also where it drafts in one call that is no forward"
    assert found.efficiency == pytest.approx(found.forward_share / found.plain_forward_share)
    assert parts.column_medians([(1.0, 9.0), (2.0, 3.0), (5.0, 4.0)]) == [2.0, 4.0]


def test_the_profile_adds_up_to_the_step(target: CausalLM, drafter: CausalLM) -> None:
    """Verbs and models together are the step, but for the bookkeeping between the verbs."""
    found = parts.profile(draft_arm(target, drafter), [PROMPT], 24, GREEDY)
    total = found.target_seconds + found.drafter_seconds + sum(found.verb_seconds.values())
    assert total <= found.step_seconds
    assert total > 0.5 * found.step_seconds
    assert min(found.verb_seconds.values()) >= 0
    assert 0 < found.outside_share < 1
    assert "run" not in vars(target.execution)


def test_a_pair_grows_in_width_and_vocabulary(pair: pairs.Pair) -> None:
    own, small = pair.target.config, pair.drafter.config
    assert pairs.scaled(pair, "none") is pair
    grown = pairs.scaled(pair, "512x1408")
    assert (grown.target.config.hidden_size, grown.drafter) == (512, pair.drafter)
    assert "inflated in width from hidden" in grown.label
    wide = pairs.scaled(pair, "none", own.vocab_size + 8)
    assert wide.target.config.vocab_size == wide.drafter.config.vocab_size == own.vocab_size + 8
    assert pairs.widened(pair.drafter, 1) is pair.drafter
    assert pairs.widened(pair.drafter, 3).config.hidden_size == 3 * small.hidden_size


@pytest.mark.parametrize("scale", ["big", "1024", "ax2"])
def test_an_unknown_scale_is_refused(scale: str) -> None:
    with pytest.raises(ConfigError, match="HIDDENxFFN"):
        sizes(scale)
    assert sizes("512x1408") == (512, 1408)


SMALL = ["--model", "zoo:tiny", "--dtype", "float32", "--num-prompts", "1", "--max-new-tokens", "12"]
ROWS = {"efficiency": 4, "profile": 2, "drafting": len(parts.CONFIGS), "accepted": 6}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", parts.SHOWN)
def test_every_part_prints_a_table_and_keeps_it(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "part.json"
    small = ["--contexts", "64", "--datastore-sizes", "1e4", "--draft-steps", "10", "--out", str(out)]
    parts.main([part, *SMALL, *small])
    rows = json.loads(out.read_text())[part]
    assert len(rows) == ROWS[part]
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= parts.WIDTH
    assert all(name.split("_")[0] in text for name in parts.SHOWN[part])
