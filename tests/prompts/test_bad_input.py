"""Bad input is refused with a typed error that names the value, and does no harm to the rows beside it."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch

from drafting import made
from foredraft import LLM
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.errors import (
    ConfigError,
    ContextLengthError,
    EngineBusyError,
    PromptError,
)
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, toy_model
from foredraft.tree import DraftTree
from toys import VOCAB_SIZE, small, target

POISON = 63


def drafter() -> Drafter:
    return DraftModelDrafter(small(), target_vocab_size=VOCAB_SIZE, num_speculative_tokens=3, num_branches=3)


def finish(engine: Engine) -> None:
    list(engine.run())


@cache
def sound_outputs(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """What the good prompts give without any bad neighbour."""
    engine = Engine(target(), EmptyDrafter())
    rows = [engine.add_request(prompt, params)[0] for prompt in PROMPTS]
    finish(engine)
    return tuple(tuple(row.output_ids) for row in rows)


BAD_PROMPTS = [
    ((), PromptError, "no tokens"),
    ((1, 2, VOCAB_SIZE), PromptError, f"{VOCAB_SIZE}"),
    ((1, -1), PromptError, "-1"),
    ((1, True), PromptError, "True is not a whole number"),
    ((1, 2.5), PromptError, "not a list of token ids"),
    (("1", "2"), PromptError, "not a list of token ids"),
    (tuple([1] * 256), ContextLengthError, "256"),
]


def test_bad_prompts_are_refused_and_harm_nobody() -> None:
    """Before, between and after good ones, in the middle of decoding."""
    engine = Engine(target(), drafter())
    rows: list[Row] = []
    for good in PROMPTS:
        for prompt, error, message in BAD_PROMPTS:
            with pytest.raises(error, match=message):
                engine.add_request(cast("Any", prompt), GREEDY)
        rows += engine.add_request(good, GREEDY)
        engine.step()
    finish(engine)
    assert tuple(tuple(row.output_ids) for row in rows) == sound_outputs(GREEDY)


@pytest.mark.parametrize("eos", [True, [2, False], 2.5])
def test_an_end_of_text_that_is_no_token_id_is_refused(eos: Any) -> None:
    """True ended texts at token 1."""
    model = toy_model(VOCAB_SIZE)
    model.generation_config.eos_token_id = eos
    with pytest.raises(ConfigError, match=r"generation_config\.eos_token_id of the llama model is .* or to None"):
        LLM(model)


def test_a_logit_bias_outside_of_the_vocabulary_is_refused() -> None:
    engine = Engine(target(), EmptyDrafter())
    with pytest.raises(ConfigError, match=str(VOCAB_SIZE)):
        engine.add_request(PROMPTS[0], replace(GREEDY, logit_bias={VOCAB_SIZE: 1.0}))
    assert not engine.has_unfinished


# -- rows without a distribution -------------------------------------------------------------------------------------


@cache
def poisoned() -> CausalLM:
    """The same target, but token 63 makes everything behind it NaN."""
    model = toy_model(VOCAB_SIZE)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return CausalLM(model, execution="eager", probe=False)


class DraftsPoison(NGramDrafter):
    """Hangs the poisonous token under every pending one, beside a sound chain."""

    def propose_row(self, row: Row, budget: int) -> DraftTree:
        chain = super().propose_row(row, budget)
        paths = [chain.path_tokens(leaf) for leaf in chain.leaves]
        return DraftTree.from_paths(row.pending, [(POISON, POISON)[:budget], *paths])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("acceptance", "params"), [("match", SAMPLED), ("standard", GREEDY), ("standard", SAMPLED), ("block", SAMPLED)]
)
def test_a_drafted_token_that_turns_the_model_nan_costs_no_token(params: SamplingParams, acceptance: str) -> None:
    """Plain decoding never feeds it, so its NaN must not reach the others through masked columns: 0 * NaN is NaN."""
    never = replace(params, bad_words_ids=((POISON,),))
    engine = Engine(
        poisoned(), made("ngram", 3, cls=DraftsPoison, prompt_lookup_min=1), EngineConfig(acceptance=acceptance)
    )
    rows = [engine.add_request(prompt, never)[0] for prompt in PROMPTS]
    assert not [output.error for outputs in engine.run() for output in outputs if output.error]
    assert {row.finish_reason for row in rows} == {"length"}
    if acceptance == "match" or params is GREEDY:
        plain = Engine(target(), EmptyDrafter())
        sound = [plain.add_request(prompt, never)[0] for prompt in PROMPTS]
        finish(plain)
        assert [row.output_ids for row in rows] == [row.output_ids for row in sound]


def test_parameters_that_leave_no_token_end_their_own_row_only() -> None:
    engine = Engine(target(), drafter())
    nothing = replace(GREEDY, logit_bias=dict.fromkeys(range(VOCAB_SIZE), float("-inf")))
    (bad,) = engine.add_request(PROMPTS[0], nothing)
    rows = [engine.add_request(prompt, GREEDY)[0] for prompt in PROMPTS]
    finish(engine)
    assert bad.finish_reason == "error"
    assert tuple(tuple(row.output_ids) for row in rows) == sound_outputs(GREEDY)


# -- threads ---------------------------------------------------------------------------------------------------------


def test_an_engine_entered_from_two_threads_refuses_the_second() -> None:
    inside, may_leave = threading.Event(), threading.Event()

    class Waits(EmptyDrafter):
        def propose(self, rows: Any, budgets: Any) -> Any:
            inside.set()
            may_leave.wait(10)
            return super().propose(rows, budgets)

    engine = Engine(target(), Waits(), EngineConfig())
    rows = [engine.add_request(prompt, GREEDY)[0] for prompt in PROMPTS]
    thread = threading.Thread(target=finish, args=(engine,))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(EngineBusyError, match="thread"):
        engine.step()
    with pytest.raises(EngineBusyError, match="thread"):
        engine.abort("request-0")
    may_leave.set()
    thread.join()
    assert tuple(tuple(row.output_ids) for row in rows) == sound_outputs(GREEDY)


def test_a_prompt_that_is_too_long_is_refused_by_this_library_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers wrote besides that running it "will result in indexing errors", to the log of the server, too."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    llm = LLM("zoo:tiny")
    assert llm.tokenizer is not None
    llm.tokenizer.deprecation_warnings.clear()  # what it has said already
    with pytest.raises(ContextLengthError, match="shorten the prompt"):
        llm.generate("a " * 5000)
    llm.generate("a", replace(GREEDY, prediction="a " * 5000, max_tokens=2))
    assert "indexing errors" not in caplog.text
    llm.tokenizer("a " * 5000)
    assert "indexing errors" in caplog.text
