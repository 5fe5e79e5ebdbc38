"""A real chat model: drafted texts are plain texts, and plain texts those of transformers.

zoo:smollm2 on prompts through its chat template, greedy and sampled. Plain decoding runs every request alone, drafting
runs them in a batch. Cells are those of ``benchmarks/guarantee.py``: where the library's own kernels run, texts have
the bits of plain decoding; elsewhere what differs is a near-tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import guarantee
import pytest
import torch
from guarantee import Said, Study, gap_of

from foredraft import SamplingParams, zoo
from foredraft.loading.models import load_tokenizer

pytestmark = [pytest.mark.smollm2, pytest.mark.usefixtures("_loaded_once")]

QUESTIONS = (
    "Copy this line twice: ha ha ha ha ha ha ha ha, said the cat on the mat.",
    "Write a Python function add(a, b) that returns the sum of a and b, then a function sub(a, b) in the same style.",
    'Turn this into JSON with the keys name, age and city: "Maria is 34 years old and lives in Lisbon."',
    "Why is the sky blue? Explain it to a child in three sentences.",
)
"""Some repeat what was said, some do not."""
MODES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=100, max_tokens=24),
}
OWN = {
    "layer_skip": {"method": "layer_skip", "exit_layer": 26, "num_speculative_tokens": 3},
    "layer_skip, swift": {"method": "layer_skip", "layer_search": "swift", "num_speculative_tokens": 3},
    "quantized_self, tree": {"method": "quantized_self", "num_draft_branches": 2, "max_draft_nodes": 12},
}
METHODS = (
    *("ngram", "nasd", "suffix", "token_recycling", "lookahead", "jacobi", "quantized_self", "sparse_kv", "eagle3"),
    *("suffix+eagle3", "ngram>token_recycling", *OWN),
)
"""Those for which zoo:smollm2 needs nothing beside it."""
COVERING = {
    ("ngram", "bfloat16", "sampled"),
    ("eagle3", "bfloat16", "greedy"),
    ("quantized_self, tree", "bfloat16", "sampled"),
    ("token_recycling", "float32", "sampled"),
}
"""What `make test` runs: chains and trees, from lookups, a head and the target itself, in both dtypes."""


@pytest.fixture(scope="module", autouse=True)
def _own_methods() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarantee, "METHODS", {**guarantee.METHODS, **OWN})
        yield


@cache
def study(dtype: str) -> Study:
    tokenizer = load_tokenizer("zoo:smollm2")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return Study("zoo:smollm2", prompts=prompts, dtype=dtype, max_num_seqs=3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "dtype", "mode"),
    [
        pytest.param(*cell, marks=pytest.mark.slow if cell in COVERING else pytest.mark.full)
        for cell in product(METHODS, ("float32", "bfloat16"), MODES)
    ],
)
def test_drafts_change_no_text(method: str, dtype: str, mode: str) -> None:
    cell = study(dtype).cell(method, MODES[mode], 3)
    assert cell.is_good, cell.line()


def test_plain_texts_are_those_of_transformers() -> None:
    """In single precision, but for ties closer than 1e-4; another answer in place of this one's is none."""
    found = study("float32")
    model, _, tokenizer = zoo.load("smollm2", dtype=torch.float32)
    rows, params = found.plain(MODES["greedy"]), MODES["greedy"]
    for row in rows:
        ids = torch.tensor([row.prompt])
        given = {"max_new_tokens": params.max_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id or 0}
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, ids.shape[1] :]
        want = Said(row.prompt, tuple(text.tolist()), (), {})
        assert (gap_of(row, want, found.target, params) or 0.0) < 1e-4
        assert len(row.token_ids) == len(want.token_ids)
    assert (gap_of(rows[0], rows[3], found.target, params) or 0.0) > 1e-2
