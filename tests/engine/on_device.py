"""Everything that decodes or trains, on a simulated GPU: what `test_accelerator.py` runs in a process of its own.

Texts are those of the CPU, run by the same modules: the device refuses and lays out as a GPU does, but computes alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from guarantee import METHODS, TEXTS
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import foredraft
import simulated_device
from architectures import ARCHITECTURES, target_model
from foredraft import LLM, SamplingParams, StructuredOutputs, zoo
from foredraft.classic.ngram_assisted import NGramStorage, OneLevelNGramStorage, ngram_assisted_speculative_generate
from foredraft.classic.sampling import autoregressive_generate, speculative_generate
from foredraft.classic.sampling.base_decoding import beam_search_generate
from foredraft.classic.utils.logits_processor import GreedyProcessor, MultinomialProcessor
from foredraft.cli import app
from foredraft.errors import ConfigError
from foredraft.methods import methods
from foredraft.sampling import precision
from foredraft.testing import perturbed, toy_model
from foredraft.zoo.manifest import root
from harness import random_ids
from serving import Running, running

DEVICE = "sim"
ON_CPU_ALONE = {"quantized_self"}
UNIONS = ("suffix+token_recycling", "auto")
DECODING = {**{name: config for name, config in METHODS.items() if name not in ON_CPU_ALONE}, **{u: u for u in UNIONS}}
RULES: dict[str, dict[str, Any]] = {
    "rejection": {"method": "draft_model", "rejection_sample_method": "rejection"},
    "block": {"method": "draft_model", "rejection_sample_method": "block"},
    "self-drafted": {"method": "layer_skip", "rejection_sample_method": "rejection"},
    "looked up": {"method": "ngram", "prompt_lookup_min": 1, "rejection_sample_method": "rejection"},
    "swift": {"method": "layer_skip", "layer_search": "swift"},
    "view that changes": {"method": "sparse_kv", "kv_budget": 24, "kv_refresh": 4},
    "view that is voted for": {"method": "sparse_kv", "kv_selector": "snapkv", "kv_budget": 24, "kv_window": 8},
}
LENGTH = 8
GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=LENGTH)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.4)
MODES = {"greedy": GREEDY, "sampled": SAMPLED}
PARAMS = {
    **MODES,
    "logprobs": replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "several": replace(SAMPLED, n=2),
    "penalised": replace(
        GREEDY, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        no_repeat_ngram_size=3, min_tokens=3, logit_bias={5: 2.0}, bad_words=("the",),
    ),
    "truncated": replace(GREEDY, temperature=0.9, top_p=0.8, top_k=30, min_p=0.02, typical_p=0.95),
    "stopped": replace(GREEDY, stop=(" was", "return")),
    "predicted": replace(GREEDY, prediction=" a girl. Once upon a time there was a boy"),
    "shortened": replace(GREEDY, num_speculative_tokens=2),
    "structured": replace(GREEDY, structured_outputs=StructuredOutputs(regex=r"(the|a) [a-z]{3,9}( and [a-z]{3,9})+")),
    "chosen": replace(SAMPLED, structured_outputs=StructuredOutputs(choice=["yes", 'no "maybe"'])),
}  # fmt: skip
full = pytest.mark.full
OFTEN = ("token_recycling", "layer_skip", "draft_model, tree", "eagle3")
"""One of each kind of step: tables on the host, the target's own layers and cache, another model, and a head."""


