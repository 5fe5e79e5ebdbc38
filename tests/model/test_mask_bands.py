"""The band that masks of chains are cut from reaches as far as it is asked for, and not much farther."""

from __future__ import annotations

import pytest
import torch

from foredraft.model.masks import FULL, SLIDING, Masks


@pytest.mark.parametrize("window", [None, 5])
def test_texts_that_are_read_again_and_again_do_not_make_the_band_double_each_time(window: int | None) -> None:
    """It did: reading a text from its beginning, a token longer each time, took 17 GB after some twenty steps."""
    kind = SLIDING if window else FULL
    masks = Masks((kind,), window, torch.float32, torch.device("cpu"))
    for length, width in [(0, width) for width in range(2, 60)] + [(place, 3) for place in range(60, 90)]:
        found = masks.of_chains(kind, [length], width, length + width)[0, 0]
        distance = length + torch.arange(width)[:, None] - torch.arange(length + width)
        assert torch.equal(found, (distance >= 0) & (distance < (window or 10_000)))
        assert found.untyped_storage().nbytes() <= 59 * (256 + 2 * 59)
