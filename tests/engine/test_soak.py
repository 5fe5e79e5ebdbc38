"""Requests of every kind, with all sorts of faults: each text is that of its request alone, and nothing stays behind.

`benchmarks/soak.py` does the same for as long as one likes.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from soak import METHODS, Soak, growth, leftovers, toy_world

DENSE = {"abort_rate": 0.03, "interrupt_rate": 0.012, "bursts": (1, 1, 2, 4)}
"""For a run that is short: what happens seldom happens more often, and each method has a turn."""


def soaked(num_requests: int, folder: Path, fault_rate: float, seed: int, methods: Any = METHODS, **rates: Any) -> Soak:
    logging.getLogger("foredraft").setLevel(logging.ERROR)
    rng = random.Random(seed)
    soak = Soak(toy_world(rng, folder, tuple(methods)), rng, fault_rate=fault_rate, **rates)
    try:
        soak.run(lambda count: count >= num_requests, drain_every=25)
    finally:
        logging.getLogger("foredraft").setLevel(logging.NOTSET)
    return soak


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_requests", "fault_rate", "seed", "rates"),
    [
        pytest.param(44, 0.03, 4, DENSE, marks=pytest.mark.slow),
        pytest.param(150, 0.01, 1, {}, marks=pytest.mark.full),
        pytest.param(100, 0.1, 2, {}, marks=pytest.mark.full),
        pytest.param(800, 0.01, 3, {}, marks=pytest.mark.full),
    ],
)
def test_every_text_is_that_of_its_request_alone_and_nothing_stays_behind(
    num_requests: int, fault_rate: float, seed: int, rates: dict[str, Any], tmp_path: Path
) -> None:
    """Arrivals, aborts, Ctrl-C, processors, tokenizers and drafters that fail, prefixes, little memory; float64."""
    soak = soaked(num_requests, tmp_path, fault_rate, seed, **rates)
    counts = soak.counts
    assert not soak.differing
    assert counts["compared"] == counts["texts"] >= num_requests
    assert counts["most_cache_bytes"] <= int(soak.world.config.max_kv_bytes or 0)
    assert soak.faults
    assert all(counts[name] for name in ("accepted", "aborts", "interrupts", "cached_tokens"))
    assert {f"ended by {reason}" for reason in ("stop", "length", "abort", "error")} <= counts.keys()
    if num_requests > 500:
        assert counts["preemptions"]
        more = growth(soak.memory)
        assert more["megabytes"] < 16
        assert more["tensors"] < 60


def test_what_drafters_keep_of_rows_is_found(tmp_path: Path) -> None:
    """The check itself: a drafter that holds on to rows is told, and a row in its cache, by where they lie."""
    soak = soaked(1, tmp_path, 0.0, 0, ["draft_model"])
    engine = soak.engines["draft_model"]
    beside = soak.world.target, engine.cache
    works, seen = engine.drafter.start, list[Any]()
    engine.drafter.start = lambda rows, chunks: (seen.extend(rows), works(rows, chunks))
    engine.add_request(*soak.world.request(random.Random(1)))
    list(engine.run())
    engine.drafter.seen, (_, own) = [], engine.caches.caches
    assert not leftovers(engine.drafter, beside=(*beside, engine.drafter.start))
    engine.drafter.seen = seen
    own.add_rows()
    left = leftovers(engine.drafter, beside=beside)
    assert any("KVCache of lengths" in each for each in left)
    assert any("Row" in each for each in left)
