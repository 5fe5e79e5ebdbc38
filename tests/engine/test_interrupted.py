"""Ctrl-C at the edge of any context of a step: what is collected later disturbs nothing."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.testing import toy_model

PROMPT = [5, 6, 7, 5, 6, 9]
PARAMS = SamplingParams(temperature=1, max_tokens=8, seed=5, ignore_eos=True)


class Cut:
    """Raises KeyboardInterrupt after the n-th time a block begins, or before it ends; notes where they stand."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.edges: list[tuple[Any, ...]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_edge = (code.co_name, event) in (("__enter__", "return"), ("__exit__", "call"))
        if not is_edge or not ("contextlib" in code.co_filename or "foredraft" in code.co_filename):
            return
        block = frame.f_locals.get("self")
        self.edges.append((event, code, getattr(getattr(block, "gen", None), "gi_code", type(block)), *callers(frame)))
        if len(self.edges) == self.place:
            sys.setprofile(None)
            raise KeyboardInterrupt


def callers(frame: FrameType) -> tuple[Any, ...]:
    """Lines of the two functions that a block stands in."""
    outer = frame.f_back
    assert outer is not None
    return tuple((each.f_code, each.f_lineno) for each in (outer, outer.f_back) if each is not None)


def interrupted(llm: LLM, place: int) -> tuple[list[BaseException], list[tuple[Any, ...]]]:
    """The error that a call was cut off by, which holds its frames, and the edges that came before."""
    cut = Cut(place)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    sys.setprofile(cut)
    try:
        next(stream), next(stream)
    except KeyboardInterrupt as error:
        return [error], cut.edges
    finally:
        sys.setprofile(None)
    return [], cut.edges


@pytest.mark.parametrize(
    "config",
    [
        {"method": "layer_skip", "exit_layer": 1, "length_policy": "fixed"},
        pytest.param({"method": "ngram", "prompt_lookup_min": 1, "length_policy": "fixed"}, marks=pytest.mark.full),
    ],
    ids=lambda config: config["method"],
)
def test_what_ctrl_c_has_left_disturbs_no_later_step(config: Any) -> None:
    """The edges are those of any method."""
    llm = LLM(toy_model(seed=3), config)
    expected = LLM(toy_model(seed=3)).generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    _, edges = interrupted(llm, 0)
    ends = {edge: place for place, edge in enumerate(edges, 1)}
    places = sorted({*ends.values(), *(1 + edges.index(edge) for edge in ends)})  # first and last of each line
    assert len(places) > 4
    gc.collect()
    gc.freeze()  # what others hold, which every collection below would walk through
    for place in places:
        left, _ = interrupted(llm, place)
        tokens: list[int] = []
        for number, news in enumerate(llm.stream(PROMPT, PARAMS)):
            tokens += news.token_ids
            if number == 1:
                left.clear()
                gc.collect()
        assert tuple(tokens) == expected, place
