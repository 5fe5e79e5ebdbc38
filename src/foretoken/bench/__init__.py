"""The benchmark that keeps the library honest: interleaved runs, equality before speed, costs measured."""

from foretoken.bench.arms import Arm, EngineArm, Run, Sampling, TransformersArm
from foretoken.bench.measure import Comparison, Trial, compare, interleave
from foretoken.bench.workload import Prompt, load_prompts

__all__ = [
    "Arm",
    "Comparison",
    "EngineArm",
    "Prompt",
    "Run",
    "Sampling",
    "TransformersArm",
    "Trial",
    "compare",
    "interleave",
    "load_prompts",
]
