"""Which layers of a model are left out, and cheaper forms of it: without them, over 4-bit weights, or both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import ConfigError
from foretoken.folders import keep_json, parsed_json
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    import foretoken.model.lm as lm
    from foretoken.model import quantize, sublayers
    from foretoken.model.lm import CausalLM
else:
    lm = Lazy("foretoken.model.lm")
    quantize = Lazy("foretoken.model.quantize")
    sublayers = Lazy("foretoken.model.sublayers")

FORMAT = "foretoken-layer-set"


@dataclass(frozen=True)
class LayerSet:
    """Which residual branches are left out while drafting.

    Args:
      attention, mlp: indices of the layers, ascending.
      num_layers: of the model that the set is for; None for any.
      details: how it was found; kept as it is.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    num_layers: int | None = None
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def exit_at(cls, layer: int, num_layers: int) -> LayerSet:
        """Everything from ``layer`` on: early exit, the first ``layer`` layers and the head draft.

        Raises: ConfigError unless 1 <= layer < num_layers.
        """
        if not 1 <= layer < num_layers:
            raise ConfigError(f"exit_layer is {layer}; the model has {num_layers} layers, so 1..{num_layers - 1} exit")
        rest = tuple(range(layer, num_layers))
        return cls(rest, rest, num_layers)

    @classmethod
    def load(cls, path: str | Path) -> LayerSet:
        """Read what ``save`` (and ``foretoken tune layer-skip``) wrote.

        Raises: ConfigError for a file that is missing or something else.
        """
        path = Path(path).expanduser()
        try:
            content = parsed_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"layer set {path} cannot be read: {error.strerror}; check the path") from None
        except ValueError as error:
            raise ConfigError(f"layer set {path} is not JSON: {error}; make one by foretoken tune layer-skip") from None
        try:
            if content["format"] != FORMAT:
                raise KeyError("format")
            return cls(
                _layers(content, "skipped_attention"),
                _layers(content, "skipped_mlp"),
                _whole(content["num_layers"], "num_layers"),
                dict(content.get("details") or {}),
            )
        except KeyError as error:
            raise ConfigError(
                f"layer set {path} lacks a proper {error}; make one by foretoken tune layer-skip"
            ) from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a layer set: {error}; make one by foretoken tune layer-skip") from None

    def save(self, path: str | Path) -> None:
        """Write a small JSON file."""
        content = {
            "format": FORMAT,
            "num_layers": self.num_layers,
            "skipped_attention": list(self.attention),
            "skipped_mlp": list(self.mlp),
            "details": self.details,
        }
        keep_json(Path(path), content)

    def check(self, num_layers: int, model_name: str) -> None:
        """Raises: ConfigError when a layer is named that the model does not have, or the set is for another depth."""
        if self.num_layers is not None and self.num_layers != num_layers:
            raise ConfigError(
                f"the layer set is for a model of {self.num_layers} layers and {model_name} has {num_layers}; "
                "search one for this model by foretoken tune layer-skip"
            )
        for kind, indices in (("skipped_attention", self.attention), ("skipped_mlp", self.mlp)):
            missing = [index for index in indices if not 0 <= index < num_layers]
            if missing:
                raise ConfigError(f"{kind} names layers {missing}, and {model_name} has 0..{num_layers - 1}")

    def __len__(self) -> int:
        """Number of sublayers left out."""
        return len(self.attention) + len(self.mlp)


def _layers(content: dict[str, Any], key: str) -> tuple[int, ...]:
    """Raises: KeyError, TypeError for anything but a list of whole numbers."""
    if not isinstance(content[key], list):
        raise TypeError(f"{key} is {content[key]!r}, not a list of layers")
    return tuple(sorted({_whole(layer, key) for layer in content[key]}))


def _whole(value: object, key: str) -> int:
    """Raises: TypeError for anything but a whole number, which int() would cut to one."""
    if type(value) is not int:
        raise TypeError(f"{key} has {value!r}, not a whole number")
    return value


def skipping(target: CausalLM, layer_set: LayerSet) -> CausalLM:
    """A variant of the target without these sublayers.

    Raises: ConfigError for layers that it does not have; UnsupportedModelError for layers that are built differently.
    """
    layer_set.check(target.num_layers, target.name)

    return target.variant(f"without {len(layer_set)} sublayers", lambda variant, _: leave_out(variant, layer_set))


def quantized(target: CausalLM, group_size: int, layer_set: LayerSet, *, with_head: bool = False) -> CausalLM:
    """A variant of the target over 4-bit weights, without some sublayers.

    Raises: ConfigError when no linear of the target can be quantised in such groups.
    """
    layer_set.check(target.num_layers, target.name)

    def edit(variant: CausalLM, model: PreTrainedModel) -> None:
        quantize.quantize_linears(model, group_size, with_head=with_head)
        if len(layer_set):
            leave_out(variant, layer_set)

    return target.variant("4-bit", edit)


def leave_out(variant: CausalLM, layer_set: LayerSet) -> None:
    """Take these sublayers out of a variant that is being made."""
    sublayers.SkippableLayers(variant.layers, lambda: run_once(variant)).leave_out(layer_set.attention, layer_set.mlp)


def run_once(model: CausalLM) -> None:
    """One forward over a token, in a cache of its own."""
    model.forward(lm.Nodes.from_chains([[0]]), model.new_cache(1, capacity=8))
