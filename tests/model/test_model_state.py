"""`ModelState`: changes of every kind of attribute show, and nothing that a forward leaves behind does."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from architectures import ARCHITECTURES, OF_EACH_CACHE, kinds_of
from foredraft.model.state import ModelState
from foredraft.testing import toy_model


@dataclass
class Settings:
    scale: float
    names: list[str]


def function() -> None:
    pass


SHARED = [1, 2]
CHANGES: dict[str, tuple[Any, Any]] = {
    "flag": (False, True),
    "minus one and two": (-1, -2),  # whose hashes are equal
    "number": (1.0, 2.0),
    "text": ("one", "two"),
    "nothing": (None, 0.5),
    "list": ([1, 2], [1, 3]),
    "deque": (deque([1]), deque([2])),
    "set": ({"a"}, {"b"}),
    "nested": ({"one": [1, {"two": (3, 4)}]}, {"one": [1, {"two": (3, 5)}]}),
    "key": ({"one": 1}, {"two": 1}),
    "order": ({"one": 1, "two": 2}, {"two": 2, "one": 1}),
    "dataclass": (Settings(1.0, ["a"]), Settings(1.0, ["b"])),
    "array": (np.arange(3), np.arange(3)[::-1]),
    "tensor": (torch.zeros(3), torch.zeros(3)),
    "function": (function, Settings),
    "partial": (functools.partial(function, 1), functools.partial(function, 2)),
    "method": (SHARED.append, SHARED.remove),
    "module": (nn.ReLU(), nn.GELU()),
    "dtype": (torch.float32, torch.float16),
}
"""Values, and what they are changed to."""


@pytest.mark.parametrize("kind", CHANGES)
def test_an_attribute_of_any_module_shows(kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    layer = model[1][0]
    before, after = CHANGES[kind]
    without = ModelState.of(model)
    layer.value = before
    first = ModelState.of(model)
    assert first == ModelState.of(model) != without
    layer.value = after
    assert ModelState.of(model) != first
    layer.value = before
    assert ModelState.of(model) == first
    layer.renamed = vars(layer).pop("value") if kind != "module" else layer._modules.pop("value")
    assert ModelState.of(model) != first


def test_what_is_written_into_an_attribute_shows() -> None:
    model = nn.Sequential(nn.ReLU())
    model[0].table = {"one": [1.0]}
    model[0].settings = Settings(1.0, ["a"])
    model[0].mask = torch.zeros(3)
    states = [ModelState.of(model)]
    for write in (
        lambda: model[0].table["one"].append(2.0),
        lambda: model[0].settings.names.clear(),
        lambda: setattr(model[0].settings, "scale", 0.5),
        lambda: model[0].mask.add_(1),
    ):
        write()
        states.append(ModelState.of(model))
    assert len({id(state) for state in states}) == len(states)
    assert all(a != b for i, a in enumerate(states) for b in states[:i])


def test_attributes_that_no_forward_reads_do_not_show() -> None:
    model = toy_model()
    before = ModelState.of(model)
    model.train()
    model.generation_config = GenerationConfig(max_new_tokens=3)
    model.generation_config.temperature = 0.5
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert ModelState.of(model) == before
    model.eval()


def test_attributes_that_refer_to_themselves_and_to_the_model_are_read() -> None:
    model = toy_model()
    model.own = {"model": model, "list": []}
    model.own["list"].append(model.own)
    model.owner = Settings(1.0, [])
    model.owner.names.append(model.owner)
    first = ModelState.of(model)
    assert first == ModelState.of(model)
    model.own["list"].append(1)
    assert first != ModelState.of(model)


def test_a_state_keeps_nothing_alive() -> None:
    model = toy_model()
    model.bound = model.forward
    state = ModelState.of(model)
    alive = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    del model
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert state == state


# longrope's generate leaves the frequencies of its last length behind, in transformers 5.9
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [each for each in kinds_of(OF_EACH_CACHE) if each.values[0] != "phi3-longrope"])
def test_generating_leaves_a_model_as_it_was(name: str) -> None:
    """Otherwise every call of the hook after a plain one would make a new shadow."""
    model = ARCHITECTURES[name].build(ARCHITECTURES[name].attention[0])
    ids = torch.tensor([[10, 11, 12, 13]])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 90, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, **given)
    before = ModelState.of(model)
    model.generate(ids, **{**given, "max_new_tokens": 3})
    assert ModelState.of(model).structure == before.structure
