"""Material of the probe: decoding steps with deliberate faults, and plain forward passes over the same sequences.

The reference also records inputs and outputs of linear layers' own code, to compare packed layers with.
"""

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
from foredraft.model.execution.experts import packable_experts
from foredraft.model.execution.forwards import replacement
from foredraft.model.execution.packing import packable
from foredraft.model.nodes import Nodes
from foredraft.tree import DraftTree

Text: TypeAlias = tuple[int, ...]
Fault: TypeAlias = Callable[[Nodes, int], Nodes]

PREFIX_LENGTHS = (5, 8)  # deliberately different, and both longer than WINDOW
WINDOW = 4
BUSHY, FLAT, CHAIN, SHORT = (-1, 0, 0, 1, 1, 2, 4), (-1, 0, 0, 2, 2), (-1, 0, 1, 2), (-1, 0, 1)


# -- faults, made on purpose -----------------------------------------------------------------------------------------


def shift_positions(nodes: Nodes, row: int) -> Nodes:
    """Move every node of a row one position further from the prefix."""
    depths = nodes.depths.clone()
    depths[row] += 1
    return dataclasses.replace(nodes, depths=depths)


def hide_parents(nodes: Nodes, row: int) -> Nodes:
    """Hide the parent of every node of a row."""
    return _with_ancestors(nodes, row, lambda seen, parent: seen & ~parent)


def show_siblings(nodes: Nodes, row: int) -> Nodes:
    """Let a node attend to every earlier node, related or not."""
    return _with_ancestors(nodes, row, lambda seen, parent: torch.ones_like(seen).tril())


def show_everything(nodes: Nodes, row: int) -> Nodes:
    """Show every node to every other, as without a mask."""
    return _with_ancestors(nodes, row, lambda seen, parent: torch.ones_like(seen))


