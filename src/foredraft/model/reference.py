"""What the probe does and what it holds a model against: decoding steps, the texts that they stand for, and faults made
on purpose; plain forwards over every one of these texts, and linear layers' own code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from foredraft.model.cache.ragged import KVCache
from foredraft.model.execution.forwards import replacement
from foredraft.model.execution.packing import packable
from foredraft.model.nodes import Nodes
from foredraft.tree import DraftTree

Text: TypeAlias = tuple[int, ...]
Fault: TypeAlias = Callable[[Nodes, int], Nodes]

PREFIX_LENGTHS = (5, 8)  # ragged on purpose, and both longer than the window below
WINDOW = 4
BUSHY, FLAT, CHAIN, SHORT = (-1, 0, 0, 1, 1, 2, 4), (-1, 0, 0, 2, 2), (-1, 0, 1, 2), (-1, 0, 1)


# -- faults, made on purpose -----------------------------------------------------------------------------------------


def shift_positions(nodes: Nodes, row: int) -> Nodes:
    """Every node of a row one position too far from the prefix."""
    depths = nodes.depths.clone()
    depths[row] += 1
    return dataclasses.replace(nodes, depths=depths)


def hide_parents(nodes: Nodes, row: int) -> Nodes:
    """No node of a row sees the one before it."""
    return _with_ancestors(nodes, row, lambda seen, parent: seen & ~parent)


def show_siblings(nodes: Nodes, row: int) -> Nodes:
    """A node sees every node before it, related or not."""
    return _with_ancestors(nodes, row, lambda seen, parent: torch.ones_like(seen).tril())


def show_everything(nodes: Nodes, row: int) -> Nodes:
    """Every node sees every other, as without a mask."""
    return _with_ancestors(nodes, row, lambda seen, parent: torch.ones_like(seen))


def _with_ancestors(nodes: Nodes, row: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Nodes:
    num_rows, width = nodes.tokens.shape
    ancestors = torch.ones(num_rows, width, width, dtype=torch.bool).tril()  # of chains
    ancestors, depths = ancestors if nodes.ancestors is None else nodes.ancestors.clone(), nodes.depths[row]
    is_parent = depths[None, :] == depths[:, None] - 1  # among the ancestors of a node, one has this depth
    ancestors[row] = change(ancestors[row], is_parent)
    return dataclasses.replace(nodes, ancestors=ancestors)


FAULTS: tuple[tuple[str, Fault], ...] = (
    ("positions", shift_positions),
    ("masks", hide_parents),
    ("masks", show_siblings),
)
"""What is wrong, and how."""


# -- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One forward over drafts, and what is committed after it.

    Args:
      trees: one per row, from ``first_row`` on.
      paths: nodes to commit of these rows; nothing where there are fewer paths than rows.
      faults: what is wrong on purpose, by row.
    """

    name: str
    trees: tuple[DraftTree, ...]
    paths: tuple[tuple[int, ...], ...] = ()
    first_row: int = 0
    faults: tuple[tuple[int, Fault], ...] = ()


