"""Chains of draft models in one call: the argmaxes of logits, the drafts of their levels, and texts that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafting import begin, check_conforms, end
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.parts.reduced_output import reduced_model
from foredraft.engine.drafter import StepResult
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.engine.stopping import StopChecker
from foredraft.errors import ShapeError
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.lengths import LengthPolicy
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.native import library as native
from foredraft.sampling.processors import Sampler
from foredraft.testing import GREEDY, SAMPLED, toy_model
from foredraft.testing.toys import strengthen

V = 320
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SHAPE = {**SIZES, "num_hidden_layers": 2, "vocab_size": V, "max_position_embeddings": 512}
TEXT = [(7 * number * number + 3 * number) % V for number in range(40)]


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if native.library() is None:
        pytest.skip("no kernels of the library's own here")


def llama(**others: Any) -> LlamaForCausalLM:
    return strengthen(LlamaForCausalLM(LlamaConfig(**SHAPE, **others)), 3).eval()


def adapter(dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    return CausalLM(llama().to(dtype), **{"execution": "packed", "probe": False, **options})


@pytest.mark.sample(2)
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduced", [False, True])
def test_chains_are_the_argmaxes_of_logits(dtype: torch.dtype, reduced: bool) -> None:
    """Three rows, one of which nothing is wanted of; tokens of a reduced vocabulary by their names."""
    lm = adapter(dtype)
    names = torch.arange(0, 3 * V, 3) if reduced else None
    chains, depths, columns = [TEXT[:4], TEXT[4:5], TEXT[9:11]], [5, 0, 2], V - 20
    cache, count = lm.new_cache(3), lm.num_forwards
    found = lm.chains(chains, cache, depths, columns, names)
    assert [len(row) for row in found] == depths
    assert lm.num_forwards == count + 5
    for row, chain in enumerate(chains):
        want, text, one = [], list(chain), lm.new_cache(1)
        for _ in range(depths[row]):
            fed = text[one.lengths[0] :]
            best = int(lm.forward(Nodes.from_chains([fed]), one)[0, -1, :columns].argmax())
            want.append(best if names is None else int(names[best]))
            one.commit([range(len(fed))])
            text.append(min(want[-1], V - 1))
        assert found[row] == want
    assert cache.lengths == [0, 0, 0]  # what is kept is for the caller to say


def test_a_chain_needs_a_token_to_begin_with() -> None:
    lm = adapter()
    with pytest.raises(ShapeError, match="the chain of row 1 is empty"):
        lm.chains([TEXT[:4], []], lm.new_cache(2), [3, 3], V, None)


def test_a_chain_ends_where_logits_are_no_numbers() -> None:
    (first,) = adapter().chains([TEXT[:4]], adapter().new_cache(1), [3], V, None) or ()
    model = llama()
    with torch.no_grad():
        model.get_input_embeddings().weight[first[0]] = torch.nan
    spoilt = CausalLM(model, execution="packed", probe=False)
    assert spoilt.chains([TEXT[:4]], spoilt.new_cache(1), [3], V, None) == [first[:1]]
    assert spoilt.num_forwards == 2


# -- drafts ------------------------------------------------------------------------------------------------------------


def row_of(row_id: int, text: Sequence[int], **params: float) -> Row:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **params})
    sampler = Sampler(replace(sampling, seed=row_id), vocab_size=V, prompt_ids=text)
    checker = StopChecker(sampling, (), len(text), 400)
    return Row(row_id, "0", 0, list(text), len(text), sampling, 7, sampler, 400, checker)


def drafts_of(drafter: DraftModelDrafter, num_steps: int = 6, **params: float) -> list[list[tuple[int, ...]]]:
    """Tokens and parents of what is proposed to three rows, of which some is accepted, and one leaves in the middle."""
    rows = [row_of(number, TEXT[number : number + 3 + 9 * number], **params) for number in range(3)]
    caches = begin(drafter, rows)
    found = []
    for step in range(num_steps):
        trees = drafter.propose(rows, [1 + (step + row.id) % 5 for row in rows])
        found.append([(*tree.tokens, *tree.parents) for tree in trees])
        results = []
        for row, tree in zip(rows, trees, strict=True):
            path, node = [0], 0
            while len(path) <= (step + row.id) % 4 and node in tree.parents:
                node = tree.parents.index(node)
                path.append(node)
            tokens = (*(tree.tokens[node] for node in path[1:]), TEXT[step + row.id])
            row.token_ids.extend(tokens)
            row.num_steps += 1
            results.append(StepResult(tree, tuple(path), tokens))
        drafter.observe(rows, results)
        if step == num_steps // 2:
            end(rows[0])
            caches.remove(0)  # the last row takes its place
            del rows[0]
            rows[1].slot = 0
    return found


class Varied(LengthPolicy):
    """Another length in every step."""

    name = "varied"

    def longest(self, row: Row) -> int:
        return 1 + len(row.token_ids) % 4


def drafter(**options: Any) -> DraftModelDrafter:
    lm = adapter()
    if "vocabulary" in options:
        lm = reduced_model(lm, options["vocabulary"])
    made = DraftModelDrafter(lm, **{"target_vocab_size": V, "policy": LengthPolicy(5), **options})
    made.model.num_forwards = 0
    return made


SOME = DraftVocabulary.of(range(0, V, 2), V)
CASES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "greedy": ({}, {}),
    "lengths of their own": ({"policy": Varied(5)}, {}),
    "sampled": ({}, {"temperature": 0.9}),
    "penalties": ({}, {"repetition_penalty": 1.3}),
    "a tree": ({"num_branches": 2, "beam_width": 2}, {}),
    "reranked": ({"num_branches": 3, "reranks": True, "max_nodes": 7}, {}),
    "rejection": ({"acceptance": "standard"}, {"temperature": 0.9}),
    "fewer tokens": ({"vocabulary": SOME}, {}),
    "fewer tokens, sampled": ({"vocabulary": SOME}, {"temperature": 0.9}),
    "a smaller target": ({"target_vocab_size": V - 40}, {}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come, are accepted in part, and leave; forwards are counted alike."""
    options, params = CASES[name]
    made = drafter(**options)
    assert made.model.execution.program is not None
    found = drafts_of(made, **params)
    num_forwards = made.model.num_forwards
    monkeypatch.setattr("foredraft.model.execution.native_program.NativeProgram.is_possible", False)
    made = drafter(**options)
    assert drafts_of(made, **params) == found
    assert made.model.num_forwards == num_forwards


