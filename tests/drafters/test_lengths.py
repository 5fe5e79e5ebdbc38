"""Length policies: literal schedules and values, what they ask for, and no trace of rows in a policy."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafting import StubRow, made, started
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.errors import ConfigError
from foredraft.methods.lengths import (
    FIRST_REFERENCE,
    NOTHING,
    POLICIES,
    Acceptance,
    AdaEDL,
    Bass,
    Confidence,
    Egag,
    EntropyHistory,
    Heuristic,
    LengthPolicy,
    Threshold,
    calibrated_share,
    entropy,
    normalised_entropy,
)
from foredraft.tree import DraftPlan

VOCAB_SIZE = 1000


def row(id: int = 1, is_greedy: bool = True) -> Any:
    return StubRow(id, is_greedy=is_greedy)


def distribution_with_top(probability: float) -> torch.Tensor:
    """Log-probabilities of a vocabulary with one token of this probability, the others alike."""
    rest = (1.0 - probability) / (VOCAB_SIZE - 1)
    return torch.tensor([probability] + [rest] * (VOCAB_SIZE - 1), dtype=torch.float64).log()


def distribution_of_entropy(nats: float) -> torch.Tensor:
    """Log-probabilities with this entropy, between a point mass and uniform, found by bisection."""
    low, high = 1.0 / VOCAB_SIZE, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy(distribution_with_top(middle)) > nats else (low, middle)
    return distribution_with_top(low)


def drafted(
    policy: LengthPolicy, row: Any, distributions: list[torch.Tensor], plan: DraftPlan | None = None
) -> tuple[int, int]:
    """Tokens drafted along these distributions, and forwards made for it, as a drafter does it."""
    plan, depth, forwards = plan or DraftPlan(policy.longest(row)), 0, 0
    while depth < min(plan.gamma, len(distributions)):
        forwards += 1
        if policy.looks(depth):
            policy.stop(row, plan, depth, distributions[depth])
        depth = min(depth + 1, plan.gamma)
    return depth, forwards


SURE, UNSURE = distribution_with_top(0.95), distribution_with_top(0.05)


# -- confidence ------------------------------------------------------------------------------------------------------


def test_confidence_keeps_the_unsure_token_and_makes_no_forward_behind_it() -> None:
    policy = Confidence(6, 0.4)
    assert drafted(policy, row(), [SURE, SURE, UNSURE, SURE, SURE, SURE]) == (3, 3)
    assert drafted(policy, row(), [UNSURE] * 6) == (1, 1)
    assert drafted(policy, row(), [SURE] * 9) == (6, 6)


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 6), (0.5, 6), (0.51, 1), (1.0, 1)])
def test_the_threshold_itself_is_sure_enough(threshold: float, expected: int) -> None:
    assert drafted(Confidence(6, threshold), row(), [distribution_with_top(0.5)] * 6)[0] == expected


def test_a_distribution_of_nan_ends_the_draft() -> None:
    nan = torch.full((VOCAB_SIZE,), torch.nan)
    for policy in (Confidence(4), Acceptance(4), Egag(4), Egag(4, "paper"), AdaEDL(4)):
        assert drafted(policy, row(), [SURE, nan, SURE, SURE])[0] in ((1, 2) if policy.looks(1) else (3,))
        assert drafted(policy, row(2), [nan] * 4)[0] <= 1


# -- Draft & Verify --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "rate", "num_drafted", "num_accepted", "threshold"),
    [
        ("paper", 0.0, 4, 1, 0.801),  # rate 0.125
        ("paper", 1.0, 4, 4, 0.799),  # rate 1.0
        ("paper", 1.0, 8, 8, 0.799),
        ("paper", 0.8, 4, 4, 0.801),  # rate 0.9, which is the wanted one: at most, says the paper
        ("code", 0.8, 4, 4, 0.799),  # less, says its program
        ("code", 0.0, 4, 1, 0.801),
        ("code", 1.0, 4, 4, 0.799),
        ("code", 1.0, 8, 8, 0.8),  # as long as drafts get
        ("static", 0.0, 4, 0, 0.8),
        ("paper", 0.0, 0, 0, 0.8),  # nothing was drafted
    ],
)
def test_threshold_rule(mode: str, rate: float, num_drafted: int, num_accepted: int, threshold: float) -> None:
    state = Threshold(0.8, rate)
    state.follow(Acceptance(8), mode, num_drafted, num_accepted)
    assert state.value == pytest.approx(threshold, abs=1e-12)
    if num_drafted and mode != "static":
        assert state.acceptance_rate == 0.5 * rate + 0.5 * num_accepted / num_drafted


def test_acceptance_starts_from_the_published_thresholds_and_keeps_one_per_row() -> None:
    policy = Acceptance(8)
    greedy, sampled = row(1), row(2, is_greedy=False)
    assert (policy.threshold(greedy).value, policy.threshold(sampled).value) == (0.8, 0.5)
    assert Acceptance(8, draft_threshold=0.6).threshold(row(3)).value == 0.6
    for _ in range(3):
        policy.update(greedy, 4, 0)
    assert policy.threshold(greedy).value == pytest.approx(0.803)
    assert policy.threshold(sampled).value == 0.5
    assert drafted(policy, greedy, [distribution_with_top(0.802)] * 8)[0] == 1
    assert drafted(policy, sampled, [distribution_with_top(0.802)] * 8)[0] == 8


def test_all_constants_of_the_rule_can_be_set() -> None:
    policy = Acceptance(
        8,
        length_policy_mode="paper",
        draft_threshold=0.5,
        initial_acceptance_rate=1.0,
        target_acceptance_rate=0.5,
        threshold_step=0.1,
        acceptance_momentum=0.0,
        threshold_momentum=0.0,
    )
    watched = row()
    policy.update(watched, 4, 1)
    assert policy.threshold(watched).value == pytest.approx(0.6)
    policy.update(watched, 4, 4)
    assert policy.threshold(watched).value == pytest.approx(0.5)


# -- AdaEDL ----------------------------------------------------------------------------------------------------------


def test_adaedl_stops_where_the_bound_falls_below_the_threshold() -> None:
    """1 - sqrt(0.2 H) is 0.7 at H = 0.45."""
    policy = AdaEDL(6)
    below, above = distribution_of_entropy(0.44), distribution_of_entropy(0.46)
    assert drafted(policy, row(), [below] * 6) == (6, 6)
    assert drafted(policy, row(), [above, below, above, below]) == (2, 3)  # the first is always drafted
    assert drafted(AdaEDL(6, entropy_scale=0.1), row(), [above] * 6) == (6, 6)


def test_adaedl_follows_the_acceptance_rate() -> None:
    policy, distribution, watched = AdaEDL(6), distribution_of_entropy(0.4495), row()
    assert drafted(policy, watched, [distribution] * 6)[0] == 6
    for _ in range(5):
        policy.update(watched, 6, 1)  # rate below 0.9: up by 0.001 each
    assert drafted(policy, watched, [distribution] * 6)[0] == 1
    for _ in range(30):
        policy.update(watched, 6, 6)
    assert drafted(policy, watched, [distribution] * 6)[0] == 6


# -- EGAG ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nats", [0.0, 0.1, 1.0, 2.0, 4.0, 6.5])
@pytest.mark.parametrize("longest", [1, 4, 8])
def test_egag_as_published_is_the_formula_of_the_first_distribution(nats: float, longest: int) -> None:
    distribution = distribution_of_entropy(nats)
    expected, _ = Egag(longest).length(normalised_entropy(distribution.exp()))
    others = [distribution_of_entropy(6.5)] * longest  # later distributions play no part
    plan = DraftPlan(longest)
    assert drafted(Egag(longest, "paper"), row(), [distribution, *others], plan) == (expected, expected)
    assert plan.gamma == expected
    assert plan.entropy == pytest.approx(normalised_entropy(distribution.exp()))


def test_egag_smooths_over_steps() -> None:
    policy, watched = Egag(8, "paper", egag_ema_beta=0.5), row()
    long, short = distribution_of_entropy(0.01), distribution_of_entropy(6.8)  # 7 and 1
    assert [drafted(policy, watched, [distribution] * 8)[0] for distribution in (long, short, short)] == [7, 4, 2]


def test_calibrated_egag_asks_anew_before_every_token() -> None:
    policy = Egag(5, reference_entropy=2.0)
    sure, half, unsure = (
        distribution_of_entropy(0.0),
        distribution_of_entropy(0.9),
        distribution_of_entropy(2.5),
    )  # 5, 3 and 1 tokens
    assert drafted(policy, row(), [sure] * 5)[0] == 5
    assert drafted(policy, row(), [half] * 5)[0] == 3
    assert drafted(policy, row(), [unsure] * 5)[0] == 1
    assert drafted(policy, row(), [sure, sure, unsure, sure, sure])[0] == 2
    assert drafted(policy, row(), [sure, sure, half, half, sure])[0] == 3


@pytest.mark.parametrize("nats", [0.0, 0.3, 0.9, 1.3, 2.0, 5.0])
def test_calibration_rounds_to_the_nearest(nats: float) -> None:
    length, _ = Egag(5).length(calibrated_share(nats, 2.0, 5))
    assert length == max(1, math.floor((1 - min(nats / 2, 1)) * 5 + 0.5))


def test_the_reference_is_a_percentile_of_what_the_row_has_shown() -> None:
    history = EntropyHistory()
    assert history.reference == FIRST_REFERENCE
    for nats in [1.0] * 17 + [3.0, 3.0, 4.0]:
        history.add(nats)
    assert history.reference == 4.0  # index 19 of 20
    for _ in range(128):
        history.add(0.5)
    assert history.reference == 0.5


def test_the_shortest_draft_may_be_none() -> None:
    assert drafted(Egag(4, reference_entropy=1.0, min_draft_tokens=0), row(), [distribution_of_entropy(3.0)] * 4) == (
        0,
        1,
    )
    assert drafted(Egag(0), row(), [SURE]) == (0, 0)


def test_entropies() -> None:
    uniform = torch.full((VOCAB_SIZE,), 1.0 / VOCAB_SIZE).log()
    assert entropy(uniform) == pytest.approx(math.log(VOCAB_SIZE), rel=1e-5)
    assert entropy(torch.tensor([0.0, -torch.inf])) == 0.0
    assert entropy(torch.tensor([torch.nan, 0.0])) == math.inf


# -- all of them -----------------------------------------------------------------------------------------------------

CASES = {
    "fixed": {},
    "heuristic": {},
    "confidence": {},
    "egag": {},
    "egag-paper": {"length_policy_mode": "paper", "egag_ema_beta": 0.5},
    "adaedl": {},
    "acceptance": {},
    "acceptance-paper": {"length_policy_mode": "paper"},
    "acceptance-static": {"length_policy_mode": "static"},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_do_not_see_each_other_and_leave_nothing(case: str) -> None:
    """A row behaves the same beside one with another fate, and after a row of the same id before it."""
    policy = POLICIES[case.partition("-")[0]](6, **CASES[case])
    before = deepcopy(vars(policy))

    def life(of: Any, distributions: list[torch.Tensor], beside: Any = None) -> list[int]:
        lengths = []
        for distribution in distributions:
            lengths.append(drafted(policy, of, [distribution] * 6)[0])
            if beside is not None:
                drafted(policy, beside, [UNSURE] * 6)
                policy.update(beside, 4, 0)
            policy.update(of, lengths[-1], lengths[-1] // 2)
        return lengths

    distributions = [distribution_of_entropy(nats) for nats in (0.2, 1.5, 0.1, 3.0, 0.44, 0.45, 0.46)] * 8
    alone = life(row(1), distributions)
    assert life(row(1), distributions, beside=row(2)) == alone
    assert life(row(2), distributions) == alone
    assert vars(policy) == before


@pytest.mark.parametrize("name", [name for name in POLICIES if POLICIES[name].looks_at != NOTHING])
def test_a_drafter_without_a_distribution_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.*which ngram does not provide"):
        NGramDrafter(length_policy=POLICIES[name](3)).length(row(), 9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("egag", {"egag_ema_beta": 1.0}),
        ("egag", {"min_draft_tokens": 5}),
        ("adaedl", {"threshold_momentum": 1.0}),
        ("acceptance", {"acceptance_momentum": 1.0}),
        ("acceptance", {"draft_threshold": float("nan")}),
    ],
)
def test_settings_out_of_range_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SpeculativeConfig("draft_model", length_policy=name, **settings).options.new_policy(4)
    with pytest.raises(ConfigError, match="-2"):
        POLICIES[name](-2)


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "unsaid"),
    [
        (
            "acceptance",
            {
                "length_policy_mode": "paper",
                "draft_threshold": 0.6,
                "initial_acceptance_rate": 0.5,
                "target_acceptance_rate": 0.7,
                "threshold_step": 0.05,
                "acceptance_momentum": 0.25,
                "threshold_momentum": 0.75,
            },
            {},
        ),
        ("egag", {"length_policy_mode": "paper", "min_draft_tokens": 2, "egag_ema_beta": 0.9}, {}),
        ("adaedl", {"entropy_scale": 0.4}, {"draft_threshold": 0.7}),
    ],
)
def test_settings_arrive_at_the_policy(name: str, keys: dict[str, Any], unsaid: dict[str, Any]) -> None:
    policy = SpeculativeConfig("draft_model", length_policy=name, **keys).options.new_policy(7)
    assert type(policy) is POLICIES[name]
    assert vars(policy) == vars(POLICIES[name](7, **keys, **unsaid))


@pytest.mark.parametrize("alias", ["assistant_confidence_threshold", "draft_p_min", "spec_draft_p_min"])
def test_names_of_other_tools_mean_confidence(alias: str) -> None:
    config = SpeculativeConfig(**{"method": "draft_model", alias: 0.25})
    assert (config.length_policy, config.draft_threshold) == ("confidence", 0.25)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"method": "ngram", "length_policy": "egag"},
            "'egag' needs the drafter's distribution.* fixed, heuristic, bass$",
        ),
        ({"method": "ngram", "length_policy": "confidence"}, "'confidence' needs the drafter's confidence"),
        (
            {"method": "nasd", "length_policy": "adaedl"},
            "one of fixed, heuristic, bass, confidence, acceptance$",
        ),
        (
            {"method": "draft_model", "draft_threshold": 0.5},
            "'draft_threshold' has no meaning for length_policy",
        ),
        ({"method": "draft_model", "length_policy": "confidence", "entropy_scale": 0.5}, "only for adaedl"),
        ({"method": "draft_model", "length_policy": "egag", "length_policy_mode": "code"}, "no mode 'code'.*paper"),
        ({"method": "draft_model", "length_policy": "entropy"}, "length_policy is 'entropy'; choose one of"),
        ({"method": "draft_model", "draft_threshold": 2}, "draft_threshold is 2"),
    ],
)
def test_what_does_not_fit_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**keys)


# -- drafters that know shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "budget", "drafted"),
    [
        (Confidence(4, 0.3), 9, (3, 7, 1, 3)),
        (Confidence(4, 0.3), 2, (3, 7)),
        (Confidence(4, 0.5), 9, (3,)),
        (Confidence(9, 0.0), 9, (3, 7, 1, 3, 7, 1, 3, 7, 1)),
        (LengthPolicy(2), 9, (3, 7)),
        (LengthPolicy(0), 9, ()),
    ],
)
def test_nasd_ends_at_a_cap_the_budget_or_behind_a_small_share(
    policy: LengthPolicy, budget: int, drafted: tuple[int, ...]
) -> None:
    """1 is followed by 2 and 3 alike (share 0.4 each of 5 with the unknown), everything else by one token."""
    drafter = made("nasd", 4, ngram_size=2, filler_top_k=1, length_policy=policy)
    watched = started(drafter, 1, 2, 7, 1, 3, 7, 1, 2, 7, 1, 3, 7, 1)
    (tree,) = drafter.propose([watched], [budget])
    assert tree.tokens[1:] == drafted
    assert tree.plan.gamma == (1 if drafted == (3,) else policy.num_tokens)


def test_a_draft_ends_where_nothing_is_known() -> None:
    drafter = made("nasd", 4, ngram_size=2, filler_top_k=1, length_policy=Confidence(4, 0.1))
    assert drafter.propose([started(drafter, 1, 2, 3, 1, 9, 2)], [9])[0].tokens[1:] == (3, 1, 9, 2)
    assert drafter.propose([started(drafter, 1, 2, 3, id=2)], [9])[0].tokens[1:] == ()


# -- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "drafted", "accepted", "length"),
    [(3, 2, 2, 3), (3, 0, 0, 3), (3, 2, 1, 2), (0, 0, 0, 0)],
    ids=["short and right", "none", "short and wrong", "never"],
)
def test_heuristic_after_one_draft(start: int, drafted: int, accepted: int, length: int) -> None:
    policy, watched = Heuristic(start), row()
    policy.update(watched, drafted, accepted)
    assert policy.longest(watched) == length


def test_heuristic_schedule() -> None:
    """3 -> all of 3 accepted -> 5 -> 2 of 5 -> 4 -> none of 4 -> 3 -> 2 -> 1 -> 1."""
    policy, watched, lengths = Heuristic(3), row(), []
    for accepted in (3, 2, 0, 0, 0, 0, 1):
        lengths.append(policy.longest(watched))
        policy.update(watched, lengths[-1], accepted)
    assert [*lengths, policy.longest(watched)] == [3, 5, 4, 3, 2, 1, 1, 3]


def test_bass_schedule() -> None:
    """Rounds of two rows, of which the better one counts: 7 + 2, - 1, - 1 - 1; nothing after short drafts, then + 2."""
    policy, lengths = Bass(7), []
    for drafted, outcomes in ((7, (7, 0)), (9, (4, 3)), (8, (0, 4)), (2, (2, 2)), (6, (6, 6))):
        lengths.append(policy.longest(row()))
        for accepted in outcomes:
            policy.update(row(), drafted, accepted)
    assert [*lengths, policy.longest(row())] == [7, 9, 8, 6, 6, 8]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30), st.integers(1, 8))
def test_heuristic_stays_at_one_or_more(outcomes: list[tuple[int, int]], start: int) -> None:
    policy, watched = Heuristic(start), row()
    for drafted, accepted in outcomes:
        before = policy.longest(watched)
        drafted = min(drafted, before)
        policy.update(watched, drafted, min(drafted, accepted))
        assert policy.longest(watched) - before in (-1, 0, 2)
        assert policy.longest(watched) >= 1
