"""Every example of the documents that describe the classic interface, with another prefix and another model.

Of the five, two describe the functions (speculative decoding; n-gram assisted decoding), two show the usage of the
n-gram function and of its storages (test_classic_installed.py runs it), and one is a survey of other methods.
"""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest
import torch
from classic_models import PROMPT, drafter, target
from transformers.cache_utils import DynamicCache

from foredraft.classic import DraftedToken, Step, last_trace
from foredraft.classic.ngram_assisted import (
    INgramStorage,
    NGramStorage,
    OneLevelNGramStorage,
    ngram_assisted_speculative_generate,
)
from foredraft.classic.sampling import (
    autoregressive_generate,
    beam_search_generate,
    speculative_generate,
)
from foredraft.classic.utils import printing
from foredraft.classic.utils.caching import prune_cache
from foredraft.classic.utils.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from foredraft.errors import ShapeError
from foredraft.model.support import cache_argument

WORDS = ["The", "capital", "of", "France", "is", "Paris", "Germany", "Berlin", "London"]


def ids(text: str) -> torch.Tensor:
    return torch.tensor([[WORDS.index(word) for word in text.split()]])


def words(table: Any) -> Any:
    """Token ids of a storage's tables as words."""
    if isinstance(table, dict):
        return {words(key) if isinstance(key, tuple) else WORDS[key]: words(value) for key, value in table.items()}
    return tuple(WORDS[token] for token in table) if isinstance(table, tuple) else table


def said(answer: tuple[torch.Tensor, torch.Tensor]) -> tuple[str, bool]:
    assert answer[0].shape == answer[1].shape == (1, 1)
    assert answer[1].dtype == torch.bool
    return WORDS[int(answer[0])], bool(answer[1])


# -- signatures and modules --------------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {"max_gen_len": 40, "eos_tokens_id": 1, "pad_token_id": 0, "use_cache": False, "debug": False}
SIGNATURES: list[tuple[Any, str, dict[str, Any]]] = [
    (
        autoregressive_generate,
        "inputs model max_gen_len logits_processor eos_tokens_id pad_token_id use_cache debug",
        SHARED,
    ),
    (
        beam_search_generate,
        "inputs model max_gen_len num_beams top_k min_length alpha eos_tokens_id pad_token_id debug tokenizer",
        {key: SHARED[key] for key in SHARED if key != "use_cache"}
        | {"num_beams": 4, "top_k": 3, "min_length": 5.0, "alpha": 1.2, "tokenizer": None},
    ),
    (
        speculative_generate,
        "inputs drafter target tokenizer gamma use_egag gamma_min gamma_max egag_ema_beta logits_processor max_gen_len "
        "eos_tokens_id pad_token_id use_cache skip_sample_adjustment first_target debug",
        SHARED
        | {"tokenizer": None, "gamma": 5, "use_egag": False, "gamma_min": 1, "gamma_max": None, "egag_ema_beta": 0.0}
        | {"skip_sample_adjustment": False, "first_target": True},
    ),
    (
        ngram_assisted_speculative_generate,
        "inputs ngramstorage target tokenizer gamma filler_top_k logits_processor max_gen_len eos_tokens_id "
        "pad_token_id use_cache first_target stop_if_unknown debug filler_weight",
        SHARED
        | {"tokenizer": None, "gamma": 5, "filler_top_k": 3, "first_target": True, "stop_if_unknown": False}
        | {"filler_weight": 1.0},
    ),
]


