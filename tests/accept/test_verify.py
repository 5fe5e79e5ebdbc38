"""Acceptance rules against the exact target distribution, by enumeration of every draft and every outcome.

`joint_distribution` runs the real functions with a noise that forks at every random decision, so it sums exact
probabilities and samples nothing. Biased variants, most of them the real rules with one part exchanged, must fail the
very same check.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from foredraft import accept as verify
from foredraft.accept import RejectionNoise, Verdict, block, inverse, match, rejection, residual, without
from foredraft.errors import ProbabilityError, ShapeError, TreeError
from foredraft.sampling.noise import Purpose, stream_key, uniform
from foredraft.tree import DraftTree
from mutants import Apply, replaced, with_arguments, with_result

HORIZON = 3  # tokens whose joint distribution is compared: two drafted levels and the bonus
Prefix = tuple[int, ...]
Rule = Callable[..., Verdict]


# --- noise that enumerates ----------------------------


class Script(Exception):
    """A run met its first decision that the script leaves open; carries the branches and their probabilities."""


class Forking:
    """Verify noise that follows a script of branches and multiplies their probabilities."""

    def __init__(self, script: Prefix) -> None:
        self.script = list(script)
        self.weight = 1.0
        self.asked: set[tuple[str, int, int]] = set()

    def uniform(self, depth: int, sibling: int) -> Uniform:
        self._ask("uniform", depth, sibling)
        return Uniform(self)

    def draw(self, depth: int, probs: Tensor) -> int:
        self._ask("draw", depth, 0)
        return self.branch((probs.double() / probs.double().sum()).tolist())

    def branch(self, probs: list[float]) -> int:
        if not self.script:
            raise Script(probs)
        choice = self.script.pop(0)
        self.weight *= probs[choice]
        return choice

    def _ask(self, *question: str | int) -> None:
        assert question not in self.asked, f"the same noise was asked for twice: {question}"
        self.asked.add(question)


class Uniform:
    """A uniform variate that is only ever compared: ``u * q < p`` and ``u < h`` fork into their two outcomes."""

    def __init__(self, noise: Forking, scale: float = 1.0) -> None:
        self.noise, self.scale = noise, scale

    def __mul__(self, scale: float) -> Uniform:
        return Uniform(self.noise, self.scale * scale)

    def __lt__(self, bound: float) -> bool:
        chance = min(1.0, max(0.0, bound / self.scale))
        return self.noise.branch([1.0 - chance, chance]) == 1

    __le__ = __lt__  # the same but for one point, which `edge_violations` looks at


class Edge:
    """The smallest or largest uniform; draws stay inside the support."""

    def __init__(self, uniform: float) -> None:
        self.value = uniform

    def uniform(self, depth: int, sibling: int) -> float:
        return self.value

    def draw(self, depth: int, probs: Tensor) -> int:
        return int(probs.argmax())

    def branch(self, probs: list[float]) -> int:
        return probs.index(max(probs))


def runs(rule: Callable[[Forking], Verdict]) -> Iterator[tuple[float, Verdict]]:
    """Every outcome of a rule with its probability, by depth-first replay."""
    scripts: list[Prefix] = [()]
    while scripts:
        script = scripts.pop()
        noise = Forking(script)
        try:
            verdict = rule(noise)
        except Script as open_end:
            scripts += [(*script, i) for i, prob in enumerate(open_end.args[0]) if prob > 0.0]
        else:
            yield noise.weight, verdict


# --- distributions and drafts ----------------------------


@dataclass(frozen=True)
class Distributions:
    """Target and draft distributions after every prefix of at most two tokens."""

    name: str
    target: dict[Prefix, Tensor]
    draft: dict[Prefix, Tensor]

    @property
    def vocab_size(self) -> int:
        return len(self.target[()])


def prefixes(vocab_size: int) -> list[Prefix]:
    return [prefix for length in range(HORIZON) for prefix in product(range(vocab_size), repeat=length)]


def make_distributions(name: str, pair: Callable[[int], tuple[Tensor, Tensor]], vocab_size: int) -> Distributions:
    pairs = {prefix: pair(i) for i, prefix in enumerate(prefixes(vocab_size))}
    return Distributions(name, {k: p for k, (p, _) in pairs.items()}, {k: q for k, (_, q) in pairs.items()})


def distribution(*weights: float) -> Tensor:
    tensor = torch.tensor(weights, dtype=torch.float64)
    return tensor / tensor.sum()


def random_distribution(seed: int, vocab_size: int, zeros: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 2 + 0.01
    if zeros:
        weights[torch.randint(vocab_size, (), generator=generator)] = 0.0
    return weights / weights.sum()


def one_hot(index: int, vocab_size: int) -> Tensor:
    return torch.eye(vocab_size, dtype=torch.float64)[index % vocab_size]


def cases(vocab_size: int) -> list[Distributions]:
    """Random, zero-containing, one-hot, disjoint and equal distributions; the textbook one for three tokens."""
    half = torch.arange(vocab_size) < vocab_size // 2
    left, right = half.double() / half.sum(), (~half).double() / (~half).sum()
    made = {
        "random": lambda i: (random_distribution(i, vocab_size), random_distribution(1000 + i, vocab_size)),
        "zeros": lambda i: (
            random_distribution(i, vocab_size, zeros=True),
            random_distribution(2000 + i, vocab_size, zeros=True),
        ),
        "one-hot target": lambda i: (one_hot(i, vocab_size), random_distribution(3000 + i, vocab_size)),
        "one-hot draft": lambda i: (random_distribution(i, vocab_size), one_hot(i, vocab_size)),
        "one-hot both": lambda i: (one_hot(i, vocab_size), one_hot(i * i, vocab_size)),
        "disjoint": lambda i: (left, right) if i % 2 else (right, left),
        "equal": lambda i: (random_distribution(i, vocab_size), random_distribution(i, vocab_size)),
    }
    if vocab_size == 3:
        made["textbook"] = lambda i: (distribution(0.40, 0.35, 0.25), distribution(0.50, 0.30, 0.20))
    return [make_distributions(name, pair, vocab_size) for name, pair in made.items()]


def samples(draft: Tensor, count: int) -> Iterator[tuple[float, Prefix]]:
    """Every ordered sample without replacement of at most ``count`` tokens; fewer where the support is smaller."""
    if count == 0 or not bool((draft > 0).any()):
        yield 1.0, ()
        return
    for token in draft.nonzero().flatten().tolist():
        rest = draft.clone()
        rest[token] = 0.0
        rest = rest / rest.sum() if rest.sum() > 0 else rest
        for weight, others in samples(rest, count - 1):
            yield float(draft[token]) * weight, (token, *others)


def sampled_trees(
    distributions: Distributions, widths: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[float, DraftTree]]:
    """Every draft of a fixed shape: ``widths[d][i]`` children below the i-th node of depth d, level by level."""
    partial: list[tuple[float, list[int], list[int], list[Prefix], list[int]]] = [(1.0, [0], [-1], [()], [0])]
    for level in widths:
        for position, width in enumerate(level):
            grown = []
            for weight, tokens, parents, paths, frontier in partial:
                if position >= len(frontier):
                    grown.append((weight, tokens, parents, paths, frontier))
                    continue
                node = frontier[position]
                for chance, drawn in samples(distributions.draft[paths[node]], width):
                    grown.append(
                        (
                            weight * chance,
                            tokens + list(drawn),
                            parents + [node] * len(drawn),
                            paths + [(*paths[node], token) for token in drawn],
                            frontier,
                        )
                    )
            partial = grown
        partial = [
            (weight, tokens, parents, paths, [i for i in range(len(tokens)) if i > frontier[-1]])
            for weight, tokens, parents, paths, frontier in partial
        ]
    for weight, tokens, parents, paths, _ in partial:
        yield (
            weight,
            DraftTree(tuple(tokens), tuple(parents), probs=torch.stack([distributions.draft[p] for p in paths])),
        )


CHAINS = {"K=0": (), "K=1": ((1,),), "K=2": ((1,), (1,))}
TREES = {"2 siblings": ((2,),), "3 siblings": ((3,),), "two levels": ((2,), (2, 1)), "3 below 1": ((1,), (3,))}
SHAPES = CHAINS | TREES


def deterministic(
    distributions: Distributions, shape: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[float, DraftTree]]:
    """The same drafts without their distribution: any tree made without looking at the target's noise."""
    return ((weight, replace(tree, probs=None)) for weight, tree in sampled_trees(distributions, shape))


