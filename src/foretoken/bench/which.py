"""Which method for a model: plain decoding and all candidates, interleaved on the same prompts, equality first."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from foretoken.bench import equality
from foretoken.bench.arms import EngineArm, Sampling
from foretoken.bench.equality import Equality
from foretoken.bench.measure import Comparison, Trial, compare, interleave, prompt_ratios
from foretoken.bench.models import describe, sizes
from foretoken.bench.workload import (
    AGAIN,
    COPY,
    Prompt,
    asked_again,
    load_prompts,
    read_questions,
    repeated_share,
    select,
)
from foretoken.config.engine import EngineConfig
from foretoken.config.method import methods
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.materials import DrafterFactory
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import Drafter
from foretoken.engine.stats import SequenceStats, StepProfile
from foretoken.errors import ConfigError, ForetokenError
from foretoken.loading.info import Loaded, eos_token_ids
from foretoken.loading.models import is_zoo, load_model
from foretoken.loading.pairing import Pairing
from foretoken.model.lm import CausalLM
from foretoken.testing.inflation import inflate

PLAIN = "plain"
ALL = "all"
COMPOSITIONS = ("suffix+draft_model", "ngram>token_recycling")
"""The combinations that "all" tries besides the single methods."""
_WARM_UP_TOKENS = 8
_CHECKED_TOKENS = 32
"""Of a prompt's output that are compared in the strict mode before anything is timed."""

Say = Callable[[str, int, int], None]
"""Told what is running, how many prompts of it are done, and of how many."""


@dataclass(frozen=True)
class WhichSettings:
    """Settings of a comparison. Defaults are those of ``foretoken bench --methods``.

    Args:
      num_prompts: in all, of the kinds in turn.
      kinds: of prompts; None for all that the prompts have but passages to copy.
      repeats: rounds of forwards and backwards through all methods, per prompt.
      exactness: of the runs that are timed.
      ignore_eos: go on past the end of the answer.
    """

    num_prompts: int = 9
    max_new_tokens: int = 48
    repeats: int = 1
    kinds: tuple[str, ...] | None = None
    prompts_file: Path | None = None
    sampling: Sampling = field(default_factory=Sampling)
    execution: str = "auto"
    exactness: str = EngineConfig.exactness


@dataclass(frozen=True)
class Candidate:
    """One way of drafting.

    Args:
      name: in tables.
      given: what a user writes as the speculative config.
    """

    name: str
    given: Mapping[str, Any]

    @property
    def config(self) -> SpeculativeConfig:
        return SpeculativeConfig.parse(self.given)


_PLAIN = Candidate(PLAIN, {"method": "none"})


@dataclass(frozen=True)
class Refused:
    """A method that this model cannot draft by, and why."""

    method: str
    reason: str


@dataclass(frozen=True)
class MethodRow:
    """The results of one method; figures are None where it differs from plain decoding or nothing was timed.

    Args:
      given: the speculative config.
      comparison: speed by own plain decoding.
      prompt_ratios: the same of every prompt, None where nothing was left to time.
      tokens_per_step: tau, the bonus included.
      nodes_per_step: verified nodes, the pending token included.
      draft_seconds: proposing and observing, per step.
      memory_bytes: by which the process grew when the method was loaded and ran for the first time, its own
        key-value cache of the target included; None where the system does not say.
      equality: with plain decoding, in the mode in which it is promised.
      timed_equality: the same in the runs that were timed.
    """

    method: str
    given: Mapping[str, Any]
    tokens_per_second: float | None
    comparison: Comparison | None
    prompt_ratios: tuple[float | None, ...]
    tokens_per_step: float
    acceptance_rate: float | None
    nodes_per_step: float
    draft_seconds: float
    memory_bytes: int | None
    equality: Equality | None
    timed_equality: Equality | None

    @property
    def is_timed(self) -> bool:
        return self.comparison is not None and self.comparison.num_prompts > 0


@dataclass(frozen=True)
class Outcome:
    """All findings of a comparison.

    Args:
      kinds: of the prompts, in their order.
      promised: "default" or "strict": the mode in which equality was judged.
      different: methods whose tokens are not those of plain decoding in that mode.
      repeated_share: of plain decoding's tokens, those inside repeated 8-grams.
      num_prompts_planned: what an interrupted run did not reach.
    """

    sampling: str
    kinds: tuple[str, ...]
    num_prompts_planned: int
    runs_per_prompt: int
    other_cpu_share: float
    promised: str
    repeated_share: float
    plain: MethodRow
    rows: tuple[MethodRow, ...]
    different: tuple[Equality, ...]
    refused: tuple[Refused, ...]

    @property
    def num_prompts(self) -> int:
        return len(self.kinds)


