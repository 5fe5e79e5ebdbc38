"""Counts of accepted tokens for every setting, on the outputs of plain decoding. The counts do not depend on any
clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from threading import Event
from time import perf_counter
from typing import Any

from foredraft.config.drafting import FIXED
from foredraft.config.engine import EngineConfig
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.cost_model import CostCurve, CostModel
from foredraft.engine.costs import StepCosts
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.row import Row
from foredraft.engine.stats import StepSeconds
from foredraft.model.lm import CausalLM
from foredraft.tree import DraftSize
from foredraft.tune.walk import CountedStep, Counts, RecordedText, Walk, until_interrupted

LENGTHS = (1, 2, 3, 4, 6, 8, 10, 16)
NODES = (2, 3, 4, 6, 8, 12, 16, 24)
FEW_LENGTHS, FEW_NODES = (2, 4, 8), (4, 8, 16)
"""Sizes for drafters that need the target, where every setting has to decode all prompts."""

ROWS_AT_ONCE = 8
TIMED_STEPS = 12
TIMED_TEXTS = 3
"""Number of prompts that are decoded one by one to time drafting and the host's part of a step."""

DISTURBED = 0.125
"""Share of the slowest timed steps to leave out, because other load of the machine slows down single steps."""


@dataclass(frozen=True)
class Setting:
    """One way of drafting.

    Args:
      title: name of the method as written by the user.
      config: speculative config that is saved if this setting is chosen.
      length: longest draft in tokens; None if the setting does not set it.
      nodes: largest number of nodes; None if the setting does not limit it.
      is_governed: True if measured costs decide the size of drafts.
    """

    title: str
    config: Mapping[str, Any]
    length: int | None = None
    nodes: int | None = None
    is_governed: bool = False

    @property
    def name(self) -> str:
        """Name of the setting in reports."""
        if self.nodes is not None:
            return f"{self.title}, {self.nodes} nodes"
        if self.length is not None:
            return f"{self.title}, K = {self.length}"
        return f"{self.title}, governed" if self.is_governed else self.title


PLAIN = Setting("plain decoding", {"method": "none"})


@dataclass(frozen=True)
class SettingCounts:
    """A setting, the steps that it takes for every prompt, and its speed once all settings have been compared.

    Args:
      priced_as: key of the setting's drafting costs in `StepCosts`.
      speed: speed relative to plain decoding; NaN before `choose`.
      low, high: 95 % interval of the speed, over prompts and measurements of the cost curve.
    """

    setting: Setting
    counts: tuple[Counts, ...]
    priced_as: str = ""
    speed: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")


def settings_of(title: str, given: Mapping[str, Any], *, is_walked: bool) -> list[Setting]:
    """Return the settings of a method to try: lengths of drafts, and numbers of nodes of trees.

    Args:
      given: speculative config as written by the user.
      is_walked: True if settings need no forward pass of the target. If True, more sizes, and the governor, are tried.
    """
    config = SpeculativeConfig.parse(given)
    options: Any = config.options
    keys, branches = config.definition.keys, options.num_branches > 1 or options.drafts_trees
    fixed = {**given, "length_policy": FIXED}
    found = [Setting(title, given, is_governed=True)] if is_walked and config.is_governed else []
    if "max_draft_nodes" in keys and branches:
        most = config.max_draft_nodes or max(FEW_NODES)
        sizes = _up_to(NODES if is_walked else FEW_NODES, most)
        found += [Setting(title, {**fixed, "max_draft_nodes": size}, nodes=size) for size in sizes]
    if (is_walked or not branches) and not config.definition.combines:
        lengths = _up_to(LENGTHS if is_walked else FEW_LENGTHS, config.num_speculative_tokens)
        found += [Setting(title, {**fixed, "num_speculative_tokens": length}, length=length) for length in lengths]
    return found or [Setting(title, fixed)]


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    return sorted({most, *(size for size in sizes if size < most)})