# --- the check ----------------------------

Drafts = Callable[[Distributions, tuple[tuple[int, ...], ...]], Iterator[tuple[float, DraftTree]]]


def target_at(distributions: Distributions, tree: DraftTree) -> Callable[[int], Tensor]:
    return lambda node: distributions.target[tree.path_tokens(node)]


def matching(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking) -> Verdict:
    return match(tree, lambda node: noise.draw(tree.depths[node], target_probs(node)))


def extensions(distributions: Distributions, prefix: Prefix) -> Iterator[tuple[float, Prefix]]:
    """All continuations to HORIZON tokens, by the target distribution."""
    if len(prefix) == HORIZON:
        yield 1.0, prefix
        return
    for token, chance in enumerate(distributions.target[prefix].tolist()):
        if chance > 0.0:
            for weight, longer in extensions(distributions, (*prefix, token)):
                yield chance * weight, longer


def joint_distribution(
    rule: Rule, distributions: Distributions, drafts: Iterator[tuple[float, DraftTree]]
) -> dict[Prefix, float]:
    """The distribution of the next HORIZON tokens when one step is taken with ``rule``."""
    emitted: dict[Prefix, float] = defaultdict(float)
    for draft_weight, tree in drafts:
        for weight, verdict in runs(lambda noise, tree=tree: rule(tree, target_at(distributions, tree), noise)):
            emitted[(*tree.path_tokens(verdict.path[-1]), verdict.next_token)] += draft_weight * weight
    joint: dict[Prefix, float] = defaultdict(float)
    for prefix, mass in emitted.items():
        for weight, tokens in extensions(distributions, prefix[:HORIZON]):
            joint[tokens] += mass * weight
    return joint


