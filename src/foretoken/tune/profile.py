"""Measures what a method brings and costs on this machine, and the length of draft that is best where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.bench.arms import EngineArm
from foretoken.bench.trial import Sampling, Trial, bootstrap, interleave
from foretoken.bench.workload import Prompt
from foretoken.config.engine import EngineConfig
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.cost_model import CostCurve
from foretoken.engine.costs import Forward, facts_of, filled_cache, forward_times
from foretoken.engine.profiles import BestLength, Profile, StepCurve
from foretoken.errors import ConfigError
from foretoken.tune.prices import drafting_seconds, rates

if TYPE_CHECKING:
    from foretoken.engine.drafter import Drafter
    from foretoken.model.lm import CausalLM

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
NUM_RESAMPLES = 400

Drafted = list[tuple[int, int]]
"""Depth of the draft and accepted tokens of every step of a text that drafted."""


@dataclass(frozen=True)
class Observed:
    """One method on some prompts, drafting as deep as it may.

    Args:
      by_prompt: steps of every prompt.
      share: of steps that drafted.
      drafting: seconds of drafting by levels.
      host: seconds of a step beside drafting and verifying, which plain steps have, too.
    """

    by_prompt: list[Drafted]
    share: float
    drafting: dict[int, float]
    host: float = 0.0

    def rates(self, prompts: Seq[Drafted] | None = None) -> tuple[float, ...]:
        """The chance of every depth, given that the one above was right; as deep as anything was tried."""
        return rates(Counter(step for one in (self.by_prompt if prompts is None else prompts) for step in one))


def observe(
    target: CausalLM, new_drafter: Callable[[int], Drafter], longest: int, prompts: Seq[Prompt], max_new_tokens: int
) -> Observed:
    """Decode prompts one by one with drafts of one token and with the longest.

    Args:
      new_drafter: makes a drafter with drafts of so many tokens, which nothing else cuts.

    Raises: ConfigError where no step drafted.
    """
    drafting, by_prompt, num_steps, host = {}, list[Drafted](), 0, 0.0
    for length in dict.fromkeys((1, longest)):
        arm = EngineArm("", target, new_drafter(length), (), EngineConfig(max_num_seqs=1))
        arm.run(prompts[0].token_ids, 4, Sampling(ignore_eos=True))
        profile = arm.engine.profile
        before, steps_before = profile.propose_seconds, profile.num_steps
        host_before = profile.host_seconds
        by_prompt, num_steps = [], 0
        for prompt in prompts:
            (row,) = arm.engine.add_request(prompt.token_ids, Sampling(ignore_eos=True).params(max_new_tokens))
            while not row.is_finished:
                arm.engine.step()
            by_prompt.append([(step.drafted, step.accepted) for step in row.trace if step.drafted])
            num_steps += row.num_steps
        drafting[length] = max(profile.propose_seconds - before, 1e-9) / (profile.num_steps - steps_before)
        host = (profile.host_seconds - host_before) / (profile.num_steps - steps_before)
    num_drafted = sum(map(len, by_prompt))
    if not num_drafted:
        raise ConfigError("no step of these prompts had a draft, so there is nothing to measure; give other prompts")
    return Observed(by_prompt, num_drafted / num_steps, drafting, host)


def curves(
    target: CausalLM, batch_sizes: Seq[int], contexts: Seq[int], repeats: int, say: Callable[[str], None]
) -> tuple[StepCurve, ...]:
    """The least seconds of steps over chains, by rows, context and nodes per row."""
    found = []
    for num_rows in batch_sizes:
        for context in contexts:
            say(f"timing steps of {num_rows} rows after {context} tokens")
            cache, length = filled_cache(target, context, max(WIDTHS), num_rows)
            forwards = [Forward(target, cache, width, num_rows) for width in WIDTHS]
            times = forward_times(forwards, repeats)
            seconds = {width: min(taken) for width, taken in zip(WIDTHS, times, strict=True)}
            found.append(StepCurve(num_rows, length, seconds))
    return tuple(found)


def expected_speed(observed: Observed, rates: Seq[float], curve: StepCurve, length: int) -> float:
    """Speed by plain decoding with drafts of this length: tokens per step by what steps cost.

    Steps that found nothing to draft are plain ones. Drafting for a batch is reckoned row by row.
    """
    gained, chance = 0.0, 1.0
    for rate in rates[:length]:
        chance *= rate
        gained += chance
    seconds_of = CostCurve(curve.seconds)
    plain = seconds_of.at(1)
    share = observed.share
    drafting = drafting_seconds(observed.drafting, length) * curve.num_rows
    # of a batch all rows draft at some time of a step: it costs what its widest row makes of it
    with_draft = seconds_of.at(length + 1)
    step = (1 - share) * plain + share * with_draft + drafting
    return (1.0 + share * gained) * (plain + observed.host) / (step + observed.host)


def settings(observed: Observed, found: Seq[StepCurve]) -> tuple[BestLength, ...]:
    """The best length at every batch and context, with what is to be expected of it."""
    whole = observed.rates()
    chosen = []
    for curve in found:
        lengths = range(min(len(whole), max(WIDTHS) - 1) + 1)
        speeds = {length: expected_speed(observed, whole, curve, length) if length else 1.0 for length in lengths}
        best = max(speeds, key=speeds.__getitem__)

        def speed(prompts: Seq[Drafted], curve: StepCurve = curve, best: int = best) -> float:
            return expected_speed(observed, observed.rates(prompts), curve, best) if best else 1.0

        low, high = bootstrap(observed.by_prompt, speed, num_resamples=NUM_RESAMPLES)
        chosen.append(BestLength(curve.num_rows, curve.context, best, speeds[best], low, high))
    return tuple(chosen)


def nearest_setting(found: Seq[BestLength], prompts: Seq[Prompt], max_new_tokens: int) -> BestLength | None:
    """That of one row at the context which is nearest to that of prompts halfway through their answers."""
    context = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts) + max_new_tokens / 2
    of_one_row = [one for one in found if one.num_rows == 1]
    return min(of_one_row, key=lambda one: abs(one.context - context), default=None)


def measure(
    target: CausalLM,
    method: str,
    new_drafter: Callable[[int], Drafter],
    longest: int,
    prompts: Seq[Prompt],
    *,
    max_new_tokens: int,
    batch_sizes: Seq[int],
    contexts: Seq[int],
    repeats: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Profile, Observed]:
    """A whole profile."""
    say("decoding the prompts")
    observed = observe(target, new_drafter, longest, prompts, max_new_tokens)
    timed = curves(target, batch_sizes, contexts, repeats, say)
    profile = Profile(method, facts_of(target), timed, observed.drafting, observed.rates(), settings(observed, timed))
    return profile, observed


def replayed(target: CausalLM, drafter: Drafter, prompts: Seq[Prompt], max_new_tokens: int, repeats: int) -> Trial:
    """The prompts with a drafter and plainly, one row, interleaved."""
    arms = [
        EngineArm(name, target, one, (), EngineConfig(max_num_seqs=1))
        for name, one in (("plain", EmptyDrafter()), ("drafting", drafter))
    ]
    return interleave(arms, prompts, Sampling(ignore_eos=True), max_new_tokens, repeats)


def measured_speed(trial: Trial) -> tuple[float, float, float]:
    """Speed over all prompts by that of plain decoding, and its 95 % interval, by resampling prompts."""
    seconds = [
        tuple(sum(run.decode_seconds for run in trial.runs[name][place]) for name in ("plain", "drafting"))
        for place in range(len(trial.runs["plain"]))
    ]

    def speed(some: Seq[tuple[float, ...]]) -> float:
        return sum(plain for plain, _ in some) / sum(drafting for _, drafting in some)

    return speed(seconds), *bootstrap(seconds, speed)