def _with_ancestors(nodes: Nodes, row: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Nodes:
    num_rows, width = nodes.tokens.shape
    ancestors = torch.ones(num_rows, width, width, dtype=torch.bool).tril()  # ancestors in a chain
    ancestors, depths = ancestors if nodes.ancestors is None else nodes.ancestors.clone(), nodes.depths[row]
    is_parent = depths[None, :] == depths[:, None] - 1  # among the ancestors of a node, one has this depth
    ancestors[row] = change(ancestors[row], is_parent)
    return dataclasses.replace(nodes, ancestors=ancestors)


FAULTS: tuple[tuple[str, Fault], ...] = (
    ("positions", shift_positions),
    ("masks", hide_parents),
    ("masks", show_siblings),
)
"""Deliberate faults: the part that is wrong, and the function that makes it wrong."""


# -- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One forward pass over drafts, and the nodes that are committed after it.

    Args:
      trees: one tree per row, from ``first_row`` on.
      paths: nodes to commit, by row; rows beyond the last path commit nothing.
      faults: deliberate faults, as pairs of row and fault.
    """

    name: str
    trees: tuple[DraftTree, ...]
    paths: tuple[tuple[int, ...], ...] = ()
    first_row: int = 0
    faults: tuple[tuple[int, Fault], ...] = ()


@dataclass(frozen=True)
class ProbePlan:
    """Prefixes of different lengths, and the decoding steps that follow them."""

    prefixes: tuple[Text, ...]
    steps: tuple[Step, ...]

    @classmethod
    def whole(cls, vocab_size: int, seed: int, faults: Sequence[Fault]) -> ProbePlan:
        """Return a plan of steps: chains that are partly rejected, a single token, trees of which one branch is kept,
        and one more step.

        Args:
          faults: faults to make in the trees, each in an additional row that otherwise equals the first.
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
        """Return a plan with trees, and the same trees again with a fault in each row."""
        prefixes, tree = _drawn(vocab_size, seed)
        trees = (tree(BUSHY), tree(FLAT))
        return cls(prefixes, (Step("trees", trees), Step("faults", trees, faults=tuple(enumerate(faults)))))

    def as_chains(self) -> ProbePlan:
        """Return the plan with the deepest path of every tree as a chain, a subset of the trees' sequences."""
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
        """Rows times width, over all forward passes."""
        widths = [max(map(len, step.trees)) * len(step.trees) for step in self.steps]
        return len(self.prefixes) * max(map(len, self.prefixes)) + sum(widths)

    def texts(self, step: Step) -> list[list[Text]]:
        """Return for every node of every row of a step the token sequence up to and including the node."""
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
        """Return logits (rows, nodes, V) of every step.

        Args:
          forward: forward of an adapter.
          cache: cache of that adapter with one row per prefix.
        """
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
    """Return two prefixes, and a function from the parents of a tree to that tree with new tokens."""
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
"""Root-mean-square errors of the logits by row and node, relative to the spread of the correct logits."""

MAX_COLUMNS = 1024  # vocabulary columns to compare; enough for a mean square
NUM_ROWS = 2  # sampled rows of every linear layer


@dataclass(frozen=True)
class Reference:
    """Results of plain forward passes, without cache, masks and positions.

    Args:
      logits: logits after the last token of every sequence.
      rounding: errors of a few sequences when the input of every layer is disturbed by one rounding.
      shape: errors of one sequence run alone, in a forward pass of another shape; empty if not requested.
      epsilon: relative rounding of a number in the dtype of these forward passes.
      ahead: largest change of a sequence's logits when other tokens follow it in its row.
      num_tokens: rows times width of these forward passes.
    """

    logits: dict[Text, torch.Tensor]
    rounding: list[float]
    shape: list[float]
    epsilon: float
    ahead: float
    num_tokens: int

    def errors(self, texts: Sequence[Sequence[Text]], logits: torch.Tensor) -> Errors:
        """Return the errors of logits (rows, nodes, V), by row and node."""
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
    """Run every sequence of a plan through the model itself, in one batch, padded at the ends.

    Args:
      layers: layers whose inputs are changed by one rounding, in additional rows.
      rehearsal: the plan.
      epsilon: relative rounding of the dtype.
      once_more: also run one of the sequences alone.
    """
    texts = {text for step in rehearsal.steps for row in rehearsal.texts(step) for text in row}
    whole = sorted((text for text in texts if not _goes_on(text, texts)), key=lambda text: (-len(text), text))
    rounded = whole[:1] + whole[-1:]  # from different rows
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
    """Disturb the input of every layer by a rounding error, in the rows from ``first_row`` on.

    The rounding of kernels depends on the machine and on chance. The amplification of rounding by a model does not.
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
    """Return evenly spaced columns (..., V) of logits, at most `MAX_COLUMNS`, as float64 on the CPU."""
    stride = -(-logits.shape[-1] // MAX_COLUMNS)
    return logits[..., ::stride].cpu().double()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the root-mean-square error (V,), relative to the spread of the correct values; infinite for NaN.

    Entries that are infinite in both count as equal, since some models exclude tokens.
    """
    finite = torch.isfinite(want)
    if not bool(finite.any()) or not torch.equal(torch.isfinite(got), finite):
        return float("inf")
    got, want = got[finite], want[finite]
    error = float((got - want).square().mean().sqrt())
    spread = float((want - want.mean()).square().mean().sqrt())
    return 0.0 if error == 0.0 else error / max(spread, 1e-12)


def epsilon(dtype: torch.dtype, rounds_inputs: str) -> float:
    """Return the relative rounding of a dtype. It is at least that of float32, in which models compute norms and
    angles.

    Args:
      rounds_inputs: sentence about layers that round their inputs to 8 bits; empty without such layers. Rounding to 8
        bits is about as coarse as bfloat16, because the last bit of an input can move it by a whole step.
    """
    least = torch.finfo(torch.bfloat16 if rounds_inputs else torch.float32).eps
    return max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0, least)


Samples: TypeAlias = dict[nn.Module, tuple[list[torch.Tensor], torch.Tensor]]
"""Inputs and outputs of the own code of linear layers and experts, a few rows of each, to compare with replacement
forwards.
"""


@contextmanager
def linear_samples(model: nn.Module | None) -> Iterator[Samples]:
    """Record samples in the forward passes of the block; nothing without a model."""
    samples: Samples = {}

    def keep(layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        *inputs, outputs = (each.reshape(-1, each.shape[-1])[:NUM_ROWS].clone() for each in (*args, output))
        samples[layer] = inputs, outputs

    # before the model's own hooks, which are not part of the replaced forward
    layers = [] if model is None else [*packable(model), *packable_experts(model)]
    handles = [layer.register_forward_hook(keep, prepend=True) for layer in layers]
    try:
        yield samples
    finally:
        for handle in handles:
            handle.remove()


def linear_errors(model: nn.Module, samples: Samples) -> dict[str, float]:
    """Return relative errors, by path, of the layers with a replaced forward; NaN if the original gave NaN."""
    paths = {module: path for path, module in model.named_modules()}
    return {
        paths[layer]: _relative_distance(layer.forward(*inputs), outputs)
        for layer, (inputs, outputs) in samples.items()
        if replacement(layer) is not None
    }


def _relative_distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if bool(got.isnan().any()) and not bool(want.isnan().any()):
        return math.inf
    error, size = (float(tensor.square().sum().sqrt()) for tensor in (got.double() - want.double(), want.double()))
    return 0.0 if error == 0.0 else error / max(size, 1e-30)