def distribution_error(rule: Rule, distributions: Distributions, drafts: Iterator[tuple[float, DraftTree]]) -> float:
    joint = joint_distribution(rule, distributions, drafts)
    exact = {tokens: weight for weight, tokens in extensions(distributions, ())}
    return max(abs(joint.get(tokens, 0.0) - exact.get(tokens, 0.0)) for tokens in joint.keys() | exact.keys())


def edge_violations(rule: Rule, distributions: Distributions, drafts: Iterator[tuple[float, DraftTree]]) -> int:
    """How often the extreme uniforms let a token through that the target never says."""
    count = 0
    for (_, tree), value in product(drafts, (0.0, 1.0 - 2.0**-53)):
        verdict = rule(tree, target_at(distributions, tree), Edge(value))
        said = (*tree.path_tokens(verdict.path[-1]), verdict.next_token)
        count += any(distributions.target[said[:i]][token] == 0.0 for i, token in enumerate(said) if i < HORIZON)
    return count


def is_exact(rule: Rule, drafts: Drafts, shapes: dict[str, tuple[tuple[int, ...], ...]], vocab_size: int) -> bool:
    """The whole check: distributions to 1e-12, and no impossible token at the edges of the uniforms."""
    for distributions, shape in product(cases(vocab_size), shapes.values()):
        if distribution_error(rule, distributions, drafts(distributions, shape)) > 1e-12:
            return False
        if edge_violations(rule, distributions, drafts(distributions, shape)):
            return False
    return True


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", [rejection, matching], ids=["rejection", "match"])
@pytest.mark.parametrize("drafts", [sampled_trees, deterministic])
def test_rule_has_exactly_the_target_distribution(rule: Rule, drafts: Drafts, shape: str) -> None:
    assert is_exact(rule, drafts, {shape: SHAPES[shape]}, vocab_size=3)


@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("drafts", [sampled_trees, deterministic])
def test_block_has_exactly_the_target_distribution(drafts: Drafts, shape: str) -> None:
    assert is_exact(block, drafts, {shape: CHAINS[shape]}, vocab_size=3)


@pytest.mark.parametrize("shape", ["K=2", "3 siblings"])
@pytest.mark.parametrize("rule", [rejection, matching, block], ids=["rejection", "match", "block"])
def test_distributions_over_four_tokens(rule: Rule, shape: str) -> None:
    if rule is not block or shape in CHAINS:
        assert is_exact(rule, sampled_trees, {shape: SHAPES[shape]}, vocab_size=4)


# --- biased variants: each was published somewhere, and each must fail the check above ----------------------------


@dataclass(frozen=True)
class Listening:
    """Noise that is asked in the place of another; what it answers may depend on the answers of that one."""

    noise: Forking
    heard: Callable[[Uniform], object] = lambda uniform: uniform
    drawn: Callable[[int, Tensor], Tensor] = lambda depth, probs: probs

    def uniform(self, depth: int, sibling: int) -> object:
        return self.heard(self.noise.uniform(depth, sibling))

    def draw(self, depth: int, probs: Tensor) -> int:
        return self.noise.draw(depth, self.drawn(depth, probs))


@dataclass(frozen=True)
class Unscaled:
    """A uniform that stays what it is when it is multiplied."""

    uniform: Uniform

    def __mul__(self, scale: float) -> Unscaled:
        return self

    def __lt__(self, bound: float) -> bool:
        return self.uniform < bound


