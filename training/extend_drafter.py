"""Teach a drafter to draft far into a context: distil from its target on long rows mixed with short ones.

    python training/extend_drafter.py --shards SHARDS --target DIR --draft DIR --out RUN

Only the drafter learns. A step is a few micro-batches of one size in tokens, each either one long row or several short
ones; the loss is the forward divergence from the target's full distribution at temperature 1 with a little cross
entropy. Started again with the same ``--out`` it goes on where it stopped; ``--seconds`` bounds one start, so that a
shared machine gets its processors back in between. The rate falls to zero at ``--steps``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TextIO

import torch
from data import Mixture
from train_tiny import MIXTURE, likelihood_loss, optimizer_for, save_checkpoint, save_pretrained, smoothed
from transformers import LlamaForCausalLM


def is_long(number: int, share: float) -> bool:
    """Whether micro-batch ``number`` is a long row: evenly spread, ``share`` of them. 0.7: 0110110111 and again."""
    return math.floor((number + 1) * share + 1e-9) > math.floor(number * share + 1e-9)


def rate_at(step: int, options: argparse.Namespace) -> float:
    """Warm-up, then a straight line that reaches zero behind the last step."""
    warm = min(1.0, (step + 1) / max(1, options.warmup_steps))
    return float(options.learning_rate * warm * (options.steps - step) / options.steps)


class Extension:
    """One run: everything that a checkpoint holds, and the step."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.draft = LlamaForCausalLM.from_pretrained(options.draft, dtype=torch.float32).train()
        self.target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
        self.optimizer = optimizer_for(self.draft, options)
        self.mixture = Mixture(options.shards, options.weights, options.seed)
        self.step, self.spent_seconds = 0, 0.0
        self.loss = {True: math.nan, False: math.nan}  # by length: long, short

    def save(self) -> None:
        state = {
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mixture": self.mixture.state(),
            "step": self.step,
            "spent_seconds": self.spent_seconds,
            "loss": self.loss,
        }
        save_checkpoint(self.options.out, state)

    def resume(self) -> None:
        path = self.options.out / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=False)
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.mixture.restore(state["mixture"])
        self.step, self.spent_seconds, self.loss = state["step"], state["spent_seconds"], state["loss"]

    def rows(self, long: bool) -> torch.Tensor:
        length = self.options.long_length if long else self.options.length
        return torch.from_numpy(self.mixture.batch(max(1, self.options.long_length // length), length))

    def update(self) -> None:
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.step, options)
        self.optimizer.zero_grad(set_to_none=True)
        for micro in range(options.micro_batches):
            long = is_long(self.step * options.micro_batches + micro, options.long_share)
            loss = likelihood_loss(self.draft, self.rows(long), self.target, options.teacher_share)
            (loss / options.micro_batches).backward()
            self.loss[long] = smoothed(self.loss[long], float(loss.detach()), 0.98)
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1


def note(log: TextIO, run: Extension) -> None:
    losses = {"loss_long": round(run.loss[True], 4), "loss_short": round(run.loss[False], 4)}
    rate = round(rate_at(run.step - 1, run.options), 7)
    log.write(json.dumps({"step": run.step, **losses, "rate": rate, "spent_seconds": round(run.spent_seconds)}) + "\n")
    log.flush()


def extend(options: argparse.Namespace) -> bool:
    """Train until the end or until ``options.seconds`` are over; True at the end, with the model written."""
    options.out.mkdir(parents=True, exist_ok=True)
    run = Extension(options)
    run.resume()
    begin, before = time.monotonic(), run.spent_seconds
    with (options.out / "log.jsonl").open("a", encoding="utf8") as log:
        while run.step < options.steps and time.monotonic() - begin < options.seconds:
            run.update()
            run.spent_seconds = before + time.monotonic() - begin
            if run.step % 20 == 0 or run.step == options.steps:
                note(log, run)
    run.save()
    if run.step < options.steps:
        return False
    save_pretrained(options.out, run.draft, run.draft.generation_config.eos_token_id)
    return True


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True, help="the teacher; it does not change")
    parser.add_argument("--draft", type=Path, required=True, help="weights to start from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=json.loads, default=MIXTURE, help="JSON: source to weight")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--teacher-share", type=float, default=0.9)
    parser.add_argument("--micro-batches", type=int, default=2, help="of --long-length tokens each, per step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--long-length", type=int, default=1536)
    parser.add_argument("--long-share", type=float, default=0.7, help="of the micro-batches, and so of the tokens")
    parser.add_argument("--seconds", type=float, default=math.inf, help="bound of this start; the next goes on")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(0 if extend(parse()) else 75)  # 75: not at the end yet, start again
