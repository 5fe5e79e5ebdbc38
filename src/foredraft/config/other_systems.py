"""Names of other systems: aliases of foredraft's keys, and keys that foredraft does not support, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Alias:
    """Name that another system has for one of foredraft's keys.

    Args:
      key: name in foredraft.
      implies: other keys that the alias sets if they are not given.
      words: values for a switch that is on and off; None if nothing needs to be set.
    """

    key: str
    implies: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[bool, str | None] = field(default_factory=dict)


_BY_CONFIDENCE = Alias("draft_threshold", {"length_policy": "confidence"})

ALIASES: dict[str, dict[str, dict[str, str | Alias]]] = {
    "speculative_config": {
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
            "speculative_draft_model_quantization": "quantization",
            "speculative_num_steps": "num_speculative_tokens",
            "speculative_num_draft_tokens": "max_draft_nodes",  # both count the root
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
    "sampling_params": {
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
"""All aliases: config -> other system -> name in that system -> key in foredraft."""


@cache
def aliases(owner: str) -> dict[str, Alias]:
    """Return the aliases of a config's keys, by name."""
    named = {name: key for system in ALIASES.get(owner, {}).values() for name, key in system.items()}
    return {name: Alias(key) if isinstance(key, str) else key for name, key in named.items()}


@dataclass(frozen=True)
class UnsupportedOption:
    """A key of another system that foredraft does not support.

    Args:
      reason: why the option is not supported, and the remedy.
      harmless: values that request the behaviour that foredraft has anyway. Harmless values are accepted and have no
        effect.
    """

    reason: str
    harmless: tuple[Any, ...] = (None,)

    def is_harmless(self, value: Any) -> bool:
        return any(is_same(value, harmless) for harmless in self.harmless)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values of a key are equal. Arrays and models are equal only to themselves."""
    plain, nested = (bool, int, float, str), (list, dict)
    return a is b or (any(type(a) in kinds and type(b) in kinds for kinds in (plain, nested)) and bool(a == b))


_ONE_PROCESS = "the model runs in one process on one device; leave it out"
_OWN_WEIGHTS = (
    "weights keep the format of the checkpoint; load the model with transformers in the format you need and pass it"
)
_NO_ADAPTERS = "adapters cannot be swapped per request; merge the adapter into the model and pass the merged model"
_GRAMMAR = "use structured_outputs to constrain the output: StructuredOutputs(json=..., regex=..., choice=..., ...)"
_NO_BEAMS = (
    "beam search cannot be combined with drafting; foredraft.classic.sampling.beam_search_generate runs it without, "
    "and n draws several samples"
)
_NO_THRESHOLDS = (
    "the only lossy rule of foredraft is typical acceptance, for medusa, hydra and eagle: "
    "rejection_sample_method='typical' with posterior_threshold and posterior_alpha"
)
_PROCESSOR = "it is not a parameter of foredraft; pass transformers' own processor for it in logits_processors"
_EOS = "EOS is that of the model; stop_token_ids adds further stop tokens, and ignore_eos continues after EOS"
_BY_BATCH = "draft lengths already adapt to the batch by measured cost; length_policy chooses another policy"
_CHUNKS = "prompts are read in chunks, and running rows wait for at most one chunk; use prefill_chunk_size"

NOT_HERE = {
    "LLM": {
        # vLLM
        **dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
            UnsupportedOption(_ONE_PROCESS, (None, 1)),
        ),
        "enable_expert_parallel": UnsupportedOption(_ONE_PROCESS, (None, False)),
        "distributed_executor_backend": UnsupportedOption(_ONE_PROCESS, (None, "uni")),
        "disable_custom_all_reduce": UnsupportedOption(_ONE_PROCESS, (None, False, True)),
        "gpu_memory_utilization": UnsupportedOption(
            "no memory is reserved in advance: the cache grows with the running rows; max_num_seqs, max_model_len and "
            "max_kv_bytes limit it"
        ),
        "kv_cache_memory_bytes": UnsupportedOption(
            "the cache grows with the running rows; use max_kv_bytes to limit it"
        ),
        "swap_space": UnsupportedOption(
            "rows that do not fit wait instead of being swapped out; use max_num_seqs to limit running rows", (None, 0)
        ),
        "cpu_offload_gb": UnsupportedOption(
            "weights stay on one device; choose it with device='cpu' or device='cuda'", (None, 0)
        ),
        "block_size": UnsupportedOption("the cache is not paged; leave it out"),
        "quantization_config": UnsupportedOption(_OWN_WEIGHTS),
        "load_in_8bit": UnsupportedOption("use quantization='int8'", (None, False)),
        "load_in_4bit": UnsupportedOption("use quantization='int4'", (None, False)),
        "load_format": UnsupportedOption(_OWN_WEIGHTS, (None, "auto", "safetensors")),
        "hf_overrides": UnsupportedOption(_OWN_WEIGHTS),
        "model_impl": UnsupportedOption(
            "models always run through transformers' own code; leave it out", (None, "auto", "transformers")
        ),
        "enforce_eager": UnsupportedOption(
            "use execution='eager', which sets how forward passes are run", (None, False)
        ),
        "compilation_config": UnsupportedOption("use execution='compiled', which sets how forward passes are run"),
        "attention_backend": UnsupportedOption(
            "execution and the model's code decide the attention kernels; leave it out"
        ),
        "attn_implementation": UnsupportedOption(
            "execution and the model's code decide the attention kernels; load the model with it and pass the model"
        ),
        "max_num_batched_tokens": UnsupportedOption(
            "a step is limited by rows and by prompt tokens per row; use max_num_seqs and prefill_chunk_size"
        ),
        "long_prefill_token_threshold": UnsupportedOption(_CHUNKS, (None, 0)),
        "chunked_prefill_size": UnsupportedOption(_CHUNKS, (None,)),
        "enable_chunked_prefill": UnsupportedOption(
            "prompts are always prefilled in chunks of prefill_chunk_size", (None, True)
        ),
        "enable_prefix_caching": UnsupportedOption(
            "foredraft needs the number of prefixes to keep; use num_cached_prefixes=N", (None, False)
        ),
        "scheduling_policy": UnsupportedOption("requests run in order of arrival; leave it out", (None, "fcfs")),
        "async_scheduling": UnsupportedOption("steps run one after another; leave it out", (None, False)),
        "enable_lora": UnsupportedOption(_NO_ADAPTERS, (None, False)),
        "max_loras": UnsupportedOption(_NO_ADAPTERS, (None, 1)),
        "max_lora_rank": UnsupportedOption(_NO_ADAPTERS),
        "tokenizer_mode": UnsupportedOption("pass a loaded tokenizer with tokenizer=", (None, "auto", "hf")),
        "tokenizer_revision": UnsupportedOption(
            "the tokenizer has the revision of the model; pass a loaded one with tokenizer= to use another"
        ),
        "skip_tokenizer_init": UnsupportedOption(
            "the tokenizer is loaded if there is one; token ids work without it", (None, False)
        ),
        "limit_mm_per_prompt": UnsupportedOption("prompts are text or token ids; leave it out"),
        **dict.fromkeys(
            ("task", "runner"), UnsupportedOption("the model generates text; leave it out", (None, "auto", "generate"))
        ),
        "download_dir": UnsupportedOption("downloads go to the cache of huggingface_hub; set HF_HOME"),
        "hf_token": UnsupportedOption("huggingface_hub stores the token; run hf auth login, or set HF_TOKEN"),
        "max_logprobs": UnsupportedOption("SamplingParams.logprobs has no limit; leave it out"),
        "logits_processors": UnsupportedOption(
            "processors belong to requests; use SamplingParams(logits_processors=[...])"
        ),
        "disable_log_stats": UnsupportedOption(
            "every result contains statistics, in metrics; leave it out", (None, True)
        ),
        # vLLM's older names, and transformers'
        **dict.fromkeys(
            ("speculative_model", "assistant_model", "draft_model"),
            UnsupportedOption("use speculative_config={'method': 'draft_model', 'model': ...}"),
        ),
        "num_speculative_tokens": UnsupportedOption(
            "drafting is set in one place; write speculative_config={'method': ..., 'num_speculative_tokens': ...}"
        ),
        "prompt_lookup_num_tokens": UnsupportedOption(
            "use speculative_config={'method': 'ngram', 'num_speculative_tokens': ...}"
        ),
        "method": UnsupportedOption(
            "use speculative_config, which also accepts a bare name: speculative_config='ngram'"
        ),
        "temperature": UnsupportedOption("it belongs to requests; use SamplingParams(temperature=...)"),
        "max_tokens": UnsupportedOption("it belongs to requests; use SamplingParams(max_tokens=...)"),
        "device_map": UnsupportedOption("the model runs on one device; use device", (None, "auto")),
    },
    "sampling_params": {
        # vLLM
        "best_of": UnsupportedOption("all samples are returned; use n and choose among them", (None, 1)),
        "use_beam_search": UnsupportedOption(_NO_BEAMS, (None, False)),
        "guided_decoding": UnsupportedOption(_GRAMMAR),
        "truncate_prompt_tokens": UnsupportedOption(
            "prompts are never truncated; shorten the token ids before the call", (None, -1)
        ),
        "spaces_between_special_tokens": UnsupportedOption(
            "text is the result of the tokenizer's decode; leave it out", (None, True)
        ),
        "output_kind": UnsupportedOption(
            "LLM.generate returns whole results and LLM.stream returns every step; leave it out"
        ),
        "flat_logprobs": UnsupportedOption("logprobs contain one mapping per token; leave it out", (None, False)),
        "extra_args": UnsupportedOption("foredraft has no use for it; leave it out"),
        "thinking_token_budget": UnsupportedOption(
            "reasoning is not treated separately; max_tokens limits it with the output"
        ),
        # transformers
        "do_sample": UnsupportedOption(
            "temperature=0 is greedy decoding, and any other temperature samples", (None, True)
        ),
        "num_beams": UnsupportedOption(_NO_BEAMS, (None, 1)),
        "length_penalty": UnsupportedOption(_NO_BEAMS, (None, 1, 1.0)),
        "early_stopping": UnsupportedOption(_NO_BEAMS, (None, False)),
        "max_length": UnsupportedOption("it would include the prompt; use max_tokens, which does not"),
        "min_length": UnsupportedOption("it would include the prompt; use min_tokens, which does not", (None, 0)),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), UnsupportedOption(_PROCESSOR, (None, 0, 0.0))),
        "top_h": UnsupportedOption(_PROCESSOR),
        "encoder_repetition_penalty": UnsupportedOption(_PROCESSOR, (None, 1, 1.0)),
        **dict.fromkeys(("eos_token_id", "eos_tokens_id"), UnsupportedOption(_EOS)),
        "pad_token_id": UnsupportedOption("rows are never padded; leave it out"),
        "use_cache": UnsupportedOption("the cache is always used; leave it out", (None, True)),
        "streamer": UnsupportedOption("use LLM.stream"),
        # the OpenAI API
        "response_format": UnsupportedOption(_GRAMMAR),
        "top_logprobs": UnsupportedOption("logprobs itself is the number of tokens to return; use logprobs=N"),
        "stream": UnsupportedOption("use LLM.stream", (None, False)),
    },
    "speculative_config": {
        # vLLM
        "draft_tensor_parallel_size": UnsupportedOption(_ONE_PROCESS, (None, 1)),
        "weights": UnsupportedOption("it applies to the target; give weights='stored' for the model"),
        "max_model_len": UnsupportedOption(
            "it applies to target and drafter together; give max_model_len for the model"
        ),
        "enforce_eager": UnsupportedOption(
            "the drafter runs as the target does; give execution='eager' for the model", (None, False)
        ),
        "use_heterogeneous_vocab": UnsupportedOption(
            "drafter and target must share a tokenizer; methods without a second model, such as ngram, need none",
            (None, False),
        ),
        **dict.fromkeys(
            ("num_speculative_tokens_per_batch_size", "disable_by_batch_size", "speculative_disable_by_batch_size"),
            UnsupportedOption(_BY_BATCH),
        ),
        "parallel_drafting": UnsupportedOption(
            "this version has no drafters that predict a block in parallel", (None, False)
        ),
        "disable_logprobs": UnsupportedOption(
            "log-probabilities are returned if a request needs them", (None, False, True)
        ),
        # transformers
        **dict.fromkeys(
            ("assistant_lookbehind", "target_lookbehind"),
            UnsupportedOption("drafter and target must share a tokenizer; leave it out"),
        ),
        "use_mtp": UnsupportedOption("multi-token prediction heads are not available in this version", (None, False)),
        # the plain functions of the original description
        "first_target": UnsupportedOption(
            "the prompt is always read before drafting begins; leave it out", (None, False, True)
        ),
        "skip_sample_adjustment": UnsupportedOption(
            "it is lossy; foredraft.classic.sampling.speculative_generate shows what it does", (None, False)
        ),
        # SGLang
        "speculative_accept_threshold_single": UnsupportedOption(_NO_THRESHOLDS, (None, 1, 1.0)),
        "speculative_accept_threshold_acc": UnsupportedOption(_NO_THRESHOLDS, (None, 1, 1.0)),
    },
}
"""All unsupported keys: config -> key -> reason and remedy."""

_HEADS = "heads that are trained for one target"

METHODS_NOT_HERE = {
    **dict.fromkeys(("mtp", "draft_mtp", "deepseek_mtp", "nextn", "mlp_speculator"), _HEADS),
    **dict.fromkeys(("dflash", "draft_dflash", "dspark", "p_eagle"), _HEADS),
    "pard": "a drafter that predicts a block in parallel",
    "extract_hidden_states": "a way to write training data",
}
"""Well-known methods that are not available in this version, with a description."""


def method_not_here(name: str) -> str | None:
    """Describe a well-known method that this version does not have; None for any other name.

    >>> method_not_here("NEXTN")
    'heads that are trained for one target'
    """
    plain = _squeezed(name)
    if plain.endswith("mtp"):  # vLLM has one name per model family: deepseek_mtp, qwen3_next_mtp, ...
        return METHODS_NOT_HERE["mtp"]
    return next((what for known, what in METHODS_NOT_HERE.items() if _squeezed(known) == plain), None)


def _squeezed(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")