@cache
def target(dtype: torch.dtype) -> CausalLM:
    """All products by the library's own kernels, so that nodes of trees have the bits of plain decoding."""
    return CausalLM(toy_model(V, dtype=dtype, **SIZES), execution="packed")


@pytest.mark.full
@pytest.mark.parametrize("branches", [1, 2])
def test_every_text_stays(branches: int) -> None:
    """By the conformance suite, with a drafter that is right now and then."""
    lm = CausalLM(toy_model(V, dtype=torch.float32, seed=1, **SIZES), execution="packed", probe=False)
    assert lm.execution.program is not None

    def make(depth: int) -> DraftModelDrafter:
        return DraftModelDrafter(lm, target_vocab_size=V, num_speculative_tokens=depth, num_branches=branches)

    check_conforms(make, target(torch.float32), depths=(1, 4))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_as_its_own_drafter_is_always_right(params: SamplingParams) -> None:
    """In single precision, where logits do not tie: positions, columns and masks are those of the text."""
    engine = Engine(
        target(torch.float32), DraftModelDrafter(target(torch.float32), target_vocab_size=V, policy=LengthPolicy(4))
    )
    rows = [engine.add_request(TEXT[start : start + 4], replace(params, max_tokens=20, n=1))[0] for start in (0, 9)]
    list(engine.run())
    assert all(row.stats.num_accepted_draft_tokens == row.stats.num_draft_tokens > 8 for row in rows)


def test_weights_that_were_released_are_those_that_were_packed() -> None:
    """Of a model that the library has loaded itself the originals are gone."""
    want = drafts_of(drafter())
    lm = adapter(release_originals=True)
    assert drafts_of(DraftModelDrafter(lm, target_vocab_size=V, policy=LengthPolicy(5))) == want


def test_long_catching_up_runs_as_modules() -> None:
    made = drafter()
    row = row_of(0, TEXT)
    begin(made, [row])
    row.token_ids.extend(TEXT)  # more than are fed at once
    (tree,) = made.propose([row], [3])
    other = DraftModelDrafter(adapter(execution="eager"), target_vocab_size=V, policy=LengthPolicy(5))
    fresh = row_of(0, [*TEXT, *TEXT])
    begin(other, [fresh])
    assert other.propose([fresh], [3])[0].tokens == tree.tokens
