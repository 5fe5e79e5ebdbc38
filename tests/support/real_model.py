"""Is drafted text plain text? What every method makes of chats with a real model, and how that is compared.

For each method: which texts equal plain decoding of the same prompt and seed, greedy and sampled; how far apart the
model puts the two tokens at each first difference, and what rounding explains of it; and what was accepted. Greedy
texts are held against transformers' `generate`, too.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from foretoken import LLM, SamplingParams
from foretoken.bench.equality import MAX_FLOAT32_GAP, first_difference
from foretoken.model.lm import CausalLM, Nodes
from foretoken.retrieval.build import build
from foretoken.sessions.outputs import RequestOutput
from foretoken.testing import token_gap

QUESTIONS = (
    "Copy this line twice: ha ha ha ha ha ha ha ha, said the cat on the mat.",
    "Write a Python function add(a, b) that returns the sum of a and b, then a function sub(a, b) in the same style.",
    "Count from one to twelve in words, separated by commas.",
    "Why is the sky blue? Explain it to a child in three sentences.",
    "Tom has 12 apples. He gives 5 to Ann and buys 9 more. How many apples does Tom have now? Show your steps.",
    "Summarise in one sentence: The town of Kell lies on a river. Every spring the river floods the lower streets, and "
    "the people of Kell move their goods to the upper floors. Last year the town voted to build a dam upstream.",
    "Translate to French: Good morning. Where is the train station? Thank you very much.",
    "List five fruits, five vegetables and five spices.",
    "Write an SQL query that selects name and price from the table products where price is above 10, sorted by price.",
    'Turn this into JSON with the keys name, age and city: "Maria is 34 years old and lives in Lisbon."',
    "Write a polite e-mail to my landlord: the heating in the kitchen has not worked since Monday.",
    "Rewrite in the past tense: I walk to the park, I see a bird, I feed the bird, and I walk home.",
)
"""Chat, code, sums, a summary, a translation, lists: some repeat what was said, some do not."""

DRAFT_LAYERS = (0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 15, 19, 20, 21, 22, 23, 24, 26, 28, 29)
"""Of the target, that the small draft model is made of."""

CORPUS = (
    "The sky is blue because air scatters blue light more than red light.",
    "def mul(a, b):\n    return a * b\n\n\ndef div(a, b):\n    return a / b\n",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve.",
)
"""Goes into the datastore of ``rest``, beside the model's own answers to every other question."""

DRAFT, STORE = "<draft model>", "<datastore>"
"""Stand in configurations for what is made from the target at hand."""

CHAINS: Mapping[str, Mapping[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 6},
    "nasd": {"method": "nasd", "num_speculative_tokens": 4},
    "jacobi": {"method": "jacobi", "num_speculative_tokens": 8},
    "suffix": {"method": "suffix", "num_draft_branches": 1, "num_speculative_tokens": 8},
    "rest": {"method": "rest", "datastore": STORE, "num_draft_branches": 1, "num_speculative_tokens": 6},
    "layer_skip, exit_layer": {"method": "layer_skip", "exit_layer": 26, "num_speculative_tokens": 3},
    "layer_skip, swift": {"method": "layer_skip", "layer_search": "swift", "num_speculative_tokens": 3},
    "quantized_self": {"method": "quantized_self", "num_speculative_tokens": 3},
    "ngram>draft_model": {
        "method": "first",
        "drafters": [
            {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 6},
            {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3},
        ],
    },
}
TREES: Mapping[str, Mapping[str, Any]] = {
    "draft_model, tree": {
        "method": "draft_model",
        "model": DRAFT,
        "num_speculative_tokens": 3,
        "num_draft_branches": 2,
        "max_draft_nodes": 12,
    },
    "ngram, tree": {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "num_speculative_tokens": 5,
        "num_prompt_lookup_candidates": 3,
    },
    "nasd, tree": {"method": "nasd", "num_speculative_tokens": 3, "num_draft_branches": 2, "max_draft_nodes": 12},
    "lookahead": {"method": "lookahead", "num_speculative_tokens": 3, "window_size": 3, "guess_set_size": 3},
    "suffix, tree": {"method": "suffix", "max_draft_nodes": 12},
    "rest, tree": {"method": "rest", "datastore": STORE, "max_draft_nodes": 12},
    "token_recycling": {"method": "token_recycling", "max_draft_nodes": 16},
    "layer_skip, tree": {
        "method": "layer_skip",
        "exit_layer": 26,
        "num_speculative_tokens": 3,
        "num_draft_branches": 2,
        "max_draft_nodes": 12,
    },
    "quantized_self, tree": {
        "method": "quantized_self",
        "num_speculative_tokens": 3,
        "num_draft_branches": 2,
        "max_draft_nodes": 12,
    },
    "token_recycling+ngram": {
        "method": "union",
        "drafters": [{"method": "token_recycling"}, {"method": "ngram", "prompt_lookup_min": 1}],
        "max_draft_nodes": 16,
    },
}
METHODS = {**CHAINS, **TREES}