# -- candidates --------------------------------------------------------------------------------------------------


def read_candidates(text: str, draft_model: str | None, num_draft_tokens: int | None) -> list[Candidate]:
    """The methods that a user names: by comma, ``a+b`` and ``a>b`` as everywhere, JSON for other settings, or "all".

    Args:
      draft_model: for those that draft with a model.
      num_draft_tokens: for all; None leaves every method its default.

    Raises: ConfigError for anything that is not a method.
    """
    found: list[Candidate] = []
    for part in split_outside_brackets(text):
        single = (name for name, method in methods().items() if name != "none" and not method.combines)
        names = [*single, *COMPOSITIONS]
        for given in [{"method": name} for name in names] if part == ALL else [_given(part)]:
            candidate = _completed(given, draft_model, num_draft_tokens)
            if candidate.name not in [other.name for other in found]:
                found.append(candidate)
    if not found:
        raise ConfigError(f"--methods is {text!r}; name methods with commas between them, or {ALL}")
    return found


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that stand outside of braces, brackets and quotes: ``a,{"b": 1, "c": [2, 3]}`` has two parts."""
    parts, depth, is_quoted = [""], 0, False
    for place, sign in enumerate(text):
        if sign == '"' and text[place - 1 : place] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 0 and not is_quoted:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _given(part: str) -> dict[str, Any]:
    if not part.startswith("{"):
        return {"method": part}
    try:
        return dict(json.loads(part))
    except ValueError as error:
        raise ConfigError(f"--methods holds {part!r}, which is not valid JSON: {error}") from None


def _completed(given: dict[str, Any], draft_model: str | None, num_draft_tokens: int | None) -> Candidate:
    """The candidate with the drafter and the length that were named beside it, under the method's own name."""
    config = SpeculativeConfig.parse(given)
    if config.method == "none":
        raise ConfigError("--methods holds plain decoding, which every method is compared with anyway; leave it out")
    full = dict(given)
    part = config.model_part
    if draft_model is not None and part is not None and part.model is None:
        full["model"] = draft_model
    if num_draft_tokens is not None:
        full.setdefault("num_speculative_tokens", num_draft_tokens)
    spelled = str(given["method"]) if "method" in given else str(config.method)
    others = {key: value for key, value in given.items() if key != "method"}
    return Candidate(" ".join([spelled, *(f"{key}={value}" for key, value in others.items())]), full)


# -- the comparison ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """An arm that has run, and what it added to the memory of the process."""

    arm: EngineArm
    memory_bytes: int | None


@dataclass
class Contender:
    """A candidate on its way through the comparison.

    Args:
      equality: with plain decoding in strict mode; None where the timed runs are the ones to be compared.
    """

    candidate: Candidate
    make: DrafterFactory
    started: Started
    equality: Equality | None = None


