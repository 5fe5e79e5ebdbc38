"""Methods that draft with a cheaper form of the target: their options and entries."""

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
    """Keys that select the layers to skip while drafting, in one of several ways."""

    layer_set: str | None = option(path(is_read=True), help="file that foredraft tune layer-skip wrote")
    skipped_attention: tuple[int, ...] | None = option(whole_numbers(), help="layers whose attention is skipped")
    skipped_mlp: tuple[int, ...] | None = option(whole_numbers(), help="layers whose MLP is skipped")

    @property
    def num_ways(self) -> int:
        """Number of alternative keys in use; more than one is an error."""
        by_index = self.skipped_attention is not None or self.skipped_mlp is not None
        return (self.layer_set is not None) + by_index

    def check(self) -> None:
        super().check()
        if self.num_ways > 1:
            raise ConfigError(
                "layer_set, exit_layer and skipped_attention / skipped_mlp exclude each other; give only one of them"
            )


@dataclass(frozen=True, kw_only=True)
class LayerSkipOptions(LayerSetOptions):
    """Keys of drafting with some of the target's layers."""

    method: ClassVar[str] = "layer_skip"
    own_policy: ClassVar[str] = "acceptance"
    num_speculative_tokens: int = draft_length(8)
    exit_layer: int | None = option(whole(1), help="first layer to skip; all layers after it are skipped, too")
    layer_search: str | None = option(
        one_of(("swift",)),
        help="swift improves the set of skipped layers while decoding, starting from the given set or its own; this is "
        "the default when no set is known",
    )

    @property
    def num_ways(self) -> int:
        return super().num_ways + (self.exit_layer is not None)


@dataclass(frozen=True, kw_only=True)
class QuantizedSelfOptions(LayerSetOptions):
    """Keys of drafting with 4-bit copies of the target's weights."""

    method: ClassVar[str] = "quantized_self"
    num_speculative_tokens: int = draft_length(3)
    quantization_group_size: int = option(whole(1), 32, "number of inputs that share a scale in the 4-bit weights")
    quantize_head: bool = option(
        flag(), False, "quantise the output embedding to 4 bits, too; drafts are cheaper, but accepted less often"
    )


@dataclass(frozen=True, kw_only=True)
class SparseKVOptions(LayerSetOptions, ModelOptions):
    """Keys of drafting with attention to a part of the cache."""

    method: ClassVar[str] = "sparse_kv"
    num_speculative_tokens: int = draft_length(3)
    kv_budget: int = option(whole(1), 256, "number of cache columns that drafts attend to")
    kv_selector: str = option(
        one_of((STREAMING, SNAPKV), {"streamingllm": STREAMING, "streaming_llm": STREAMING, "snap_kv": SNAPKV}),
        STREAMING,
        "streaming keeps the first and the last columns, snapkv the columns that the last tokens attend to most",
    )
    kv_sinks: int = option(whole(0), 4, "number of first columns that are always kept")
    kv_window: int | None = option(
        whole(1), help="number of last tokens whose attention selects columns in snapkv, kept themselves; 32 by default"
    )
    kv_refresh: int = option(whole(1), 64, "number of new tokens, kept in addition, after which columns are reselected")
    quantize_draft: bool = option(flag(), False, "draft with 4-bit copies of the weights, too, as quantized_self does")
    quantization_group_size: int = option(whole(1), 32, "number of inputs that share a scale in the 4-bit weights")

    @property
    def window(self) -> int:
        """Number of last columns that are always kept."""
        if self.kv_selector == STREAMING:
            return self.kv_budget - self.kv_sinks
        return 32 if self.kv_window is None else self.kv_window

    def check(self) -> None:
        super().check()
        if self.kv_selector == STREAMING and self.kv_window is not None:
            raise ConfigError(
                "kv_window has no meaning for kv_selector='streaming', which keeps the first kv_sinks columns and "
                "fills the rest of kv_budget with the last columns; leave kv_window out, or set kv_selector='snapkv'"
            )
        if self.kv_sinks >= self.kv_budget:
            raise ConfigError(
                f"kv_budget is {self.kv_budget} columns and kv_sinks is {self.kv_sinks}, which leaves no column for "
                "the last tokens; raise kv_budget, or lower kv_sinks"
            )
        if self.kv_selector == SNAPKV and self.kv_sinks + self.window >= self.kv_budget:
            raise ConfigError(
                f"kv_budget is {self.kv_budget} columns, and kv_sinks={self.kv_sinks} and kv_window={self.window} use "
                "all of them, which leaves none to select by attention; raise kv_budget, or lower the others"
            )
        if self.model is not None and (self.quantize_draft or self.num_ways):
            raise ConfigError(
                "quantize_draft, layer_set and skipped_attention / skipped_mlp turn the target into a drafter, and "
                "model names another drafter; leave out one or the other"
            )


METHODS = (
    Method(
        LayerSkipOptions,
        "foredraft.drafters.selfdraft.layer_skip:build",
        summary="with the target itself, skipping some of its layers",
        aliases=("draft_and_verify", "self_speculative", "early_exit"),
    ),
    Method(
        QuantizedSelfOptions,
        "foredraft.drafters.selfdraft.quantized_self:build",
        summary="with the target itself, in 4-bit weights",
        aliases=("qspec",),
    ),
    Method(
        SparseKVOptions,
        "foredraft.drafters.selfdraft.sparse_kv:build",
        summary="with the target itself or a smaller model, attending to a small part of its cache",
        aliases=("magicdec", "streaming_kv"),
        model_is_optional=True,
    ),
)