@pytest.mark.parametrize(("function", "names", "defaults"), SIGNATURES)
def test_signatures(function: Any, names: str, defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert list(parameters) == names.split()
    for name, default in defaults.items():
        assert parameters[name].default == default, name
    if "logits_processor" in parameters:
        assert type(parameters["logits_processor"].default) is GreedyProcessor
    keyword_only = [name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keyword_only == [name for name in parameters if name == "filler_weight"]  # no parameter of the documents


def test_modules_and_constructors() -> None:
    for name in (
        "sampling.base_decoding",
        "sampling.speculative_decoding",
        "ngram_assisted.ngram_assisted",
        "ngram_assisted.ngram_storage",
        "utils.logits_processor",
        "utils.caching",
        "utils.printing",
    ):
        importlib.import_module(f"foredraft.classic.{name}")
    assert GreedyProcessor().temperature == 1.0
    assert MultinomialProcessor(0.5).temperature == 0.5
    assert TopKProcessor(0.5, 7).top_k == 7
    assert NucleusProcessor(0.5, 0.8).top_p == 0.8
    both = TopKNucleusProcessor(0.5, 7, 0.8)
    assert (both.temperature, both.top_k, both.top_p) == (0.5, 7, 0.8)
    assert issubclass(NGramStorage, INgramStorage)
    assert issubclass(OneLevelNGramStorage, INgramStorage)
    assert issubclass(TopKProcessor, LogitsProcessor)


# -- storages ----------------------------------------------------------------------------------------------------------


def test_what_a_one_level_storage_holds() -> None:
    """A trigram storage of one sentence; it looks at the last two words."""
    storage = OneLevelNGramStorage(n=3, vocab_size=9)
    storage.initialize(ids("The capital of France is Paris"))
    assert words(storage.counts) == {
        ("The", "capital"): {"of": 1},
        ("capital", "of"): {"France": 1},
        ("of", "France"): {"is": 1},
        ("France", "is"): {"Paris": 1},
    }
    assert {gram: WORDS[token] for gram, token in words(storage.ngrams).items()} == {
        ("The", "capital"): "of",
        ("capital", "of"): "France",
        ("of", "France"): "is",
        ("France", "is"): "Paris",
    }
    assert said(storage.next_token(ids("The capital"))) == ("of", True)
    assert said(storage.next_token(ids("The capital of"))) == ("France", True)
    assert said(storage.next_token(ids("is Paris")))[1] is False
    assert said(storage.next_token(ids("of")))[1] is False


def test_what_a_storage_of_all_orders_holds() -> None:
    """Bigrams and trigrams, keyed by order and then by context."""
    storage = NGramStorage(n=3, vocab_size=9)
    for _ in range(2):
        storage.initialize(ids("The capital of France is Paris"))
    storage.initialize(ids("The capital of Germany is Berlin"))
    assert set(storage.counts) == set(storage.ngrams) == {2, 3}
    assert words(storage.counts[2])[("of",)] == {"France": 2, "Germany": 1}
    assert words(storage.counts[3])[("capital", "of")] == {"France": 2, "Germany": 1}
    assert words(storage.counts[3])[("The", "capital")] == {"of": 3}
    assert WORDS[storage.ngrams[3][tuple(ids("capital of")[0].tolist())]] == "France"


def test_the_longest_known_context_wins() -> None:
    """n=4: three words of context are new, two are known; one would say something else."""
    storage = NGramStorage(n=4, vocab_size=9)
    storage.initialize(ids("is capital of France"))
    storage.update(ids("Paris of"), ids("London"))
    storage.update(ids("Berlin of"), ids("London"))
    assert said(storage.next_token(ids("The capital of"))) == ("France", True)
    assert said(storage.next_token(ids("Germany of"))) == ("London", True)
    assert said(storage.next_token(ids("Germany")))[1] is False


def test_unknown_contexts_get_random_tokens_of_the_vocabulary() -> None:
    storage = NGramStorage(3, 9)
    torch.manual_seed(0)
    answers = [storage.next_token(ids("The")) for _ in range(200)]
    assert {int(token) for token, _ in answers} == set(range(9))
    assert not any(bool(known) for _, known in answers)


def test_a_batch_of_texts() -> None:
    storage = NGramStorage(3, 9)
    storage.initialize(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    tokens, known = storage.next_token(torch.tensor([[0, 1], [3, 4], [8, 8]]))
    assert tokens.shape == known.shape == (3, 1)
    assert tokens[:2].tolist() == [[2], [5]]
    assert known.tolist() == [[True], [True], [False]]
    storage.update(torch.tensor([[0, 1], [3, 4]]), torch.tensor([[7, 6], [8, 7]]))
    assert storage.counts[3][(3, 4)] == {5: 1, 8: 1, 7: 1}


# -- n-gram assisted generation ----------------------------------------------------------------------------------------


# -- speculative decoding, parts and whole -----------------------------------------------------------------------------


def test_filters_keep_what_they_say() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]]))
    assert (TopKProcessor(1.0, 2)(logits) > 0).tolist() == [[False, True, True, False]]
    assert (NucleusProcessor(1.0, 0.5)(logits) > 0).tolist() == [[False, True, True, False]]
    assert (NucleusProcessor(1.0, 0.3)(logits) > 0).tolist() == [[False, True, False, False]]
    assert (TopKNucleusProcessor(1.0, 3, 0.9)(logits) > 0).tolist() == [[False, True, True, True]]
    torch.testing.assert_close(TopKProcessor(1.0, 2)(logits)[0, 1], torch.tensor(0.4 / 0.7))
    torch.testing.assert_close(NucleusProcessor(0.5, 0.5)(logits)[0, 1], torch.tensor(0.16 / 0.25))
    assert torch.equal(TopKProcessor(1.0, 99)(logits), MultinomialProcessor(1.0)(logits))
    assert GreedyProcessor().sample(torch.tensor([[0.1, 0.9], [0.8, 0.2]])).tolist() == [[1], [0]]


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)])
@pytest.mark.parametrize(
    "processor",
    [GreedyProcessor(), MultinomialProcessor(1.0), TopKNucleusProcessor(1.0, 3, 0.9), NucleusProcessor(1.0, 0.9)],
)
def test_processors_take_any_leading_dimensions(processor: Any, shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    probs = processor(logits)
    assert probs.shape == shape
    assert probs.dtype == logits.dtype
    tokens = processor.sample(probs)
    assert tokens.shape == (*shape[:-1], 1)
    assert bool((probs.gather(-1, tokens) > 0).all())
    rows = torch.stack([processor(row) for row in logits.reshape(-1, 5)])
    torch.testing.assert_close(probs.reshape(-1, 5), rows)


def test_pruning_a_dynamic_cache_equals_never_having_seen_the_tokens() -> None:
    """A loop of one's own: feed, prune, feed something else."""
    model = target()
    cache = DynamicCache()
    given = {cache_argument(model): cache, "use_cache": True}
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPT]), **given)
        assert prune_cache(cache, 3) is cache
        logits = model(input_ids=torch.tensor([[8, 9]]), **given).logits
        wanted = model(input_ids=torch.tensor([[*PROMPT[:-3], 8, 9]])).logits[:, -2:]
    torch.testing.assert_close(logits, wanted)
    assert prune_cache(cache, cache.get_seq_length()).get_seq_length() == 0
    assert prune_cache(DynamicCache(), 0).get_seq_length() == 0