SAMPLED_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on."""

    name: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0


@dataclass(frozen=True)
class Difference:
    """Where a text leaves its reference.

    Args:
      gap: by how much the logits of the model in float32 must change for one token to come instead of the other.
      bound: up to which rounding explains it.
    """

    request: str
    index: int
    got: int
    want: int
    gap: float
    bound: float


@dataclass(frozen=True)
class Evidence:
    """What one method did with all requests."""

    method: str
    num_texts: int
    differences: tuple[Difference, ...]
    num_steps: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    from_generate: tuple[Difference, ...] = field(default=())


def chat_requests(tokenizer: PreTrainedTokenizerBase, questions: Seq[str], max_new_tokens: int) -> list[Request]:
    """Every question through the chat template, greedy and sampled with a seed of its own."""
    found = []
    for i, question in enumerate(questions):
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        greedy = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
        sampled = replace(greedy, temperature=SAMPLED_TEMPERATURE, top_p=0.95, seed=100 + i)
        found += [Request(f"{i} greedy", ids, greedy), Request(f"{i} sampled", ids, sampled)]
    return found


def shallow(model: PreTrainedModel, layers: Seq[int]) -> LlamaForCausalLM:
    """A small Llama of some of the target's layers; it shares their weights, and the tokenizer."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    with torch.device("meta"):
        small = LlamaForCausalLM(config)
    weights = {}
    for name, weight in model.state_dict().items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if match is None:
            weights[name] = weight
        elif int(match[1]) in layers:
            weights[f"model.layers.{layers.index(int(match[1]))}.{match[2]}"] = weight
    small.load_state_dict(weights, assign=True)
    small.tie_weights()
    small.model.rotary_emb = model.model.rotary_emb  # its frequencies are not weights
    small.generation_config = model.generation_config
    return small.eval()