class Which:
    """Holds the model and runs the comparison.

    Args:
      model: as for `LLM`.
      scale: width to inflate the target to; see `foretoken.bench.models.sizes`.
      say: told what is running.

    Raises: CheckpointError, UnsupportedModelError, ConfigError.
    """

    def __init__(self, model: str, dtype: str, scale: str, settings: WhichSettings, say: Say | None = None) -> None:
        self.settings = settings
        self._say = say or (lambda what, done, total: None)
        loaded = load_model(model, dtype=dtype)
        loaded = _scaled(loaded, scale)
        self.label = describe(loaded.model)
        self._eos = tuple(eos_token_ids(loaded.model))
        self.target = CausalLM(loaded.model, execution=settings.execution, release_originals=True)
        zoo_name = model if is_zoo(model) else None
        self._pairing = Pairing(loaded, self.target, loaded.tokenizer, zoo_name, settings.execution, dtype=dtype)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Prompts, of the kinds in turn; those that leave no room for the output are skipped.

        Raises: ConfigError when no prompt remains, or a kind has none.
        """
        settings, tokenizer = self.settings, self._pairing.tokenizer
        questions = read_questions(settings.prompts_file)
        known = list(dict.fromkeys(question.category for question in questions))
        wanted = settings.kinds or [kind for kind in known if kind != COPY]
        unknown = [kind for kind in wanted if kind not in (*known, AGAIN)]
        if unknown:
            raise ConfigError(f"no prompt is of the kind {unknown[0]!r}; choose among {', '.join((*known, AGAIN))}")
        by_kind = {kind: [one for one in questions if one.category == kind] for kind in wanted if kind != AGAIN}
        room = None if self.target.context_length is None else self.target.context_length - settings.max_new_tokens
        found = {kind: load_prompts(tokenizer, several, None, room) for kind, several in by_kind.items()}
        if AGAIN in wanted:
            found[AGAIN] = self._asked_again(select(questions, settings.num_prompts), room)
        prompts = _in_turn(list(found.values()))[: settings.num_prompts]
        if not prompts:
            raise ConfigError(f"no prompt leaves room for {settings.max_new_tokens} tokens in {room} of context")
        return prompts

    def _asked_again(self, questions: Seq[Any], room: int | None) -> list[Prompt]:
        plain, length = self._arm(_PLAIN, EmptyDrafter), self.settings.max_new_tokens
        ending = replace(self.settings.sampling, temperature=0.0, ignore_eos=False)
        prompts = asked_again(
            self._pairing.tokenizer, questions, lambda ids: plain.run(ids, length, ending).token_ids, room
        )
        return [replace(prompt, category=AGAIN) for prompt in prompts]

    def run(self, candidates: Seq[Candidate], on_prompt: Callable[[Outcome], None]) -> Outcome:
        """Compare all that apply.

        Args:
          on_prompt: told of what is known so far, after every prompt.

        Raises: ConfigError when no method applies.
        """
        plain = self._started(_PLAIN, EmptyDrafter)
        contenders, refused = self._contenders(candidates)
        if not contenders:
            reasons = "; ".join(f"{one.method}: {one.reason}" for one in refused)
            raise ConfigError(f"none of the methods applies to this model: {reasons}")
        self._check_strictly(contenders)
        equal = [one for one in contenders if one.equality is None or self._passes(one.equality)]
        settings = self.settings

        def outcome(trial: Trial) -> Outcome:
            return self._outcome(trial, plain, contenders, refused)

        def note(trial: Trial) -> None:
            self._say("timing", len(trial.prompts), len(self.prompts))
            on_prompt(outcome(trial))

        self._say("timing", 0, len(self.prompts))
        arms = [plain.arm, *(one.started.arm for one in equal)]
        trial = interleave(arms, self.prompts, settings.sampling, settings.max_new_tokens, settings.repeats, note)
        return outcome(trial)

    def _contenders(self, candidates: Seq[Candidate]) -> tuple[list[Contender], list[Refused]]:
        """The candidates whose drafter can be made, each started once; and the others with their reason."""
        contenders: list[Contender] = []
        refused = []
        for place, candidate in enumerate(candidates):
            self._say("loading", place, len(candidates))
            before = resident_bytes()
            try:
                make = self._pairing.drafting(candidate.config).new_drafter
            except ForetokenError as error:
                refused.append(Refused(candidate.name, str(error)))
                continue
            contenders.append(Contender(candidate, make, self._started(candidate, make, before)))
        return contenders, refused

    @property
    def _is_full_precision(self) -> bool:
        return self.target.dtype in (torch.float32, torch.float64)

    @property
    def promised_exactness(self) -> str:
        """The mode in which every dtype's tokens are promised to equal those of plain decoding."""
        return self.settings.exactness if self._is_full_precision else "strict"

    def _passes(self, found: Equality) -> bool:
        """Full precision: identical, near-ties excepted. Strict: identical."""
        return found.passes(self.target.dtype) if self._is_full_precision else not found.divergences

    def _check_strictly(self, contenders: Seq[Contender]) -> None:
        """Half precision: the tokens of every method against those of plain decoding, in strict mode.

        In full precision the runs that are timed are the ones to be compared.
        """
        judged = [one for one in contenders if self._is_judged(one)]
        if self._is_full_precision or not judged:
            return
        length, sampling = min(_CHECKED_TOKENS, self.settings.max_new_tokens), self.settings.sampling
        arms = [self._arm(_PLAIN, EmptyDrafter, "strict")]
        arms += [self._arm(one.candidate, one.make, "strict") for one in judged]
        trial = Trial(self.prompts, sampling, length, {arm.name: [] for arm in arms})
        for place, prompt in enumerate(self.prompts):
            self._say("checking that tokens are equal", place, len(self.prompts))
            for arm in arms:
                trial.runs[arm.name].append([arm.run(prompt.token_ids, length, sampling)])
        found = equality.check(trial, self.target, PLAIN, [one.candidate.name for one in judged])
        for contender, equal in zip(judged, found, strict=True):
            contender.equality = equal

    def _is_judged(self, contender: Contender) -> bool:
        """Rules that draw by themselves follow the law of plain decoding, and not its tokens."""
        return contender.candidate.config.rule.keeps_tokens or self.settings.sampling.is_greedy

    def _arm(self, candidate: Candidate, make: Callable[[], Drafter], exactness: str | None = None) -> EngineArm:
        config = EngineConfig(
            max_num_seqs=1,
            acceptance=candidate.config.rejection_sample_method,
            exactness=exactness or self.settings.exactness,
        )
        return EngineArm(candidate.name, self.target, make(), self._eos, config)

    def _started(self, candidate: Candidate, make: Callable[[], Drafter], before: int | None = None) -> Started:
        """An arm that has run once.

        Args:
          before: what the process held before anything of it was loaded; what it holds now if left out.
        """
        before = resident_bytes() if before is None else before
        arm = self._arm(candidate, make)
        arm.run(self.prompts[0].token_ids, _WARM_UP_TOKENS, self.settings.sampling)
        arm.engine.profile = StepProfile()
        after = resident_bytes()
        return Started(arm, None if before is None or after is None else max(0, after - before))

    # -- figures -----------------------------------------------------------------------------------------------

    def _outcome(self, trial: Trial, plain: Started, contenders: Seq[Contender], refused: Seq[Refused]) -> Outcome:
        judged = [one.candidate.name for one in contenders if one.candidate.name in trial.runs and self._is_judged(one)]
        timed = {found.arm: found for found in equality.check(trial, self.target, PLAIN, judged)}
        rows, different = [], []
        for contender in contenders:
            name = contender.candidate.name
            found = timed.get(name) if self._is_full_precision else contender.equality
            if found is not None and not self._passes(found):
                different.append(found)
            else:
                rows.append(_row(trial, contender.candidate, contender.started, found, timed.get(name)))
        return Outcome(
            sampling=self.settings.sampling.label,
            kinds=tuple(prompt.category for prompt in trial.prompts),
            num_prompts_planned=len(self.prompts),
            runs_per_prompt=2 * self.settings.repeats,
            other_cpu_share=trial.other_cpu_share,
            promised=self.promised_exactness,
            repeated_share=repeated_share(trial.outputs(PLAIN)),
            plain=_row(trial, _PLAIN, plain, None, None),
            rows=tuple(rows),
            different=tuple(different),
            refused=tuple(refused),
        )


