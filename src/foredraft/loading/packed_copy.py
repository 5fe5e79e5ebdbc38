"""Packed weights of a model, kept in the cache folder: the next load reads them instead of packing them again.

A copy holds everything that loading computes about weights, and is of one source: of its files as they were, of one
way to load them, for one instruction set, by one version of each library. Whatever is not that is told, and made again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

import foredraft
from foredraft.errors import ConfigError
from foredraft.folders import cache_folder
from foredraft.gguf.header import Header
from foredraft.loading.sources import Source
from foredraft.loading.tensor_file import DTYPES, DamagedFileError, TensorFile, write_tensors
from foredraft.model.execution.forwards import replace_forward, replacement
from foredraft.model.execution.packing import PackedLinear, PackedProduct, PackedRows, dense_weight
from foredraft.model.lm import CausalLM
from foredraft.native.library import library, source_digest
from foredraft.native.packed_matmul import Facts, PackedMatrix
from foredraft.progress import no_progress_bars

logger = logging.getLogger("foredraft")

FORMAT = 1
"""Raised when something else is written than before."""
LOOKED_AT = 2**20
"""Bytes at both ends of a file of a source that are hashed."""
SUFFIX = ".packed"


def check_cache_packed(cache_packed: bool, execution: str) -> None:
    """Raises: ConfigError where nothing is packed that could be kept."""
    if cache_packed and execution == "eager":
        raise ConfigError("cache_packed keeps packed weights, and execution='eager' packs none; leave one of them out")


@dataclass(frozen=True)
class PackedCopy:
    """A place for the packed weights of a model.

    Args:
      name: of the model, for messages.
      file: where they are, or will be.
      source: whose weights they are.
      blocks: GGUF file that is read besides.
      way: how they are loaded.
    """

    name: str
    file: Path
    source: Source
    blocks: Path | None
    way: Mapping[str, str | None]

    @classmethod
    def of(
        cls,
        source: Source,
        blocks: Header | None,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str | None,
        weights: str | None,
    ) -> PackedCopy:
        """In the cache folder, in ``packed``. Raises: ConfigError for a device that has no packed weights."""
        if device.type != "cpu":
            raise ConfigError(f"cache_packed keeps weights as CPUs read them, and the device is {device}; leave it out")
        kernels = library()
        way = {
            "dtype": str(dtype).removeprefix("torch."),
            "quantization": quantization,
            "weights": weights,
            "instruction_set": None if kernels is None else kernels.instruction_set,
        }
        place = os.path.realpath(source.location) if source.is_local else source.location
        named = json.dumps([place, source.revision, source.gguf_file, way])
        short = re.sub(r"[^\w.-]+", "-", source.name).strip("-.")[-60:]
        file = cache_folder("packed", f"{short}-{hashlib.sha256(named.encode()).hexdigest()[:16]}{SUFFIX}")
        return cls(source.name, file, source, None if blocks is None else blocks.path, way)

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 where there is none."""
        try:
            return self.file.stat().st_size
        except OSError:
            return 0

    def key(self) -> dict[str, Any]:
        """Sources, settings and versions that a usable copy was made from."""
        return {
            **_versions(),
            "way": dict(self.way),
            "files": [_fingerprint(file) for file in _files_of(self.source, self.blocks)],
        }

    def read(self) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        """The model, and facts that `keep` was given; None where there is no copy, or none that can be used.

        Why a copy is not used is logged in one line.
        """
        if library() is None or not self.file.exists():
            return None
        try:
            kept = TensorFile(self.file)
            key = self.key()
            differing = [name for name in key if kept.about["key"].get(name) != key[name]]
            if differing:
                raise DamagedFileError(f"it was made from other {' and '.join(differing)}")
            return model_of(kept.about, kept.read()), kept.about["facts"]
        except Exception as error:  # of a file that is not what was written; loading goes on without it
            detail = " ".join(str(error).split())[:200]
            told = detail if isinstance(error, DamagedFileError) else f"{type(error).__name__}: {detail}"
            logger.warning("the packed copy %s is not used, and made again: %s", self.file, told)
            return None

    def keep(self, lm: CausalLM, model: PreTrainedModel, facts: Mapping[str, Any]) -> bool:
        """Write the weights of a model as they are packed; whether that was done.

        What prevents it is logged in one line; the model is as good without.

        Args:
          lm: its adapter.
          facts: that `read` gives back: JSON.
        """
        if reason := why_not_kept(lm, model):
            logger.warning("no packed copy of %s is kept: %s", self.name, reason)
            return False
        start = time.perf_counter()
        try:
            about, tensors = described(lm, model)
            write_tensors(self.file, {"key": self.key(), "facts": dict(facts), **about}, tensors)
        except OSError as error:
            logger.warning(
                "no packed copy of %s is kept in %s: %s", self.name, self.file.parent, error.strerror or error
            )
            return False
        seconds = time.perf_counter() - start
        logger.info(
            "packed weights of %s are kept in %s (%.1f MB, %.1f s)", self.name, self.file, self.num_bytes / 1e6, seconds
        )
        return True


