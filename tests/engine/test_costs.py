"""The one timer of forwards: how often what runs, on what, and in which order."""

from __future__ import annotations

import pytest
import torch

from foredraft.engine import costs
from foredraft.engine.costs import Forward, filled_cache, forward_times, median_times, seconds_of
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model


@pytest.fixture
def lm() -> CausalLM:
    return CausalLM(toy_model(), execution="eager", probe=False)


def test_forwards_run_in_turns_after_one_round_that_is_not_counted(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = filled_cache(lm, 5, 4)
    clock = iter(range(1000))
    monkeypatch.setattr(costs, "perf_counter", lambda: next(clock) ** 2)
    widths: list[int] = []
    forward = lm.forward
    monkeypatch.setattr(lm, "forward", lambda nodes, *a, **k: widths.append(nodes.width) or forward(nodes, *a, **k))
    times = forward_times([Forward(lm, cache, 1), Forward(lm, cache, 4)], 3)
    assert widths == [1, 4] * 4
    assert times == [[2 * n + 1 for n in (4, 8, 12)], [2 * n + 1 for n in (6, 10, 14)]]


def test_nothing_is_kept_of_what_was_timed(lm: CausalLM) -> None:
    cache, length = filled_cache(lm, 5, 4)
    assert len(median_times([Forward(lm, cache, 4)], 2)) == 1
    assert (cache.lengths, length) == ([5], 5)


def test_a_context_is_cut_to_what_the_model_has_room_for(lm: CausalLM) -> None:
    assert lm.context_length == 256
    cache, length = filled_cache(lm, 1000, 16)
    assert (cache.lengths, length) == ([240], 240)


def test_a_call_is_timed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("synchronize"))
    assert seconds_of(lambda what: done.append(what), torch.device("cuda"), "call") >= 0
    assert done == ["synchronize", "call", "synchronize"]
