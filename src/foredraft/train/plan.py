"""Settings of one training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError
from foredraft.train.draft_model import SmallPlan
from foredraft.train.recipe import NUM_LAYERS, WITH_LAYER

POSITIVE = ("epochs", "batch_tokens", "learning_rate", "draft_vocabulary", "num_heads", "num_steps", "evaluate_tokens")
"""Numbers that have to be above 0."""

FORWARD_TOKENS = 32_768
"""Tokens of a forward where nothing is said, on an accelerator: every call takes longer than few tokens do there."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of one training.

    Args:
      method: see `foredraft.train.recipe.METHODS`.
      out: folder of everything that is made; a run that was begun there goes on.
      prompts: file or folder; None for prompts of the target's own alone.
      own_prompts: how many prompts the target asks itself.
      epochs: how often the examples are gone through; a fraction takes a part of them.
      forward_tokens: of texts side by side in one forward, padding included; None for one text after the other on a
        CPU, and `FORWARD_TOKENS` elsewhere.
      draft_vocabulary: how many tokens can be drafted.
      one_in: of how many prompts one is held out.
      evaluate_tokens: answer tokens between two measurements.
      patience: measurements without a better tau after which training ends; 0 for never.
      features: folder of kept features; None computes them each time.
      max_length: tokens at which texts are cut.
      max_answer_tokens: tokens at which answers of the target are cut.
      raw: prompts are texts to go on with, without the chat template.
      small: what a drafter that is a model is made of.
      num_layers: of the MLP of every head, or of a draft model that begins at random; None for those of `NUM_LAYERS`.
      intermediate_size: of the MLP of the decoder layer in heads that have one; None for the target's.
      input_noise: of Hydra and Hydra++; see `HydraRecipe`.
    """

    method: str
    out: Path
    prompts: Path | None = None
    own_prompts: int = 0
    epochs: float = 1.0
    batch_tokens: int = 1024
    forward_tokens: int | None = None
    learning_rate: float = 8e-4
    draft_vocabulary: int = 8192
    num_heads: int = 4
    num_steps: int = 4
    one_in: int = 64
    num_measured: int = 8
    evaluate_tokens: int = 100_000
    checkpoint_seconds: float = 180.0
    patience: int = 5
    features: Path | None = None
    max_length: int = 1024
    max_answer_tokens: int = 256
    raw: bool = False
    small: SmallPlan = field(default_factory=SmallPlan)
    num_layers: int | None = None
    intermediate_size: int | None = None
    input_noise: float = 0.0
    seed: int = 0

    def answer_params(self, number: int) -> SamplingParams:
        """Parameters of the answer to a prompt: every second one is sampled, the others are greedy."""
        if number % 2 == 0:
            return SamplingParams(temperature=0.0, max_tokens=self.max_answer_tokens)
        return SamplingParams(temperature=0.8, top_p=0.95, max_tokens=self.max_answer_tokens, seed=self.seed + number)

    def check(self) -> None:
        """Raises: ConfigError."""
        if self.prompts is None and not self.own_prompts:
            raise ConfigError("there is nothing to train on; give --prompts, or --own-prompts for a target that chats")
        for name in POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0, and finite")
        for name in ("own_prompts", "patience", "forward_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.one_in < 2:
            raise ConfigError(f"one prompt in {self.one_in} cannot be held out; want 2 or more")
        if self.method != "draft_model" and self.small != SmallPlan():
            raise ConfigError(
                f"layers and embeddings are chosen for draft_model, not for {self.method}; leave them out"
            )
        if not 0 <= self.input_noise < math.inf or (self.input_noise and not self.method.startswith("hydra")):
            raise ConfigError(f"input_noise is {self.input_noise} for {self.method}; it is for hydra, 0 or more")
        width = self.intermediate_size
        if width is not None and (width < 1 or self.method not in WITH_LAYER):
            raise ConfigError(
                f"intermediate_size is {width} for {self.method}; it is for {', '.join(WITH_LAYER)}, 1 or more"
            )
        self._check_layers()
        self.small.check()

    def tokens_of_forward(self, device: str) -> int:
        """Tokens of one forward on a type of device; 0 for one text after the other."""
        if self.forward_tokens is not None:
            return self.forward_tokens
        return 0 if device == "cpu" else FORWARD_TOKENS

    def _check_layers(self) -> None:
        number = self.num_layers
        if number is None:
            return
        if self.method not in NUM_LAYERS:
            raise ConfigError(
                f"num_layers is {number}, and heads of {self.method} have one decoder layer; it is for "
                f"{', '.join(NUM_LAYERS)}: leave it out"
            )
        if number < 1:
            raise ConfigError(f"num_layers is {number}; want 1 layer or more")
        if self.small.from_layers or self.small.start is not None:
            raise ConfigError(f"num_layers is {number}, and from_layers or start says what layers there are; give one")
