"""One test for each of 21 defects known of the original functions, pinning the right behaviour."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from classic_models import (
    PROMPT,
    FixedStorage,
    RecordingStorage,
    difference,
    drafter,
    enumerated,
    plain_distribution,
    target,
    tiny,
)
from transformers import T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache

from foredraft.classic import last_trace, ngram_assisted, sampling
from foredraft.classic.adapters import adapter_of
from foredraft.classic.ngram_assisted import (
    NGramStorage,
    OneLevelNGramStorage,
    ngram_assisted_speculative_generate,
)
from foredraft.classic.reader import Reader
from foredraft.classic.sampling import autoregressive_generate, max_fn, speculative_generate
from foredraft.classic.utils.caching import prune_cache
from foredraft.classic.utils.logits_processor import (
    GreedyProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from foredraft.errors import ConfigError, ContextLengthError, UnsupportedModelError
from foredraft.model.lm import CausalLM
from foredraft.model.support import cache_argument
from generated import generated


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


def test_01_greedy_speculative_decoding_is_greedy() -> None:
    """It used to accept at random and to replace by the argmax of p - q."""
    wanted = generated(target(1), PROMPT, 12)
    for _ in range(3):
        tokens, rate = speculative_generate(PROMPT, drafter(1), target(1), max_gen_len=12, eos_tokens_id=[])
        assert tokens == wanted
        assert 0.0 < rate < 1.0


def test_02_with_a_cache_only_unseen_tokens_are_fed(monkeypatch: Any) -> None:
    """The whole text used to be fed to a filled cache, at shifted positions."""
    adapters = adapter_of(target()).target, adapter_of(drafter()).target  # probed before anybody watches
    fed: dict[int, list[int]] = {}
    forward = CausalLM.forward

    def watched(self: CausalLM, nodes: Any, cache: Any, **options: Any) -> torch.Tensor:
        fed.setdefault(id(self), []).append(nodes.width)
        return forward(self, nodes, cache, **options)

    monkeypatch.setattr(CausalLM, "forward", watched)
    tokens, _ = speculative_generate(
        PROMPT, drafter(), target(), gamma=4, max_gen_len=20, eos_tokens_id=[], use_cache=True
    )
    of_target, of_drafter = (fed[id(adapter)] for adapter in adapters)
    assert of_target[0] == len(PROMPT)
    assert max(of_target[1:]) <= 5
    assert of_drafter[0] == len(PROMPT) + 1
    assert max(of_drafter[1:]) <= 2
    assert tokens == generated(target(), PROMPT, 20)


def test_03_prune_cache_takes_current_caches_and_zero_tokens() -> None:
    """Attributes that are gone, ``[:-0]`` which empties a cache, and cross-attention cut too."""
    cache = DynamicCache()
    with torch.no_grad():
        target()(input_ids=ids(*PROMPT), use_cache=True, **{cache_argument(target()): cache})
    assert prune_cache(cache, 0).get_seq_length() == len(PROMPT)
    assert prune_cache(cache, 4).get_seq_length() == len(PROMPT) - 4
    own, cross = torch.arange(9.0).view(1, 1, 9, 1).expand(1, 2, 9, 4), torch.zeros(1, 2, 7, 4)
    pruned = prune_cache(((own, own, cross, cross), None), 3)
    assert [tensor.shape[2] for tensor in pruned[0]] == [6, 6, 7, 7]
    assert (float(pruned[0][0][0, 0, -1, 0]), own.shape[2]) == (5.0, 9)
    assert pruned[1] is None
    assert [prune_cache(((own, own),), count)[0][0].shape[2] for count in (0, 9)] == [9, 0]
    assert prune_cache(None, 3) is None
    (layer,) = prune_cache(((own,) * 4,), 3)  # the layout that is described: (2 or 4) x (batch, heads, T, head_dim)
    assert [tensor.shape[2] for tensor in layer] == [6, 6, 6, 6]


def test_04_the_cache_is_right_after_every_acceptance() -> None:
    """Two counts of tokens to prune, both off by one, and none when everything was accepted.

    Texts grow, shrink and branch off at random; logits are those of a fresh reading every time.
    """
    generator = torch.Generator().manual_seed(0)
    reader = Reader(adapter_of(target()), keeps_cache=True)
    text = list(PROMPT)
    for _ in range(25):
        kept = int(torch.randint(1, len(text) + 1, (1,), generator=generator))
        grown = torch.randint(64, (int(torch.randint(0, 6, (1,), generator=generator)),), generator=generator)
        text = [*text[:kept], *grown.tolist()]
        num_last = int(torch.randint(1, len(text) + 1, (1,), generator=generator))
        with torch.no_grad():
            wanted = target()(input_ids=ids(*text)).logits[0, -num_last:]
        torch.testing.assert_close(reader.read(text, num_last).clone(), wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "processor",
    [
        GreedyProcessor(0.7),
        MultinomialProcessor(0.7),
        TopKProcessor(0.7, 2),
        NucleusProcessor(0.7, 0.7),
        TopKNucleusProcessor(0.7, 3, 0.6),
    ],
)
def test_05_processors_leave_logits_alone_and_apply_the_temperature_last(processor: Any) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]], dtype=torch.float64)
    before = logits.clone()
    probs = processor(logits)
    assert torch.equal(logits, before)
    kept = probs > 0
    wanted = (logits.masked_fill(~kept, -torch.inf) / 0.7).softmax(-1)
    torch.testing.assert_close(probs, wanted)
    assert int(kept.sum()) == {"TopKProcessor": 2, "NucleusProcessor": 2, "TopKNucleusProcessor": 1}.get(
        type(processor).__name__, 4
    )


def test_06_orders_that_were_never_stored_are_unknown() -> None:
    storage = NGramStorage(4, 16)
    assert not storage.next_token(ids(1, 2, 3))[1].any()
    assert not storage.has_gram(torch.tensor([1, 2, 3]))
    storage.initialize(ids(5, 6))
    assert not storage.next_token(ids(1, 2, 3))[1].any()


def test_07_bigrams_are_stored_and_used() -> None:
    storage = NGramStorage(2, 16)
    storage.initialize(ids(5, 6, 5, 6))
    assert storage.counts == {2: {(5,): {6: 2}, (6,): {5: 1}}}
    assert storage.next_token(ids(9, 5))[0].tolist() == [[6]]
    assert set(NGramStorage(3, 16).__dict__) >= {"counts", "ngrams"}


def test_08_the_shortest_context_is_learned() -> None:
    storage = OneLevelNGramStorage(3, 16)
    storage.update(ids(1, 2), ids(3))
    assert storage.counts == {(1, 2): {3: 1}}
    storage.update(ids(1), ids(3))
    assert storage.counts == {(1, 2): {3: 1}}


@pytest.mark.parametrize("kind", [NGramStorage, OneLevelNGramStorage])
def test_09_a_stored_n_gram_is_found(kind: Any) -> None:
    storage = kind(3, 16)
    storage.initialize(ids(1, 2, 3, 4))
    assert storage.has_gram(torch.tensor([1, 2, 3]))
    assert storage.has_gram(torch.tensor([2, 3, 4]))
    assert not storage.has_gram(torch.tensor([1, 2, 3, 4]))
    assert not storage.has_gram(torch.tensor([1, 2, 4]))
    assert not storage.has_gram(torch.tensor([2, 3, 1]))
    assert storage.has_gram(torch.tensor([1, 2])) is (kind is NGramStorage)


def test_10_sampling_with_a_storage_has_the_distribution_of_the_target(monkeypatch: Any) -> None:
    """After a mismatch it used to draw afresh from p, which counts the drafted token out twice."""
    processor = MultinomialProcessor(1.0)
    prompt = [0, 2, 1]
    wanted = plain_distribution(tiny(7, 3), processor, prompt, 2)
    for future in itertools.product(range(3), repeat=2):

        def run(future: tuple[int, ...] = future) -> list[int]:
            storage = FixedStorage([*prompt, *future], 3)
            return ngram_assisted_speculative_generate(
                prompt, storage, tiny(7, 3), logits_processor=processor, max_gen_len=2, eos_tokens_id=[]
            )[0]

        assert difference(enumerated(run, monkeypatch), wanted) < 1e-12


def test_11_an_end_token_inside_an_accepted_draft_ends_the_output() -> None:
    wanted = generated(target(1), PROMPT, 8)
    eos = wanted[2]
    assert eos not in wanted[:2]
    storage = FixedStorage([*PROMPT, *wanted])
    tokens, rate = ngram_assisted_speculative_generate(
        PROMPT, storage, target(1), gamma=6, max_gen_len=8, eos_tokens_id=eos, first_target=False
    )
    assert tokens == wanted[:3]
    assert rate == 3 / 6
    trace = last_trace()
    assert trace.steps[-1].final_token is None


def test_12_of_several_end_tokens_the_earliest_counts() -> None:
    wanted = generated(target(1), PROMPT, 8)
    early, late = wanted[1], wanted[5]
    assert wanted.index(late) == 5
    storage = FixedStorage([*PROMPT, *wanted])
    for order in ([late, early], [early, late]):
        assert (
            ngram_assisted_speculative_generate(PROMPT, storage, target(1), gamma=7, eos_tokens_id=order)[0]
            == wanted[:2]
        )
        assert speculative_generate(PROMPT, target(1), target(1), gamma=7, eos_tokens_id=order)[0] == wanted[:2]


def test_13_without_drafts_the_acceptance_rate_is_zero() -> None:
    assert speculative_generate(PROMPT, drafter(), target(), max_gen_len=1, eos_tokens_id=[])[1] == 0.0
    assert ngram_assisted_speculative_generate(PROMPT, NGramStorage(3, 64), target(), max_gen_len=1)[1] == 0.0
    assert speculative_generate(PROMPT, drafter(), target(), max_gen_len=3, gamma=0, eos_tokens_id=[])[1] == 0.0


def test_14_the_total_length_is_right_at_every_edge() -> None:
    """Prompts at the limit, models that state none, and encoder-decoder models, refused by name."""
    for length in (256, 257, 300):
        with pytest.raises(ContextLengthError, match="no room"):
            speculative_generate((PROMPT * 30)[:length], drafter(), target())
        with pytest.raises(ContextLengthError):
            ngram_assisted_speculative_generate((PROMPT * 30)[:length], NGramStorage(3, 64), target())
    assert len(autoregressive_generate((PROMPT * 30)[:255], target(), eos_tokens_id=[])) == 1
    endless = copy.deepcopy(target())
    endless.config.__dict__["max_position_embeddings"] = None
    options: dict[str, Any] = {"max_gen_len": 5, "eos_tokens_id": []}
    assert len(ngram_assisted_speculative_generate(PROMPT, NGramStorage(3, 64), endless, **options)[0]) == 5
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match="the t5 model is an encoder-decoder"):
        speculative_generate(PROMPT, drafter(), t5)


def test_15_the_residual_is_never_nan() -> None:
    assert max_fn(torch.zeros(2, 5)).tolist() == [[0.0] * 5] * 2
    torch.testing.assert_close(
        max_fn(torch.tensor([[0.3, -0.2, 0.1], [0.0, 0.0, 0.0]])), torch.tensor([[0.75, 0.0, 0.25], [0.0, 0.0, 0.0]])
    )


def test_16_random_tokens_are_drafted_only_where_that_is_asked_for() -> None:
    """The documents state the random token for ``stop_if_unknown=False``; with True nothing is drafted."""
    drafted = []
    for stop_if_unknown in (False, True):
        tokens, _ = ngram_assisted_speculative_generate(
            [7], NGramStorage(3, 64), target(), max_gen_len=6, gamma=4, stop_if_unknown=stop_if_unknown
        )
        trace = last_trace()
        drafted.append(trace.steps[1].gamma)
        assert tokens == generated(target(), [7], 6)
    assert drafted == [4, 0]


def test_17_every_token_counts_once_more_than_the_likely_ones() -> None:
    """As listed, ties included, but for impossible tokens."""
    storage = RecordingStorage(3, 64)
    processor = TopKProcessor(1.0, 3)
    torch.manual_seed(0)
    tokens, _ = ngram_assisted_speculative_generate(
        PROMPT, storage, target(), logits_processor=processor, filler_top_k=10, max_gen_len=12, eos_tokens_id=[]
    )
    text = [*PROMPT, *tokens]
    places = range(len(PROMPT), len(text))
    assert storage.updates == [(text[:place], [text[place]]) for place in places]
    with torch.no_grad():
        logits = target()(input_ids=ids(*text)).logits[0]
    for place, (context, likely) in zip(places, storage.fills, strict=True):
        assert context == text[:place]
        assert likely == logits[place - 1].topk(3).indices.tolist()
    plain = NGramStorage(3, 64)
    plain.fill(ids(1, 2), ids(8, 9), 0.25)
    assert plain.counts[3] == {(1, 2): {8: 0.25, 9: 0.25}}
    assert plain.ngrams[3] == {(1, 2): 8}
    plain.update(ids(1, 2), ids(5))
    assert plain.ngrams[3] == {(1, 2): 5}
    plain.update(ids(1, 2), ids(6))
    assert plain.ngrams[3] == {(1, 2): 5}, "equal counts change nothing"
    plain.update(ids(1, 2), ids(6))
    assert plain.ngrams[3] == {(1, 2): 6}
    for storage in (NGramStorage(3, 64), OneLevelNGramStorage(3, 64)):
        storage.initialize(ids(1, 2, 3, 1, 2, 4))
        assert int(storage.next_token(ids(1, 2))[0]) == 3
        storage.update(ids(1, 2), ids(7, 4))
        assert int(storage.next_token(ids(1, 2))[0]) == 4


@pytest.mark.parametrize(("given", "said", "likely"), [({}, 2.0, 1.0), ({"filler_weight": 0.25}, 1.25, 0.25)])
def test_the_token_that_was_said_counts_two_and_the_other_likely_ones_one(
    given: dict[str, float], said: float, likely: float
) -> None:
    """Greedy, with a context that no other place of the text has, so that each count is of that place alone."""
    storage = NGramStorage(8, 64)
    tokens, _ = ngram_assisted_speculative_generate(
        PROMPT, storage, target(), filler_top_k=3, max_gen_len=6, eos_tokens_id=[], **given
    )
    text = [*PROMPT, *tokens]
    with torch.no_grad():
        best = target()(input_ids=ids(*text)).logits[0].topk(3).indices.tolist()
    for place in range(len(PROMPT), len(text)):
        context = tuple(text[place - 7 : place])
        assert sum(tuple(text[i - 7 : i]) == context for i in range(7, len(text))) == 1
        assert storage.counts[8][context] == dict.fromkeys(best[place - 1], likely) | {text[place]: said}


def test_a_storage_of_ones_own_counts_fillers_by_update_and_refuses_fractions() -> None:
    class Own(FixedStorage):
        def update(self, input_ids: torch.Tensor, next_tokens: torch.Tensor) -> None:
            told.append(next_tokens[0].tolist())

    told: list[list[int]] = []
    options: dict[str, Any] = {"filler_top_k": 3, "max_gen_len": 4, "eos_tokens_id": []}
    tokens, _ = ngram_assisted_speculative_generate(PROMPT, Own(PROMPT), target(), **options)
    assert [len(one) for one in told] == [1, 3] * 4
    assert [one for one in told if len(one) == 1] == [[token] for token in tokens]
    with pytest.raises(ConfigError, match="can only count 1 each"):
        ngram_assisted_speculative_generate(PROMPT, Own(PROMPT), target(), **options, filler_weight=0.5)


def test_18_storages_see_cpu_tensors_and_forget_when_told() -> None:
    """``initialize`` adds, as the documents say; after ``reset`` a storage is as good as new."""
    storage = RecordingStorage(3, 64)
    options: dict[str, Any] = {"max_gen_len": 10, "eos_tokens_id": [], "stop_if_unknown": True}
    fresh = ngram_assisted_speculative_generate(PROMPT, storage, target(), **options)
    assert storage.devices == {"cpu"}
    counts = copy.deepcopy(storage.counts)
    storage.initialize(ids(60, 61, 62))
    assert storage.counts[2][(60,)] == {61: 1}
    assert all(storage.counts[2][gram] == followers for gram, followers in counts[2].items())
    storage.reset()
    assert (storage.counts, storage.ngrams) == ({}, {})
    assert ngram_assisted_speculative_generate(PROMPT, storage, target(), **options) == fresh
    assert storage.counts == counts


def test_19_the_trace_counts_tokens_and_times_every_step_anew() -> None:
    """Throughput was characters per second, and timers were stale."""
    tokens, rate = speculative_generate(PROMPT, drafter(), target(), gamma=3, max_gen_len=20, eos_tokens_id=[])
    trace = last_trace()
    assert sum(step.accepted + (step.final_token is not None) for step in trace.steps) == len(tokens)
    assert rate == trace.num_accepted / trace.num_drafted
    for name in ("draft_seconds", "verify_seconds", "accept_seconds"):
        times = [getattr(step, name) for step in trace.steps]
        assert all(0.0 < time < 10.0 for time in times)
        assert len(set(times)) > 1


def test_20_names_are_those_that_the_documentation_uses() -> None:
    """The original's read-me used arguments and modules that did not exist."""
    functions = {
        name: getattr(module, name)
        for module in (sampling, ngram_assisted)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    page = (Path(__file__).parents[2] / "docs" / "classic.md").read_text(encoding="utf-8")
    for name, arguments in re.findall(r"^(\w+_generate)\((.*?)\)$", page, re.MULTILINE | re.DOTALL):
        known = inspect.signature(functions[name]).parameters
        assert set(re.findall(r"(\w+)=", arguments)) <= known.keys()
    for name in functions:
        assert name in page


def test_21_the_lossy_switch_warns_and_points_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="no longer has the target's distribution") as caught:
        speculative_generate(PROMPT, drafter(), target(), max_gen_len=4, skip_sample_adjustment=True)
    assert caught[0].filename == __file__
