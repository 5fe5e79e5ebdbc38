"""What ``foretoken bench`` measures, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark. Defaults are those of ``foretoken bench``.

    Args:
      contexts: tokens to which prompts are padded, one table each.
      num_draft_tokens: of the own drafters; None for the defaults of their methods.
      num_branches: of the tree arm.
      assisted_lengths, lookup_lengths: numbers of draft tokens among which transformers' arms are tuned.
      draft_contexts, datastore_sizes, draft_steps: tokens of context and of datastores, and steps, at which the host
        time of drafting is measured.
      draft_costs: targets for the cost of a drafter's forward; 0 is the drafter as it is.
    """

    num_prompts: int = 4
    max_new_tokens: int = 48
    repeats: int = 1
    contexts: tuple[int, ...] = (256, 1500)
    draft_costs: tuple[float, ...] = (0.0, 0.05, 0.15)
    num_draft_tokens: int | None = None
    num_branches: int = 2
    batch_size: int = 8
    vocab_sizes: tuple[int, ...] = (4096, 32000, 150000)
    profile_contexts: tuple[int, ...] = (100, 500, 1500)
    draft_contexts: tuple[int, ...] = (1000, 16000, 128000)
    datastore_sizes: tuple[int, ...] = (100_000,)
    draft_steps: int = 200
    assisted_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    lookup_lengths: tuple[int, ...] = (2, 3, 5, 8, 10, 15)
    ignore_eos: bool = True
    seed: int = 0
    execution: str = "auto"
    prompts_file: Path | None = None
