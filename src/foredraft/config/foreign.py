"""Names of other systems: what their keys are called here, and those that are not here, because."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Alias:
    """The name that another system has for a key.

    Args:
      key: its name here.
      implies: other keys that the alias sets, where they are not given.
      words: values that a switch stands for, on and off; None where nothing need be set.
    """

    key: str
    implies: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[bool, str | None] = field(default_factory=dict)


_BY_CONFIDENCE = Alias("draft_threshold", {"length_policy": "confidence"})

ALIASES: dict[str, dict[str, dict[str, str | Alias]]] = {
    "SpeculativeConfig": {
        "transformers": {
            "assistant_model": "model",
            "num_assistant_tokens": "num_speculative_tokens",
            "prompt_lookup_num_tokens": Alias("num_speculative_tokens", {"method": "ngram"}),
            "max_matching_ngram_size": "prompt_lookup_max",
            "num_assistant_tokens_schedule": "length_policy",
            "assistant_confidence_threshold": _BY_CONFIDENCE,
            "assistant_early_exit": "exit_layer",
        },
        "SGLang": {
            "speculative_algorithm": "method",
            "speculative_draft_model_path": "model",
            "speculative_draft_model_revision": "revision",
            "speculative_num_steps": "num_speculative_tokens",
            "speculative_num_draft_tokens": "max_draft_nodes",  # the root is counted, as here
            "speculative_eagle_topk": "num_draft_branches",
            "speculative_ngram_min_match_window_size": "prompt_lookup_min",
            "speculative_ngram_max_match_window_size": "prompt_lookup_max",
        },
        "llama.cpp": {
            "spec_type": "method",
            "md": "model",
            "model_draft": "model",
            "spec_draft_model": "model",
            "spec_draft_n_max": "num_speculative_tokens",
            "draft": "num_speculative_tokens",
            "draft_n": "num_speculative_tokens",
            "draft_max": "num_speculative_tokens",
            "draft_n_max": "num_speculative_tokens",
            "draft_p_min": _BY_CONFIDENCE,
            "spec_draft_p_min": _BY_CONFIDENCE,
        },
        "mlx-lm, LM Studio": {"draft_model": "model", "num_draft_tokens": "num_speculative_tokens"},
        "Medusa, vLLM": {
            "head_tree": "speculative_token_tree",
            "medusa_choices": "speculative_token_tree",
            "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
            "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
        },
        "foredraft, shorter or older": {
            "drafter": "model",
            "draft_dtype": "dtype",
            "ngram_n": "ngram_size",
            "acceptance": "rejection_sample_method",
            "num_lookup_candidates": "num_prompt_lookup_candidates",
        },
        "the plain functions of the original description": {  # see dev/from_the_documents.md
            "gamma": "num_speculative_tokens",
            "gamma_max": "num_speculative_tokens",
            "gamma_min": "min_draft_tokens",
            "n": "ngram_size",
            "ngramstorage": "storage",
            "num_output_tokens": "num_speculative_tokens",
            "max_num_draft": "max_draft_nodes",
            "use_egag": Alias("length_policy", {"length_policy_mode": "paper"}, words={True: "egag", False: None}),
            "stop_if_unknown": Alias("unknown", words={True: "stop", False: "random"}),
        },
    },
    "SamplingParams": {
        "transformers": {
            "max_new_tokens": "max_tokens",
            "min_new_tokens": "min_tokens",
            "stop_strings": "stop",
            "num_return_sequences": "n",
            "bad_words_token_ids": "bad_words_ids",
            "logits_processor": "logits_processors",
        },
        "the OpenAI API and its kin": {"max_completion_tokens": "max_tokens", "stop_sequences": "stop"},
        "foredraft.classic": {"max_gen_len": "max_tokens"},
    },
    "LLM": {"transformers": {"torch_dtype": "dtype"}, "TensorRT-LLM": {"max_seq_len": "max_model_len"}},
}
"""The one table of aliases: whose keys they are, who calls them so, the name there, the name here."""


@cache
def aliases(owner: str) -> dict[str, Alias]:
    """The aliases of an owner's keys, by name."""
    named = {name: key for system in ALIASES.get(owner, {}).values() for name, key in system.items()}
    return {name: Alias(key) if isinstance(key, str) else key for name, key in named.items()}


