"""Defaults of a model's generation_config.json: request > file > default, in the library, the server and the verbs."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams, speculate, trajectory, zoo
from foredraft.cli import app
from foredraft.config.sampling import MODEL_DEFAULTS
from foredraft.errors import ConfigError
from foredraft.loading.info import sampling_defaults
from foredraft.serve.parsed_request import read_params
from foredraft.verify.subjects import LLMSubject

STORY = "Once upon a time there was a king."
SET = {"temperature": 0.6, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with defaults under which sampling has one outcome."""
    path = tmp_path_factory.mktemp("model")
    model, _, tokenizer = zoo.load("tiny")
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=[0, 3], pad_token_id=0, **SET)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), "ngram", dtype="float32")


@pytest.fixture(scope="module")
def hook(folder: Path) -> list[int]:
    """What transformers and the hook make of the story."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer(STORY, return_tensors="pt")
    outputs = [model.generate(**asked), model.generate(**asked, custom_generate=speculate("ngram"))]
    plain, hooked = [output[0, asked["input_ids"].shape[1] :].tolist() for output in outputs]
    assert plain == hooked
    return plain


def said(llm: LLM, params: Any = None) -> list[int]:
    return list(llm.generate(STORY, params)[0].outputs[0].token_ids)


def test_an_llm_says_what_generate_says(llm: LLM, hook: list[int]) -> None:
    """It sampled at temperature 1 without a word, while transformers, vLLM and the hook followed the file."""
    assert said(llm) == said(llm, SamplingParams()) == said(llm, {}) == hook
    assert said(llm, SamplingParams(max_tokens=7)) == hook[:7]
    assert said(llm, [{"max_tokens": 7}]) == hook[:7]
    with llm.stream(STORY) as stream:
        assert [token for delta in stream for token in delta.token_ids] == hook
    assert said(llm.with_speculative_config("suffix")) == hook


def test_what_a_request_sets_goes_before_the_file(llm: LLM, folder: Path) -> None:
    """Also a number that is the default of `SamplingParams`."""
    bare = LLM(str(folder), dtype="float32", generation_config="none")
    given = SamplingParams(temperature=1.0, top_k=0, repetition_penalty=1.0, max_tokens=16, seed=3)
    assert said(llm, given) == said(bare, SamplingParams(seed=3)) == said(bare, given)
    assert said(llm, SamplingParams(seed=3).explicit()) == said(bare, given)
    assert said(llm, SamplingParams(seed=3)) != said(bare, SamplingParams(seed=3))
    assert bare.sampling_defaults == {}
    assert bare.get_default_sampling_params() == SamplingParams()


def test_defaults_are_told(llm: LLM, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = {"repetition_penalty": 1.3, "temperature": 0.6, "top_k": 1, "max_tokens": 12}
    assert llm.sampling_defaults == wanted
    assert llm.get_default_sampling_params() == SamplingParams(**wanted)
    assert llm.get_tokenizer() is llm.tokenizer
    with caplog.at_level(logging.INFO, logger="foredraft"):
        LLM(str(folder))
    (line,) = [message for message in caplog.messages if "generation config" in message]
    assert (
        "sampling defaults from its generation config: "
        "repetition_penalty=1.3, temperature=0.6, top_k=1, max_tokens=12" in line
    )


def test_unset_is_what_nobody_has_set_however_parameters_travel() -> None:
    defaults = {"temperature": 0.6, "top_k": 5, "max_tokens": 40}
    unset = SamplingParams(seed=1)
    for same in (
        unset,
        replace(unset, seed=1),
        copy.deepcopy(unset),
        pickle.loads(pickle.dumps(unset)),
        unset.clone(),
        SamplingParams(**vars(unset)),
    ):
        assert same == unset
        assert same.filled(defaults) == SamplingParams(seed=1, temperature=0.6, top_k=5, max_tokens=40)
    for given in (SamplingParams(temperature=1.0, top_k=0, max_tokens=16), SamplingParams(max_tokens=None), unset):
        filled = given.explicit()
        assert filled == given
        assert filled.filled(defaults) == given
    half = SamplingParams(temperature=1)
    assert half.filled(defaults) == SamplingParams(temperature=1.0, top_k=5, max_tokens=40)
    assert replace(half, top_k=0).filled(defaults).top_k == 0
    assert unset.filled({}) is unset
    assert repr(SamplingParams()) == "SamplingParams()"
    assert json.dumps([unset.temperature, unset.max_tokens]) == "[1.0, 16]"
    assert set(MODEL_DEFAULTS.values()) == {
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    }


def test_fields_of_a_request_to_the_server_go_before_the_file(llm: LLM) -> None:
    read = read_params({"temperature": 0.2}, llm.tokenizer, llm.sampling_defaults)
    assert (read.temperature, read.top_k, read.repetition_penalty, read.max_tokens) == (0.2, 1, 1.3, 12)
    assert read_params({"max_tokens": None}, llm.tokenizer, llm.sampling_defaults).max_tokens is None


def test_the_command_line_uses_them_and_options_go_before(folder: Path, hook: list[int]) -> None:
    def run(*options: str) -> list[int]:
        asked = ["generate", STORY, "--model", str(folder), "--raw", "--json", "--method", "ngram", *options]
        result = CliRunner().invoke(app, asked)
        assert result.exit_code == 0, result.output
        line = next(line for line in result.stdout.splitlines() if line.startswith("{"))
        return list(json.loads(line)["token_ids"])

    assert run() == hook
    assert run("--max-new-tokens", "5") == hook[:5]
    greedy = LLM(str(folder), dtype="float32", generation_config="none")
    wanted = said(greedy, SamplingParams(temperature=0, max_tokens=20))
    assert run("--generation-config", "none", "--max-new-tokens", "20") == wanted
    assert run("--temperature", "0", "--repetition-penalty", "1", "--max-new-tokens", "20") == wanted


def test_comparisons_are_over_what_they_set(llm: LLM, folder: Path) -> None:
    """A verdict compares with a reference that knows no file."""
    bare = LLM(str(folder), dtype="float32", generation_config="none")
    ids = list(llm.tokenizer(STORY)["input_ids"])
    params = SamplingParams(temperature=0.0, max_tokens=12)
    of_llm, of_bare = (LLMSubject(each).generate([ids], [params])[0].samples[0].token_ids for each in (llm, bare))
    assert of_llm == of_bare == tuple(said(bare, params))
    assert said(llm, params) != said(bare, params)  # since it penalises repetition


def test_a_trajectory_is_that_of_the_text(llm: LLM) -> None:
    given = SamplingParams(temperature=0, max_tokens=10)
    assert list(trajectory(llm, STORY, 4, given).token_ids) == said(llm, given)


def test_a_folder_has_a_config_of_its_own(folder: Path, tmp_path: Path) -> None:
    GenerationConfig(do_sample=True, temperature=0.3, min_p=0.1, eos_token_id=5).save_pretrained(tmp_path)
    for path in (str(tmp_path), tmp_path, tmp_path / "generation_config.json"):
        other = LLM(str(folder), generation_config=path)
        assert other.sampling_defaults == {"temperature": 0.3, "min_p": 0.1}
        assert other.eos_token_ids == (5, 3)  # and the tokenizer's
    given = LLM(str(folder), generation_config=GenerationConfig(top_p=0.5))
    assert given.sampling_defaults == {"top_p": 0.5}
    with pytest.raises(ConfigError, match=r"generation_config is .*absent.*give auto, none, or a folder"):
        LLM(str(folder), generation_config=str(tmp_path / "absent"))


@pytest.mark.parametrize("values", [{"top_p": 1.5}, {"temperature": -1.0}, {"top_k": "many"}, {"max_new_tokens": 0}])
def test_a_default_that_no_request_may_have_is_refused_by_its_file(values: dict[str, Any]) -> None:
    config = GenerationConfig()
    vars(config).update(values)
    with pytest.raises(ConfigError, match=r"the generation config of m cannot be used: \w+ is .*none"):
        sampling_defaults(config, "m")


def test_the_eos_of_the_tokenizer_ends_outputs_too(tmp_path: Path) -> None:
    """A chat went on past <|end|>, said the user's next line, and answered it."""
    model, _, tokenizer = zoo.load("tiny")
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.config.eos_token_id = 0
    assert tokenizer.eos_token_id == 3
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), "ngram")
    assert llm.eos_token_ids == (0, 3)
    params = SamplingParams(temperature=0, max_tokens=30)
    (output,) = llm.chat([{"role": "user", "content": "Tell me"}], params)[0].outputs
    assert (output.finish_reason, output.token_ids[-1]) == ("stop", 3)
    longer = llm.chat([{"role": "user", "content": "Tell me"}], replace(params, ignore_eos=True))[0].outputs[0]
    assert len(longer.token_ids) == 30
