"""Train (or go on training) a tiny Llama on CPU: resumable, pausable, held-out loss of every source watched.

    python training/train_tiny.py --shards SHARDS --init TARGET_DIR --out RUN --steps 2000

Started again with the same ``--out`` it goes on where the newest checkpoint stopped: weights, optimizer, random
state and data position. ``--steps`` may be raised or lowered between starts; the schedule is warm-up, constant,
then a decay over the last ``--decay-steps`` steps (WSD), so a run of unknown length is cut short by lowering
``--steps``. While ``--pause-file`` exists the run sleeps.

Losses: cross entropy on the corpora; with ``--teacher`` the forward divergence from a teacher's distribution as well
(drafters); with ``--repeat-rate`` some steps continue prompts greedily and push down tokens that complete an n-gram
already seen (sequence-level unlikelihood, Welleck et al. 2019, arXiv:1908.04319, section 5).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from data import Mixture, held_out_shards
from torch.nn import functional
from transformers import LlamaForCausalLM

IGNORED = -100
SPARED_IDS = (0, 1, 2, 3, 202)  # end of text, user, assistant, end, line break


def rate_at(step: int, options: argparse.Namespace) -> float:
    """Warm-up, constant, linear decay to a tenth. Step 0 of 100 warm-up steps gives 1/100 of the peak."""
    warm = min(1.0, (step + 1) / max(1, options.warmup_steps))
    left = (options.steps - step) / max(1, options.decay_steps)
    return float(options.learning_rate * warm * max(0.1, min(1.0, left)))


def optimizer_for(model: LlamaForCausalLM, options: argparse.Namespace) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def likelihood_loss(
    model: LlamaForCausalLM, batch: torch.Tensor, teacher: LlamaForCausalLM | None, teacher_share: float
) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # [B, T-1, V]
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    if teacher is None:
        return loss
    with torch.no_grad():
        wanted = teacher(input_ids=batch[:, :-1], use_cache=False).logits.log_softmax(-1)
    divergence = functional.kl_div(
        logits.log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
    )
    return (1 - teacher_share) * loss + teacher_share * divergence


def repeated(tokens: torch.Tensor, order: int, start: int) -> torch.Tensor:
    """True where a token from ``start`` on completes an n-gram of ``order`` that already occurred in its row.

    The marks of the chat format repeat by right and are spared.
    """
    marks = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(tokens.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(order, len(ids) + 1):
            gram = tuple(ids[end - order : end])
            marks[row, end - 1] = end > start and gram in seen and ids[end - 1] not in SPARED_IDS
            seen.add(gram)
    return marks


def repetition_loss(
    model: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int, order: int
) -> tuple[torch.Tensor, float]:
    """Sequence-level unlikelihood of the model's own greedy continuation, and the share of repeating tokens."""
    model.eval()
    with torch.no_grad():
        tokens = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, do_sample=False
        )
    model.train()
    marks = repeated(tokens, order, prompts.shape[1])[:, 1:]
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    chance = logits.softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    penalty = -torch.log1p(-chance.clamp(max=1 - 1e-4))
    generated = tokens.numel() - prompts.numel()
    return (penalty * marks).sum() / generated, float(marks.sum()) / generated


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, shards: dict[str, object], length: int, tokens_per_source: int
) -> dict[str, float]:
    model.eval()
    losses = {}
    for name, ids in shards.items():
        total, count = 0.0, 0
        for begin in range(0, min(len(ids), tokens_per_source) - 1, length):  # type: ignore[arg-type]
            block = torch.as_tensor(ids[begin : begin + length + 1].astype("int64"))[None]  # type: ignore[index]
            if block.shape[1] < 2:
                break
            logits = model(input_ids=block[:, :-1], use_cache=False).logits
            total += float(functional.cross_entropy(logits[0], block[0, 1:], reduction="sum"))
            count += block.shape[1] - 1
        losses[name] = total / count
    model.train()
    return losses


def save_checkpoint(out: Path, state: dict[str, Any]) -> None:
    """Write beside, then rename: a kill at any moment leaves the previous checkpoint whole."""
    beside = out / "checkpoint.pt.new"
    torch.save(state, beside)
    os.replace(beside, out / "checkpoint.pt")