# -- all that are kept ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptFile:
    """A file in the folder of packed copies, of any model and way to load it.

    Args:
      settings: it was loaded by; empty where it cannot be read.
      why_unused: why no load reads it; empty where one with these settings may.
    """

    file: str
    num_bytes: int
    settings: str
    why_unused: str


def kept_files() -> list[KeptFile]:
    """Every file there, by name: copies of other settings and versions, and what writers left that were ended."""
    folder, found = cache_folder("packed"), []
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            num_bytes = file.stat().st_size
        except OSError:  # it went away meanwhile
            continue
        found.append(KeptFile(str(file), num_bytes, *_settings_of(file)))
    return found


def _settings_of(file: Path) -> tuple[str, str]:
    """Settings of a copy, and the reason why no load reads it."""
    if file.suffix != SUFFIX:
        return "", "it was not finished, unless a process writes it now"
    try:
        key = TensorFile(file).about["key"]
        settings = " ".join(f"{name}={value}" for name, value in key["way"].items() if value is not None)
        versions = {name: version for name, version in _versions().items() if key.get(name) != version}
        sources = [name for name, *stamp in key["files"] if _stamp(Path(name)) != stamp[:2]]
    except (OSError, DamagedFileError, KeyError, TypeError, ValueError, AttributeError) as error:
        return "", f"it is damaged ({' '.join(str(error).split())[:80]})"
    if versions:
        return settings, f"it was made by another {' and '.join(versions)}"
    return settings, f"{sources[0]} has changed or is gone" if sources else ""


# -- sources -------------------------------------------------------------------------------------------------------


def _files_of(source: Source, blocks: Path | None) -> list[Path]:
    """Every file that a model may be read from."""
    place = Path(source.location)
    if not source.is_local:
        wanted = source.gguf_file or "config.json"
        found = try_to_load_from_cache(source.location, wanted, revision=source.revision or "main")
        if not isinstance(found, str):
            return []
        place = Path(found) if source.gguf_file else Path(found).parent
    files = sorted(each for each in place.iterdir() if each.is_file()) if place.is_dir() else [place]
    return [*files, *([] if blocks in (None, place) else [blocks])]