@dataclass(frozen=True)
class ProbePlan:
    """Ragged rows of text, and the steps that go on from them."""

    prefixes: tuple[Text, ...]
    steps: tuple[Step, ...]

    @classmethod
    def whole(cls, vocab_size: int, seed: int, faults: Sequence[Fault]) -> ProbePlan:
        """Chains of which a part is rejected, a single token, trees of which a branch is kept, and what follows it.

        Args:
          faults: each made in the trees of one more row, which is like the first up to there.
        """
        (first, second), tree = _drawn(vocab_size, seed)
        copies = len(faults)
        chain, token, bushy = tree(CHAIN), tree((-1,)), tree(BUSHY)
        steps = (
            Step("chains", (chain, tree(SHORT), *(chain,) * copies), ((0, 1), (0,), *((0, 1),) * copies)),
            Step("token", (token,), ((0,),), first_row=1),
            Step(
                "trees",
                (bushy, tree(FLAT), *(bushy,) * copies),
                ((0, 1, 4, 6), (0, 2, 4)),
                faults=tuple(enumerate(faults, 2)),
            ),
            Step("branches", (tree((-1, 0)), tree((-1,)))),
        )
        return cls((first, second, *(first,) * copies), steps)

    @classmethod
    def of_trees(cls, vocab_size: int, seed: int, faults: Sequence[Fault]) -> ProbePlan:
        """Trees, and the same trees once more with a fault in each row."""
        prefixes, tree = _drawn(vocab_size, seed)
        trees = (tree(BUSHY), tree(FLAT))
        return cls(prefixes, (Step("trees", trees), Step("faults", trees, faults=tuple(enumerate(faults)))))

    def as_chains(self) -> ProbePlan:
        """The deepest path of every tree as a chain: texts that the trees have, too."""
        step = self.steps[0]
        paths = [max(map(tree.path, tree.leaves), key=len) for tree in step.trees]
        chains = tuple(
            DraftTree.chain(tree.tokens[0], [tree.tokens[node] for node in path[1:]])
            for tree, path in zip(step.trees, paths, strict=True)
        )
        return dataclasses.replace(self, steps=tuple(dataclasses.replace(each, trees=chains) for each in self.steps))

    @property
    def num_forwards(self) -> int:
        return 1 + len(self.steps)

    @property
    def num_tokens(self) -> int:
        """Rows times width, over all forwards."""
        widths = [max(map(len, step.trees)) * len(step.trees) for step in self.steps]
        return len(self.prefixes) * max(map(len, self.prefixes)) + sum(widths)

    def texts(self, step: Step) -> list[list[Text]]:
        """For every row of a step the text up to and including every node."""
        rows = list(self.prefixes)
        for each in self.steps:
            if each is step:
                break
            for row, (tree, path) in enumerate(zip(each.trees, each.paths, strict=False), each.first_row):
                rows[row] = (*rows[row], *(tree.tokens[node] for node in path))
        return [
            [(*rows[row], tree.tokens[0], *tree.path_tokens(node)) for node in range(len(tree))]
            for row, tree in enumerate(step.trees, step.first_row)
        ]

    def run(self, forward: Callable[..., torch.Tensor], cache: KVCache) -> dict[str, torch.Tensor]:
        """Logits (rows, nodes, V) of every step by the forward of an adapter whose cache has a row for each prefix."""
        results = {}
        forward(Nodes.from_chains(self.prefixes), cache, keep=slice(0, 0))
        cache.commit([range(len(prefix)) for prefix in self.prefixes])
        for step in self.steps:
            nodes = Nodes.from_trees(step.trees)
            for row, fault in step.faults:
                nodes = fault(nodes, row)
            results[step.name] = forward(nodes, cache, first_row=step.first_row)
            cache.commit(step.paths, step.first_row)
        return results


def _drawn(vocab_size: int, seed: int) -> tuple[tuple[Text, Text], Callable[[tuple[int, ...]], DraftTree]]:
    """Two prefixes, and a function from the parents of a tree to that tree with tokens of its own."""
    ids = np.random.default_rng(seed).permutation(vocab_size)[:64].tolist()
    first, second = (tuple(ids[(row + i) % len(ids)] for i in range(size)) for row, size in enumerate(PREFIX_LENGTHS))
    place = max(PREFIX_LENGTHS)

    def tree(parents: tuple[int, ...]) -> DraftTree:
        nonlocal place
        tokens = tuple(ids[(place + node) % len(ids)] for node in range(len(parents)))
        place += 3
        return DraftTree(tokens, parents)

    return (first, second), tree


Errors: TypeAlias = list[list[float]]
"""The root-mean-square error of the logits of every node of every row, relative to the spread of the true ones."""

MAX_COLUMNS = 1024  # of the vocabulary; enough for a mean square
NUM_ROWS = 2  # of every linear layer


@dataclass(frozen=True)
class Reference:
    """Plain forwards, without cache, masks and positions.

    Args:
      logits: after the last token of every text.
      rounding: errors of a few of the texts when every layer is given an input that is off by one rounding.
      shape: errors of one text alone, in a forward of another shape; empty when it was not asked for.
      epsilon: what a number is rounded by, relatively, in the dtype that they ran in.
      ahead: largest error of a text that another one goes on from, in whose row other tokens follow it.
      num_tokens: rows times width of these forwards.
    """

    logits: dict[Text, torch.Tensor]
    rounding: list[float]
    shape: list[float]
    epsilon: float
    ahead: float
    num_tokens: int

    def errors(self, texts: Sequence[Sequence[Text]], logits: torch.Tensor) -> Errors:
        """The errors of logits (rows, nodes, V), row by row."""
        return [
            [relative_error(logits[row, node], self.logits[text]) for node, text in enumerate(row_texts)]
            for row, row_texts in enumerate(texts)
        ]


