"""The training loop: shuffled examples, steps, and checkpoints from which it resumes exactly."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import CheckpointError, NumericsError
from foredraft.folders import replacing
from foredraft.train.examples import Example
from foredraft.train.features import Features
from foredraft.train.losses import Part
from foredraft.train.recipe import Recipe

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Schedule:
    """Length, batch size and learning rate of a training run.

    Args:
      num_tokens: number of answer tokens to train on. Examples are repeated until that number is reached.
      batch_tokens: answer tokens of one step, approximately.
      learning_rate: peak learning rate.
      warmup: share of the tokens over which the rate rises.
      floor: final learning rate, as a share of the peak.
      weight_decay: weight decay of matrices.
      clip: largest norm of the gradients.
      seed: seed of the order of examples and of noise.
    """

    num_tokens: int
    batch_tokens: int = 1024
    learning_rate: float = 1e-3
    warmup: float = 0.03
    floor: float = 0.05
    weight_decay: float = 0.01
    clip: float = 0.5
    seed: int = 0

    def rate_at(self, num_tokens: int) -> float:
        """Return the learning rate after so many tokens: a linear rise, then a cosine down to ``floor``."""
        share = min(1.0, num_tokens / self.num_tokens)
        if share < self.warmup:
            return self.learning_rate * (
                share / self.warmup if num_tokens else 1 / max(1.0, self.warmup * self.num_tokens / self.batch_tokens)
            )
        left = (1 - share) / (1 - self.warmup)
        return self.learning_rate * (self.floor + (1 - self.floor) * (1 - math.cos(math.pi * left)) / 2)


@dataclass
class Progress:
    """Progress of a run. Together with the weights and the optimiser state, `Progress` determines the rest of the
    run."""

    step: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step.

    Args:
      loss: weighted loss per answer token.
      losses, accuracies: losses and accuracies by step of a draft or head.
    """

    step: int
    num_tokens: int
    rate: float
    loss: float
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    grad_norm: float
    seconds: float