def _row(
    trial: Trial, candidate: Candidate, started: Started, judged: Equality | None, timed: Equality | None
) -> MethodRow:
    stats = SequenceStats()
    for run in (run for runs in trial.runs[candidate.name] for run in runs):
        stats.add(run.stats or SequenceStats())
    profile = started.arm.engine.profile
    speed = trial.tokens_per_second(candidate.name)
    steps = max(1, stats.num_steps)
    return MethodRow(
        method=candidate.name,
        given=candidate.given,
        tokens_per_second=None if math.isnan(speed) else speed,
        comparison=None if candidate.name == PLAIN else compare(trial, candidate.name, PLAIN),
        prompt_ratios=tuple(prompt_ratios(trial, candidate.name, PLAIN)),
        tokens_per_step=stats.tokens_per_step,
        acceptance_rate=stats.draft_acceptance_rate if stats.num_draft_tokens else None,
        nodes_per_step=1 + stats.num_draft_tokens / steps,
        draft_seconds=(profile.propose_seconds + profile.observe_seconds) / max(1, profile.num_steps),
        memory_bytes=started.memory_bytes,
        equality=judged,
        timed_equality=timed,
    )


def _scaled(loaded: Loaded, scale: str) -> Loaded:
    """The model, inflated in width where that is asked for."""
    wanted = sizes(scale)
    if wanted is None:
        return loaded
    grown = inflate(loaded.model, hidden_size=wanted[0], intermediate_size=wanted[1])
    return Loaded.of(grown, f"{loaded.name}, inflated", True, loaded.tokenizer)


def _in_turn(groups: Iterable[Seq[Prompt]]) -> list[Prompt]:
    """(a, b), (c, d, e) -> a, c, b, d, e."""
    return [prompt for turn in zip_longest(*groups) for prompt in turn if prompt is not None]


def resident_bytes() -> int | None:
    """Resident memory of the process now; None where the system does not report it (Linux does)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
