"""Checkpoints of heads: a config and tensors by name, read from a folder or a hub id, with strict checks of every
tensor."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foredraft.errors import CheckpointError
from foredraft.folders import parsed_json, replacing, write_atomically

CONFIG = "config.json"
WEIGHTS = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)
"""Names of weight files in order of preference. Each may be sharded, with an index beside the shards."""
INDEX = ".index.json"

Shape = tuple[int, ...]
ACCEPTANCE = "first_token_acceptance"
"""Config key of a head: share of drafts whose first token the target accepted in validation, 0 to 1."""

MAX_NAMED = 6
"""Largest number of tensor names of each kind in a message."""


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint folder, read without executing anything.

    Args:
      name: location of the checkpoint, for messages.
      config: content of config.json.
      tensors: tensors by name, on the CPU, in the dtypes of the file.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def read_config(location: str | os.PathLike[str], revision: str | None = None) -> dict[str, Any]:
    """Return the config.json of a folder or hub id, which identifies a checkpoint without reading its weights.

    Raises: CheckpointError if the file is missing or is not a JSON object.
    """
    path = _find(location, CONFIG, revision)
    if path is None:
        raise CheckpointError(f"{os.fspath(location)} has no {CONFIG}; give the folder or hub id of a head or a model")
    return read_json(path)


def read_checkpoint(location: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """Return config and tensors of a folder or hub id.

    Safetensors files are preferred. PyTorch files are read with ``weights_only=True``, which executes nothing.

    Raises: CheckpointError for files that are missing or damaged, or that would execute code.
    """
    config = read_config(location, revision)
    for weights in WEIGHTS:
        index = _find(location, weights + INDEX, revision)
        if index is not None:
            return Checkpoint(os.fspath(location), config, _split(location, index, revision))
        path = _find(location, weights, revision)
        if path is not None:
            return Checkpoint(os.fspath(location), config, _tensors(path))
    raise CheckpointError(
        f"{os.fspath(location)} has no weights; it must contain one of {', '.join(WEIGHTS)}, or an index of shards"
    )


def write_checkpoint(folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a folder, made if needed; old files stay until both are written."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    beside = path / f".{WEIGHTS[0]}"
    with replacing(path / WEIGHTS[0], beside):
        save_file(copies, beside, metadata={"format": "pt"})
        write_atomically(path / CONFIG, json.dumps(dict(config), indent=2) + "\n")


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of every tensor from the index of a sharded checkpoint.

    Raises: CheckpointError for a damaged index, and for an index that names a file outside of its folder or of another
    kind.
    """
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; download or copy it again")
    suffix = Path(index.name.removesuffix(INDEX)).suffix
    for file in set(files.values()):
        if os.path.isabs(file) or "\0" in file or os.path.normpath(file).split(os.sep)[0] in ("..", "."):
            raise CheckpointError(
                f"{index} names {file!r}, which is not a file in its folder: the checkpoint is damaged, or made to "
                "read other files; download it again from a source that you trust"
            )
        if not file.endswith(suffix):
            raise CheckpointError(
                f"{index} names {file[:100]!r}, which is not a {suffix} file; download or copy the checkpoint again"
            )
    return files


# -- files -----------------------------------------------------------------------------------------------------------


