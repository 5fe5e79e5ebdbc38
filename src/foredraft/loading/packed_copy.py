"""Copies of packed weights in the cache folder. The next load reads a copy instead of packing the weights again.

A copy contains everything that loading computes about weights. It is valid only for the same source files, load
settings, instruction set and library versions. A copy that does not match is reported in the log and made again.
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
"""Version of the file contents; increased when they change."""
LOOKED_AT = 2**20
"""Bytes at each end of a source file that are hashed."""
SUFFIX = ".packed"


def check_cache_packed(cache_packed: bool, execution: str) -> None:
    """Raise ConfigError if the execution mode packs no weights, so that there is nothing to keep."""
    if cache_packed and execution == "eager":
        raise ConfigError("cache_packed keeps packed weights, but execution='eager' packs none; leave one of them out")


@dataclass(frozen=True)
class PackedCopy:
    """Location of a copy of a model's packed weights.

    Args:
      name: name of the model in messages.
      file: path of the copy, which may not exist yet.
      source: source of the weights.
      blocks: GGUF file that is read in addition.
      way: settings with which the weights are loaded.
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
        """Choose a file in the folder ``packed`` of the cache. Raises: ConfigError for a device other than a CPU."""
        if device.type != "cpu":
            raise ConfigError(f"cache_packed keeps weights packed for CPUs, but the device is {device}; leave it out")
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
        """Size of the file in bytes; 0 if it does not exist."""
        try:
            return self.file.stat().st_size
        except OSError:
            return 0

    def key(self) -> dict[str, Any]:
        """Return the source files, settings and versions that a valid copy was made from."""
        return {
            **_versions(),
            "way": dict(self.way),
            "files": [_fingerprint(file) for file in _files_of(self.source, self.blocks)],
        }

    def read(self) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        """Read the model and the facts that `keep` stored; None if there is no valid copy.

        One log line gives the reason why a copy is not used.
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
        except Exception as error:  # whatever is wrong with the file, loading continues without it
            detail = " ".join(str(error).split())[:200]
            told = detail if isinstance(error, DamagedFileError) else f"{type(error).__name__}: {detail}"
            logger.warning("the packed copy %s is not used and will be made again: %s", self.file, told)
            return None

    def keep(self, lm: CausalLM, model: PreTrainedModel, facts: Mapping[str, Any]) -> bool:
        """Store the packed weights of a model and return whether that succeeded.

        A failure is logged in one line. The model works without the copy.

        Args:
          lm: adapter of the model.
          model: the model.
          facts: JSON values that `read` returns.
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
    """A file in the folder of packed copies, of any model and any settings.

    Args:
      file: path of the file.
      num_bytes: its size.
      settings: settings with which the weights were loaded; empty if the file cannot be read.
      why_unused: reason why no load uses the file; empty if a load with these settings may use it.
    """

    file: str
    num_bytes: int
    settings: str
    why_unused: str


def kept_files() -> list[KeptFile]:
    """List every file in the folder by name, including outdated copies and incomplete files of interrupted writers."""
    folder, found = cache_folder("packed"), []
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            num_bytes = file.stat().st_size
        except OSError:  # the file was deleted in the meantime
            continue
        found.append(KeptFile(str(file), num_bytes, *_settings_of(file)))
    return found


def _settings_of(file: Path) -> tuple[str, str]:
    """Return the settings of a copy, and the reason why no load uses it."""
    if file.suffix != SUFFIX:
        return "", "it is incomplete, unless a process is writing it now"
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
    """Return every file that a model may be read from."""
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
    """Return the versions of the format and of the libraries that make a copy."""
    return {
        "format": FORMAT,
        "foredraft": f"{foredraft.__version__} {source_digest()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _stamp(file: Path) -> list[int]:
    """Return size and modification time; empty if the file does not exist."""
    try:
        found = file.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def _fingerprint(file: Path) -> list[Any]:
    """Return name, size, modification time and a hash of both ends of a file; its header is at one of the ends."""
    size, changed = _stamp(file)
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        digest.update(stream.read(LOOKED_AT))
        stream.seek(max(0, size - LOOKED_AT))
        digest.update(stream.read(LOOKED_AT))
    return [str(file), size, changed, digest.hexdigest()]


def why_not_kept(lm: CausalLM, model: PreTrainedModel) -> str:
    """Return the reason why a model's packed weights cannot be stored; empty if they can."""
    if not lm.execution.products:
        return "none of its layers is packed"
    if any(not isinstance(product.matrix, PackedMatrix) for product in lm.execution.products):
        return "some layers do not use the library's own kernels"
    for each in (model, model.config):
        if not type(each).__module__.startswith("transformers."):
            return f"{type(each).__name__} is not a class of transformers"
    dtypes = {tensor.dtype for tensor in (*lm.shadow.parameters(), *lm.shadow.buffers())}
    odd = [str(dtype) for dtype in dtypes - set(DTYPES.values())]
    return f"it contains tensors of {', '.join(odd)}" if odd else ""


def described(lm: CausalLM, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a JSON description of a model without its tensors, and the tensors."""
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
    """Rebuild the model from the values that `described` returned.

    Raises: exceptions of many types, if transformers now builds the model differently.
    """
    kernels = library()
    assert kernels is not None
    held = {name.removeprefix("of model "): tensor for name, tensor in tensors.items() if name.startswith("of model ")}
    for name, (shape, dtype) in about["released"].items():
        held[name] = torch.full((), torch.nan, dtype=DTYPES[dtype]).expand(shape)
    config = _class(about["config"]).from_dict(about["settings"])
    state = {name: held[name] for name in about["state"]}  # only the first name of tied weights
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
    """Replace the tensors of a model with these."""
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    if own.keys() != held.keys() or any(own[name].shape != held[name].shape for name in own):
        odd = sorted(own.keys() ^ held.keys()) or [name for name in own if own[name].shape != held[name].shape]
        raise ValueError(f"the model has another {odd[0]} than the copy")
    for name, tensor in own.items():
        tensor.data = held[name]


def _class(named: Sequence[str]) -> Any:
    """Import a class of transformers. Raises: ValueError for any other class."""
    module, name = named
    if not module.startswith("transformers."):
        raise ValueError(f"{module} is not part of transformers")
    return getattr(importlib.import_module(module), name)