# -- along texts -------------------------------------------------------------------------------------------------------


def walked(
    target: CausalLM,
    drafter: Callable[[], Drafter],
    settings: Sequence[Setting],
    texts: Sequence[RecordedText],
    prices: StepCosts,
) -> Iterator[SettingCounts]:
    """Yield the settings of a method with their counts, for drafts that depend on tokens alone.

    Drafting costs that are not known yet are measured with the first setting of every length.
    """
    for setting in sorted(settings, key=lambda one: one.is_governed):  # a governor needs the drafting costs
        made = drafter()
        governor = Governor(CostModel(prices.mean()), made.facts) if setting.is_governed else None
        walk = Walk(target, made, texts, None if governor is None else governor.acceptance)
        seconds: dict[int, list[float]] = {}
        counts = tuple(_walked(walk, setting, governor, prices, seconds) for _ in texts)
        known = prices.drafting.setdefault(setting.title, {})
        for levels in {SpeculativeConfig.parse(setting.config).num_speculative_tokens} & seconds.keys() - known.keys():
            known[levels] = quantiles(seconds[levels], method="inclusive")[0]  # disturbances only lengthen a timing
        yield SettingCounts(setting, counts, setting.title)


def _walked(
    walk: Walk, setting: Setting, governor: Governor | None, prices: StepCosts, seconds: dict[int, list[float]]
) -> Counts:
    """Return the steps of the next prompt.

    Args:
      seconds: drafting times by requested depth; new times are appended.
    """
    curve, longest = prices.mean(), SpeculativeConfig.parse(setting.config).num_speculative_tokens
    steps: Counter[CountedStep] = Counter()
    num_tokens, contexts = 0, []
    walk.enter(1)
    while walk.rows:
        contexts.append(len(walk.rows[0].token_ids))
        (limit,) = walk.budgets()
        budgets = [DraftSize(min(limit.depth, longest), setting.nodes or limit.nodes)]
        if governor is not None:
            budgets = governor.plan(walk.rows, budgets)
        levels = int(max(budgets))
        start = perf_counter()
        trees = walk.propose(budgets)
        if levels:
            seconds.setdefault(levels, []).append(perf_counter() - start)
        if governor is not None:
            trees = governor.select(walk.rows, trees)
        outputs = walk.emit(trees)
        if governor is not None:
            drafting = prices.draft_seconds(setting.title, levels)
            other = curve.at(len(trees[0])) + prices.host_seconds
            governor.observe(trees, outputs, StepSeconds(max(drafting, 1e-9), other))
        steps[CountedStep(len(trees[0]), levels, trees[0].depth, outputs[0].num_accepted)] += 1
        num_tokens += len(outputs[0].token_ids)
    return Counts(steps, num_tokens, fmean(contexts))


# -- with the target ---------------------------------------------------------------------------------------------------


def decoded(
    target: CausalLM,
    drafter: Callable[[], Drafter],
    setting: Setting,
    texts: Sequence[RecordedText],
    prices: StepCosts,
    say: Callable[[int], None] = lambda _: None,
    interrupted: Event | None = None,
) -> SettingCounts:
    """Return a setting with its counts, by decoding the prompts with the target, several rows at a time.

    If the drafting cost of the setting is not known yet, it is measured on a few prompts decoded one by one.

    Args:
      say: function that is called with the number of finished prompts.
      interrupted: event that is set if Ctrl-C ended the decoding early. Some outputs are then shorter or missing.
        Without an event, KeyboardInterrupt is raised.

    Raises: KeyboardInterrupt if no step was made before Ctrl-C.
    """
    engine = Engine(target, drafter(), EngineConfig(max_num_seqs=ROWS_AT_ONCE))
    steps: dict[Row, Counter[CountedStep]] = {}
    contexts: dict[Row, list[int]] = {}
    rows = [engine.add_request(text.prompt, text.params)[0] for text in texts]
    with until_interrupted(engine, rows, interrupted):
        for outputs in engine.run():
            for output in outputs:
                if output.tree is None:
                    continue
                step = CountedStep(len(output.tree), 1, output.tree.depth, output.num_accepted)
                steps.setdefault(output.row, Counter())[step] += 1
                contexts.setdefault(output.row, []).append(len(output.row.token_ids))
            say(sum(row.is_finished for row in rows))
    if interrupted is not None and interrupted.is_set() and not steps:
        raise KeyboardInterrupt
    if setting.name not in prices.drafting:
        prices.drafting[setting.name] = {1: alone(target, drafter(), texts, prices.mean())[0]}
    counts = tuple(Counts(steps[row], row.num_output_tokens, fmean(contexts[row])) for row in rows if row in steps)
    return SettingCounts(setting, counts, setting.name)