def with_q_as_one(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking) -> Verdict:
    return rejection(tree, target_probs, Listening(noise, heard=Unscaled))


def with_uniforms_below_zero(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking) -> Verdict:
    """``u * q <= p``, or a uniform that rounding has put below zero: p(x) = 0 is accepted."""

    def lowered(uniform: Uniform | float) -> Uniform | float:
        return uniform - 2.0**-53 if isinstance(uniform, float) else uniform

    return rejection(tree, target_probs, Listening(noise, heard=lowered))


def with_bonus_of_the_parent(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking) -> Verdict:
    visited = []

    def target_probs_at(node: int) -> Tensor:
        visited.append(node)
        return target_probs(node)

    def drawn(depth: int, probs: Tensor) -> Tensor:
        return target_probs(tree.parents[visited[-1]]) if visited[-1] else probs

    return rejection(tree, target_probs_at, Listening(noise, drawn=drawn))


def with_bonus_from_the_residual(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking) -> Verdict:
    """The bonus behind a wholly accepted chain is drawn as if it had been rejected."""

    def drawn(depth: int, probs: Tensor) -> Tensor:
        if depth < tree.num_draft_tokens:
            return probs
        weights, _ = verify.block_thresholds(tree, target_probs)
        return residual(probs, tree.probs[depth], weights[-1])

    return block(tree, target_probs, Listening(noise, drawn=drawn))


def by_hand(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking, keeps_p: bool = False) -> Verdict:
    """`rejection`; with ``keeps_p`` the target's distribution stays as it is until the last sibling is rejected."""
    path = [0]
    while True:
        distribution, draft, siblings = target_probs(path[-1]), tree.probs[path[-1]], tree.children[path[-1]]
        for index, child in enumerate(siblings):
            token = tree.tokens[child]
            if noise.uniform(tree.depths[path[-1]], index) * float(draft[token]) < float(distribution[token]):
                path.append(child)
                break
            if not keeps_p or child == siblings[-1]:
                distribution = residual(distribution, draft)
            if child != siblings[-1]:
                draft = without(draft, token)
        else:
            return Verdict(tuple(path), noise.draw(tree.depths[path[-1]], distribution))


def block_by_hand(
    tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking, stops: bool = False
) -> Verdict:
    """`block`; with ``stops`` it goes from the front and stops at the first failure."""
    weights, thresholds = verify.block_thresholds(tree, target_probs)
    passed = [0]
    for last in range(1, len(thresholds)) if stops else range(len(thresholds) - 1, 0, -1):
        passes = noise.uniform(last - 1, 0) < thresholds[last]
        if passes:
            passed.append(last)
        if passes != stops:
            break
    last = passed[-1]
    distribution = target_probs(last)
    if last < tree.num_draft_tokens:
        distribution = residual(distribution, tree.probs[last], weights[last])
    return Verdict(tuple(range(last + 1)), noise.draw(last, distribution))


def unclipped(tree: DraftTree, target_probs_at: Callable[[int], Tensor]) -> tuple[list[float], list[float]]:
    """`block_thresholds` with weights above one."""
    weights, thresholds = [1.0], [1.0]
    for node, token in enumerate(tree.tokens[1:], 1):
        weight = weights[-1] * float(target_probs_at(node - 1)[token]) / float(tree.probs[node - 1][token])
        if not weight > 0.0:
            break
        surplus = float((weight * target_probs_at(node) - tree.probs[node]).relu().sum())
        rest = surplus + 1.0 - weight
        weights.append(weight)
        thresholds.append(weight if node == tree.num_draft_tokens else 1.0 if rest == 0.0 else surplus / rest)
    return weights, thresholds


def zeroed(draft: Tensor, token: int) -> Tensor:
    """`without`, but not renormalised."""
    return draft.index_fill(0, torch.tensor([token]), 0.0)


