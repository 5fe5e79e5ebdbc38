"""What transformers says after a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


def generated(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Greedily; with ``custom_generate`` it is said by speculation inside of `generate`."""
    ids = torch.tensor([list(prompt)])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
    return model.generate(ids, **given, **options)[0, len(prompt) :].tolist()
