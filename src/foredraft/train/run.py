"""A training run from prompts to a drafter: answers, examples, steps, measurements, and the files written beside."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from foredraft.bench.provenance import provenance
from foredraft.config.sampling import SamplingParams
from foredraft.errors import CheckpointError, PromptError
from foredraft.folders import append_lines, is_no_room, json_lines, keep_json, write_atomically
from foredraft.heads.checkpoint import ACCEPTANCE
from foredraft.llm import LLM
from foredraft.loading.info import eos_token_ids
from foredraft.model.support import check_width
from foredraft.pictures import require_matplotlib
from foredraft.train.answers import answered, asked_by_itself, to_try
from foredraft.train.draft_model import check_sizes
from foredraft.train.examples import (
    TrainingPrompt,
    example_of,
    is_evaluation,
    is_held_out,
    prompt_ids,
    read_prompts,
)
from foredraft.train.features import FeatureCache, Features, target_features
from foredraft.train.plan import Plan
from foredraft.train.start import frequent_tokens, new_recipe, parts_of
from foredraft.train.trainer import Schedule, Trainer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a training run.

    Args:
      num_examples, num_tokens: number of examples, and of answer tokens in all epochs. If answers are missing, both,
        and all figures derived from them, are extrapolated from the answers to the first prompts.
      num_parameters: number of trained parameters.
      memory_bytes: memory of the drafter, its gradients and the optimiser, without the target.
      feature_bytes: size of the stored features.
      answer_seconds: time to generate missing prompts and answers; 0 if there are none.
      seconds: time of training, from two trial steps, without answers and measurements.
    """

    num_examples: int
    num_tokens: int
    num_parameters: int
    memory_bytes: int
    feature_bytes: int
    answer_seconds: float
    seconds: float


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert errors of a full disk inside the context to CheckpointError."""
    try:
        yield
    except Exception as error:
        if not is_no_room(error):
            raise
        raise CheckpointError(
            f"{folder} cannot be written: the disk is full. Make room and run the same command again; it continues "
            "from what was saved"
        ) from error


class Training:
    """One training run. Started again in the same folder, it continues from the newest checkpoint.

    Args:
      llm: `LLM` of the target. The `LLM` should draft nothing, or with a drafter that needs no memory.
      plan: settings of the run.
      say: function that is called with progress in sentences.
      is_trial: True for `estimate`. If True, answers are generated only for the first prompts, and kept for the
        training.

    Raises: PromptError for invalid prompts, or too few of them; UnsupportedModelError for a target on which heads
      cannot be trained; CheckpointError for a folder with another run.
    Randomness: ``plan.seed``.
    """

    def __init__(self, llm: LLM, plan: Plan, say: Say = lambda _: None, *, is_trial: bool = False) -> None:
        plan.check()
        self.llm, self.plan, self._say = llm, plan, say
        self._is_trial, self._num_left_out, self._answer_seconds = is_trial, 0, 0.0
        self._eos = eos_token_ids(llm.target.shadow)
        self._target = parts_of(llm.target, self._eos)
        if plan.method != "draft_model":
            check_width(llm.target.name, llm.target.shadow)
        if plan.method == "draft_model":
            check_sizes(plan.small, self._target)
        with writing(plan.out):
            plan.out.mkdir(parents=True, exist_ok=True)
            asked = [one for one in self._prompts() if not is_evaluation(one.text)]
        held = [one for one in asked if is_held_out(one.digest, plan.one_in)]
        if not asked:
            raise PromptError(
                "every prompt is in an evaluation set, and such prompts are never trained on; use other prompts"
            )
        held = held or [min(asked, key=lambda one: one.digest)]
        digests = {one.digest for one in held}
        train = [one for one in asked if one.digest not in digests]
        if len(train) < 2:
            raise PromptError(f"{len(asked)} prompts are too few for training and measuring; use more")
        with writing(plan.out):
            answers = self._answers(train)
        self._times = 1 + self._num_left_out / len(answers)
        made = [example_of(one, llm.tokenizer, self._eos, plan.max_length, is_raw=plan.raw) for one in answers]
        self.examples = [example for example in made if example.num_answer_tokens > 2]
        if not self.examples:
            raise PromptError("no answer is longer than two tokens, so there is nothing to learn; use other prompts")
        self._measured = [prompt_ids(one, llm.tokenizer, is_raw=plan.raw) for one in held[: plan.num_measured]]
        torch.manual_seed(plan.seed)
        vocabulary = frequent_tokens(self.examples, plan.draft_vocabulary, self._target)
        vocabulary.check_eos(self._eos, "this run")
        self._recipe = new_recipe(plan, self._target, vocabulary)
        device = llm.target.device
        self._recipe.module.to(device)
        num_tokens = int(plan.epochs * sum(example.num_answer_tokens for example in self.examples))
        schedule = Schedule(num_tokens, plan.batch_tokens, plan.learning_rate, seed=plan.seed)
        narrow = llm.target.dtype if llm.target.dtype in (torch.bfloat16, torch.float16) else None
        self._source = self._features()
        forward_tokens = plan.tokens_of_forward(device.type)
        self.trainer = Trainer(
            self._recipe, self._source, self.examples, schedule, plan.out, narrow, forward_tokens=forward_tokens
        )
        self._best: tuple[float, int] = (0.0, 0)
        self._since_best = 0
        self._measured_at = -1  # index of the last measured interval of evaluate_tokens; the first step is measured

    def estimate(self) -> Estimate:
        """Estimate the cost of the run from two training steps. The run must not be continued afterwards."""
        self.trainer.take_step()
        before, start = self.trainer.progress.num_tokens, time.perf_counter()
        self.trainer.take_step()
        per_token = (time.perf_counter() - start) / (self.trainer.progress.num_tokens - before)
        parameters = sum(parameter.numel() for parameter in self._recipe.module.parameters())
        num_texts = sum(len(example.token_ids) for example in self.examples)
        width = self._target.hidden_size * self.llm.target.dtype.itemsize
        num_tokens = round(self._times * self.trainer.schedule.num_tokens)
        return Estimate(
            round(self._times * len(self.examples)),
            num_tokens,
            parameters,
            16 * parameters,
            round(self._times * num_texts) * len(self._recipe.layers) * width,
            self._answer_seconds,
            per_token * num_tokens,
        )

    def train(self) -> Iterator[dict[str, Any]]:
        """Train to the end, and yield a record per step. ``metrics.jsonl`` contains the same records.

        Raises: CheckpointError if the disk is full.
        """
        with writing(self.plan.out):
            yield from self._train()

    def _train(self) -> Iterator[dict[str, Any]]:
        if self.trainer.resume():
            self._say(f"continuing after {self.trainer.progress.num_tokens:,} tokens")
            self._remember()
        saved = time.monotonic()
        for step in self.trainer.steps():
            record: dict[str, Any] = asdict(step)
            before = step.num_tokens // self.plan.evaluate_tokens
            is_due = self._measured_at < before or self.trainer.is_done
            if is_due:
                record |= self._measure(step.num_tokens)
            if is_due or time.monotonic() - saved > self.plan.checkpoint_seconds:
                self.trainer.save()
                saved = time.monotonic()
            self._note(record)
            yield record
            if self.plan.patience and self._since_best >= self.plan.patience:
                self._say(f"tau has not improved for {self._since_best} measurements: training ends")
                break
        if isinstance(self._source, FeatureCache):
            self._source.close()
        metrics = self.plan.out / "metrics.jsonl"
        if metrics.exists():
            draw(metrics, self.plan.out / "curve.png")

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def _most_tried(self) -> int:
        """Number of prompts that a trial generates and answers: two batches."""
        return 2 * self.llm.engine_config.max_num_seqs

    def _prompts(self) -> Iterator[TrainingPrompt]:
        """Yield the prompts of the files, then those that the target invents."""
        if self.plan.prompts is not None:
            yield from read_prompts(self.plan.prompts)
        if self.plan.own_prompts:
            yield from self._own_prompts(self.plan.out / "own_prompts.jsonl", self.plan.own_prompts)

    def _own_prompts(self, file: Path, number: int) -> list[TrainingPrompt]:
        if not file.exists():
            wanted = min(number, self._most_tried) if self._is_trial else number
            self._say(f"the target invents {wanted} prompts")
            start = time.perf_counter()
            made = list(asked_by_itself(self.llm, wanted, self.plan.seed))
            if self._is_trial:
                self._num_left_out += number - wanted
                self._answer_seconds += (time.perf_counter() - start) * number / wanted
                return made
            write_atomically(file, "".join(json.dumps({"prompt": one.text}) + "\n" for one in made))
        return read_prompts(file)

    def _answers(self, asked: list[TrainingPrompt]) -> list[TrainingPrompt]:
        """Return prompts with their answers: all, or those of a trial."""
        file, tried, num_made = self.plan.out / "answers.jsonl", asked, 0
        if self._is_trial:
            tried, num_made = to_try(asked, file, self._most_tried)
            self._num_left_out += len(asked) - len(tried)
        start = time.perf_counter()
        found = answered(
            self.llm, tried, self.plan, file, lambda done, total: self._say(f"{done} of {total} prompts answered")
        )
        if num_made:
            self._answer_seconds += (time.perf_counter() - start) * (num_made + self._num_left_out) / num_made
        return found

    def _features(self) -> Features:
        online = partial(target_features, self.llm.target, self._recipe.layers)
        folder = self.plan.features
        return online if folder is None else FeatureCache(online, folder, self._recipe.layers)

    def _measure(self, num_tokens: int) -> dict[str, Any]:
        """Measure tau of the current drafter. Save the drafter in the folder if it is better than all before."""
        scratch = self.plan.out / "newest"
        self._recipe.save(scratch, {})
        depth = min(5, self.plan.num_heads) if self.plan.method in ("medusa", "hydra", "hydra++") else 5
        found = measure(self.llm, chain_config(self.plan.method, scratch, depth), self._measured)
        self._measured_at = num_tokens // self.plan.evaluate_tokens
        if found.tokens_per_step > self._best[0]:
            self._best, self._since_best = (found.tokens_per_step, num_tokens), 0
            self._ship(found, num_tokens)
        else:
            self._since_best += 1
        return {"tau": found.tokens_per_step, "by_position": found.by_position}

    def _ship(self, found: Evaluation, num_tokens: int) -> None:
        self._recipe.save(self.plan.out, {ACCEPTANCE: found.by_position[0]})
        if self.plan.method == "draft_model" and self.llm.tokenizer is not None:
            self.llm.tokenizer.save_pretrained(self.plan.out)
        record = {
            "method": self.plan.method,
            "target": self.llm.model_info.name,
            "num_examples": len(self.examples),
            "num_tokens": num_tokens,
            "tau": found.tokens_per_step,
            "by_position": found.by_position,
            "plan": {key: str(value) for key, value in asdict(self.plan).items()},
            "provenance": provenance(),
        }
        keep_json(self.plan.out / "training.json", record)

    def _note(self, record: dict[str, Any]) -> None:
        append_lines(self.plan.out / "metrics.jsonl", json.dumps(record) + "\n")

    def _remember(self) -> None:
        """Read the measurements of earlier starts, up to the checkpoint."""
        file = self.plan.out / "metrics.jsonl"
        for record in json_lines(file):
            if "tau" not in record or record["num_tokens"] > self.trainer.progress.num_tokens:
                continue
            self._measured_at = record["num_tokens"] // self.plan.evaluate_tokens
            if record["tau"] > self._best[0]:
                self._best, self._since_best = (record["tau"], record["num_tokens"]), 0
            else:
                self._since_best += 1


DEPTH = 5
_METHOD = {"eagle": "eagle2"}


@dataclass(frozen=True)
class Evaluation:
    """Acceptance measured by decoding with a drafter.

    Args:
      tokens_per_step: tau, bonus included.
      by_position: share of drafts of which at least 1, 2, ... tokens were accepted.
      num_steps: number of steps.
    """

    tokens_per_step: float
    by_position: tuple[float, ...]
    num_steps: int


def chain_config(method: str, folder: Path, depth: int = DEPTH) -> dict[str, Any]:
    """Return a config that drafts chains with the drafter in a folder."""
    method = _METHOD.get(method, method)
    config: dict[str, Any] = {"method": method, "model": str(folder), "num_speculative_tokens": depth}
    if method == "draft_model":
        return config
    if method in ("eagle2", "eagle3"):
        return {**config, "num_draft_branches": 1, "max_draft_nodes": depth + 1}
    return {**config, "speculative_token_tree": "x".join(["1"] * depth)}


def measure(llm: LLM, config: dict[str, Any], prompts: Sequence[Sequence[int]], max_new_tokens: int = 48) -> Evaluation:
    """Decode prompts greedily with a config, and return its acceptance.

    Args:
      llm: `LLM` of the target, with any config.
      prompts: token ids.

    Exactness: no governor is used, so every draft that the config makes counts.
    """
    drafting = llm.with_speculative_config(config).drafting
    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    with llm.engine(drafting.new_drafter()) as engine:
        rows = [engine.add_request(tuple(prompt), params)[0] for prompt in prompts]
        while any(not row.is_finished for row in rows):
            engine.step()
    histogram: Counter[int] = Counter()
    for row in rows:
        histogram.update(row.stats.acceptance_histogram)
    num_drafts = max(1, histogram.total())
    deepest = max((*histogram, DEPTH))
    num_steps = sum(row.stats.num_steps for row in rows)
    return Evaluation(
        tokens_per_step=sum(row.stats.num_emitted_tokens for row in rows) / max(1, num_steps),
        by_position=tuple(
            sum(count for length, count in histogram.items() if length >= depth) / num_drafts
            for depth in range(1, deepest + 1)
        ),
        num_steps=num_steps,
    )


def draw(metrics: Path, file: Path) -> bool:
    """Plot tokens per step, and the accuracy of the first token in training, against trained tokens.

    Args:
      metrics: JSON lines of a run.
      file: file of the picture; its suffix determines the format.

    Returns: False if matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        return False
    records = list(json_lines(metrics))
    figure = require_matplotlib().Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    measured = [record for record in records if "tau" in record]
    left.plot([record["num_tokens"] for record in measured], [record["tau"] for record in measured], "o-")
    left.set_xlabel("answer tokens")
    left.set_ylabel("tokens per step, held-out prompts")
    right = left.twinx()
    first = [record["accuracies"][0] for record in records]
    right.plot([record["num_tokens"] for record in records], first, color="0.7", linewidth=0.8)
    right.set_ylabel("first token right, in training")
    figure.savefig(file)
    return True
