"""The sublayers that a search over layer sets may leave out, and where it begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foretoken.drafters.parts.layer_set import LayerSet
from foretoken.errors import ConfigError

ATTENTION, MLP = "attention", "mlp"


@dataclass(frozen=True)
class Space:
    """One yes or no per sublayer: is it left out while drafting?

    Args:
      num_layers: of the model.
      kept: layers that stay whole, counted from 0.
    """

    num_layers: int
    kept: frozenset[int] = frozenset()

    @classmethod
    def of(cls, num_layers: int, kept: Iterable[int] = ()) -> Space:
        """The space of a model; layers below 0 are counted from the end.

        Raises: ConfigError for a layer that the model does not have, or when none may be left out.
        """
        wanted = tuple(kept)
        wrong = [layer for layer in wanted if not -num_layers <= layer < num_layers]
        if wrong:
            raise ConfigError(
                f"keep-layers names {wrong}, and the model has layers 0..{num_layers - 1} (-1 is the last); correct it"
            )
        space = cls(num_layers, frozenset(layer % num_layers for layer in wanted))
        if not space.free:
            raise ConfigError(f"keep-layers keeps all {num_layers} layers, so there is nothing to search; keep fewer")
        return space

    @property
    def free(self) -> list[int]:
        """Layers whose sublayers may be left out."""
        return [layer for layer in range(self.num_layers) if layer not in self.kept]

    @property
    def names(self) -> list[str]:
        """The names of the variables: "attention.0" says whether the attention of layer 0 is left out."""
        return [f"{kind}.{layer}" for kind in (ATTENTION, MLP) for layer in self.free]

    def layer_set(self, choice: Mapping[str, bool]) -> LayerSet:
        """The layer set that a choice leaves out."""
        left_out: dict[str, list[int]] = {ATTENTION: [], MLP: []}
        for name in self.names:
            kind, layer = name.split(".")
            if choice[name]:
                left_out[kind].append(int(layer))
        return LayerSet(tuple(left_out[ATTENTION]), tuple(left_out[MLP]), self.num_layers)

    def choice(self, layer_set: LayerSet) -> dict[str, bool]:
        """The variables of a set, as far as it leaves out what may be left out."""
        named = {f"{ATTENTION}.{layer}" for layer in layer_set.attention} | {
            f"{MLP}.{layer}" for layer in layer_set.mlp
        }
        return {name: name in named for name in self.names}

    def probes(self, limit: int) -> list[dict[str, bool]]:
        """Choices to begin with, at most ``limit``, all different.

        Patterns come first. Attention is the more redundant kind: the published sets leave out 24 attention and 10
        MLP sublayers of 40, and 47 and 37 of 80 (Draft & Verify, arXiv:2309.08168). Then every sublayer alone,
        attention first.
        """
        middle = [layer for layer in self.free if 0 < layer < self.num_layers - 1] or self.free
        patterns = [
            LayerSet(tuple(middle[::2]), (), self.num_layers),
            LayerSet(tuple(middle), (), self.num_layers),
            LayerSet(tuple(middle[::2]), tuple(middle[::4]), self.num_layers),
            LayerSet(tuple(middle[::2]), tuple(middle[::2]), self.num_layers),
        ]
        choices = [self.choice(pattern) for pattern in patterns]
        choices += [{name: name == single for name in self.names} for single in self.names]
        distinct = {tuple(choice.values()): choice for choice in choices}
        return list(distinct.values())[:limit]
