"""Replicas in processes of their own, by Ray: they are killed, and clients notice nothing but a pause.

Everything runs in processes that end with the test, with a limit on every wait; addresses and ports are free ones.
"""

from __future__ import annotations

import os
import random
import signal
from importlib.util import find_spec

import cluster
import httpx
import pytest

from foretoken.llm import LLM

MODEL = "zoo:tiny"
METHOD = "ngram"

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'foretoken[ray]'")
pytestmark = [needs_ray, pytest.mark.slow]


def test_texts_outlive_a_killed_replica() -> None:
    """kill -9 in the middle of sixteen streams of eight kinds: all texts are those of one engine."""
    bodies = [cluster.request_of(place, 300) for place in range(16)]
    expected = cluster.references(LLM(MODEL, METHOD, max_num_seqs=16), bodies)
    draw = random.Random(0)
    with cluster.cluster(MODEL, 2, "--method", METHOD, "--max-num-seqs", "16") as running:
        num_moved = 0
        for _ in range(2):
            victim = draw.choice(sorted(running.wait_for(2).values()))
            heard = cluster.under_fire(running, bodies, lambda: os.kill(victim, signal.SIGKILL), 0.7)  # noqa: B023
            assert cluster.differences(heard, expected) == []
            num_moved += sum(one.failovers for one in heard)
        page = httpx.get(f"{running.address}/metrics").text
        assert f'foretoken:failovers_total{{model_name="{MODEL}"}} {num_moved}.0' in page
        answer = httpx.post(f"{running.address}/v1/completions", json={"prompt": 5}, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")
        assert answer.json()["error"]["param"] == "prompt"
