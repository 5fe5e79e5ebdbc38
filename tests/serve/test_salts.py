"""Requests with a salt share nothing with those of another: neither beginnings nor what drafters learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from foredraft.config.sampling import SamplingParams
from foredraft.errors import PromptError
from foredraft.llm import LLM
from foredraft.serve.ray.affinity import Affinity
from foredraft.serve.served import Served
from serving import MODEL, Running, running

PROMPT = "The quick brown fox jumps over the lazy dog and runs away from the farmer and his wife."
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def keeping() -> Iterator[Running]:
    llm = LLM(MODEL, "draft_model", num_cached_prefixes=8, prefill_chunk_size=64)
    with running(Served({"tiny": llm})) as found:
        yield found


def cached(server: Running, prompt: str, salt: str | None, path: str = "/v1/completions") -> int:
    """Tokens that an answer has taken over."""
    asked: dict[str, Any] = {
        "/v1/completions": {"prompt": prompt, "max_tokens": 4},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": prompt}], "max_tokens": 4},
        "/v1/responses": {"input": prompt, "max_output_tokens": 4},
    }[path]
    answer = server.post(path, **asked, temperature=0, cache_salt=salt)
    assert "x-foredraft-warning" not in answer.headers
    usage = answer.json()["usage"]
    return int(usage.get("prompt_tokens_details", usage.get("input_tokens_details"))["cached_tokens"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_beginnings_are_shared_with_requests_of_the_same_salt_alone(keeping: Running, path: str) -> None:
    """The field was ignored, so that times told one client what another had asked."""
    prompt = f"{path} {PROMPT}"
    template = 10  # tokens of it, and of the path, that all prompts begin with
    assert cached(keeping, prompt, None, path) < template
    whole = cached(keeping, prompt, None, path)
    assert whole > 2 * template
    for salt in ("mine", "yours"):
        assert cached(keeping, prompt, salt, path) < template
        assert cached(keeping, prompt, salt, path) == whole
    assert cached(keeping, prompt, None, path) == whole
    assert cached(keeping, prompt, "third", path) < template


@pytest.mark.parametrize("wrong", ["", 5, ["a"], "x" * 1025])
def test_a_salt_is_a_text(keeping: Running, wrong: Any) -> None:
    refused = keeping.post("/v1/completions", prompt="a", cache_salt=wrong)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_prompts_have_salts_in_python() -> None:
    llm = LLM(MODEL, None, num_cached_prefixes=4, prefill_chunk_size=64)
    (first,) = llm.generate({"prompt": PROMPT, "cache_salt": "mine"}, GREEDY)
    (other,) = llm.generate({"prompt": PROMPT, "cache_salt": "yours"}, GREEDY)
    (again,) = llm.generate([{"prompt_token_ids": list(first.prompt_token_ids), "cache_salt": "mine"}], GREEDY)
    (none,) = llm.generate(PROMPT, GREEDY)
    assert (other.num_cached_tokens, none.num_cached_tokens) == (0, 0)
    assert again.num_cached_tokens > 0
    assert first.outputs[0].token_ids == other.outputs[0].token_ids == again.outputs[0].token_ids
    with pytest.raises(PromptError, match="cache_salt"):
        llm.generate({"prompt": PROMPT, "cache_salt": ""}, GREEDY)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["suffix", "nasd", "token_recycling", "suffix+ngram"])
def test_drafters_that_learn_from_all_requests_do_not_draft_for_those_with_a_salt(method: str) -> None:
    """Nor do they learn from them: drafts, which clients may see, would be the texts of others."""
    parts = [{"method": part, **({} if part == "ngram" else {"shared": True})} for part in method.split("+")]
    config = parts[0] if len(parts) == 1 else {"method": "union", "drafters": parts}
    given = {**config, "length_policy": "fixed"} if len(parts) == 1 else config
    llm = LLM(MODEL, given)
    (plain,) = llm.with_speculative_config(None).generate(PROMPT, GREEDY)
    salted = [llm.generate({"prompt": PROMPT, "cache_salt": salt}, GREEDY)[0] for salt in ("mine", "mine", "yours")]
    for output in salted:
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert output.metrics.speculative_decoding["num_proposed_tokens"] == 0
    first = LLM(MODEL, given).generate(PROMPT, GREEDY)
    after = [llm.generate(PROMPT, GREEDY)[0] for _ in range(2)]
    numbers = [each.metrics.speculative_decoding["num_proposed_tokens"] for each in (*first, *after)]
    assert numbers[0] == numbers[1] != numbers[2], "the second has learned from the one before, and from nothing else"
    assert [output.outputs[0].token_ids for output in after] == [plain.outputs[0].token_ids] * 2


def test_routing_does_not_lead_where_another_salt_has_been() -> None:
    affinity, loads, ids = Affinity(block=4), {"a": 0, "b": 0}, list(range(16))
    first = affinity.choose(ids, "", loads, "mine")
    assert affinity.choose(ids, "", loads, "mine") == first
    assert affinity.num_hits == 1
    for salt in ("yours", ""):
        affinity.choose(ids, "", loads, salt)
    assert affinity.num_hits == 1