class Study:
    """A target in one dtype and one mode of exactness, its plain texts, and what every method makes of them.

    Args:
      model, tokenizer: the target, which stays as it is.
      exactness: of the `LLM`.
      exact: the same weights in float32, which measure how close two tokens were; by default the target itself.
      batch_size: rows that run at once when drafting. Plain decoding runs every row alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        requests: Seq[Request],
        *,
        exactness: str = "default",
        exact: CausalLM | None = None,
        batch_size: int = 1,
        folder: Path,
    ) -> None:
        self.llm = LLM(model, tokenizer=tokenizer, exactness=exactness, max_num_seqs=batch_size)
        self.model, self.requests, self.folder = model, requests, folder
        self.exact = exact or self.llm.target
        self._noises: dict[int, float] = {}

    @cached_property
    def plain(self) -> list[tuple[int, ...]]:
        """Tokens of every request, decoded alone and without drafts."""
        return [tuple(self._run(self.llm, [request])[0].outputs[0].token_ids) for request in self.requests]

    @cached_property
    def generated(self) -> dict[int, tuple[int, ...]]:
        """What `generate` of transformers makes of the greedy requests, by their place."""
        found = {}
        for place, request in enumerate(self.requests):
            if request.is_greedy:
                ids = torch.tensor([request.prompt_ids])
                text = self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=request.params.max_tokens,
                )
                found[place] = tuple(text[0, ids.shape[1] :].tolist())
        return found

    @property
    def keeps_bits(self) -> bool:
        """Whether every draft has the bits of plain decoding."""
        return self.llm.promise.keeps_bits

    @cached_property
    def _draft(self) -> LlamaForCausalLM:
        return shallow(self.model, DRAFT_LAYERS)

    @cached_property
    def _store(self) -> str:
        """A datastore of a few texts and of the greedy answers to every other question."""
        answers = [self.llm.tokenizer.decode(tokens) for place, tokens in enumerate(self.plain) if place % 4 == 0]
        corpus = self.folder / "corpus.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in (*CORPUS, *answers)), encoding="utf-8")
        build([corpus], self.llm.tokenizer, self.folder / "store")
        return str(self.folder / "store")

    def config(self, method: str) -> dict[str, Any]:
        """The configuration of a method, with what it needs of this target; it drafts as much as it can."""
        return {"length_policy": "fixed", **self._filled(METHODS[method])}

    def _filled(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._filled(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self._filled(part) for part in value]
        return self._draft if value is DRAFT else self._store if value is STORE else value

    def evidence(self, method: str, *, with_generate: bool = False) -> Evidence:
        """Draft by a method, and compare."""
        plain = self.plain  # first, so that both have seen the same calls before
        outputs = self._run(self.llm.with_speculative_config(self.config(method)), self.requests)
        texts = [tuple(output.outputs[0].token_ids) for output in outputs]
        counts = [output.metrics.speculative_decoding for output in outputs]
        return Evidence(
            method,
            len(texts),
            self.differences(texts, dict(enumerate(plain))),
            num_steps=sum(count["num_steps"] for count in counts),
            num_tokens=sum(map(len, texts)),
            num_drafted=sum(count["num_draft_tokens"] for count in counts),
            num_accepted=sum(count["num_accepted_draft_tokens"] for count in counts),
            from_generate=self.differences(texts, self.generated) if with_generate else (),
        )

    def differences(self, texts: Seq[tuple[int, ...]], wanted: Mapping[int, tuple[int, ...]]) -> tuple[Difference, ...]:
        """The first difference of every text that has one."""
        found = []
        for place, want in wanted.items():
            index = first_difference(want, texts[place])
            if index is None:
                continue
            request = self.requests[place]
            pair = texts[place][index], want[index]  # neither can have ended: what ends a text is a token of it
            gap = self._gap(request, want[:index], pair)
            found.append(Difference(request.name, index, *pair, gap, self._bound(place)))
        return tuple(found)

    def _gap(self, request: Request, output: Seq[int], pair: tuple[int, int]) -> float:
        """By how much logits must change for one token of the pair to come instead of the other.

        Until their scores are equal, or until one of them crosses the edge of the nucleus: then the odds of the tokens
        that are no likelier than it, against all others, are those of 1 - top_p. A token beyond the edge can come by
        crossing it alone.
        """
        whole = replace(request.params, top_p=1.0)
        gap = token_gap(self.exact, request.prompt_ids, output, whole, 0, pair)
        if request.params.top_p == 1.0:
            return gap
        logits = _logits(self.exact, [*request.prompt_ids, *output])[-1].double() / request.params.temperature
        law = logits.softmax(0)
        tails = torch.stack([law[law <= law[token]].sum() for token in pair]).clamp(max=1.0)
        edges = torch.logit(tails) - torch.logit(torch.tensor(1.0 - request.params.top_p, dtype=torch.float64))
        if bool((edges <= 0).any()):
            return float(-edges.min())
        return min(gap, float(edges.min()))

    def _bound(self, place: int) -> float:
        """The largest gap that rounding explains.

        In half precision it is what rounding was measured to change in the difference of two logits: half precision
        against float32, the same weights, over the plain text. No odds of one set of tokens against the others change
        by more. Sampling divides logits by the temperature, and errors with them.
        """
        if self.exact is self.llm.target:
            return MAX_FLOAT32_GAP
        if place not in self._noises:
            text = [*self.requests[place].prompt_ids, *self.plain[place]]
            rough, fine = (_logits(lm, text).float() for lm in (self.llm.target, self.exact))
            errors = rough - fine  # (N, V)
            self._noises[place] = float((errors.amax(1) - errors.amin(1)).max())
        return self._noises[place] / (self.requests[place].params.temperature or 1.0)

    @staticmethod
    def _run(llm: LLM, requests: Seq[Request]) -> list[RequestOutput]:
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        return llm.generate(prompts, [request.params for request in requests], use_tqdm=False)


@torch.inference_mode()
def _logits(lm: CausalLM, text: Seq[int]) -> torch.Tensor:
    """(N, V)"""
    return lm.forward(Nodes.from_chains([text]), lm.new_cache(1, capacity=len(text)))[0]