@dataclass(frozen=True)
class Foreign:
    """A key of another system that has no counterpart here.

    Args:
      reason: why, and what to use instead.
      harmless: values that ask for what happens anyway; they are accepted and have no effect.
    """

    reason: str
    harmless: tuple[Any, ...] = (None,)

    def is_harmless(self, value: Any) -> bool:
        return any(is_same(value, harmless) for harmless in self.harmless)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values of a key are equal; arrays and models are only themselves."""
    plain, nested = (bool, int, float, str), (list, dict)
    return a is b or (any(type(a) in kinds and type(b) in kinds for kinds in (plain, nested)) and bool(a == b))


_ONE_PROCESS = "the model runs in one process on one device; leave it out"
_OWN_WEIGHTS = (
    "weights keep the form of the checkpoint; load the model with transformers as you want it and pass the model"
)
_NO_ADAPTERS = "adapters are not swapped per request; merge the adapter into the model and pass that"
_GRAMMAR = "what an output must match is structured_outputs, StructuredOutputs(json=..., regex=..., choice=..., ...)"
_NO_BEAMS = (
    "beams are not drafted for; foredraft.classic.sampling.beam_search_generate decodes them plainly, and n "
    "draws samples"
)
_NO_THRESHOLDS = (
    "the one lossy rule here is typical acceptance, for medusa, hydra and eagle: rejection_sample_method='typical' "
    "with posterior_threshold and posterior_alpha"
)
_PROCESSOR = "it is not a parameter here; pass transformers' own processor for it through logits_processors"
_EOS = "EOS is the model's; stop_token_ids adds further ends, and ignore_eos goes on past it"
_BY_BATCH = "draft lengths follow the batch by measured cost already; length_policy forces others"
_CHUNKS = "prompts are read in chunks, of which running rows wait for one at most; use prefill_chunk_size"

NOT_HERE = {
    "LLM": {
        # vLLM
        **dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), Foreign(_ONE_PROCESS, (None, 1))
        ),
        "enable_expert_parallel": Foreign(_ONE_PROCESS, (None, False)),
        "distributed_executor_backend": Foreign(_ONE_PROCESS, (None, "uni")),
        "disable_custom_all_reduce": Foreign(_ONE_PROCESS, (None, False, True)),
        "gpu_memory_utilization": Foreign(
            "no memory is set aside in advance: the cache grows with the rows that run; max_num_seqs and max_model_len "
            "limit it"
        ),
        "kv_cache_memory_bytes": Foreign("the cache grows with the rows that run; max_kv_bytes limits it"),
        "swap_space": Foreign(
            "rows that do not fit wait instead of being swapped out; max_num_seqs says how many run", (None, 0)
        ),
        "cpu_offload_gb": Foreign(
            "weights stay on one device; choose it with device='cpu' or device='cuda'", (None, 0)
        ),
        "block_size": Foreign("the cache is not paged; leave it out"),
        "quantization_config": Foreign(_OWN_WEIGHTS),
        "load_in_8bit": Foreign("use quantization='int8'", (None, False)),
        "load_in_4bit": Foreign("use quantization='int4'", (None, False)),
        "load_format": Foreign(_OWN_WEIGHTS, (None, "auto", "safetensors")),
        "hf_overrides": Foreign(_OWN_WEIGHTS),
        "model_impl": Foreign(
            "models always run through transformers' own code; leave it out", (None, "auto", "transformers")
        ),
        "enforce_eager": Foreign("execution says how forwards are carried out; use execution='eager'", (None, False)),
        "compilation_config": Foreign("execution says how forwards are carried out; use execution='compiled'"),
        "attention_backend": Foreign("attention is that of the model's code and execution; leave it out"),
        "attn_implementation": Foreign(
            "attention is that of the model's code and execution; load the model with it and pass that"
        ),
        "max_num_batched_tokens": Foreign(
            "a step is bounded by rows and by the prompt tokens of each; use max_num_seqs and prefill_chunk_size"
        ),
        "long_prefill_token_threshold": Foreign(_CHUNKS, (None, 0)),
        "chunked_prefill_size": Foreign(_CHUNKS, (None,)),
        "enable_chunked_prefill": Foreign("prompts are always prefilled in chunks of prefill_chunk_size", (None, True)),
        "enable_prefix_caching": Foreign(
            "how many prefixes are kept is a number; use num_cached_prefixes=N", (None, False)
        ),
        "scheduling_policy": Foreign("rows run in the order in which they came; leave it out", (None, "fcfs")),
        "async_scheduling": Foreign("steps run one after the other; leave it out", (None, False)),
        "enable_lora": Foreign(_NO_ADAPTERS, (None, False)),
        "max_loras": Foreign(_NO_ADAPTERS, (None, 1)),
        "max_lora_rank": Foreign(_NO_ADAPTERS),
        "tokenizer_mode": Foreign("pass a loaded tokenizer with tokenizer=", (None, "auto", "hf")),
        "tokenizer_revision": Foreign(
            "the tokenizer is that of the model's revision; pass a loaded one with tokenizer="
        ),
        "skip_tokenizer_init": Foreign(
            "the tokenizer is loaded where there is one; ids work without it", (None, False)
        ),
        "limit_mm_per_prompt": Foreign("prompts are text or token ids; leave it out"),
        **dict.fromkeys(
            ("task", "runner"), Foreign("the model generates text; leave it out", (None, "auto", "generate"))
        ),
        "download_dir": Foreign("files lie in the cache of huggingface_hub; set HF_HOME"),
        "hf_token": Foreign("huggingface_hub holds the token; run hf auth login, or set HF_TOKEN"),
        "max_logprobs": Foreign("there is no limit to SamplingParams.logprobs; leave it out"),
        "logits_processors": Foreign("processors belong to requests; use SamplingParams(logits_processors=[...])"),
        "disable_log_stats": Foreign("statistics come with every result, in metrics; leave it out", (None, True)),
        # vLLM's older names, and transformers'
        **dict.fromkeys(
            ("speculative_model", "assistant_model", "draft_model"),
            Foreign("use speculative_config={'method': 'draft_model', 'model': ...}"),
        ),
        "num_speculative_tokens": Foreign(
            "how to draft is set in one place; write speculative_config={'method': ..., 'num_speculative_tokens': ...}"
        ),
        "prompt_lookup_num_tokens": Foreign(
            "use speculative_config={'method': 'ngram', 'num_speculative_tokens': ...}"
        ),
        "method": Foreign("use speculative_config, which takes a bare name, too: speculative_config='ngram'"),
        "temperature": Foreign("it belongs to requests; use SamplingParams(temperature=...)"),
        "max_tokens": Foreign("it belongs to requests; use SamplingParams(max_tokens=...)"),
        "device_map": Foreign("the model lies on one device; use device", (None, "auto")),
    },
    "SamplingParams": {
        # vLLM
        "best_of": Foreign("every sample that is drawn is returned; use n and choose among them", (None, 1)),
        "use_beam_search": Foreign(_NO_BEAMS, (None, False)),
        "guided_decoding": Foreign(_GRAMMAR),
        "truncate_prompt_tokens": Foreign(
            "prompts are used whole or refused; cut token_ids before they come in", (None, -1)
        ),
        "spaces_between_special_tokens": Foreign(
            "text is what the tokenizer's decode gives; leave it out", (None, True)
        ),
        "output_kind": Foreign("LLM.generate returns whole results and LLM.stream every step's; leave it out"),
        "flat_logprobs": Foreign("logprobs hold one mapping per token; leave it out", (None, False)),
        "extra_args": Foreign("nothing reads it here; leave it out"),
        "thinking_token_budget": Foreign("reasoning is text like any other; max_tokens limits it"),
        # transformers
        "do_sample": Foreign("temperature=0 is greedy, every other temperature samples", (None, True)),
        "num_beams": Foreign(_NO_BEAMS, (None, 1)),
        "length_penalty": Foreign(_NO_BEAMS, (None, 1, 1.0)),
        "early_stopping": Foreign(_NO_BEAMS, (None, False)),
        "max_length": Foreign("it would count the prompt, too; use max_tokens, which does not"),
        "min_length": Foreign("it would count the prompt, too; use min_tokens, which does not", (None, 0)),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), Foreign(_PROCESSOR, (None, 0, 0.0))),
        "top_h": Foreign(_PROCESSOR),
        "encoder_repetition_penalty": Foreign(_PROCESSOR, (None, 1, 1.0)),
        **dict.fromkeys(("eos_token_id", "eos_tokens_id"), Foreign(_EOS)),
        "pad_token_id": Foreign("rows are never padded; leave it out"),
        "use_cache": Foreign("the cache is always used; leave it out", (None, True)),
        "streamer": Foreign("use LLM.stream"),
        # the OpenAI API
        "response_format": Foreign(_GRAMMAR),
        "top_logprobs": Foreign("how many come with every token is logprobs itself; use logprobs=N"),
        "stream": Foreign("use LLM.stream", (None, False)),
    },
    "SpeculativeConfig": {
        # vLLM
        "draft_tensor_parallel_size": Foreign(_ONE_PROCESS, (None, 1)),
        "quantization": Foreign(
            "the drafter is used as it was loaded; load it with transformers and give the model itself"
        ),
        "weights": Foreign("they are the target's, read when it is loaded; use LLM(weights='stored')"),
        "max_model_len": Foreign("it is of the target; use LLM(max_model_len=...), which limits both"),
        "enforce_eager": Foreign("the drafter runs as the target does; use LLM(execution='eager')", (None, False)),
        "use_heterogeneous_vocab": Foreign(
            "drafter and target must share a tokenizer; methods without a second model, such as ngram, need none",
            (None, False),
        ),
        **dict.fromkeys(
            ("num_speculative_tokens_per_batch_size", "disable_by_batch_size", "speculative_disable_by_batch_size"),
            Foreign(_BY_BATCH),
        ),
        "parallel_drafting": Foreign(
            "there are no drafters that predict a block in parallel in this version", (None, False)
        ),
        "disable_logprobs": Foreign("log-probabilities come with every token that asks for them", (None, False, True)),
        # transformers
        **dict.fromkeys(
            ("assistant_lookbehind", "target_lookbehind"),
            Foreign("drafter and target must share a tokenizer; leave it out"),
        ),
        "use_mtp": Foreign("heads for several tokens are not available in this version; leave it out", (None, False)),
        # the plain functions of the original description
        "first_target": Foreign(
            "prompts are always read before anything is drafted; leave it out", (None, False, True)
        ),
        "skip_sample_adjustment": Foreign(
            "it is lossy; use foredraft.classic.sampling.speculative_generate to see what it does", (None, False)
        ),
        # SGLang
        "speculative_accept_threshold_single": Foreign(_NO_THRESHOLDS, (None, 1, 1.0)),
        "speculative_accept_threshold_acc": Foreign(_NO_THRESHOLDS, (None, 1, 1.0)),
    },
}
"""The one table of keys that are not here, because: whose keys they would be, the name, the reason and remedy."""

_HEADS = "heads that are trained for one target"

METHODS_NOT_HERE = {
    **dict.fromkeys(("mtp", "draft_mtp", "deepseek_mtp", "nextn", "mlp_speculator"), _HEADS),
    **dict.fromkeys(("dflash", "draft_dflash", "dspark", "p_eagle"), _HEADS),
    "pard": "a drafter that predicts a block in parallel",
    "extract_hidden_states": "a way to write training data",
}
"""Methods that are known by name and are not available in this version -> what they are."""


def method_not_here(name: str) -> str | None:
    """Describe a well-known method that this version does not have; None for any other name.

    >>> method_not_here("NEXTN")
    'heads that are trained for one target'
    """
    plain = _squeezed(name)
    if plain.endswith("mtp"):  # each family has a name of its own in vLLM: deepseek_mtp, qwen3_next_mtp, ...
        return METHODS_NOT_HERE["mtp"]
    return next((what for known, what in METHODS_NOT_HERE.items() if _squeezed(known) == plain), None)


def _squeezed(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")