FAULTS: dict[str, tuple[Rule, Apply]] = {
    "residual replaced by p": (rejection, replaced(verify, "residual", lambda p, q, weight=1.0: p)),
    "residual not renormalised": (rejection, replaced(verify, "residual", lambda p, q, weight=1.0: (p - q).relu())),
    "q not renormalised": (rejection, replaced(verify, "without", zeroed)),
    "q keeps the rejected sibling": (rejection, replaced(verify, "without", lambda draft, token: draft)),
    "block residual without its weight": (block, with_arguments(verify, "residual", lambda call: {"weight": 1.0})),
    "block tests the weights, not the thresholds": (
        block,
        with_result(verify, "block_thresholds", lambda found, call: (found[0], found[0])),
    ),
    "block weight not clipped": (block, replaced(verify, "block_thresholds", unclipped)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_biased_part_of_a_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, fault = FAULTS[name]
    fault(monkeypatch)
    assert not is_exact(rule, sampled_trees, CHAINS if rule is block else SHAPES, vocab_size=3)


def test_rules_by_hand_and_noise_that_listens_are_exact() -> None:
    """The control of the variants: nothing but their faults makes them fail."""
    assert is_exact(by_hand, sampled_trees, SHAPES, vocab_size=3)
    assert is_exact(block_by_hand, sampled_trees, CHAINS, vocab_size=3)
    for rule in (rejection, block):
        listening: Rule = lambda tree, probs, noise, rule=rule: rule(tree, probs, Listening(noise))  # noqa: E731
        assert is_exact(listening, sampled_trees, CHAINS, vocab_size=3)


def redrawing(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking) -> Verdict:
    """Match, then redraw the token after a miss (Medusa's sampling modes)."""
    verdict = matching(tree, target_probs, noise)
    return Verdict(verdict.path, noise.branch(target_probs(verdict.path[-1]).tolist()))


def matching_per_row(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking) -> Verdict:
    """Every root-to-leaf row draws for itself, the longest match wins (REST's buffers)."""
    rows = [DraftTree.chain(0, tree.path_tokens(leaf)) for leaf in tree.leaves]
    best = Verdict((0,), -1)
    for row, leaf in zip(rows, tree.leaves, strict=True):
        path = tree.path(leaf)
        verdict = match(row, lambda node, path=path: noise.branch(target_probs(path[node]).tolist()))
        if len(verdict.path) > len(best.path) or best.next_token < 0:
            best = Verdict(tuple(path[node] for node in verdict.path), verdict.next_token)
    return best


def with_raw_bonus(tree: DraftTree, target_probs: Callable[[int], Tensor], noise: Forking) -> Verdict:
    """The bonus of a wholly accepted draft comes from unprocessed logits."""

    def probs(node: int) -> Tensor:
        return target_probs(node) if tree.children[node] else distribution(*(target_probs(node) ** 0.5).tolist())

    return rejection(tree, probs, noise)


def doubtful_tokens_dropped(
    distributions: Distributions, shape: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[float, DraftTree]]:
    """A drafted token of low probability is thrown away after it was seen."""
    for weight, tree in sampled_trees(distributions, shape):
        doubtful = [i for i in range(1, len(tree)) if float(tree.probs[tree.parents[i]][tree.tokens[i]]) < 0.35]
        keep = min(doubtful, default=len(tree))
        yield weight, replace(tree, tokens=tree.tokens[:keep], parents=tree.parents[:keep])


def likeliest_with_soft_distribution(
    distributions: Distributions, shape: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[float, DraftTree]]:
    """The draft is the argmax of q, passed off as a sample of q."""
    path: Prefix = ()
    for _ in shape:
        path = (*path, int(distributions.draft[path].argmax()))
    probs = torch.stack([distributions.draft[path[:i]] for i in range(len(path) + 1)])
    yield 1.0, DraftTree.chain(0, path, probs=probs)


VARIANTS: dict[str, tuple[Rule, Drafts]] = {
    "q taken as one": (with_q_as_one, sampled_trees),
    "<= accepts p(x) = 0": (with_uniforms_below_zero, sampled_trees),
    "bonus from the parent's distribution": (with_bonus_of_the_parent, sampled_trees),
    "rejected p kept for later siblings": (partial(by_hand, keeps_p=True), sampled_trees),
    "block stops at the first failure": (partial(block_by_hand, stops=True), sampled_trees),
    "block bonus from the residual": (with_bonus_from_the_residual, sampled_trees),
    "match, then redraw": (redrawing, sampled_trees),
    "independent draws per row": (matching_per_row, sampled_trees),
    "bonus from another distribution": (with_raw_bonus, sampled_trees),
    "doubtful token dropped, rejection": (rejection, doubtful_tokens_dropped),
    "doubtful token dropped, block": (block, doubtful_tokens_dropped),
    "argmax draft with soft q, rejection": (rejection, likeliest_with_soft_distribution),
    "argmax draft with soft q, block": (block, likeliest_with_soft_distribution),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_biased_variant_is_caught(name: str) -> None:
    rule, drafts = VARIANTS[name]
    shapes = TREES if name in ("independent draws per row", "rejected p kept for later siblings") else CHAINS
    assert not is_exact(rule, drafts, shapes, vocab_size=3)


def test_dropping_tokens_unseen_is_harmless() -> None:
    """The control of the variants: a draft cut by a rule that saw nothing of the dropped token stays exact."""

    def short_after_zero(
        distributions: Distributions, shape: tuple[tuple[int, ...], ...]
    ) -> Iterator[tuple[float, DraftTree]]:
        for weight, tree in sampled_trees(distributions, shape):
            yield weight, tree.cut(1) if len(tree) > 1 and tree.tokens[1] == 0 else tree

    assert is_exact(rejection, short_after_zero, CHAINS, vocab_size=3)
    assert is_exact(block, short_after_zero, CHAINS, vocab_size=3)


# --- how much is accepted: a rule that rejects everything would be lossless too ----------------------------


def expected_accepted(rule: Rule, distributions: Distributions, shape: tuple[tuple[int, ...], ...]) -> float:
    return sum(
        draft_weight * weight * verdict.num_accepted
        for draft_weight, tree in sampled_trees(distributions, shape)
        for weight, verdict in runs(lambda noise, tree=tree: rule(tree, target_at(distributions, tree), noise))
    )


@pytest.mark.parametrize("distributions", cases(3), ids=lambda distributions: distributions.name)
def test_one_token_is_accepted_with_the_overlap_of_the_distributions(distributions: Distributions) -> None:
    overlap = float(torch.minimum(distributions.target[()], distributions.draft[()]).sum())
    assert expected_accepted(rejection, distributions, ((1,),)) == pytest.approx(overlap, abs=1e-12)
    assert expected_accepted(block, distributions, ((1,),)) == pytest.approx(overlap, abs=1e-12)


@pytest.mark.parametrize("distributions", cases(3), ids=lambda distributions: distributions.name)
def test_block_accepts_at_least_as_much_as_rejection_and_rejection_as_match(distributions: Distributions) -> None:
    by_rule = [expected_accepted(rule, distributions, ((1,), (1,))) for rule in (block, rejection, matching)]
    assert by_rule == sorted(by_rule, reverse=True) or max(by_rule) - min(by_rule) < 1e-12


def test_block_accepts_more_than_rejection_where_distributions_differ() -> None:
    distributions = cases(3)[0]
    assert (
        expected_accepted(block, distributions, ((1,), (1,)))
        > expected_accepted(rejection, distributions, ((1,), (1,))) + 1e-3
    )


def test_equal_distributions_accept_everything() -> None:
    distributions = next(distributions for distributions in cases(3) if distributions.name == "equal")
    for rule in (rejection, block):
        assert expected_accepted(rule, distributions, ((1,), (1,))) == pytest.approx(2.0, abs=1e-12)


# --- literal examples, pieces, errors ----------------------------


def test_residual_literal() -> None:
    assert residual(distribution(4, 4, 2), distribution(6, 2, 2)).tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert residual(distribution(4, 4, 2), distribution(2, 3, 5), weight=1.0).tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0.0]
    )
    assert residual(distribution(4, 4, 2), distribution(0, 1, 0), weight=0.5).tolist() == pytest.approx(
        [2 / 3, 0.0, 1 / 3]
    )


def test_empty_residual_is_the_target_distribution() -> None:
    assert residual(distribution(1, 2, 3), distribution(1, 2, 3)).tolist() == distribution(1, 2, 3).tolist()


def test_without_literal() -> None:
    assert without(distribution(2, 1, 1), 0).tolist() == [0.0, 0.5, 0.5]
    assert without(distribution(0, 1, 0), 1).tolist() == [0.0, 0.0, 0.0]


def test_pieces_leave_their_inputs_alone() -> None:
    target, draft = distribution(1, 2, 3), distribution(3, 2, 1)
    residual(target, draft)
    without(draft, 1)
    assert target.tolist() == distribution(1, 2, 3).tolist()
    assert draft.tolist() == distribution(3, 2, 1).tolist()


def test_block_thresholds_literal() -> None:
    """p = (.4 .4 .2) everywhere, q = (.8 .1 .1), draft 0, 0: w = 1, 1/2, 1/4.

    S_1 = max(.2 - .8, 0) + max(.2 - .1, 0) + max(.1 - .1, 0) = .1, h_1 = .1 / (.1 + .5) = 1/6, h_2 = w_2 = 1/4.
    """
    tree = DraftTree.chain(9, [0, 0], probs=torch.stack([distribution(8, 1, 1)] * 2))
    weights, thresholds = verify.block_thresholds(tree, lambda node: distribution(4, 4, 2))
    assert weights == pytest.approx([1.0, 0.5, 0.25])
    assert thresholds == pytest.approx([1.0, 1 / 6, 1 / 4])


def test_block_looks_past_a_failed_prefix() -> None:
    """The first uniform fails its threshold 1/6, the second passes 1/4: both tokens stay."""
    tree = DraftTree.chain(9, [0, 0], probs=torch.stack([distribution(8, 1, 1)] * 2))

    class Noise(Edge):
        def uniform(self, depth: int, sibling: int) -> float:
            return (0.9, 0.2)[depth]

    assert block(tree, lambda node: distribution(4, 4, 2), Noise(0.0)) == Verdict((0, 1, 2), 0)


@pytest.mark.parametrize("rule", [rejection, block], ids=["rejection", "block"])
def test_token_impossible_under_its_own_distribution_is_refused(rule: Rule) -> None:
    tree = DraftTree.chain(9, [1], probs=distribution(1, 0, 1)[None])
    with pytest.raises(ProbabilityError, match=r"token 1 .* probability 0\.0"):
        rule(tree, lambda node: distribution(1, 1, 1), Edge(0.5))


@pytest.mark.parametrize("rule", [rejection, block], ids=["rejection", "block"])
def test_second_sibling_or_token_is_refused_too(rule: Rule) -> None:
    """After token 0 of a point mass nothing more can have been drawn."""
    chain = DraftTree.chain(9, [0, 1], probs=torch.stack([distribution(1, 0, 0)] * 2))
    tree = chain if rule is block else DraftTree((9, 0, 1), (-1, 0, 0), probs=distribution(1, 0, 0)[None])
    with pytest.raises(ProbabilityError, match="token 1"):
        rule(tree, lambda node: distribution(1, 99, 99), Edge(0.999))


def test_distributions_of_different_size_are_refused() -> None:
    tree = DraftTree.chain(9, [0], probs=distribution(1, 1)[None])
    with pytest.raises(ShapeError, match=r"\(3,\) .* \(2,\)"):
        rejection(tree, lambda node: distribution(0, 1, 1), Edge(0.5))


def test_block_refuses_trees() -> None:
    tree = DraftTree((9, 0, 1), (-1, 0, 0), probs=distribution(1, 1)[None])
    with pytest.raises(TreeError, match="chains"):
        block(tree, lambda node: distribution(1, 1), Edge(0.5))


@pytest.mark.parametrize("rule", [rejection, block], ids=["rejection", "block"])
@pytest.mark.parametrize("probs", [None, torch.full((2, 3), 1 / 3)], ids=["deterministic", "sampled"])
def test_nan_distribution_gives_no_token(rule: Rule, probs: Tensor | None) -> None:
    tree = DraftTree.chain(9, [0, 1], probs=probs)
    verdict = rule(tree, lambda node: torch.full((3,), torch.nan), RejectionNoise(0, 0, 0))
    assert verdict == Verdict((0,), -1)


@pytest.mark.parametrize("rule", [rejection, matching], ids=["rejection", "match"])
def test_only_visited_nodes_are_looked_at_and_each_once(rule: Rule) -> None:
    tree = DraftTree(
        (9, 0, 1, 2, 0, 1), (-1, 0, 0, 1, 2, 2), probs=torch.stack([random_distribution(i, 3) for i in range(3)])
    )
    for step in range(100):
        looked_at: list[int] = []

        def target_probs(node: int, looked_at: list[int] = looked_at) -> Tensor:
            looked_at.append(node)
            return random_distribution(50 + node, 3)

        verdict = rule(tree, target_probs, RejectionNoise(3, step, 0))
        assert tuple(looked_at) == verdict.path


def test_block_looks_at_every_node_once() -> None:
    tree = DraftTree.chain(9, [0, 1, 2], probs=torch.stack([random_distribution(i, 3) for i in range(3)]))
    looked_at: Counter[int] = Counter()

    def target_probs(node: int) -> Tensor:
        looked_at[node] += 1
        return random_distribution(50 + node, 3)

    for step in range(50):
        looked_at.clear()
        block(tree, target_probs, RejectionNoise(3, step, 0))
        assert set(looked_at.values()) == {1}


# --- match against plain decoding ----------------------------

paths = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6)