def alone(target: CausalLM, drafter: Drafter, texts: Sequence[RecordedText], curve: CostCurve) -> tuple[float, float]:
    """Return the seconds of a step for drafting, and for everything but drafting and verifying, of one row at a time.

    Both costs are scaled by the ratio of the curve's verification time to the measured one. A busy machine then does
    not make drafting look more expensive relative to the curve.
    """
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=1))
    timed = [times for text in spread(texts, TIMED_TEXTS) for times in _timed(engine, text, curve)]
    drafting, beside = zip(*timed, strict=True)
    return undisturbed(drafting), undisturbed(beside)


def _timed(engine: Engine, text: RecordedText, curve: CostCurve) -> list[tuple[float, float]]:
    """Return the seconds per step of drafting, and of everything else but the forward pass. The warm-up step is left
    out."""
    profile = engine.profile
    (row,) = engine.add_request(text.prompt, text.params)
    found: list[tuple[float, float]] = []
    while not row.is_finished:
        before = vars(profile).copy()
        outputs = engine.step()
        if not outputs or outputs[0].tree is None:
            continue
        taken = {name: getattr(profile, name) - value for name, value in before.items() if name.endswith("_seconds")}
        scale = curve.at(len(outputs[0].tree)) / taken["verify_seconds"]
        drafting = scale * (taken["propose_seconds"] + taken["observe_seconds"])
        found.append((drafting, scale * (taken["accept_seconds"] + taken["commit_seconds"] + taken["emit_seconds"])))
        if len(found) > TIMED_STEPS:
            engine.abort_row(row)
    return found[1:] or found


def spread(texts: Sequence[RecordedText], most: int) -> list[RecordedText]:
    """Return at most this number of texts, evenly spread, the first one included."""
    number = min(most, len(texts))
    return [texts[place * len(texts) // number] for place in range(number)]


def undisturbed(seconds: Sequence[float]) -> float:
    """Return the mean of all but the slowest steps.

    The median would be wrong for drafters with two kinds of steps, such as a union that uses its head in every second
    step.
    """
    kept = sorted(seconds)[: len(seconds) - int(DISTURBED * len(seconds))]
    return fmean(kept)


def record(
    target: CausalLM,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    params: Any,
    eos: Sequence[int],
    say: Callable[[int], None],
) -> list[RecordedText]:
    """Decode the prompts plainly, several rows at a time, and return them with their outputs.

    Args:
      prompts: pairs of the kind and the token ids.
      eos: tokens that end an output.
      say: function that is called with the number of finished prompts.
    """
    engine = Engine(target, EmptyDrafter(), EngineConfig(max_num_seqs=ROWS_AT_ONCE), eos_token_ids=eos)
    rows = [engine.add_request(ids, params)[0] for _, ids in prompts]
    for _ in engine.run():
        say(sum(row.is_finished for row in rows))
    return [
        RecordedText(kind, tuple(ids), tuple(row.output_ids), params)
        for (kind, ids), row in zip(prompts, rows, strict=True)
    ]
