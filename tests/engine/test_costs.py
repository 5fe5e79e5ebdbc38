"""The one timer of forwards, and curves of costs: measured once, kept, and dropped where steps disprove them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from foredraft.drafters.none import EmptyDrafter
from foredraft.engine import costs
from foredraft.engine.cost_model import FEW, CostCurve
from foredraft.engine.costs import Forward, StepCosts
from foredraft.engine.governor import new_governor
from foredraft.engine.memory import bytes_per_token
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model

# -- curves --------------------------------------------------------------------------------------------------------


def target(seed: int = 0) -> CausalLM:
    """Another one, of the same shapes."""
    return CausalLM(toy_model(64, seed=seed), execution="eager", probe=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    return tmp_path / "costs"


@pytest.fixture
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is that runs the tests."""
    monkeypatch.setattr(costs, "BUSY", float("inf"))


@pytest.mark.usefixtures("_steady")
def test_a_curve_is_measured_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = costs.cost_curve(target())
    assert {1, 4, 16} <= first.seconds.keys()
    assert all(seconds > 0 for seconds in first.seconds.values())
    assert first.per_token >= 0
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    assert kept["facts"]["dtype"] == "torch.float64"
    monkeypatch.setattr(costs, "measure_curve", lambda target: pytest.fail("measured again"))
    assert costs.cost_curve(target(seed=1)) == first  # of the same shapes


@pytest.mark.full
def test_on_a_busy_machine_some_processes_measure_and_the_next_takes_what_they_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "BUSY", -1.0)
    measure, found = costs.measure_curve, []

    def measured(target: CausalLM) -> tuple[CostCurve, bool]:
        found.append(measure(target))
        return found[-1]

    monkeypatch.setattr(costs, "measure_curve", measured)
    for number in range(FEW + 2):
        one = target()  # as another process would
        curve = costs.cost_curve(one)
        assert costs.cost_curve(one) == curve
        assert len(found) == min(number + 1, FEW)
    for count in curve.seconds:
        assert curve.seconds[count] == pytest.approx(sum(one.seconds[count] for one, _ in found) / len(found))


@pytest.mark.usefixtures("_steady")
def test_a_curve_that_steps_disprove_is_dropped_from_the_disk(folder: Path) -> None:
    """By made-up times of sizes that are always measured: 16 nodes take a hundred times what the file says."""
    one = target()
    curve = costs.cost_curve(one)
    (file,) = folder.iterdir()
    governor = new_governor(one, EmptyDrafter())
    for _ in range(8):
        governor.costs.verified(1, 1, curve.seconds[1])
        governor.costs.verified(1, 4, curve.seconds[4])
    assert file.exists()
    for _ in range(8):
        governor.costs.verified(1, 16, 100 * curve.seconds[16])
    assert not file.exists()
    assert governor.costs.verify(1, 16) / governor.costs.verify(1, 1) > 10
    costs.cost_curve(one)
    assert file.exists()


@pytest.mark.usefixtures("_steady")
def test_a_digit_that_was_damaged_is_measured_again(folder: Path) -> None:
    """A time that is a thousand times too long is as likely as any: only the digest tells."""
    one = target()
    curve = costs.cost_curve(one)
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    facts = costs.facts_of(one)
    known = StepCosts.kept(facts)
    assert known.curves == (curve,)
    kept["curves"][0]["seconds"]["4"] *= 1000
    file.write_text(json.dumps(kept))
    assert StepCosts.kept(facts) is None
    again = costs.cost_curve(target())
    assert again.seconds[4] < 100 * curve.seconds[4]
    known = StepCosts.kept(facts)
    assert known.curves == (again,)


def kept(curve: str) -> str:
    """A file with this curve alone, as costs are kept."""
    return f'{{"curves": [{curve}], "host_seconds": 0.0, "drafting": {{}}, "measured": "", "is_steady": true}}'


def signed(text: str) -> str:
    """A file with this content and the digest that belongs to it."""
    content = json.loads(text)
    return json.dumps({**content, "digest": costs.digest_of(content)})


@pytest.mark.usefixtures("_steady")
def test_a_file_that_says_nothing_is_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[CausalLM] = []

    def measure(target: CausalLM) -> tuple[CostCurve, bool]:
        measured.append(target)
        return CostCurve({1: 1.0, 4: 2.0}), True

    monkeypatch.setattr(costs, "measure_curve", measure)
    costs.cost_curve(target())
    (file,) = folder.iterdir()
    for number, content in enumerate(
        [
            "",
            "{",
            signed(kept('{"seconds": [1], "context": 256, "per_token": 0.0}')),
            signed(kept('{"seconds": {"1": -1}, "context": 256, "per_token": 0.0}')),
            signed(kept('{"seconds": {"1": 1}}')),
            kept('{"seconds": {"1": 1}, "context": 256, "per_token": 0.0}'),
            signed(kept('{"seconds": {"1": Infinity}, "context": 256, "per_token": 0.0}')),
            "[" * 100_000,
        ],
        2,
    ):
        file.write_text(content)
        assert costs.cost_curve(target()).seconds == {1: 1.0, 4: 2.0}
        assert len(measured) == number, content[:80]
        assert "facts" in json.loads(file.read_text())


@pytest.mark.usefixtures("_steady")
def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "costs").write_text("in the way")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert 1 in costs.cost_curve(target()).seconds


def test_a_short_context_and_no_time_are_enough(folder: Path) -> None:
    short = CausalLM(toy_model(64, max_position_embeddings=12), execution="eager")
    found, _ = costs.measure_curve(short)
    assert max(found.seconds) < 12
    assert found.context + max(found.seconds) <= 12
    assert set(costs.measure_curve(target(), seconds=0.0)[0].seconds) <= {1, 4, 16, 64}


@pytest.mark.usefixtures("_steady")
def test_a_longer_context_is_measured_to_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By made-up times: what a forward takes is what its cache holds."""

    def times(forwards: Sequence[Forward], repeats: int, *, warm_ups: int) -> list[list[float]]:
        return [[1.0 + forward.width + forward.cache.lengths[0] / 1000] * repeats for forward in forwards]

    monkeypatch.setattr(costs, "forward_times", times)
    long = CausalLM(toy_model(64, max_position_embeddings=4096), execution="eager")
    found, is_steady = costs.measure_curve(long)
    assert is_steady
    assert found.context == costs.CONTEXT
    assert found.seconds[4] == pytest.approx(5.256)
    assert found.per_token == pytest.approx(0.001)
    monkeypatch.setattr(costs, "MOST_BYTES", 1000 * bytes_per_token(long))
    lengths = []
    monkeypatch.setattr(
        costs,
        "forward_times",
        lambda forwards, repeats, warm_ups: (
            lengths.append(forwards[-1].cache.lengths[0]) or times(forwards, repeats, warm_ups=warm_ups)
        ),
    )
    assert costs.measure_curve(long)[0].per_token == pytest.approx(0.001)
    assert set(lengths) == {1000}