@given(paths, st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_match_emits_a_prefix_of_plain_decoding(drafted: list[list[int]], plain: list[int]) -> None:
    """Whatever is drafted: the emitted tokens are the next plain ones, as many as any drafted path agrees on."""
    tree = DraftTree.from_paths(9, drafted)
    visited = []

    def choose_at(node: int) -> int:
        visited.append(node)
        return plain[tree.depths[node]]

    verdict = match(tree, choose_at)
    emitted = [*tree.path_tokens(verdict.path[-1]), verdict.next_token]
    agreed = max(
        (next((i for i, (a, b) in enumerate(zip(path, plain)) if a != b), len(path)) for path in drafted),  # noqa: B905
        default=0,
    )
    assert emitted == plain[: len(emitted)]
    assert verdict.num_accepted == agreed
    assert tuple(visited) == verdict.path


# --- the keyed noise ----------------------------


def test_noise_is_a_function_of_its_key() -> None:
    assert RejectionNoise(1, 2, 3).uniform(0, 0) == RejectionNoise(1, 2, 3).uniform(0, 0)
    values = {
        RejectionNoise(seed, step, 10).uniform(depth, sibling)
        for seed, step, depth, sibling in product(range(3), range(3), range(3), range(3))
    }
    assert len(values) == 81
    assert all(0.0 <= value < 1.0 for value in values)


def test_inverse_literal() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [inverse(probs, u) for u in (0.0, 0.2, 0.25, 0.9, 1.0 - 2.0**-53, 1.0)] == [1, 1, 3, 3, 3, 3]


@given(st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.1, 0.3, 1.0]), min_size=1, max_size=900), st.floats(0, 1))
def test_inverse_equals_the_running_total(weights: list[float], uniform: float) -> None:
    """Over up to four stretches; the two ways of summing may differ by rounding, so a neighbour may be as good."""
    probs = torch.tensor(weights, dtype=torch.float64)
    token = inverse(probs, uniform)
    if not any(weights):
        assert token == -1
        return
    assert weights[token] > 0.0
    total = sum(weights)
    assert sum(weights[:token]) <= uniform * total + 1e-12 * total
    assert sum(weights[: token + 1]) >= uniform * total - 1e-12 * total


