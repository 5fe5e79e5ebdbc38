"""Settings of one training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError, PromptError
from foredraft.folders import check_folder
from foredraft.prompts.prompt_files import STDIN

METHODS = ("medusa", "hydra", "hydra++", "eagle", "eagle2", "eagle3", "draft_model")
"""Methods whose drafters can be trained. "eagle2" trains the same heads as "eagle"."""

WITH_LAYER = ("hydra++", "eagle", "eagle2", "eagle3")
"""Methods whose heads have their own decoder layer."""

NUM_LAYERS = {"medusa": 1, "hydra": 1, "hydra++": 4, "draft_model": 4}
"""Default number of layers by method: of the MLP of every head, as published, or of a draft model."""

POSITIVE = (
    "epochs",
    "batch_tokens",
    "learning_rate",
    "draft_vocabulary",
    "num_heads",
    "num_steps",
    "evaluate_tokens",
    "max_answer_tokens",
)
"""Settings that must be positive."""

FORWARD_TOKENS = 32_768
"""Default number of tokens per forward pass on an accelerator, where small passes waste most of their time."""


@dataclass(frozen=True, kw_only=True)
class SmallPlan:
    """Layers and embeddings of a draft model.

    Args:
      from_layers: layers of the target, in this order; the draft model's layers start with their weights. If empty,
        they start with random weights.
      hidden_size: hidden size of random layers; 0 for the target's.
      own_embeddings: True to train an embedding for the draft model, which is its output layer as well. If False, the
        target's embeddings are used unchanged and saved with the draft model's layers.
      start: folder of a draft model to train further. The other arguments but the last must then be left out.
      total_variation: share of total variation in the loss; the rest is forward KL.
    """

    from_layers: tuple[int, ...] = ()
    hidden_size: int = 0
    own_embeddings: bool = False
    start: Path | None = None
    total_variation: float = 0.0

    def check(self) -> None:
        """Raise ConfigError for values out of range, or arguments that exclude each other."""
        if not 0.0 <= self.total_variation <= 1.0:
            raise ConfigError(f"total_variation is {self.total_variation}; it is a share of the loss, from 0 to 1")
        if self.hidden_size < 0:
            raise ConfigError(f"hidden_size is {self.hidden_size}; use 1 or more, or 0 for the target's")
        if self.start is not None and (self.from_layers or self.hidden_size or self.own_embeddings):
            raise ConfigError(
                f"{self.start} already has layers and embeddings; leave out from_layers, hidden_size and own_embeddings"
            )
        if self.start is not None and not self.start.expanduser().is_dir():
            raise ConfigError(f"{self.start} is not a folder; give the folder of a draft model to train further")
        if self.from_layers and self.hidden_size:
            raise ConfigError("layers of the target have the width of the target; leave hidden_size out")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of one training run.

    Args:
      method: method of the drafter; one of `METHODS`.
      out: folder for all results. If the folder contains an unfinished run, that run is continued.
      prompts: file or folder of prompts; None to use only prompts that the target invents.
      own_prompts: number of prompts that the target invents.
      epochs: number of passes over the examples; a fraction uses a part of them.
      batch_tokens: answer tokens per optimiser step, approximately.
      forward_tokens: tokens per forward pass over padded texts, padding included; 0 for one text at a time. None means
        0 on a CPU and `FORWARD_TOKENS` elsewhere.
      draft_vocabulary: number of tokens that can be drafted.
      num_steps: number of unrolled steps of EAGLE-3.
      one_in: one of this many prompts is held out.
      num_measured: number of held-out prompts to measure tau on.
      evaluate_tokens: answer tokens between two measurements.
      checkpoint_seconds: seconds between two checkpoints.
      patience: number of measurements without a better tau after which training ends; 0 for no limit.
      features: folder for stored features; None to compute them each time.
      max_length: number of tokens at which texts are cut.
      max_answer_tokens: number of tokens at which generated answers are cut.
      raw: True for prompts without the chat template.
      small: layers and embeddings of a draft model.
      num_layers: number of layers in the MLP of every head, or of a draft model with random weights; None for
        `NUM_LAYERS`.
      intermediate_size: MLP width of the decoder layer in heads that have one; None for the target's.
      input_noise: strength of the noise for Hydra and Hydra++; see `HydraRecipe`.
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
        """Return the parameters of the answer to a prompt: every second answer is sampled, and the others are
        greedy."""
        if number % 2 == 0:
            return SamplingParams(temperature=0.0, max_tokens=self.max_answer_tokens)
        return SamplingParams(temperature=0.8, top_p=0.95, max_tokens=self.max_answer_tokens, seed=self.seed + number)

    def check(self) -> None:
        """Check all that can be checked without the target.

        Raises: ConfigError for an unknown method, values out of range, or settings that do not apply to the method;
          PromptError for a path of prompts that does not exist.
        """
        if self.method not in METHODS:
            raise ConfigError(f"{self.method!r} cannot be trained; use one of {', '.join(METHODS)}")
        if self.prompts is None and not self.own_prompts:
            raise ConfigError("there are no prompts; use --prompts, or --own-prompts for a target with a chat template")
        if self.prompts is not None and str(self.prompts) != STDIN and not self.prompts.expanduser().exists():
            raise PromptError(f"{self.prompts} does not exist; give a file or a folder of prompts")
        for name in POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        for name in ("own_prompts", "patience", "forward_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.one_in < 2:
            raise ConfigError(f"one_in is {self.one_in}; one prompt of that many is held out, so it must be 2 or more")
        if self.method != "draft_model" and self.small != SmallPlan():
            raise ConfigError(
                f"from_layers, hidden_size, own_embeddings, start and total_variation are for draft_model, not for "
                f"{self.method}; leave them out"
            )
        if not 0 <= self.input_noise < math.inf or (self.input_noise and not self.method.startswith("hydra")):
            raise ConfigError(
                f"input_noise is {self.input_noise} for {self.method}; it is for hydra and hydra++, 0 or more"
            )
        width = self.intermediate_size
        if width is not None and (width < 1 or self.method not in WITH_LAYER):
            raise ConfigError(
                f"intermediate_size is {width} for {self.method}; it is for {', '.join(WITH_LAYER)}, 1 or more"
            )
        if self.features is not None:
            check_folder(self.features.expanduser())
        self._check_layers()
        self.small.check()

    def tokens_of_forward(self, device: str) -> int:
        """Return the number of tokens per forward pass on a type of device; 0 for one text at a time."""
        if self.forward_tokens is not None:
            return self.forward_tokens
        return 0 if device == "cpu" else FORWARD_TOKENS

    def _check_layers(self) -> None:
        number = self.num_layers
        if number is None:
            return
        if self.method not in NUM_LAYERS:
            raise ConfigError(
                f"num_layers is {number}, but heads of {self.method} have one decoder layer; leave it out (it is for "
                f"{', '.join(NUM_LAYERS)})"
            )
        if number < 1:
            raise ConfigError(f"num_layers is {number}; it must be 1 or more")
        if self.small.from_layers or self.small.start is not None:
            raise ConfigError(
                f"num_layers is {number}, but from_layers or start determines the layers; use one of them"
            )
