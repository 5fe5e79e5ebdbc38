"""What timings of batches share: an arm that decodes a group of prompts, in the place where others decode one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.bench.arms import Arm, EngineArm, Run, Sampling
from foretoken.bench.suite import Suite
from foretoken.bench.workload import Prompt, load_prompts, select
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, drafter_factory
from foretoken.engine.stats import SequenceStats


class GroupArm(Arm):
    """One method at one batch size, over all prompts of a group.

    ``run`` takes a tuple of prompts instead of one; its output is all their outputs one after another. Times are of
    decoding: batches of ``config.max_num_seqs`` rows, from the step at which all of them have entered.
    """

    def __init__(self, name: str, suite: Suite, speculation: dict[str, Any], config: EngineConfig) -> None:
        self.name = name
        parsed = SpeculativeConfig.parse(speculation)
        context = DrafterContext(suite.target, suite.lineup.drafter, suite.pair.tokenizer, suite.pair.zoo_name)
        drafter = drafter_factory(parsed, context)()
        self._arm = EngineArm(name, suite.target, drafter, suite.pair.eos_token_ids, config)

    @property
    def batch_size(self) -> int:
        return self._arm.engine.config.max_num_seqs

    def run(self, prompt_ids: Sequence[Any], max_new_tokens: int, sampling: Sampling) -> Run:
        outputs: list[int] = []
        stats = SequenceStats()
        num_decoded, seconds = 0, 0.0
        for start in range(0, len(prompt_ids), self.batch_size):
            rows, decoded, taken = self._arm.decode_batch(
                prompt_ids[start : start + self.batch_size], max_new_tokens, sampling
            )
            num_decoded, seconds = num_decoded + decoded, seconds + taken
            for row in rows:
                outputs += row.output_ids
                stats.add(row.stats)
        return Run(tuple(outputs), len(outputs) - num_decoded, 0.0, seconds, stats)


def groups_of(suite: Suite, size: int, count: int, context: int | None = None) -> list[Prompt]:
    """Groups of prompts of all kinds and lengths; each group stands where a prompt is expected."""
    questions = select(suite.questions, size * count)
    prompts = load_prompts(suite.pair.tokenizer, questions, context)
    if len(prompts) < size * count:
        raise SystemExit(f"{size * count} prompts are wanted, {len(prompts)} are there: fewer --groups or rows")
    return [
        Prompt(f"group-{place}", "group", tuple(one.token_ids for one in prompts[place * size : (place + 1) * size]))
        for place in range(count)
    ]


def tau(trial_runs: Sequence[Sequence[Run]]) -> float:
    """Tokens per step over the first runs of all prompts."""
    stats = SequenceStats()
    for runs in trial_runs:
        stats.add(runs[0].stats or SequenceStats())
    return stats.tokens_per_step
