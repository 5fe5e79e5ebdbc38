"""Acceptance rules against the exact target distribution, by enumeration of every draft and every outcome.

`joint_distribution` runs the real functions with a noise that forks at every random decision, so it sums exact
probabilities and samples nothing. Biased variants, most of them the real rules with one part exchanged, must fail the
very same check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft import accept as verify
from foredraft.accept import RejectionNoise, Verdict, block, inverse, match, rejection
from foredraft.errors import TreeError
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
    "independent draws per row": (matching_per_row, sampled_trees),
    "doubtful token dropped, rejection": (rejection, doubtful_tokens_dropped),
    "doubtful token dropped, block": (block, doubtful_tokens_dropped),
    "argmax draft with soft q, rejection": (rejection, likeliest_with_soft_distribution),
    "argmax draft with soft q, block": (block, likeliest_with_soft_distribution),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_biased_variant_is_caught(name: str) -> None:
    rule, drafts = VARIANTS[name]
    shapes = TREES if name == "independent draws per row" else CHAINS
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
    """More, where the distributions differ."""
    by_rule = [expected_accepted(rule, distributions, ((1,), (1,))) for rule in (block, rejection, matching)]
    assert by_rule == sorted(by_rule, reverse=True) or max(by_rule) - min(by_rule) < 1e-12
    assert distributions.name != "random" or by_rule[0] > by_rule[1] + 1e-3


def test_equal_distributions_accept_everything() -> None:
    distributions = next(distributions for distributions in cases(3) if distributions.name == "equal")
    for rule in (rejection, block):
        assert expected_accepted(rule, distributions, ((1,), (1,))) == pytest.approx(2.0, abs=1e-12)


# --- literal examples, pieces, errors ----------------------------


@pytest.mark.parametrize("rule", [rejection, block], ids=["rejection", "block"])
def test_token_impossible_under_its_own_distribution_is_refused(rule: Rule) -> None:
    tree = DraftTree.chain(9, [1], probs=distribution(1, 0, 1)[None])
    with pytest.raises(TreeError, match=r"token 1 .* probability 0\.0"):
        rule(tree, lambda node: distribution(1, 1, 1), Edge(0.5))


@pytest.mark.parametrize("rule", [rejection, block], ids=["rejection", "block"])
def test_second_sibling_or_token_is_refused_too(rule: Rule) -> None:
    """After token 0 of a point mass nothing more can have been drawn."""
    chain = DraftTree.chain(9, [0, 1], probs=torch.stack([distribution(1, 0, 0)] * 2))
    tree = chain if rule is block else DraftTree((9, 0, 1), (-1, 0, 0), probs=distribution(1, 0, 0)[None])
    with pytest.raises(TreeError, match="token 1"):
        rule(tree, lambda node: distribution(1, 99, 99), Edge(0.999))


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
