"""Under `standard` and `block` the engine's outputs have exactly the target's distribution; broken rules are found out.

One chi-square per wiring path: the joint distribution of three tokens over a vocabulary of four, enumerated from plain
forwards, against 1,500 samples of one request, or 600 where a fault is gross. False alarms: the seeds are fixed, and
each right cell was accepted at the level 1e-3 when it was written; each fault must be rejected at 1e-9.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from drafting import made
from foredraft import accept
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.heads.eagle import EagleDrafter
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.heads.eagle import EagleHead, EagleShape
from foredraft.heads.layers import LayerShape
from foredraft.heads.medusa_hydra import HeadsShape, HydraHeads, MedusaHeads
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.rank_tree import RankTree
from foredraft.model.lm import CausalLM
from foredraft.sampling import noise
from foredraft.testing import perturbed, toy_model
from foredraft.tree import DraftTree
from mutants import Apply, replaced, with_arguments, with_result

VOCAB_SIZE = 4
PROMPT = (0, 3, 0, 3, 1, 0, 3)
LENGTH = 3
NUM_SAMPLES = 1500
TEMPERATURE = 1.2

pytestmark = pytest.mark.slow


@cache
def target() -> CausalLM:
    return CausalLM(toy_model(VOCAB_SIZE, seed=3), execution="eager")


@cache
def drafter_model() -> CausalLM:
    return CausalLM(perturbed(toy_model(VOCAB_SIZE, seed=3), 0.6, seed=4), execution="eager")


@cache
def exact_distribution() -> dict[tuple[int, ...], float]:
    """Probability of every output, from one plain forward each."""
    distribution = {}
    for output in itertools.product(range(VOCAB_SIZE), repeat=LENGTH):
        with torch.no_grad():
            ids = torch.tensor([[*PROMPT, *output]])
            distributions = (toy_model(VOCAB_SIZE, seed=3)(input_ids=ids).logits[0] / TEMPERATURE).softmax(-1)
        probabilities = [distributions[len(PROMPT) - 1 + i, token] for i, token in enumerate(output)]
        distribution[output] = float(torch.stack(probabilities).prod())
    return distribution


def make_drafter(kind: str, acceptance: str) -> Drafter:
    growth: dict[str, Any] = {"target_vocab_size": VOCAB_SIZE, "acceptance": acceptance}
    static = {**growth, "tree": RankTree.cartesian((2, 2)), "max_depth": 2}
    layer = LayerShape(hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8)
    torch.manual_seed(8 if kind.startswith("hydra") else 7)
    if kind == "none":
        return EmptyDrafter()
    if kind == "ngram":
        return made("ngram", 2, prompt_lookup_min=1, num_prompt_lookup_candidates=2)
    if kind == "medusa":
        heads = MedusaHeads(HeadsShape(32, VOCAB_SIZE, 2)).double().requires_grad_(False)
        return MultiHeadDrafter(heads, 2, **static)
    if kind in ("hydra", "hydra++"):
        shape = HeadsShape(32, VOCAB_SIZE, 2, prefix=layer if kind == "hydra++" else None)
        return MultiHeadDrafter(HydraHeads(shape).double().requires_grad_(False), 2, **static)
    if kind in ("eagle", "eagle2"):
        head = EagleHead(EagleShape(1, layer, 32, (2,), 2)).double().requires_grad_(False)
        dynamic = {**growth, "policy": LengthPolicy(2), "num_branches": 2}
        return EagleDrafter(head, target(), **(static if kind == "eagle" else dynamic))
    return DraftModelDrafter(
        drafter_model(), num_speculative_tokens=2, num_branches=2 if kind == "tree" else 1, **growth
    )


def p_value(kind: str, acceptance: str, num_samples: int = NUM_SAMPLES) -> float:
    return p_value_of(make_drafter(kind, acceptance), acceptance, num_samples)


def p_value_of(drafter: Drafter, acceptance: str, num_samples: int = NUM_SAMPLES) -> float:
    """Of the hypothesis that the engine's outputs have the exact distribution; rare outputs are pooled."""
    config = EngineConfig(max_num_seqs=300, acceptance=acceptance)  # caches of all rows at once take twice as long
    engine = Engine(target(), drafter, config)
    params = SamplingParams(n=num_samples, max_tokens=LENGTH, temperature=TEMPERATURE, seed=99)
    rows = engine.add_request(PROMPT, params)
    list(engine.run())
    counts = Counter(tuple(row.output_ids) for row in rows)
    expected = {output: probability * num_samples for output, probability in exact_distribution().items()}
    frequent = [output for output in expected if expected[output] >= 5]
    observed = [counts[output] for output in frequent]
    wanted = [expected[output] for output in frequent]
    observed.append(num_samples - sum(observed))
    wanted.append(num_samples - sum(wanted))
    return float(chisquare(observed, wanted).pvalue)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "acceptance"),
    [
        ("none", "match"),
        *((kind, "standard") for kind in ("chain", "tree", "eagle2")),
        ("chain", "block"),
        *(
            pytest.param(kind, "standard", marks=pytest.mark.full)
            for kind in ("ngram", "medusa", "hydra", "hydra++", "eagle")
        ),
        *(pytest.param(kind, "block", marks=pytest.mark.full) for kind in ("ngram", "tree")),  # of a tree its chain
    ],
)
def test_outputs_have_the_distribution_of_the_target(kind: str, acceptance: str) -> None:
    """Under match, drafted outputs are the samples of plain decoding: see `engine/test_identity.py`."""
    assert p_value(kind, acceptance) > 1e-3