def test_draw_reads_the_residual_stream() -> None:
    noise = RejectionNoise(5, 6, 7)
    key = stream_key(5, 6, 7 + 2, Purpose.RESIDUAL)
    probs = torch.full((1000,), 1e-3)
    assert noise.draw(2, probs) == inverse(probs, uniform(key)) == int(uniform(key) * 1000)


def step_counts(rule: Rule, make_noise: Callable[[int], RejectionNoise], shape: str) -> tuple[list[int], list[float]]:
    """Counts of the first two tokens of 10,000 steps, and what the target distribution expects."""
    distributions = cases(3)[0]
    drafts = list(sampled_trees(distributions, SHAPES[shape]))
    picks = torch.multinomial(
        torch.tensor([weight for weight, _ in drafts]), 10_000, True, generator=torch.Generator().manual_seed(5)
    )
    extend = torch.Generator().manual_seed(6)
    counts: Counter[Prefix] = Counter()
    for step, pick in enumerate(picks.tolist()):
        tree = drafts[pick][1]
        verdict = rule(tree, target_at(distributions, tree), make_noise(step))
        said = (*tree.path_tokens(verdict.path[-1]), verdict.next_token)[:2]
        if len(said) == 1:
            said = (*said, int(torch.multinomial(distributions.target[said], 1, generator=extend)))
        counts[said] += 1
    pairs = list(product(range(3), repeat=2))
    expected = [10_000 * float(distributions.target[()][a] * distributions.target[(a,)][b]) for a, b in pairs]
    return [counts[pair] for pair in pairs], expected