class Words:
    """A tokenizer for the display."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(f"w{token}" for token in tokens)


def test_the_debug_display(capsys: pytest.CaptureFixture[str]) -> None:
    """Every step of the trace, as `describe` tells it."""
    torch.manual_seed(2)
    speculative_generate(
        PROMPT,
        drafter(),
        target(),
        Words(),
        gamma=3,
        logits_processor=MultinomialProcessor(1.0),
        max_gen_len=14,
        eos_tokens_id=[],
        debug=True,
    )
    text, shown, seen = list[int](), list[str](), set[object]()
    for step in last_trace().steps:
        text += [*(draft.token for draft in step.drafts[: step.accepted]), step.final_token]
        shown.append(printing.describe(step, text, Words()))
        seen |= {"adjusted" if step.is_adjusted else "target", *(draft.accepted for draft in step.drafts)}
    assert capsys.readouterr().out.splitlines() == "\n".join(shown).splitlines()
    assert seen == {True, False, None, "adjusted", "target"}


@pytest.mark.parametrize("name", ["autoregressive", "beams", "speculative", "ngram"])
def test_debug_without_a_tokenizer_shows_ids(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"max_gen_len": 4, "eos_tokens_id": [], "debug": True}
    calls = {
        "autoregressive": lambda: autoregressive_generate(PROMPT, target(), **options),
        "beams": lambda: beam_search_generate(PROMPT, target(), alpha=0.0, top_k=8, **options),
        "speculative": lambda: speculative_generate(PROMPT, drafter(), target(), **options)[0],
        "ngram": lambda: ngram_assisted_speculative_generate(PROMPT, NGramStorage(3, 64), target(), **options)[0],
    }
    tokens = calls[name]()
    assert str(tokens) in capsys.readouterr().out


def test_the_example_of_the_debug_display() -> None:
    """The lines of the example; its final sample stands one place too early there."""
    names = ["Paris", ",", "France", "and"]
    drafts = tuple(
        DraftedToken(10 + i, i, q, ratio * q, r, r < ratio)
        for i, (q, ratio, r) in enumerate([(0.85, 1.1, 0.3), (0.72, 0.9, 0.5), (0.68, 0.62, 0.75)])
    )
    step = Step(10, 4, None, drafts, 2, 3, True, 0.0, 0.0, 0.0)
    words = types.SimpleNamespace(decode=lambda tokens: "".join(names[token] for token in tokens))
    assert printing.describe(step, [0, 1, 3], words).splitlines() == [
        "========== Speculative Step ==========",
        "Position: 10, Gamma: 4, Accepted: 2",
        "",
        "Drafts (Drafter):",
        '  [11]: "Paris" (q=0.85) ✓',
        '  [12]: "," (q=0.72) ✓',
        '  [13]: "France" (q=0.68) ✗ (rejected: r=0.75 > p/q=0.62)',
        "",
        "Final Sample:",
        '  [13]: "and" (adjusted distribution)',
        "",
        'Generated: "Paris,and"',
        "=======================================",
    ]


def test_characters_that_end_a_line_are_shown_as_they_are_written() -> None:
    step = Step(10, 1, None, (DraftedToken(10, 0, 0.5, 0.5, 0.1, True),), 1, 1, False, 0.0, 0.0, 0.0)
    breaks = types.SimpleNamespace(
        decode=lambda tokens: "".join("\n\n" if not token else "\r\u2028\\n" for token in tokens)
    )
    lines = printing.describe(step, [0, 1], breaks).splitlines()
    assert '  [11]: "\\n\\n" (q=0.50) ✓' in lines
    assert '  [12]: "\\r\\u2028\\n" (target distribution)' in lines
    assert lines[-2] == 'Generated: "\\n\\n\\r\\u2028\\n"'
    assert len(lines) == 11


def test_the_display_for_loops_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    drafts = torch.tensor([[5, 6, 7, 8, 9, 0]])
    after = torch.tensor([[5, 6, 7, 3, 0, 0]])
    printing.speculative_step(Words(), drafts, after, 1, 2, 2, 3)
    assert capsys.readouterr().out.splitlines() == [
        "========== Speculative Step ==========",
        "Position: 2, Gamma: 3, Accepted: 1",
        "",
        "Drafts (Drafter):",
        '  [3]: "w7" ✓',
        '  [4]: "w8" ✗ (rejected: differs from the target\'s token)',
        '  [5]: "w9" - (not reached)',
        "",
        "Final Sample:",
        '  [4]: "w3" (target distribution)',
        "",
        'Generated: "w7 w3"',
        "=======================================",
    ]


def test_the_display_for_loops_of_ones_own_shows_the_test_of_every_draft(capsys: pytest.CaptureFixture[str]) -> None:
    """The listed loop with its tensors q, p and r; once only a traced call could show them."""
    drafts = torch.tensor([[5, 6, 0, 1, 2, 0]])
    after = torch.tensor([[5, 6, 0, 3, 0, 0]])
    q = torch.tensor([[[0.8, 0.2, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]])
    p = torch.tensor([[[0.4, 0.6, 0.0, 0.0], [0.5, 0.3, 0.0, 0.2], [0.1, 0.1, 0.4, 0.4]]])
    arguments = (None, drafts, after, 1, 2, 2, 3)
    step = printing.speculative_step(*arguments, q=q, p=p, r=torch.tensor([0.25, 0.75, 0.5]))
    first, second, third = step.drafts
    assert (first.draft_prob, first.target_prob, first.ratio, first.uniform, first.accepted) == pytest.approx(
        (0.8, 0.4, 0.5, 0.25, True)
    )
    assert (second.draft_prob, second.target_prob, second.ratio, second.uniform, second.accepted) == pytest.approx(
        (0.5, 0.3, 0.6, 0.75, False)
    )
    assert (third.draft_prob, third.target_prob, third.uniform, third.accepted) == (1.0, None, None, None)
    assert capsys.readouterr().out.splitlines()[4:10] == [
        "  [3]: 0 (q=0.80) ✓",
        "  [4]: 1 (q=0.50) ✗ (rejected: r=0.75 > p/q=0.60)",
        "  [5]: 2 (q=1.00) - (not reached)",
        "",
        "Final Sample:",
        "  [4]: 3 (adjusted distribution)",
    ]
    with pytest.raises(ShapeError, match=r"q has shape \(1, 2, 4\) for 3 drafts"):
        printing.speculative_step(*arguments, q=q[:, :2], p=p)
    with pytest.raises(ShapeError, match="r has 1 numbers for 3 drafts"):
        printing.speculative_step(*arguments, r=torch.tensor([0.5]))