def _find(location: str | os.PathLike[str], file: str, revision: str | None) -> Path | None:
    """Return a file of a folder or hub id, downloaded if needed; None if there is no file with this name."""
    folder = Path(os.fspath(location)).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    name = os.fspath(location)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(f"{name} is neither a folder nor a hub id (owner/name)")
    from transformers.utils import cached_file

    try:
        found = cached_file(name, file, revision=revision or "main", _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        detail = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{name} is not a local folder, and {file} cannot be downloaded from the hub ({detail}); check the "
            "spelling and the network, or give a folder"
        ) from error
    return None if found is None else Path(found)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file that is one JSON object.

    Raises: CheckpointError for any other file.
    """
    try:
        value = parsed_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download or copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains no JSON object; download or copy it again")
    return value


def _split(location: str | os.PathLike[str], index: Path, revision: str | None) -> dict[str, Tensor]:
    """Return the tensors of a sharded checkpoint. Of duplicates, the tensor in the file that the index names is
    used."""
    files = weight_map(index)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        path = _find(location, file, revision)
        if path is None:
            raise CheckpointError(f"{index} names {file}, which is missing; download or copy the checkpoint again")
        found = _tensors(path)
        tensors.update({name: found[name] for name in found if files.get(name) == file or name not in tensors})
    lost = sorted(files.keys() - tensors.keys())
    if lost:
        raise CheckpointError(
            f"{index} names tensors that its files do not contain: {_listed(lost)}; download the checkpoint again"
        )
    return tensors


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file."""
    try:
        if path.suffix == ".safetensors":
            return {name: _widened(tensor) for name, tensor in load_file(path).items()}
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, or contains Python objects that would execute code when loaded, and is refused; copy "
            "it again, or convert it to safetensors if you trust it"
        ) from error
    except Exception as error:  # torch's reader raises errors of many types for damaged files
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read ({detail}); it is truncated or damaged: copy it again") from error
    if isinstance(value, Mapping) and isinstance(value.get("state_dict"), Mapping):
        value = value["state_dict"]
    if not isinstance(value, Mapping) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise CheckpointError(f"{path} contains no tensors by name; it is not a checkpoint of a head")
    return {str(name): tensor for name, tensor in value.items()}


def _widened(tensor: Tensor) -> Tensor:
    """Return 8-bit floats as bfloat16, without loss. If the file also has scales, they are refused later as unknown
    tensors."""
    return tensor.bfloat16() if tensor.dtype == torch.float8_e4m3fn else tensor


# -- strict checks ---------------------------------------------------------------------------------------------------


def differences(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> str:
    """Describe, in a sentence, how tensor names and shapes differ from those of a layout; "" if they agree.

    A matrix with the two sizes of its shape swapped is called transposed, for instance {"fc": (4, 8)} against (8, 4).
    """
    transposed: list[str] = []
    wrong: list[str] = []
    for name in sorted(expected.keys() & found.keys()):
        want, have = expected[name], found[name]
        if want != have:
            is_turned = len(want) == 2 and want == have[::-1]
            (transposed if is_turned else wrong).append(f"{name} is {_shown(have)}, expected {_shown(want)}")
    missing = [f"{name} {_shown(expected[name])}" for name in sorted(expected.keys() - found.keys())]
    extra = [f"{name} {_shown(found[name])}" for name in sorted(found.keys() - expected.keys())]
    kinds = {"missing": missing, "extra": extra, "transposed": transposed, "wrongly shaped": wrong}
    return "; ".join(f"{title}: {_listed(names)}" for title, names in kinds.items() if names)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Set all parameters of a module to the tensors of a checkpoint, in the checkpoint's dtypes.

    Args:
      module: module to fill.
      tensors: tensors by parameter name.
      name: name of the checkpoint, for messages.

    Raises: CheckpointError, naming tensors that are missing, extra, transposed or wrongly shaped, and those with NaN
    or infinite values.
    """
    own = dict(module.named_parameters())
    found = differences(
        {key: tuple(tensor.shape) for key, tensor in own.items()},
        {key: tuple(tensor.shape) for key, tensor in tensors.items()},
    )
    if found:
        raise CheckpointError(f"the tensors of {name} do not match its layout. {found}")
    bad = sorted(key for key, tensor in tensors.items() if not tensor.is_floating_point())
    if bad:
        kinds = ", ".join(f"{key} is {str(tensors[key].dtype).removeprefix('torch.')}" for key in bad[:MAX_NAMED])
        raise CheckpointError(
            f"weights of {name} are not floating-point numbers: {kinds}; quantized heads are not supported"
        )
    broken = sorted(key for key, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    if broken:
        raise CheckpointError(f"weights of {name} contain NaN or infinite values: {_listed(broken)}; copy it again")
    for key, parameter in own.items():
        parameter.data = tensors[key].detach()


def integer(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    """Return a whole number, 1 or more, from a config.

    Raises: CheckpointError for any other value, and for a missing value without a default.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        state = "is missing from" if value is None else f"is {value!r} in"
        raise CheckpointError(f"{key} {state} the config of {name}; it must be a whole number, 1 or more")
    return value


def _shown(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a number"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