def _versions() -> dict[str, Any]:
    """Versions of the libraries that make a copy."""
    return {
        "format": FORMAT,
        "foredraft": f"{foredraft.__version__} {source_digest()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _stamp(file: Path) -> list[int]:
    """Size and time of change; empty for a file that is gone."""
    try:
        found = file.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def _fingerprint(file: Path) -> list[Any]:
    """Name, size, time of change, and a hash of both ends: a head is at one of them."""
    size, changed = _stamp(file)
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        digest.update(stream.read(LOOKED_AT))
        stream.seek(max(0, size - LOOKED_AT))
        digest.update(stream.read(LOOKED_AT))
    return [str(file), size, changed, digest.hexdigest()]


def why_not_kept(lm: CausalLM, model: PreTrainedModel) -> str:
    """Why packed weights of a model cannot be kept; empty where they can be."""
    if not lm.execution.products:
        return "nothing of it is packed"
    if any(not isinstance(product.matrix, PackedMatrix) for product in lm.execution.products):
        return "some layers do not run by the library's own kernels"
    for each in (model, model.config):
        if not type(each).__module__.startswith("transformers."):
            return f"{type(each).__name__} is code of its own"
    dtypes = {tensor.dtype for tensor in (*lm.shadow.parameters(), *lm.shadow.buffers())}
    odd = [str(dtype) for dtype in dtypes - set(DTYPES.values())]
    return f"it holds tensors of {', '.join(odd)}" if odd else ""


def described(lm: CausalLM, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Description of a model besides its tensors, and the tensors."""
    shadow, tensors = lm.shadow, dict[str, torch.Tensor]()
    released = {}
    for name, weight in shadow.named_parameters(remove_duplicate=False):
        if weight.numel() > 1 and not any(weight.stride()):
            released[name] = [list(weight.shape), str(weight.dtype).removeprefix("torch.")]
        else:
            tensors[f"of model {name}"] = weight.detach()
    tensors |= {f"of model {name}": buffer for name, buffer in shadow.named_buffers(remove_duplicate=False)}
    layers: dict[PackedProduct, dict[int, str]] = {}
    rows = []
    for name, module in shadow.named_modules():
        forward = replacement(module)
        if isinstance(forward, PackedLinear):
            layers.setdefault(forward.product, {})[forward.index] = name
        elif isinstance(forward, PackedRows):
            rows.append(name)
    products = []
    for number, (product, names) in enumerate(layers.items()):
        matrix = product.matrix
        assert isinstance(matrix, PackedMatrix)
        tensors |= {f"{number} {part}": tensor for part, tensor in matrix.parts.items()}
        tensors |= {f"{number} sums {place}": sums for place, sums in enumerate(product.all_sums)}
        products.append(
            {
                "layers": [names[index] for index in range(len(product.layers))],
                "sizes": product.sizes,
                "facts": asdict(Facts.of(matrix)),
                "parts": list(matrix.parts),
                "num_sums": len(product.all_sums),
                "dtype": str(product.dtype).removeprefix("torch."),
                "weight_dtype": str(product.weight_dtype).removeprefix("torch."),
                "is_released": product.is_released,
            }
        )
    generation, in_state = model.generation_config, shadow.state_dict().keys()
    about = {
        "model": [type(model).__module__, type(model).__name__],
        "config": [type(model.config).__module__, type(model.config).__name__],
        "settings": json.loads(model.config.to_json_string(use_diff=False)),
        "name_or_path": model.config.name_or_path,
        "generation": None if generation is None else json.loads(generation.to_json_string(use_diff=False)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "released": released,
        "state": [name for name, _ in shadow.named_parameters() if name in in_state]
        + [name for name, _ in shadow.named_buffers() if name in in_state],
        "products": products,
        "rows": rows,
    }
    return about, tensors


@torch.inference_mode(False)
def model_of(about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The model that `described` was given.

    Raises: many things, for a model that is built in another way now.
    """
    kernels = library()
    assert kernels is not None
    held = {name.removeprefix("of model "): tensor for name, tensor in tensors.items() if name.startswith("of model ")}
    for name, (shape, dtype) in about["released"].items():
        held[name] = torch.full((), torch.nan, dtype=DTYPES[dtype]).expand(shape)
    config = _class(about["config"]).from_dict(about["settings"])
    state = {name: held[name] for name in about["state"]}  # of tied ones the first
    with no_progress_bars():
        model: PreTrainedModel = _class(about["model"]).from_pretrained(
            None, config=config, state_dict=state, dtype=DTYPES[about["dtype"]]
        )
    _hold(model, held)
    model.config.name_or_path = model.name_or_path = about["name_or_path"]
    if about["generation"] is not None:
        model.generation_config = GenerationConfig.from_dict(about["generation"])
    for number, each in enumerate(about["products"]):
        facts, parts = Facts(**each["facts"]), {part: tensors[f"{number} {part}"] for part in each["parts"]}
        layers = [model.get_submodule(name) for name in each["layers"]]
        shapes = [tuple(dense_weight(layer).shape) for layer in layers]
        if shapes != [(size, facts.inputs) for size in each["sizes"]] or sum(each["sizes"]) != facts.outputs:
            raise ValueError(f"layers of {shapes} are not those of {facts}")
        PackedProduct.taken(
            layers,
            facts.matrix(kernels, parts),
            each["sizes"],
            [tensors[f"{number} sums {place}"] for place in range(each["num_sums"])],
            dtype=DTYPES[each["dtype"]],
            weight_dtype=DTYPES[each["weight_dtype"]],
            is_released=each["is_released"],
        ).put_in()
    for name in about["rows"]:
        replace_forward(model.get_submodule(name), PackedRows(replacement(model.get_output_embeddings())))
    return model.eval()


def _hold(model: nn.Module, held: Mapping[str, torch.Tensor]) -> None:
    """Let a model hold these very tensors."""
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    if own.keys() != held.keys() or any(own[name].shape != held[name].shape for name in own):
        odd = sorted(own.keys() ^ held.keys()) or [name for name in own if own[name].shape != held[name].shape]
        raise ValueError(f"the model has another {odd[0]} than was kept")
    for name, tensor in own.items():
        tensor.data = held[name]


def _class(named: Sequence[str]) -> Any:
    """A class of transformers. Raises: ValueError for any other."""
    module, name = named
    if not module.startswith("transformers."):
        raise ValueError(f"{module} is no part of transformers")
    return getattr(importlib.import_module(module), name)