def save_pretrained(out: Path, model: LlamaForCausalLM, eos_token_id: Any) -> None:
    """The weights as transformers reads them, bfloat16."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.generation_config.eos_token_id = eos_token_id
    copy.to(torch.bfloat16).save_pretrained(out / "model")


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(options.init, dtype=torch.float32)
    if not options.from_scratch:
        return model
    torch.manual_seed(options.seed)
    fresh = LlamaForCausalLM(model.config)
    fresh.generation_config = model.generation_config
    return fresh


class Run:
    """One training run: everything that a checkpoint holds, and the verbs of the loop."""

    def __init__(self, options: argparse.Namespace, log: TextIO) -> None:
        torch.manual_seed(options.seed)
        self.options, self.log = options, log
        self.model = build(options).train()
        self.eos_token_id = self.model.generation_config.eos_token_id
        self.model.generation_config.eos_token_id = None  # loops run past the end of a turn
        self.optimizer = optimizer_for(self.model, options)
        self.mixture = Mixture(options.shards, options.weights, options.seed)
        self.teacher = None
        if options.teacher is not None:
            self.teacher = LlamaForCausalLM.from_pretrained(options.teacher, dtype=torch.float32).eval()
        self.held_out = held_out_shards(options.shards)
        self.step, self.spent_seconds, self.loss, self.loops = 0, 0.0, math.nan, math.nan

    def note(self, **record: object) -> None:
        self.log.write(json.dumps({"step": self.step, **record}) + "\n")
        self.log.flush()

    def evaluate(self) -> None:
        losses = held_out_loss(self.model, self.held_out, 512, self.options.held_out_tokens)
        self.note(held_out={name: round(loss, 4) for name, loss in losses.items()})

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mixture": self.mixture.state(),
            "torch_random": torch.get_rng_state(),
            "step": self.step,
            "spent_seconds": self.spent_seconds,
        }
        save_checkpoint(self.options.out, state)

    def resume(self) -> None:
        path = self.options.out / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.mixture.restore(state["mixture"])
        torch.set_rng_state(state["torch_random"])
        self.step, self.spent_seconds = state["step"], state["spent_seconds"]

    def batch(self) -> torch.Tensor:
        every = self.options.long_every
        long = every > 0 and self.step % every == every - 1
        length = self.options.long_length if long else self.options.length
        return torch.from_numpy(self.mixture.batch(max(1, self.options.tokens_per_step // length), length))

    def penalty(self) -> torch.Tensor | float:
        """The loss against loops, on ``repeat_rate`` of the steps."""
        options = self.options
        if (self.step * options.repeat_rate) % 1.0 >= options.repeat_rate:
            return 0.0
        prompts = torch.from_numpy(self.mixture.batch(options.repeat_rows, options.repeat_prompt))
        penalty, share = repetition_loss(self.model, prompts, options.repeat_tokens, options.repeat_order)
        self.loops = smoothed(self.loops, share, 0.95)
        return options.repeat_weight * penalty

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.step, self.options)
        loss = likelihood_loss(self.model, self.batch(), self.teacher, self.options.teacher_share)
        self.loss = smoothed(self.loss, float(loss.detach()), 0.98)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + self.penalty()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1


def smoothed(old: float, new: float, keep: float) -> float:
    return new if math.isnan(old) else keep * old + (1 - keep) * new


def wait_while(pause_file: Path | None) -> None:
    while pause_file is not None and pause_file.exists():
        time.sleep(1.0)


def train(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "log.jsonl").open("a", encoding="utf8") as log:
        run = Run(options, log)
        run.resume()
        if run.step == 0:
            run.evaluate()
        noted = saved = time.monotonic()
        while run.step < options.steps:
            wait_while(options.pause_file)
            run.update()
            now, last = time.monotonic(), run.step == options.steps
            if run.step % 20 == 0 or last:
                run.spent_seconds, noted = run.spent_seconds + now - noted, now
                rate, spent = rate_at(run.step - 1, options), round(run.spent_seconds)
                run.note(loss=round(run.loss, 4), loops=round(run.loops, 4), rate=rate, spent_seconds=spent)
            if run.step % options.evaluate_every == 0 or last:
                run.evaluate()
            if now - saved > options.save_seconds or last:
                run.save()
                saved = now
        save_pretrained(options.out, run.model, run.eos_token_id)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("marker", nargs="*", help="ignored: a word that scripts find this process by")
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--init", type=Path, required=True, help="weights to start from")
    parser.add_argument("--from-scratch", action="store_true", help="only the configuration of --init")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--teacher-share", type=float, default=0.8)
    parser.add_argument("--weights", type=json.loads, default=MIXTURE, help="JSON: source to weight")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--decay-steps", type=int, default=800)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--long-length", type=int, default=1536)
    parser.add_argument("--long-every", type=int, default=6, help="every n-th step uses --long-length; 0: never")
    parser.add_argument("--repeat-rate", type=float, default=0.0, help="share of steps with the repetition loss")
    parser.add_argument("--repeat-weight", type=float, default=1.0)
    parser.add_argument("--repeat-rows", type=int, default=12)
    parser.add_argument("--repeat-prompt", type=int, default=32)
    parser.add_argument("--repeat-tokens", type=int, default=88)
    parser.add_argument("--repeat-order", type=int, default=5)
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--held-out-tokens", type=int, default=8192)
    parser.add_argument("--save-seconds", type=float, default=120.0)
    parser.add_argument("--pause-file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


MIXTURE = {
    "dialogue": 0.26,
    "gsm8k": 0.20,
    "books": 0.20,
    "tldr": 0.14,
    "stories": 0.08,
    "python": 0.07,
    "factbook": 0.05,
}

if __name__ == "__main__":
    train(parse())
