"""Methods that draft with a cheaper form of the target: options, and what builds their drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foredraft.config.drafting import ModelOptions, draft_length
from foredraft.config.options import flag, one_of, option, path, whole, whole_numbers
from foredraft.errors import ConfigError
from foredraft.methods import Method
from foredraft.methods.growth import GrowthOptions

STREAMING, SNAPKV = "streaming", "snapkv"


@dataclass(frozen=True, kw_only=True)
class LayerSetOptions(GrowthOptions):
    """Which layers are left out, given in one of several ways."""

    layer_set: str | None = option(path(is_read=True), help="file that foredraft tune layer-skip wrote")
    skipped_attention: tuple[int, ...] | None = option(whole_numbers(), help="layers whose attention is left out")
    skipped_mlp: tuple[int, ...] | None = option(whole_numbers(), help="layers whose MLP is left out")

    @property
    def num_ways(self) -> int:
        """The number of ways in which the options say what is left out."""
        by_index = self.skipped_attention is not None or self.skipped_mlp is not None
        return (self.layer_set is not None) + by_index

    def check(self) -> None:
        super().check()
        if self.num_ways > 1:
            raise ConfigError("layer_set, exit_layer and skipped_attention / skipped_mlp exclude each other; give one")


@dataclass(frozen=True, kw_only=True)
class LayerSkipOptions(LayerSetOptions):
    """Keys of drafting with fewer layers."""

    method: ClassVar[str] = "layer_skip"
    own_policy: ClassVar[str] = "acceptance"
    num_speculative_tokens: int = draft_length(8)
    exit_layer: int | None = option(whole(1), help="everything from this layer on is left out")
    layer_search: str | None = option(
        one_of(("swift",)),
        help="swift looks for a better set while decoding, from the given one or its own; default where none is known",
    )

    @property
    def num_ways(self) -> int:
        return super().num_ways + (self.exit_layer is not None)


@dataclass(frozen=True, kw_only=True)
class QuantizedSelfOptions(LayerSetOptions):
    """Keys of drafting over 4-bit weights."""

    method: ClassVar[str] = "quantized_self"
    num_speculative_tokens: int = draft_length(3)
    quantization_group_size: int = option(whole(1), 32, "inputs that share a scale in the 4-bit weights")
    quantize_head: bool = option(
        flag(), False, "quantise the output embedding to 4 bits, too: cheaper, but less agreement"
    )


@dataclass(frozen=True, kw_only=True)
class SparseKVOptions(LayerSetOptions, ModelOptions):
    """Keys of drafting over a part of the cache."""

    method: ClassVar[str] = "sparse_kv"
    num_speculative_tokens: int = draft_length(3)
    kv_budget: int = option(whole(1), 256, "columns of the cache that drafts attend to")
    kv_selector: str = option(
        one_of((STREAMING, SNAPKV), {"streamingllm": STREAMING, "streaming_llm": STREAMING, "snap_kv": SNAPKV}),
        STREAMING,
        "streaming keeps the first and the last columns, snapkv those that the last tokens attend to",
    )
    kv_sinks: int = option(whole(0), 4, "first columns that are always kept")
    kv_window: int | None = option(whole(1), help="of snapkv: last tokens, which vote and are kept; 32 by default")
    kv_refresh: int = option(whole(1), 64, "new tokens that are kept besides before columns are chosen anew")
    quantize_draft: bool = option(flag(), False, "draft over 4-bit copies of the weights, too, as quantized_self does")
    quantization_group_size: int = option(whole(1), 32, "inputs that share a scale in the 4-bit weights")

    @property
    def window(self) -> int:
        """Last columns that are always kept."""
        if self.kv_selector == STREAMING:
            return self.kv_budget - self.kv_sinks
        return 32 if self.kv_window is None else self.kv_window

    def check(self) -> None:
        super().check()
        if self.kv_selector == STREAMING and self.kv_window is not None:
            raise ConfigError(
                "kv_window is the number of tokens that vote, and kv_selector='streaming' takes no votes: it keeps "
                "kv_sinks first and the rest of kv_budget last columns; leave kv_window out, or take 'snapkv'"
            )
        if self.kv_sinks >= self.kv_budget:
            raise ConfigError(
                f"kv_budget is {self.kv_budget} columns and kv_sinks is {self.kv_sinks}, which leaves none for the "
                "text before the draft; raise kv_budget, or lower kv_sinks"
            )
        if self.kv_selector == SNAPKV and self.kv_sinks + self.window >= self.kv_budget:
            raise ConfigError(
                f"kv_budget is {self.kv_budget} columns, and kv_sinks={self.kv_sinks} and kv_window={self.window} "
                "leave none of them to be voted for; raise kv_budget, or lower the others"
            )
        if self.model is not None and (self.quantize_draft or self.num_ways):
            raise ConfigError(
                "quantize_draft, layer_set and skipped_attention / skipped_mlp make a drafter of the target, and model "
                "names another one; leave out one or the other"
            )


METHODS = (
    Method(
        LayerSkipOptions,
        "foredraft.drafters.selfdraft.layer_skip:build",
        summary="with the target itself, some of its layers left out",
        aliases=("draft_and_verify", "self_speculative", "early_exit"),
    ),
    Method(
        QuantizedSelfOptions,
        "foredraft.drafters.selfdraft.quantized_self:build",
        summary="with the target itself over 4-bit weights",
        aliases=("qspec",),
    ),
    Method(
        SparseKVOptions,
        "foredraft.drafters.selfdraft.sparse_kv:build",
        summary="with the target itself, or a smaller model, over a small part of its own cache",
        aliases=("magicdec", "streaming_kv"),
        model_is_optional=True,
    ),
)