@pytest.mark.parametrize(("rule", "shape"), [(rejection, "K=2"), (rejection, "two levels"), (block, "K=2")])
def test_keyed_noise_gives_the_target_distribution(rule: Rule, shape: str) -> None:
    """Chi-square over two tokens, 10,000 steps; false-alarm rate 1e-6 (fixed seeds: it passes always or never)."""
    counts, expected = step_counts(rule, lambda step: RejectionNoise(11, step, 40), shape)
    assert chisquare(counts, expected).pvalue > 1e-6


def test_one_stream_for_acceptance_and_residual_is_caught() -> None:
    """The reason for separate purposes: given a rejection the uniform is large, so reusing it biases the draw."""

    class OneStream(RejectionNoise):
        def _uniform(self, depth: int, purpose: Purpose, index: int = 0) -> float:
            return super()._uniform(depth, Purpose.ACCEPT)

    counts, expected = step_counts(rejection, lambda step: OneStream(11, step, 40), "K=2")
    assert chisquare(counts, expected).pvalue < 1e-6


def test_noise_without_the_step_repeats_itself() -> None:
    """The reason for the step in the key: the same position is drafted again after a rejection."""
    assert RejectionNoise(1, 0, 7).uniform(1, 0) != RejectionNoise(1, 1, 8).uniform(0, 0)
