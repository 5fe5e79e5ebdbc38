"""What users may write: every range, every alias, every mistake named."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM
from foredraft.config.other_systems import ALIASES, METHODS_NOT_HERE, NOT_HERE, Alias, aliases
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig, all_keys
from foredraft.errors import ConfigError
from foredraft.methods import method_aliases, methods


class TestSamplingParams:
    def test_defaults_are_those_of_vllm(self) -> None:
        params = SamplingParams()
        assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
        assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
        assert params.stop_strings == ()
        assert not params.is_greedy

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("n", 0),
            ("n", None),
            ("temperature", None),
            ("detokenize", None),
            ("n", 1.5),
            ("n", True),
            ("temperature", -0.1),
            ("temperature", math.nan),
            ("temperature", math.inf),
            ("temperature", 1e-9),
            ("temperature", "hot"),
            ("top_p", 0.0),
            ("top_p", 1.01),
            ("top_p", math.nan),
            ("top_k", -2),
            ("top_k", 1.5),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("typical_p", 0.0),
            ("typical_p", 1.5),
            ("presence_penalty", 2.5),
            ("frequency_penalty", -3),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", math.inf),
            ("no_repeat_ngram_size", -1),
            ("stop", ["a", ""]),
            ("stop", [1]),
            ("stop", 1),
            ("allowed_token_ids", []),
            ("allowed_token_ids", [-1]),
            ("allowed_token_ids", [True]),
            ("allowed_token_ids", 7),
            ("allowed_token_ids", "7"),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", ["a"]),
            ("stop_token_ids", [True]),
            ("stop_token_ids", [torch.tensor(True)]),
            ("stop_token_ids", 7),
            ("stop_token_ids", True),
            ("min_tokens", -1),
            ("max_tokens", 0),
            ("logprobs", -1),
            ("logit_bias", {-1: 1.0}),
            ("logit_bias", {True: 1.0}),
            ("logit_bias", {"9" * 5000: 1.0}),
            ("logit_bias", {torch.tensor(True): 1.0}),
            ("logit_bias", {1: math.nan}),
            ("logit_bias", {1: math.inf}),
            ("logit_bias", [1, 2]),
            ("bad_words", ["a", ""]),
            ("bad_words_ids", [[]]),
            ("bad_words_ids", [3]),
            ("bad_words_ids", [[-3]]),
            ("bad_words_ids", [[5, True]]),
            ("bad_words_ids", 3),
            ("seed", -2),
            ("seed", 2**64),
            ("ignore_eos", 1),
            ("logits_processors", [3]),
            ("logits_processors", len),
        ],
    )
    def test_out_of_range_names_the_field(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=name):
            SamplingParams(**{name: value})

    def test_a_far_name_is_not_suggested(self) -> None:
        """An error listed 130 keys of 2 kB, or asked whether something else was meant."""
        for wrong in ("zzz", "grammar", "foo"):
            with pytest.raises(ConfigError, match=rf"takes no '{wrong}'; the nearest of \d+ known names are") as caught:
                SamplingParams(**{wrong: 1})
            assert "did you mean" not in str(caught.value)
            assert "docs/sampling.md" in str(caught.value)
        with pytest.raises(
            ConfigError, match=r"the nearest of 1\d\d known names.*docs/speculative_config.md"
        ) as caught:
            SpeculativeConfig(method="ngram", xxxyyy=2)
        assert len(str(caught.value)) < 250

    def test_alias_of_max_tokens(self) -> None:
        assert SamplingParams(max_new_tokens=7).max_tokens == 7
        assert SamplingParams.from_dict({"max_new_tokens": 7}).max_new_tokens == 7
        assert SamplingParams.from_dict({"max_new_tokens": 7, "max_tokens": 7}).max_tokens == 7
        with pytest.raises(ConfigError, match="two names of one key"):
            SamplingParams.from_dict({"max_new_tokens": 7, "max_tokens": 8})

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"temperature": -1}, r"temperature is -1\.0; .* at least 0; 0 is greedy"),
            ({"min_tokens": 20}, r"min_tokens=20 is more than max_tokens=16"),
            ({"stop": "x", "detokenize": False}, "detokenize"),
            ({"temprature": 1}, "temprature.*did you mean 'temperature'"),
            ({"maxtokens": 1}, "maxtokens.*did you mean 'max_tokens'"),
            ({"best_of": 4}, "best_of=4: .*use n"),
            ({"use_beam_search": True}, "use_beam_search=True: .*beam_search_generate"),
            ({"guided_decoding": {"json": {}}}, "guided_decoding={'json': {}}: .*structured_outputs"),
            ({"do_sample": False}, "do_sample=False: temperature=0 is greedy"),
            ({"max_length": 99}, "max_length=99: .*use max_tokens"),
        ],
        ids=str,
    )
    def test_messages_hold_value_limit_and_remedy(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            SamplingParams(**given)
        with pytest.raises(ConfigError, match=message):
            SamplingParams.from_dict(given)

    def test_what_happens_anyway_may_be_asked_for(self) -> None:
        given = {"best_of": 1, "use_beam_search": False, "guided_decoding": None, "do_sample": True, "temperature": 0.5}
        assert SamplingParams(**given) == SamplingParams(temperature=0.5)
        assert SamplingParams(max_gen_len=40) == SamplingParams(max_tokens=40)
        assert SamplingParams(min_tokens=20, max_tokens=None).min_tokens == 20

    def test_names_elsewhere_are_not_names_here(self) -> None:
        names = {"sampling_params": {f.name for f in dataclasses.fields(SamplingParams)}}
        names["speculative_config"] = {"method", *all_keys()}
        names["LLM"] = set(inspect.signature(LLM).parameters)
        assert ALIASES.keys() == NOT_HERE.keys() == names.keys()
        for owner, own in names.items():
            assert not own & NOT_HERE[owner].keys()
            assert not own & aliases(owner).keys()
            assert not aliases(owner).keys() & NOT_HERE[owner].keys()
            assert {alias.key for alias in aliases(owner).values()} <= own
            assert {key for alias in aliases(owner).values() for key in alias.implies} <= own
            for systems in ALIASES[owner].values():  # those that share an alias mean the same key
                for name, key in systems.items():
                    assert aliases(owner)[name] == (key if isinstance(key, Alias) else Alias(key))
        assert not set(method_aliases()) & set(methods())
        assert not {*methods(), *method_aliases()} & set(METHODS_NOT_HERE)

    def test_forms_are_made_regular(self) -> None:
        params = SamplingParams(
            stop="x", stop_token_ids=[3], logit_bias={"5": 1, 6: -math.inf}, top_k=-1, seed=-1, bad_words_ids=[[1, 2]]
        )
        assert params.stop == params.stop_strings == ("x",)
        assert params.stop_token_ids == (3,)
        assert params.logit_bias == {5: 1.0, 6: -math.inf}
        assert (params.top_k, params.seed, params.bad_words_ids) == (0, None, ((1, 2),))
        assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == ()

    def test_replace_keeps_the_rest(self) -> None:
        params = dataclasses.replace(SamplingParams(seed=3, stop=["a"], logit_bias={1: 2.0}), n=4)
        assert (params.seed, params.stop, params.n, params.logit_bias) == (3, ("a",), 4, {1: 2.0})
        with pytest.raises(dataclasses.FrozenInstanceError):
            params.n = 2


class TestSpeculativeConfig:
    def test_none_is_plain_decoding(self) -> None:
        config = SpeculativeConfig.parse(None)
        assert config.method == "none"
        assert config.num_speculative_tokens == 0
        assert not config.is_speculative

    @pytest.mark.parametrize("method", methods())
    def test_every_key_has_a_kind_help_and_a_default_that_it_takes(self, method: str) -> None:
        parts = {"drafters": ["ngram", "nasd"]} if methods()[method].combines else {}
        config = SpeculativeConfig(method=method, **parts)
        for key in methods()[method].keys.values():
            assert key.help
            assert key.kind.text
            value = getattr(config, key.name)
            assert value is None or key.kind.read("SpeculativeConfig", key.name, value) == value
            if key.default is not None and key.name != "num_speculative_tokens":
                assert value == key.default
        assert methods()[method].summary

    def test_is_a_value(self) -> None:
        config = SpeculativeConfig(method="suffix+ngram", num_speculative_tokens=4)
        assert eval(repr(config)) == config
        assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
        assert len({config, SpeculativeConfig.parse(config)}) == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.method = "ngram"
        values = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 4}
        changed = dataclasses.replace(SpeculativeConfig(method="ngram", prompt_lookup_max=3), num_speculative_tokens=4)
        assert changed == SpeculativeConfig(**values)

    def test_keys_are_attributes_and_nothing_else_of_the_options_is(self) -> None:
        config = SpeculativeConfig(method="ngram", prompt_lookup_max=3)
        assert (config.prompt_lookup_max, config.draft_threshold, config.ngram_size) == (3, None, None)
        assert SpeculativeConfig(method="none").num_speculative_tokens == 0
        for name in ("check", "keys", "read", "given", "num_branches", "prompt_lookup_maximum"):
            with pytest.raises(AttributeError, match=rf"{name}.*method 'ngram' are .*prompt_lookup_max"):
                getattr(config, name)

    def test_what_is_kept_of_a_config_holds_no_model(self) -> None:
        model = object()
        for method in ("draft_model", "ngram+draft_model", "ngram>suffix+draft_model"):
            config = SpeculativeConfig(method, model=model, num_speculative_tokens=4)
            assert config.model_part.model is model
            left = config.without_model()
            assert left == SpeculativeConfig(method, num_speculative_tokens=4)
            assert repr(left).count("model=") == 0

    def test_four_ways_to_write_it(self, tmp_path: Path) -> None:
        values = {"method": "ngram", "num_speculative_tokens": 4}
        file = tmp_path / "spec.json"
        file.write_text(json.dumps(values))
        config = SpeculativeConfig(**values)
        assert SpeculativeConfig.parse(values) == config
        assert SpeculativeConfig.parse(json.dumps(values)) == config
        assert SpeculativeConfig.parse(f"@{file}") == config
        assert SpeculativeConfig.parse(config) is config
        assert SpeculativeConfig.parse("ngram") == SpeculativeConfig(method="ngram")
        model = object()
        assert SpeculativeConfig.parse({"model": model}).model is model

    @pytest.mark.parametrize("text", ["{bad", "[1]", "3", "@/nowhere/spec.json", ""])
    def test_what_cannot_be_read(self, text: str) -> None:
        with pytest.raises(ConfigError):
            SpeculativeConfig.parse(text)

    @pytest.mark.parametrize(
        ("given", "field", "value"),
        [
            ({"assistant_model": "m"}, "model", "m"),
            ({"assistant_model": "m", "num_assistant_tokens": 7}, "num_speculative_tokens", 7),
            ({"prompt_lookup_num_tokens": 7}, "num_speculative_tokens", 7),
            ({"prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 2}, "prompt_lookup_max", 2),
            ({"speculative_algorithm": "STANDALONE", "speculative_num_steps": 3}, "num_speculative_tokens", 3),
            ({"--speculative-draft-model-path": "m", "--speculative-num-steps": 3}, "num_speculative_tokens", 3),
            ({"--speculative-draft-model-path": "m", "--speculative-eagle-topk": 3}, "num_draft_branches", 3),
            ({"-md": "m", "--spec-draft-n-max": 3}, "num_speculative_tokens", 3),
            ({"model-draft": "m", "draft-max": 3}, "num_speculative_tokens", 3),
            ({"draft-model": "m", "num-draft-tokens": 3}, "num_speculative_tokens", 3),
            ({"method": "draft_model", "draft_sample_method": "gumbel"}, "draft_sample_method", "probabilistic"),
            ({"method": "prompt-lookup"}, "method", "ngram"),
            ({"method": "ngram", "num_assistant_tokens_schedule": "constant"}, "length_policy", "fixed"),
            ({"ngram_size": 3}, "method", "nasd"),
            ({"assistant_early_exit": 3}, "method", "layer_skip"),
            ({"method": "ngram_gpu"}, "method", "ngram"),
            ({"method": "ngram", "gamma": 7}, "num_speculative_tokens", 7),
            ({"method": "ngram_assisted", "gamma": 5, "n": 4, "filler_top_k": 3}, "ngram_size", 4),
            ({"method": "nasd", "ngramstorage": "OneLevelNGramStorage"}, "storage", "single"),
            ({"method": "nasd", "ngramstorage": "NGramStorage"}, "storage", "levels"),
            ({"method": "nasd", "stop_if_unknown": True}, "unknown", "stop"),
            ({"stop_if_unknown": False}, "unknown", "random"),
            ({"drafter": "m", "use_egag": True, "gamma_max": 6}, "length_policy", "egag"),
            ({"drafter": "m", "use_egag": True, "gamma_max": 6}, "length_policy_mode", "paper"),
            (
                {"drafter": "m", "use_egag": True, "length_policy_mode": "calibrated"},
                "length_policy_mode",
                "calibrated",
            ),
            ({"drafter": "m", "use_egag": True, "gamma_max": 6}, "num_speculative_tokens", 6),
            ({"drafter": "m", "use_egag": True, "gamma_min": 2, "egag_ema_beta": 0.5}, "min_draft_tokens", 2),
            ({"drafter": "m", "use_egag": False, "first_target": True}, "length_policy", "governed"),
            ({"drafter": "m", "use_egag": True, "gamma": 5, "gamma_max": 8}, "num_speculative_tokens", 8),
            ({"drafter": "m", "use_egag": True, "gamma": 5, "gamma_max": None}, "num_speculative_tokens", 5),
            (
                {"drafter": "m", "gamma": 5, "use_egag": False, "gamma_min": 1, "gamma_max": 9, "egag_ema_beta": 0.0},
                "num_speculative_tokens",
                5,
            ),
            ({"method": "ngram", "num_output_tokens": 9}, "num_speculative_tokens", 9),
            ({"method": "rest", "max_num_draft": 40}, "max_draft_nodes", 40),
            ({"method": "ngram", "draft-max": 3, "draft_n": 3}, "num_speculative_tokens", 3),
            ({"method": "ngram", "draft_tensor_parallel_size": 1}, "method", "ngram"),
            ({"method": "ngram", "prompt_lookup_max": 1}, "prompt_lookup_min", 1),
            ({"method": "ngram", "prompt_lookup_min": 9}, "prompt_lookup_max", 9),
            ({"method": "ngram", "rejection_sample_method": "standard"}, "rejection_sample_method", "standard"),
            ({"method": "draft_model", "rejection_sample_method": "block"}, "rejection_sample_method", "block"),
        ],
    )
    def test_aliases(self, given: dict[str, Any], field: str, value: Any) -> None:
        assert getattr(SpeculativeConfig.parse(given), field) == value

    @pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "NEXTN", "dflash"])
    def test_known_methods_that_are_not_here_yet_are_named(self, name: str) -> None:
        """Giving such a name once said that it was not JSON, and ``--method`` asked for 'early_exit' instead."""
        for given in (name, {"method": name}, {"method": "first", "drafters": ["ngram", name]}):
            with pytest.raises(
                ConfigError, match="is not available in this version; choose one of none, draft_model, nasd"
            ):
                SpeculativeConfig.parse(given)

    def test_a_composition_with_a_method_that_is_not_here_yet(self) -> None:
        for name in ("ngram+dspark", "dflash>ngram", "ngram > nextn"):
            with pytest.raises(ConfigError, match=r"method '(dspark|dflash|nextn)' \(heads .* is not available"):
                SpeculativeConfig.parse(name)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("ngrm", "method 'ngrm' is not known; did you mean 'ngram'?"),
            ("dflas", "did you mean 'dflash'? That is not available in this version"),
            ("qwertz", "method 'qwertz' is not known; choose one of none"),
            ("ngram+", "names nothing on one side of '+'"),
            ('"ngram"', "give a JSON object"),
            ("spec.json", "to read a file, write '@spec.json'"),
            ("owner/drafter", '"model": "owner/drafter"'),
            ("zoo:tiny", '"model": "zoo:tiny"'),
            ("{'method': 'ngram'}", "is not valid JSON"),
            ("  ", "is empty"),
        ],
    )
    def test_a_bare_string_is_a_method(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            SpeculativeConfig.parse(text)
        assert message in str(caught.value)

    def test_without_a_method_and_its_keys_it_is_auto(self) -> None:
        assert SpeculativeConfig().method == SpeculativeConfig.parse("default").method == "auto"
        config = SpeculativeConfig.parse({"num_speculative_tokens": 3})
        assert (config.method, config.parts[0].num_speculative_tokens) == ("auto", 3)

    @pytest.mark.parametrize(
        ("method", "key", "value"),
        [
            ("ngram", "num_speculative_tokens", -1),
            ("ngram", "num_speculative_tokens", 1.5),
            ("ngram", "prompt_lookup_min", 0),
            ("ngram", "num_prompt_lookup_candidates", 0),
            ("nasd", "ngram_size", 1),
            ("nasd", "filler_top_k", 0),
            ("draft_model", "num_draft_branches", 0),
            ("draft_model", "max_draft_nodes", 1),
            ("draft_model", "draft_sample_method", "beam"),
            ("draft_model", "rejection_sample_method", "typical"),
            ("draft_model", "length_policy", 3),
            ("nasd", "shared", "yes"),
            ("nasd", "state_file", 3),
            ("nasd", "storage", "tree"),
            ("layer_skip", "skipped_mlp", 3),
            ("layer_skip", "skipped_mlp", [-1]),
            ("token_recycling", "num_speculative_tokens", 0),
        ],
    )
    def test_out_of_range(self, method: str, key: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=rf"^{key} is "):
            SpeculativeConfig.parse({"method": method, key: value})

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"method": "ngrm"}, r"'ngrm' is not known; did you mean 'ngram'"),
            ({"method": "ngram", "promt_lookup_max": 3}, r"promt_lookup_max.*did you mean 'prompt_lookup_max'"),
            ({"method": "ngram", "model": "m"}, r"'model' has no meaning for method 'ngram', only for draft_model"),
            ({"length_policy": "fixed"}, "add method"),
            ({"method": '{"method": "ngram"}'}, "which is a config; give it as speculative_config"),
            ({"method": "@file.json"}, "which is a config; give it as speculative_config"),
            (
                {"method": "ngram", "draft-tensor-parallel-size": 2},
                "draft_tensor_parallel_size=2: the model runs in one process",
            ),
            (
                {"method": "ngram", "use_heterogeneous_vocab": True},
                r"use_heterogeneous_vocab=True: .*must share a tokenizer",
            ),
            ({"method": "ngram", "num_speculative_tokens": 3, "draft_max": 4}, "two names of one key"),
            (
                {"method": "ngram", "draft-max": 3, "draft_max": 4},
                "draft-max=3 and draft_max=4, two names of one key",
            ),
            (
                {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
                "prompt_lookup_min=4 is more than prompt_lookup_max=3",
            ),
            ({"method": "draft_model", "num_draft_branches": 2, "rejection_sample_method": "block"}, "block"),
            ({"num_prompt_lookup_candidates": 3, "rejection_sample_method": "block"}, "block"),
            ({"model": object(), "assistant_model": object()}, "two names"),
            ({"method": "nasd", "stop_if_unknown": "yes"}, "stop_if_unknown is 'yes'; it must be true or false"),
            ({"method": "nasd", "stop_if_unknown": True, "unknown": "random"}, "two names of one key"),
            ({"drafter": "m", "gamma": 5, "gamma_max": 6}, "two names of one key"),
            ({"drafter": "m", "gamma_min": 2}, "'min_draft_tokens' has no meaning for length_policy 'fixed'"),
            ({"method": "nasd", "state_file": "x"}, "add shared=true"),
            ({"drafter": "m", "skip_sample_adjustment": True}, "it is lossy"),
        ],
    )
    def test_mistakes_are_named(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            SpeculativeConfig.parse(given)
