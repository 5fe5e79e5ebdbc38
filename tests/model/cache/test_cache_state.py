"""The cache holds what a fresh prefill would hold: after every commit, rollback and change of rows."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from architectures import ALWAYS, ARCHITECTURES, OF_EACH_CACHE, kinds_of, target_model
from foredraft.errors import ShapeError
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.support import cache_argument
from foredraft.testing import reference_node_logits, toy_model
from harness import (
    PREFIXES,
    Session,
    adapter,
    first_attention,
    largest_difference,
    random_ids,
    rounds_of,
    tolerance,
    tree_of,
)

CHAINS_OF_SOME = [
    pytest.param(name, is_tree, marks=() if is_tree or name in ALWAYS else pytest.mark.full)
    for name in ARCHITECTURES
    for is_tree in (False, True)
]
PROBE = tree_of((-1, 0, 0, 1), 31)


def fresh_states(name: str, text: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (heads, T, head_dim) per layer, from the unmodified model and transformers' own cache."""
    cache = DynamicCache()
    with torch.no_grad():
        model = target_model(name, first_attention(name))
        model(input_ids=torch.tensor([text]), **{cache_argument(model): cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def state_error(name: str, session: Session) -> float:
    """Largest difference of any committed key or value from a fresh prefill, over rows and layers."""
    worst = 0.0
    for row, text in enumerate(session.texts):
        assert session.cache.lengths[row] == len(text)
        for layer, (keys, values) in zip(session.cache.layers, fresh_states(name, text), strict=True):
            for buffer, want in ((layer.keys, keys), (layer.values, values)):
                worst = max(worst, float((buffer[row, :, : len(text)] - want).abs().max()))
    return worst


def verify_error(name: str, session: Session) -> float:
    """How far a tree behind every row is from the oracle over the row's text."""
    logits = session.verify([PROBE] * len(session.texts))
    model = target_model(name, first_attention(name))
    return largest_difference([logits], [[reference_node_logits(model, text, PROBE) for text in session.texts]])


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "is_tree"), CHAINS_OF_SOME)
def test_every_commit_leaves_the_state_of_a_fresh_prefill(name: str, is_tree: bool) -> None:
    session = Session.start(adapter(name), PREFIXES)
    limit = tolerance(name)
    assert state_error(name, session) < limit
    for step in rounds_of(is_tree):
        session.verify(step.trees)
        session.commit(step.trees, step.paths)
        assert state_error(name, session) < limit


@pytest.mark.parametrize("name", kinds_of(OF_EACH_CACHE))
def test_rollback_leaves_the_state_of_a_fresh_prefill(name: str) -> None:
    """Rolled-back rows go on with other tokens, over the columns of the forgotten ones."""
    session = Session.start(adapter(name), PREFIXES)
    session.run(rounds_of(True)[:2])
    lengths = [11, 3]
    session.cache.rollback(lengths)
    session.texts = [text[:length] for text, length in zip(session.texts, lengths, strict=True)]
    session.feed([random_ids(2, 41), random_ids(9, 42)])
    limit = tolerance(name)
    assert state_error(name, session) < limit
    assert verify_error(name, session) < limit


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", kinds_of(OF_EACH_CACHE))
def test_rows_join_leave_move_and_fork_while_others_run(name: str) -> None:
    session = Session.start(adapter(name), [*PREFIXES, random_ids(4, 51)])
    cache, texts = session.cache, session.texts
    limit = tolerance(name)

    assert cache.fork(1) == 3
    texts.append(list(texts[1]))
    assert verify_error(name, session) < limit

    cache.swap(0, 2)
    texts[0], texts[2] = texts[2], texts[0]
    session.feed([random_ids(3, 52), [5], random_ids(2, 53), [6]])
    assert state_error(name, session) < limit

    cache.remove(1)
    texts[1] = texts.pop()
    assert cache.num_rows == 3
    assert verify_error(name, session) < limit

    cache.reorder([2, 0, 0, 1, 2])
    session.texts = [list(texts[row]) for row in (2, 0, 0, 1, 2)]
    assert state_error(name, session) < limit
    session.feed([[row] for row in range(5)])
    assert verify_error(name, session) < limit

    first = cache.add_rows(2)
    newcomers = [random_ids(17, 54), random_ids(2, 55)]
    session.texts += [[], []]
    late = Session(session.lm, cache, session.texts)
    _feed_rows(late, first, newcomers)
    assert state_error(name, late) < limit
    assert verify_error(name, late) < limit


def _feed_rows(session: Session, first_row: int, chains: list[list[int]]) -> None:
    session.lm.forward(Nodes.from_chains(chains), session.cache, first_row=first_row, keep=slice(0, 0))
    session.cache.commit([range(len(chain)) for chain in chains], first_row)
    for text, chain in zip(session.texts[first_row:], chains, strict=True):
        text.extend(chain)


def test_reorder_to_fewer_and_to_no_rows() -> None:
    session = Session.start(adapter("llama"), [*PREFIXES, random_ids(4, 61)])
    session.cache.reorder([1])
    session.texts = [session.texts[1]]
    assert session.cache.num_rows == 1
    assert verify_error("llama", session) < 1e-9
    session.cache.reorder([])
    assert session.cache.num_rows == 0


def test_growth_keeps_what_is_committed() -> None:
    """From 8 columns and 2 rows to 128 and more, in several doublings, in the middle of decoding."""
    session = Session.start(adapter("llama"), PREFIXES)
    for seed in range(6):
        session.feed([random_ids(15, seed), random_ids(3, 70 + seed)])
    assert session.cache.capacity >= 103
    assert state_error("llama", session) < 1e-9


def test_rollback_refuses_what_is_not_committed() -> None:
    session = Session.start(adapter("llama"), PREFIXES)
    session.verify([PROBE, PROBE])
    with pytest.raises(ShapeError, match="cannot roll back"):
        session.cache.rollback([len(PREFIXES[0]) + 1, 0])
    with pytest.raises(ShapeError, match="cannot roll back"):
        session.cache.rollback([-1, 0])
    assert session.cache.lengths == [len(prefix) for prefix in PREFIXES]


def test_rejected_nodes_leave_no_trace_in_committed_columns() -> None:
    """Verifying and forgetting a draft changes no committed byte."""
    session = Session.start(adapter("qwen3"), PREFIXES)
    before = [layer.keys[:, :, : len(PREFIXES[1])].clone() for layer in session.cache.layers]
    session.verify([PROBE, PROBE])
    session.cache.commit([(), ()])
    after = [layer.keys[:, :, : len(PREFIXES[1])] for layer in session.cache.layers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ragged_rows_are_written_without_operations_over_the_whole_buffer(dtype: torch.dtype) -> None:
    """`scatter_` takes a thousand times longer in half precision than in float32, and grows with the capacity."""

    class Watch(TorchDispatchMode):
        seen: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    lm = CausalLM(toy_model(dtype=dtype), execution="eager", probe=False)
    cache = lm.new_cache(3)
    for row, length in enumerate((4, 9, 1)):
        cache.lengths[row] = length
    lm.forward(Nodes.from_chains([[1, 2], [3, 4], [5]]), cache)  # allocates
    with Watch():
        lm.forward(Nodes.from_chains([[1, 2], [3, 4], [5]]), cache)
    assert "index_put_" in Watch.seen or "_index_put_impl_" in Watch.seen
    assert not {name for name in Watch.seen if name.startswith("scatter")}