def test_typical_acceptance_has_another_distribution() -> None:
    """The same trees that pass under the other rules: here every sample is the same text, and nothing was drawn."""
    assert p_value("medusa", "typical", 500) < 1e-9


# -- faults ----------------------------------------------------------------------------------------------------------


def blurred(tree: DraftTree) -> DraftTree:
    return tree if tree.probs is None else replace(tree, probs=(tree.probs + 1.0 / VOCAB_SIZE) / 2)


FAULTS: dict[str, Apply] = {
    "p instead of the residual": replaced(accept, "residual", lambda target_probs, *_: target_probs.double()),
    "half the rate": with_result(accept.RejectionNoise, "uniform", lambda found, call: 0.5 + found / 2),
    "one stream for draft, test and residual": with_arguments(
        noise, "stream_key", lambda call: {"purpose": noise.Purpose.DRAFT}
    ),
    "siblings drawn with replacement": replaced(accept, "without", lambda draft_probs, _: draft_probs.double()),
    "another distribution handed over": with_result(
        DraftModelDrafter, "propose", lambda trees, call: [blurred(tree) for tree in trees]
    ),
}
FAULTY = [
    ("chain", "standard", "p instead of the residual", 600),
    ("chain", "block", "half the rate", 600),
    ("chain", "standard", "one stream for draft, test and residual", NUM_SAMPLES),
    ("tree", "standard", "siblings drawn with replacement", NUM_SAMPLES),
    *(
        pytest.param(*case, 2 * NUM_SAMPLES, marks=pytest.mark.full)
        for case in (
            ("tree", "standard", "p instead of the residual"),
            ("chain", "block", "p instead of the residual"),
            ("chain", "standard", "half the rate"),
            ("chain", "block", "one stream for draft, test and residual"),
            ("chain", "standard", "another distribution handed over"),
            ("tree", "standard", "another distribution handed over"),
            ("chain", "block", "another distribution handed over"),
        )
    ),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "acceptance", "fault", "num_samples"), FAULTY)
def test_a_broken_rule_is_found_out(
    kind: str, acceptance: str, fault: str, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact_distribution()
    FAULTS[fault](monkeypatch)
    assert p_value(kind, acceptance, num_samples) < 1e-9