class Trainer:
    """Training of the module of a recipe.

    Args:
      recipe, features, examples, schedule: see their classes.
      folder: folder of the checkpoints.
      forward_tokens: tokens per forward pass over padded texts, padding included; 0 for one text at a time.
      autocast: dtype of matrix products; None for the dtype of the weights.

    Randomness: ``schedule.seed`` determines the order of the examples and all noise.
    """

    def __init__(
        self,
        recipe: Recipe,
        features: Features,
        examples: Sequence[Example],
        schedule: Schedule,
        folder: Path,
        autocast: torch.dtype | None = None,
        forward_tokens: int = 0,
    ) -> None:
        self.recipe, self._features, self._examples = recipe, features, list(examples)
        self.schedule, self._folder, self._autocast = schedule, folder, autocast
        self._forward_tokens = forward_tokens
        self.progress = Progress()
        parameters = [p for p in recipe.module.parameters() if p.requires_grad]
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": schedule.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=schedule.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._started = time.monotonic()

    # -- state ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint to a temporary file and rename it, so that a kill at any moment leaves the old one
        intact."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.progress.seconds += time.monotonic() - self._started
        self._started = time.monotonic()
        state = {
            "module": self.recipe.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
            "schedule": asdict(self.schedule),
        }
        beside = self._folder / f".{CHECKPOINT}"
        with replacing(self._folder / CHECKPOINT, beside), beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def resume(self) -> bool:
        """Continue from the checkpoint in the folder. Return False if there is none.

        Raises: CheckpointError for a checkpoint that cannot be read, or was made with another schedule.
        """
        file = self._folder / CHECKPOINT
        if not file.exists():
            return False
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.recipe.module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # torch's reader may raise anything for a damaged file
            detail = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{file} cannot be loaded ({detail}); delete this file to train from the beginning"
            ) from error
        changed = [key for key, value in asdict(self.schedule).items() if state["schedule"].get(key) != value]
        if changed:
            was = ", ".join(f"{key}={state['schedule'].get(key)}" for key in changed)
            raise CheckpointError(f"{file} was made with {was}; use the same settings, or another folder")
        self.progress = Progress(**state["progress"])
        return True

    # -- the loop ------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self.progress.num_tokens >= self.schedule.num_tokens

    def steps(self) -> Iterator[StepMetrics]:
        """Train to the end of the schedule, and yield the metrics of every step.

        Raises: NumericsError with the examples of the step for a loss or gradient that is not finite.
        """
        while not self.is_done:
            yield self.take_step()

    def take_step(self) -> StepMetrics:
        """Train one step, on about ``batch_tokens`` answer tokens."""
        batch = self._next_batch()
        num_tokens = sum(example.num_answer_tokens for example in batch)
        sums = [[0.0, 0, 0] for _ in self.recipe.weights]
        torch.manual_seed(hash_of(self.schedule.seed, self.progress.step))
        for texts in side_by_side(batch, self._forward_tokens):
            for total, part in zip(sums, self._learn(texts, num_tokens, batch), strict=False):
                total[0] += float(part.loss.detach())
                total[1] += part.num_places
                total[2] += part.num_right
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.schedule.clip))
        if not math.isfinite(norm):
            self._refuse(f"the norm of the gradients is {norm}", batch)
        rate = self.schedule.rate_at(self.progress.num_tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.num_examples += len(batch)
        self.progress.num_tokens += num_tokens
        means = tuple(total[0] / max(1, total[1]) for total in sums)
        return StepMetrics(
            step=self.progress.step,
            num_tokens=self.progress.num_tokens,
            rate=rate,
            loss=sum(w * total[0] for w, total in zip(self.recipe.weights, sums, strict=True)) / num_tokens,
            losses=means,
            accuracies=tuple(total[2] / max(1, total[1]) for total in sums),
            grad_norm=norm,
            seconds=self.progress.seconds + time.monotonic() - self._started,
        )

    def _learn(self, texts: Sequence[Example], num_tokens: int, batch: Sequence[Example]) -> list[Part]:
        """Add the gradients of texts in one forward pass, divided by the answer tokens of their batch."""
        streams = self._features(texts)  # outside autocast, because the target must keep its dtype
        with self._casting():
            parts = self.recipe.parts(texts, streams)
            losses = [weight * part.loss for weight, part in zip(self.recipe.weights, parts, strict=False)]
        if not losses:
            return []
        loss = torch.stack(losses).sum() / num_tokens
        if not bool(loss.isfinite()):
            names = ", ".join(example.key for example in texts)
            self._refuse(f"the loss of {names} is {float(loss.detach())}", batch)
        torch.autograd.backward(loss)
        return parts

    def _next_batch(self) -> list[Example]:
        batch: list[Example] = []
        size = 0
        while size < self.schedule.batch_tokens:
            epoch, place = divmod(self.progress.num_examples + len(batch), len(self._examples))
            example = self._examples[order_of(len(self._examples), self.schedule.seed, epoch)[place]]
            batch.append(example)
            size += example.num_answer_tokens
        return batch

    def _casting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._parameters[0].device.type, dtype=self._autocast)

    def _refuse(self, what: str, batch: Sequence[Example]) -> None:
        keys = ", ".join(example.key for example in batch)
        raise NumericsError(
            f"{what} at step {self.progress.step + 1} (examples {keys}); the last checkpoint is intact: lower "
            "learning_rate, or remove the example"
        )


def side_by_side(examples: Sequence[Example], forward_tokens: int) -> list[list[Example]]:
    """Group examples for padded forward passes: longer ones first, as many per group as fit.

    Args:
      forward_tokens: tokens per group, padding included; 0 for groups of one, in the given order.
    """
    if not forward_tokens:
        return [[example] for example in examples]
    groups: list[list[Example]] = []
    for example in sorted(examples, key=lambda one: len(one.token_ids), reverse=True):
        if groups and len(groups[-1][0].token_ids) * (len(groups[-1]) + 1) <= forward_tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


_ORDERS: dict[tuple[int, int, int], list[int]] = {}


def order_of(num_examples: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the examples in an epoch."""
    key = num_examples, seed, epoch
    if key not in _ORDERS:
        _ORDERS.clear()
        order = list(range(num_examples))
        random.Random(f"{seed} {epoch}").shuffle(order)
        _ORDERS[key] = order
    return _ORDERS[key]


def hash_of(seed: int, step: int) -> int:
    return random.Random(f"{seed} {step}").getrandbits(62)
