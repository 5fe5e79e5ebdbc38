"""The band that masks of chains are cut from reaches as far as it is asked for, and not much farther."""

from __future__ import annotations

import pytest
import torch

from foredraft.model.lm import CausalLM
from foredraft.model.masks import Masks, _Template
from foredraft.testing import toy_model


@pytest.mark.parametrize("window", [None, 5])
def test_texts_that_are_read_again_and_again_do_not_make_the_band_double_each_time(window: int | None) -> None:
    """It did: reading a text from its beginning, a token longer each time, took 17 GB after some twenty steps."""
    masks: Masks = CausalLM(toy_model(64), execution="eager", probe=False)._layouts.masks
    template = _Template(masks, window)
    for length, width in [(0, width) for width in range(2, 60)] + [(place, 3) for place in range(60, 90)]:
        found = template.cut(length, width, length + width)
        distance = length + torch.arange(width)[:, None] - torch.arange(length + width)
        sees = (distance >= 0) & (distance < (window or 10_000))
        assert torch.equal(found == 0 if masks.is_additive else found, sees)
    height, total = template._band.shape
    assert (height, total) <= (59, 256 + 2 * 59)
