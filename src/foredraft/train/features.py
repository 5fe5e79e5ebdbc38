"""Features of the target along examples: computed online, or read from a cache on disk that fills during training."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.folders import append_lines
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.nodes import Wanted
from foredraft.train.examples import Example, key_of

logger = logging.getLogger("foredraft")

SHARD_TOKENS = 32_768
INDEX = "index.jsonl"

Streams = dict[int, Tensor]
"""Features by layer of the target: the layer's input after every token, (T, H). The key ``num_layers`` is the last
hidden state after the final norm."""


Features = Callable[[Sequence[Example]], list[Streams]]
"""Function that returns the features of examples."""


def target_features(target: CausalLM, layers: Sequence[int], examples: Sequence[Example]) -> list[Streams]:
    """Return the features of examples from one forward pass of the target over all of them.

    Args:
      target: the target, on the device of training.
      layers: indices of layers whose inputs are read; ``num_layers`` for the last hidden state.
    """
    last = target.num_layers
    wanted = Wanted(last in layers, tuple(sorted({*layers} - {last})))
    chains = [example.token_ids for example in examples]
    cache = target.new_cache(len(chains), max(map(len, chains)))
    output = target.forward_with(wanted, Nodes.from_chains(chains), cache, keep=slice(0, 0))
    found = dict(output.layer_inputs)
    if output.last_hidden is not None:
        found[last] = output.last_hidden
    return [{layer: found[layer][row, : len(chain)].clone() for layer in layers} for row, chain in enumerate(chains)]


class FeatureCache:
    """Features in shards on disk, computed if missing. If the disk is full, writing stops and training goes on.

    Args:
      source: function that computes missing features.
      folder: folder of the shards. Several trainings over one target may share it, even if they read different layers.
      layers: indices of the layers to read.
    """

    def __init__(self, source: Features, folder: Path, layers: Sequence[int]) -> None:
        self._source, self._folder, self._layers = source, folder, tuple(layers)
        self._open: dict[Example, Streams] = {}  # examples of the shard that is not written yet
        self._places: dict[str, tuple[str, int, int]] = {}
        self._layers_in: dict[str, frozenset[str]] = {}
        self._num_read = 0
        self._is_full = False
        folder.mkdir(parents=True, exist_ok=True)
        self._read_index()

    def __contains__(self, example: Example) -> bool:
        return example.key in self._places

    def __call__(self, examples: Sequence[Example]) -> list[Streams]:
        """Return the features of examples, read from disk if they are stored."""
        if any(example.key not in self._places for example in examples):
            self._read_index()
        missing = [example for example in examples if example.key not in self._places]
        made = dict(zip((example.key for example in missing), self._source(missing) if missing else (), strict=True))
        if not self._is_full:
            for example in missing:
                self._add(example, made[example.key])
        return [made[example.key] if example.key in made else self._read(example) for example in examples]

    def close(self) -> None:
        """Write the features that are not on disk yet."""
        self._write()

    def _read(self, example: Example) -> Streams:
        file, start, stop = self._places[example.key]
        with safe_open(self._folder / file, framework="pt") as shard:
            return {layer: shard.get_slice(str(layer))[start:stop] for layer in self._layers}

    def _add(self, example: Example, found: Streams) -> None:
        self._open[example] = {layer: states.cpu() for layer, states in found.items()}
        if sum(len(one.token_ids) for one in self._open) >= SHARD_TOKENS:
            self._write()

    def _write(self) -> None:
        """Write a shard. The index is written last, and only then the shard becomes visible.

        The name of a shard depends on all of its contents. Trainings that fill the folder at the same time therefore
        never replace a shard of another training by different contents.
        """
        shard, self._open = self._open, {}
        if not shard:
            return
        name = f"{key_of(example.key for example in shard)}-{'-'.join(map(str, self._layers))}.safetensors"
        beside = self._folder / f".{name}.{os.getpid()}"
        tensors = {str(layer): torch.cat([part[layer] for part in shard.values()]) for layer in self._layers}
        start, lines = 0, []
        for example in shard:
            stop = start + len(example.token_ids)
            lines.append(json.dumps([example.key, name, start, stop]) + "\n")
            start = stop
        try:
            save_file(tensors, beside)
            os.replace(beside, self._folder / name)
            append_lines(self._folder / INDEX, "".join(lines))
        except (OSError, SafetensorError) as error:
            beside.unlink(missing_ok=True)
            self._is_full = True
            logger.warning(
                "features are no longer stored: %s cannot be written (%s). Training continues; features that are not "
                "stored are computed again in every epoch",
                self._folder,
                getattr(error, "strerror", None) or error,
            )

    def _read_index(self) -> None:
        """Read new lines of the index, because other processes may write as well."""
        index = self._folder / INDEX
        if not index.exists():
            return
        with index.open(encoding="utf-8") as lines:
            lines.seek(self._num_read)
            text = lines.read()
        whole = text[: text.rfind("\n") + 1]
        self._num_read += len(whole.encode())
        for line in whole.splitlines():
            try:
                key, file, start, stop = json.loads(line)
            except ValueError:  # the line was cut off
                continue
            if self._has_all(file):
                self._places[key] = (file, start, stop)

    def _has_all(self, file: str) -> bool:
        """Return whether a shard contains every layer to read; shards of other trainings may contain other layers."""
        if file not in self._layers_in:
            with safe_open(self._folder / file, framework="pt") as shard:
                self._layers_in[file] = frozenset(shard.keys())
        return self._layers_in[file] >= {str(layer) for layer in self._layers}
