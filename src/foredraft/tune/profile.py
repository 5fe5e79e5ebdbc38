"""Measurement of a method's acceptance and costs on this machine, and of the best draft length per batch and
context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event

from foredraft.bench.trial import Sampling, Trial, bootstrap
from foredraft.bench.workload import BenchPrompt
from foredraft.engine.cost_model import CostCurve
from foredraft.engine.costs import StepCosts, facts_of, forward_curve
from foredraft.engine.drafter import Drafter
from foredraft.engine.profiles import BestLength, Profile
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.tune.counting import Setting, alone, decoded
from foredraft.tune.walk import Counts, RecordedText, rates

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
NUM_RESAMPLES = 400


def share_of_drafts(texts: Sequence[Counts]) -> float:
    """Return the share of steps that had a draft."""
    num_drafted = sum(count for text in texts for step, count in text.steps.items() if step.depth)
    return num_drafted / sum(text.num_steps for text in texts)


def expected_speed(texts: Sequence[Counts], prices: StepCosts, title: str, curve: CostCurve, length: int) -> float:
    """Return the expected speed of drafts of this length relative to plain decoding: tokens per step over cost of a
    step.

    Steps without a draft count as plain steps. The drafting cost of a batch is the cost of one row times the number of
    rows.

    Args:
      texts: counts of steps with drafts of this length or longer.
      title: key of the drafting costs in ``prices``.
    """
    gained, chance = 0.0, 1.0
    for rate in rates(texts)[:length]:
        chance *= rate
        gained += chance
    share, plain, host = share_of_drafts(texts), curve.at(1), prices.host_seconds
    drafting = prices.draft_seconds(title, length) * curve.num_rows
    # in a batch every step has some row that drafts, and the step costs as much as its widest row
    step = (1 - share) * plain + share * curve.at(length + 1) + drafting
    return (1.0 + share * gained) * (plain + host) / (step + host)


def best_length(texts: Sequence[Counts], prices: StepCosts, title: str, curve: CostCurve) -> BestLength:
    """Return the best draft length for one batch size and context, with its expected speed."""
    lengths = range(min(len(rates(texts)), max(WIDTHS) - 1) + 1)
    speeds = {length: expected_speed(texts, prices, title, curve, length) if length else 1.0 for length in lengths}
    best = max(speeds, key=speeds.__getitem__)

    def speed(some: Sequence[Counts]) -> float:
        return expected_speed(some, prices, title, curve, best) if best else 1.0

    low, high = bootstrap(texts, speed, num_resamples=NUM_RESAMPLES)
    return BestLength(curve.num_rows, curve.context, best, speeds[best], low, high)


def nearest_setting(
    found: Sequence[BestLength], prompts: Sequence[BenchPrompt], max_new_tokens: int
) -> BestLength | None:
    """Return the setting of one row whose context is nearest to that of the prompts halfway through their outputs."""
    context = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts) + max_new_tokens / 2
    of_one_row = [one for one in found if one.num_rows == 1]
    return min(of_one_row, key=lambda one: abs(one.context - context), default=None)


def measured_speed(trial: Trial) -> tuple[float, float, float]:
    """Return the speed of "drafting" relative to "plain" over all prompts, and its 95 % interval over resampled
    prompts."""
    seconds = [
        tuple(sum(run.decode_seconds for run in trial.runs[name][place]) for name in ("plain", "drafting"))
        for place in range(len(trial.prompts))
    ]

    def speed(some: Sequence[tuple[float, ...]]) -> float:
        return sum(plain for plain, _ in some) / sum(drafting for _, drafting in some)

    return speed(seconds), *bootstrap(seconds, speed)


def measure(
    target: CausalLM,
    method: str,
    new_drafter: Callable[[int], Drafter],
    longest: int,
    prompts: Sequence[BenchPrompt],
    *,
    max_new_tokens: int,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    say: Callable[[str], None] = lambda _: None,
    interrupted: Event | None = None,
) -> tuple[Profile, float]:
    """Measure a complete profile, and the share of steps that had a draft.

    All prompts are decoded with the longest drafts. For the cost of drafting, a few of them are decoded again with
    drafts of one token and with the longest drafts. Of repeated timings of a forward pass the smallest counts.

    Args:
      new_drafter: function that makes a drafter with drafts of a given length, which are not cut by anything else.
      interrupted: event that is set if Ctrl-C ended the decoding early. The profile then describes the tokens decoded
        until then.

    Raises: ConfigError if no step had a draft; KeyboardInterrupt if nothing was decoded.
    """
    curves = []
    for num_rows in batch_sizes:
        for context in contexts:
            say(f"timing steps of {num_rows} rows after {context} tokens")
            curves.append(forward_curve(target, WIDTHS, context, repeats, num_rows=num_rows, of=min))
    say("decoding the prompts")
    params = Sampling(ignore_eos=True).params(max_new_tokens)
    texts = [RecordedText(prompt.category, tuple(prompt.token_ids), (), params) for prompt in prompts]
    prices, setting = StepCosts(tuple(curves)), Setting(method, {"method": method})
    drafting: dict[int, float] = prices.drafting.setdefault(setting.name, {})
    single = next((one for one in curves if one.num_rows == 1), None)
    single = single or forward_curve(target, WIDTHS, contexts[0], repeats, of=min)
    for length in dict.fromkeys((1, longest)):
        seconds, prices.host_seconds = alone(target, new_drafter(length), texts, single)
        drafting[length] = max(seconds, 1e-9)
    counts = decoded(target, lambda: new_drafter(longest), setting, texts, prices, interrupted=interrupted).counts
    if not share_of_drafts(counts):
        raise ConfigError("no step had a draft on these prompts, so there is nothing to measure; use other prompts")
    settings = tuple(best_length(counts, prices, setting.name, curve) for curve in curves)
    return Profile(method, facts_of(target), prices.curves, drafting, rates(counts), settings), share_of_drafts(counts)