def often(chosen: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Names, those that are not chosen in the whole matrix alone."""
    return [name if name in chosen else pytest.param(name, marks=full) for name in names]


@cache
def llm(device: str = DEVICE) -> LLM:
    return LLM("zoo:tiny", device=device, dtype="float32", execution="eager", max_num_seqs=4, num_cached_prefixes=4)


def said(texts: list[Any]) -> list[Any]:
    """What must be the same: tokens, text, and why it ended."""
    return [[(one.token_ids, one.text, one.finish_reason) for one in text.outputs] for text in texts]


@cache
def on_cpu(*names: str, length: int = LENGTH) -> list[Any]:
    """Plain decoding on the CPU, by the names of parameters, which rows have in turn."""
    return llm("cpu").generate(TEXTS, in_turn(names, length))


def in_turn(names: tuple[str, ...], length: int = LENGTH) -> list[SamplingParams]:
    """Parameters of every row; those that begin later end sooner."""
    return [replace(PARAMS[names[row % len(names)]], max_tokens=length if row < 4 else 4) for row in range(len(TEXTS))]


def num_accepted(texts: list[Any]) -> int:
    return sum(step.accepted for text in texts for step in text.metrics.trace)


# -- the device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: there.scatter(0, here.long(), 1.0),
        lambda here, there: torch.where(here > 0, here, there),
        lambda here, there: there[here.long()],
        lambda here, there: here.index_put((there.long(),), there),
        lambda here, there: here.masked_fill(there > 0, 1.0),
        lambda here, there: torch.nn.functional.linear(here, there),
        lambda here, there: torch.rand(3, device=DEVICE, generator=torch.Generator()),
    ],
)
def test_tensors_of_two_devices_are_not_mixed(mixed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    there = torch.tensor([0.0, 1.0, 2.0])
    with pytest.raises(RuntimeError, match=r"device|indices"):
        mixed(there.to(DEVICE), there)


def test_a_tensor_of_the_device_is_none_of_numpy() -> None:
    with pytest.raises(TypeError, match="numpy"):
        torch.zeros(2, device=DEVICE).numpy()


def test_what_cuda_lets_pass_passes() -> None:
    """Scalars, index tensors of the CPU, lists, copies; transfers are counted."""
    simulated_device.transfers.clear()
    here = torch.arange(4.0, device=DEVICE)
    here[[0, 3]] += torch.tensor(2.0)
    here[1:3] = torch.tensor([7.0, 8.0])
    assert here[torch.tensor([3, 1])].tolist() == [5.0, 7.0]
    assert bool((here > 7).any())
    assert here.cpu().tolist() == [2.0, 7.0, 8.0, 5.0]
    sizes = [size for direction, size in simulated_device.transfers if direction == simulated_device.TO_HOST]
    assert sizes == [2, 1, 4]
    assert len(simulated_device.transfers) == 3 + 3  # both numbers of the list twice, and those copied


def test_attention_and_equal_values_come_in_another_form() -> None:
    """A fault of the first hour on a GPU was a view of such a result."""
    states = torch.rand(2, 3, 5, 8).to(DEVICE)
    with torch.inference_mode():
        found = torch.nn.functional.scaled_dot_product_attention(states, states, states)
    assert not found.is_contiguous()
    with pytest.raises(RuntimeError, match="view"):
        found.view(2, 15, 8)
    assert torch.ones(4, device=DEVICE).topk(2).indices.tolist() != torch.ones(4).topk(2).indices.tolist()


# -- decoding ------------------------------------------------------------------------------------------------------


def test_every_method_is_tried() -> None:
    tried = {config if isinstance(config, str) else config["method"] for config in DECODING.values()}
    combining = {name for name, method in methods().items() if method.combines and name not in tried}
    assert set(methods()) - combining - {"none"} == (tried | ON_CPU_ALONE) & set(methods())
    with pytest.raises(ConfigError, match="quantized_self"):
        llm().with_speculative_config("quantized_self")


@pytest.mark.parametrize(
    "modes", [("greedy", "sampled"), pytest.param(("sampled", "greedy"), marks=full)], ids=" beside ".join
)
@pytest.mark.parametrize("name", often(OFTEN, DECODING))
def test_every_method_says_what_plain_decoding_on_the_cpu_says(name: str, modes: tuple[str, ...]) -> None:
    """Ragged rows, more than run at a time, greedy ones beside sampled ones."""
    length = LENGTH if name in OFTEN else 12  # in which lookups find something
    texts = llm().with_speculative_config(DECODING[name]).generate(TEXTS, in_turn(modes, length))
    assert said(texts) == said(on_cpu(*modes, length=length))
    assert num_accepted(texts) > 0


@pytest.mark.parametrize("name", often(["rejection", "block"], RULES))
def test_every_rule_says_what_it_says_on_the_cpu(name: str) -> None:
    """Rejection gives other texts than plain decoding; noise is keyed, so they are those of the CPU."""
    params = replace(SAMPLED, top_p=1.0, n=2)
    here, there = (
        llm(device).with_speculative_config(RULES[name]).generate(TEXTS[:2], params) for device in ("sim", "cpu")
    )
    assert said(here) == said(there)
    assert num_accepted(here) > 0


@pytest.mark.parametrize("config", ["token_recycling", pytest.param("eagle3", marks=full)])
def test_every_parameter_means_what_it_means_on_the_cpu(config: str) -> None:
    """Rows with each, side by side."""
    pytest.importorskip("llguidance", reason="the extra [structured] is not installed")
    asked = [(name, text) for name in PARAMS if name not in MODES for text in TEXTS[:1]]
    here, there = (
        made.generate([text for _, text in asked], [PARAMS[name] for name, _ in asked])
        for made in (llm().with_speculative_config(config), llm("cpu"))
    )
    for (name, _), mine, its in zip(asked, here, there, strict=True):
        assert said([mine]) == said([its]), name
        if PARAMS[name].logprobs is not None:
            mine, its = (
                [one.logprob for each in text.outputs[0].logprobs for one in each.values()] for text in (mine, its)
            )
            assert mine == pytest.approx(its, abs=1e-3)


@pytest.mark.parametrize("config", often(["eagle3"], ["eagle3", "token_recycling"]))
def test_prefixes_are_taken_over(config: str) -> None:
    chosen = llm().with_speculative_config(config)
    for _ in range(2):
        texts = chosen.generate(TEXTS[3], GREEDY)
        assert said(texts) == said(on_cpu("greedy"))[3:4]
    assert texts[0].num_cached_tokens > 0


@pytest.mark.parametrize(
    ("method", "depth", "mode"),
    [
        ("ngram", 0, "greedy"),
        ("eagle3", 3, "sampled"),
        pytest.param("ngram", 0, "sampled", marks=full),
        pytest.param("eagle3", 3, "greedy", marks=full),
    ],
)
def test_a_step_waits_for_the_device_once_for_its_tokens_and_once_per_level_of_a_head(
    method: str, depth: int, mode: str
) -> None:
    """Tokens and scores of a level came in two round trips, and with each level the whole draft vocabulary went there,
    or the numbers of all tokens for the noise."""
    config = {"method": method, "num_speculative_tokens": 3}
    chosen = llm().with_speculative_config(config)
    chosen.generate(TEXTS[0], PARAMS[mode])
    simulated_device.transfers.clear()
    (text,) = chosen.generate(TEXTS[0], PARAMS[mode])
    num_steps = len(text.metrics.trace)
    waits = [size for direction, size in simulated_device.transfers if direction == simulated_device.TO_HOST]
    assert num_steps <= len(waits) <= num_steps * (1 + depth)
    assert max(size for _, size in simulated_device.transfers) < 512


def test_a_step_makes_one_copy_to_the_device_and_none_of_the_cache() -> None:
    """Keys and values of all tokens were copied once per group of heads in every layer as soon as there was a mask;
    tokens, lengths, depths and masks came in copies of their own.

    Operators may grow by what another version of transformers adds to a layer, not by a copy per layer.
    """
    half = LLM("zoo:tiny", device=DEVICE, dtype="bfloat16")
    num_operators, num_uploads = (45, 48, 49), (1, 1, 3)  # of a tree also the moves of a commit, and what is observed
    for (name, config), operators, uploads in zip(gpu_check.STEP_ARMS, num_operators, num_uploads, strict=False):
        drafting = half.with_speculative_config(config)
        for mode in ("greedy", "T=1"):
            steps = gpu_check.count_steps(drafting, replace(gpu_check.MODES[mode], max_tokens=10), TEXTS[3:4])
            counted = [step for step in steps if (step.num_nodes > 1) == (name != "plain")]
            assert counted
            # keys of the noise come later
            assert max(step.num_uploads for step in counted) <= uploads + (mode != "greedy")
            assert max(step.copied_bytes / step.num_nodes for step in counted) < 10_000  # of nodes, not of columns
            if mode == "greedy":
                assert max(step.num_operators for step in counted) <= operators * half.target.num_layers


@pytest.fixture
def _no_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device without float64, as MPS is."""
    monkeypatch.setattr(precision, "WITHOUT_DOUBLE", {DEVICE})
    simulated_device.refused.add(torch.float64)
    yield
    simulated_device.refused.clear()


@pytest.mark.usefixtures("_no_float64")
@pytest.mark.parametrize("name", often(["eagle3"], [None, *DECODING, "rejection", "block"]))
def test_a_device_without_float64_draws_the_tokens_of_the_cpu(name: str | None) -> None:
    """Noise was float64 on the device, so that sampled decoding and heads raised on MPS."""
    fresh = LLM("zoo:tiny", device=DEVICE, dtype="float32", execution="eager", max_num_seqs=4)
    config = {None: None, **DECODING, **RULES}[name]
    params = in_turn(("greedy", "sampled"))
    texts = fresh.with_speculative_config(config).generate(TEXTS, params)
    assert said(texts) == said(llm("cpu").with_speculative_config(config).generate(TEXTS, params))
    assert name is None or num_accepted(texts) > 0


# -- the check of a GPU ----------------------------------------------------------------------------------------------

SMALL = (
    *("--device", DEVICE, "--quick", "--methods", "ngram", "--models", "random:toy", "--rows", "1", "2"),
    *("--num-tokens", "12", "--lengths", "32", "--buckets", "1", "3", "--shapes", "toy"),
)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long on a simulated device, in a few examples."""
    monkeypatch.setattr(gpu_check, "BACKENDS", {"chosen by torch": None})
    monkeypatch.setattr(gpu_check, "VERIFIED", ())
    monkeypatch.setattr(gpu_check, "TEXTS", TEXTS[:2])
    monkeypatch.setattr(gpu_check, "DTYPES", ("bfloat16",))
    monkeypatch.setattr(gpu_check, "STEP_ARMS", gpu_check.STEP_ARMS[:2])


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]


@full
@pytest.mark.usefixtures("_small")
@pytest.mark.full
def test_the_gpu_check_runs_and_its_controls_fail(tmp_path: Path) -> None:
    arms = ["--arms", "plain", "ngram", "suffix+eagle3", "draft_model", "oracle", "transformers"]
    status = gpu_check.main([*SMALL, *arms, "--budget", "3000", "--out", str(tmp_path)])
    lines = lines_of(tmp_path)
    assert status == 0, [line for line in lines if line["status"] == "fails"]
    assert lines[0]["section"] == "conditions"
    assert lines[0]["versions"]["torch"] == torch.__version__
    by = {section: [line for line in lines if line["section"] == section] for section in gpu_check.SECTIONS}
    controls = [line for line in by["check"] if line["arm"] == gpu_check.CONTROL.name]
    assert {line["status"] for line in controls} == {"holds"}
    assert all(line["gap"] > line["near_tie"] for line in controls)
    assert {line["arm"] for line in by["check"]} == {"ngram", gpu_check.CONTROL.name}
    neighbours = [line for line in by["bits"] if line["operation"].startswith("control") and line["bucket"] > 1]
    assert neighbours
    assert not any(line["same_beside_others"] for line in neighbours)
    speeds = {(line["model"], line["rows"], line["arm"]) for line in by["speed"] if line["status"] == "told"}
    measured = {arm for arm in arms[1:] if arm != "suffix+eagle3"}  # for which the model has no head
    assert {("random:toy", rows, arm) for rows in (1, 2) for arm in measured} == speeds
    oracle = next(line for line in by["speed"] if line["arm"] == "oracle")
    assert oracle["tokens_per_step"] > 2
    assert oracle["same_as_plain"] == oracle["rows"]
    assert {line["context"] for line in by["growth"] if "kv_bytes" in line} == {32}
    assert "| random:toy |" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_texts_are_drafted_for_in_half_precision() -> None:
    """Near-ties part from plain texts in bfloat16, so only lengths are compared: what a row says is finite."""
    half = LLM("zoo:tiny", "suffix+eagle3", device=DEVICE, dtype="bfloat16")
    for params in MODES.values():
        texts = half.generate(TEXTS, replace(params, ignore_eos=True))
        assert [len(text.outputs[0].token_ids) for text in texts] == [LENGTH] * len(TEXTS)
        assert num_accepted(texts) > 0


@full
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_decodes(name: str) -> None:
    """In float64: ragged rows, trees, windows, several kinds of masks."""
    prompts = [random_ids(length, length) for length in (40, 5, 20)] + [[5, 6, 7] * 4]
    params = replace(GREEDY, temperature=0.7, max_tokens=16, ignore_eos=True)
    plain = LLM(target_model(name), execution="eager").generate(prompts, params)
    for config in ("token_recycling", {"method": "layer_skip", "exit_layer": 1}):
        there = LLM(target_model(name).to(DEVICE)).with_speculative_config(config)
        assert [text.outputs[0].token_ids for text in there.generate(prompts, params)] == [
            text.outputs[0].token_ids for text in plain
        ]


# -- other faces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", often(["eagle3"], ["eagle3", "ngram"]))
def test_the_hook_gives_tensors_of_the_device(method: str) -> None:
    """Sequences, scores and logits of ``model.generate``, greedy and sampled."""
    model = AutoModelForCausalLM.from_pretrained(zoo.path("tiny", "target"), dtype=torch.float32).to(DEVICE).eval()
    head = {} if method == "ngram" else {"model": str(root() / "tiny" / method)}
    ids = torch.tensor([llm().tokenizer(TEXTS[0]).input_ids], device=DEVICE)
    plain = model.generate(ids, max_new_tokens=LENGTH, do_sample=False)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for do_sample in (False, True):
        found = model.generate(
            ids,
            max_new_tokens=LENGTH,
            do_sample=do_sample,
            custom_generate=foredraft.speculate(method, **head),
            **wanted,
        )
        tensors = [found.sequences, *found.scores, *found.logits]
        assert {tensor.device.type for tensor in tensors} == {DEVICE}
        assert do_sample or found.sequences.tolist() == plain.tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("processor", "uses_cache"),
    [
        pytest.param(processor, uses_cache, marks=() if uses_cache and number else full)
        for number, processor in enumerate((GreedyProcessor(), MultinomialProcessor(1.0)))
        for uses_cache in (True, False)
    ],
)
def test_the_classic_functions_say_what_they_say_on_the_cpu(processor: Any, uses_cache: bool) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
    options = {"max_gen_len": LENGTH, "logits_processor": processor, "use_cache": uses_cache}

    def everything(move: Callable[[Any], Any]) -> list[Any]:
        target, drafter = move(toy_model()), move(perturbed(toy_model(), 0.1, seed=1))
        torch.manual_seed(5)
        found = [
            autoregressive_generate(prompt, target, **options),
            speculative_generate(prompt, drafter, target, gamma=3, **options),
            beam_search_generate(prompt, target, max_gen_len=8, num_beams=3),
        ]
        for storage in (NGramStorage(n=3, vocab_size=64), OneLevelNGramStorage(n=3, vocab_size=64)):
            found.append(
                ngram_assisted_speculative_generate(prompt, storage, target, gamma=3, filler_top_k=3, **options)
            )
        return found

    assert everything(lambda model: model.to(DEVICE)) == everything(lambda model: model)


@full
def test_the_server_answers() -> None:
    from foredraft.serve.served import ServedModels

    served = ServedModels.of(["tiny"], ["lookup=ngram", "plain=none"]).over(llm().with_speculative_config("eagle3"))
    with running(served) as server:
        found = [ask(server, model) for model in ("tiny", "lookup", "plain")]
    assert found[0] == found[1] == found[2] == on_cpu("greedy")[0].outputs[0].text


def ask(server: Running, model: str) -> str:
    body = {"model": model, "prompt": TEXTS[0], "max_tokens": LENGTH, "temperature": 0}
    return str(server.post("/v1/completions", **body).json()["choices"][0]["text"])


# -- verbs ---------------------------------------------------------------------------------------------------------


def foredraft_does(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@full
def test_verify_finds_no_fault() -> None:
    """Its settings and enumerated distributions, as many as there is time for."""
    given = ("--model", "zoo:tiny", "--device", DEVICE, "--dtype", "float32", "--method", "eagle3", "--json")
    done = CliRunner().invoke(app, ["verify", *given, "--num-prompts", "2", "--max-new-tokens", "16"])
    found = json.loads(done.stdout)
    assert found["status"] != "not lossless", found["sentence"]
    holding = [(one["feature"], one["check"]) for one in found["findings"] if one["status"] == "holds"]
    assert holding[:2] == [("greedy", "tokens"), ("greedy", "log-probabilities")]


@pytest.mark.parametrize("method", often(["medusa"], ["medusa", "eagle3", "hydra++", "draft_model"]))
def test_a_head_is_trained_and_drafts(method: str, tmp_path: Path) -> None:
    """Answers, features, losses, checkpoints, the measurement, and what is read back."""
    prompts, head = tmp_path / "prompts.txt", tmp_path / "head"
    prompts.write_text(
        "\n".join(f"Once there was a {one} who {other}" for one in ("dog", "girl") for other in ("ran", "sang"))
    )
    small = ("--max-new-tokens", "12", "--batch-tokens", "48", "--draft-vocabulary-size", "256", "--held-out", "8")
    on = ("--target", "zoo:tiny", "--device", DEVICE, "--dtype", "float32", "--evaluate-tokens", "8", "--json")
    told = foredraft_does("train", method, "--prompts", str(prompts), "--raw", "--out", str(head), *small, *on)
    assert json.loads(told.splitlines()[-1])["tau"] >= 1.0
    trained = llm().with_speculative_config({"model": str(head)})
    assert said(trained.generate(TEXTS, in_turn(("greedy",)))) == said(on_cpu("greedy"))