def plain_forwards(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    rehearsal: ProbePlan,
    epsilon: float,
    device: torch.device,
    *,
    once_more: bool,
) -> Reference:
    """Run every text of a rehearsal through the model itself, all in one batch, padded at their ends.

    Args:
      layers: whose inputs are rounded once more in additional rows.
      epsilon: of the dtype that is rounded to.
      once_more: run one of the texts alone, too.
    """
    texts = {text for step in rehearsal.steps for row in rehearsal.texts(step) for text in row}
    whole = sorted((text for text in texts if not _goes_on(text, texts)), key=lambda text: (-len(text), text))
    rounded = whole[:1] + whole[-1:]  # of different rows
    width, start = len(whole[0]), min(map(len, texts))
    rows = [[*text, *[text[-1]] * (width - len(text))] for text in whole + rounded]

    def run(rows: list[list[int]]) -> torch.Tensor:
        ids = torch.tensor(rows, device=device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=width - start + 1).logits
        return sampled(logits)

    with _rounded_inputs(layers, len(whole), epsilon):
        results = run(rows)
    logits: dict[Text, torch.Tensor] = {}
    ahead = 0.0
    for row, text in enumerate(whole):
        for end in range(start, len(text) + 1):
            first = logits.setdefault(text[:end], results[row, end - start])
            ahead = max(ahead, relative_error(results[row, end - start], first))

    def errors(texts: list[Text], results: torch.Tensor) -> list[float]:
        return [
            relative_error(results[row, end - start], logits[text[:end]])
            for row, text in enumerate(texts)
            for end in range(start, len(text) + 1)
        ]

    shape = errors(whole[:1], run(rows[:1])) if once_more else []
    rounding = errors(rounded, results[len(whole) :])
    return Reference(logits, rounding, shape, epsilon, ahead, (len(rows) + once_more) * width)


def _goes_on(text: Text, texts: set[Text]) -> bool:
    return any(len(other) > len(text) and other[: len(text)] == text for other in texts)


@contextmanager
def _rounded_inputs(layers: Sequence[nn.Module], first_row: int, epsilon: float) -> Iterator[None]:
    """Let the rows from the given one on enter every layer with a relative error as a rounding makes it.

    What kernels round depends on the machine and on luck; how a model magnifies what is rounded does not.
    """
    generator = torch.Generator().manual_seed(0)

    def disturb(states: torch.Tensor) -> torch.Tensor:
        rows = states[first_row:]
        noise = torch.randn(rows.shape, generator=generator).to(states.device) * (epsilon / 2)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return torch.cat([states[:first_row], (wide * (1 + noise)).to(states.dtype)])

    def hook(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (disturb(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": disturb(kwargs["hidden_states"])}

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sampled(logits: torch.Tensor) -> torch.Tensor:
    """Evenly spaced columns (..., V) of logits, at most `MAX_COLUMNS`, as float64 on the CPU."""
    stride = -(-logits.shape[-1] // MAX_COLUMNS)
    return logits[..., ::stride].cpu().double()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root-mean-square error (V,), relative to the spread of what is right; infinite for NaN.

    Entries that are infinite in both count as equal: some models rule tokens out.
    """
    finite = torch.isfinite(want)
    if not bool(finite.any()) or not torch.equal(torch.isfinite(got), finite):
        return float("inf")
    got, want = got[finite], want[finite]
    error = float((got - want).square().mean().sqrt())
    spread = float((want - want.mean()).square().mean().sqrt())
    return 0.0 if error == 0.0 else error / max(spread, 1e-12)


def epsilon(dtype: torch.dtype, rounds_inputs: str) -> float:
    """What a number is rounded by, relatively: at least as in float32, in which models take norms and angles anyway.

    Args:
      rounds_inputs: that layers round their inputs to 8 bits, if they do, which is about as coarse as bfloat16: the
        last bit of an input can move it by a whole step.
    """
    least = torch.finfo(torch.bfloat16 if rounds_inputs else torch.float32).eps
    return max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0, least)


Samples: TypeAlias = dict[nn.Module, tuple[torch.Tensor, torch.Tensor]]
"""Inputs and outputs of linear layers' own code, a few rows of each, to compare with the code that replaces it."""


@contextmanager
def linear_samples(model: nn.Module | None) -> Iterator[Samples]:
    """Take samples in the forwards of the block; without a model, none."""
    samples: Samples = {}

    def keep(layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        inputs, outputs = (tensor.reshape(-1, tensor.shape[-1])[:NUM_ROWS].clone() for tensor in (args[0], output))
        samples[layer] = inputs, outputs

    # in front of the model's own hooks: they are not what is replaced
    layers = [] if model is None else packable(model)
    handles = [layer.register_forward_hook(keep, prepend=True) for layer in layers]
    try:
        yield samples
    finally:
        for handle in handles:
            handle.remove()


def linear_errors(model: nn.Module, samples: Samples) -> dict[str, float]:
    """Relative errors, by path, of layers whose forward was replaced since; NaN where their own code gave it."""
    paths = {module: path for path, module in model.named_modules()}
    return {
        paths[layer]: _relative_distance(layer.forward(inputs), outputs)
        for layer, (inputs, outputs) in samples.items()
        if replacement(layer) is not None
    }


def _relative_distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if bool(got.isnan().any()) and not bool(want.isnan().any()):
        return math.inf
    error, size = (float(tensor.square().sum().sqrt()) for tensor in (got.double() - want.double(), want.double()))
    return 0.0 if error == 0.0 else error / max(size, 1e-30)
