"""Checkpoints of heads: a config and tensors by name, read from a folder or a hub id, and checked tensor by tensor."""

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
from foredraft.folders import keep_text, parsed_json, replacing

CONFIG = "config.json"
WEIGHTS = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)
"""Names of files of weights, those that are read first standing first; each may be split, with an index beside it."""
INDEX = ".index.json"

Shape = tuple[int, ...]
ACCEPTANCE = "first_token_acceptance"
"""Key in the config of a head: share of drafts, 0 to 1, whose first token its target took when it was validated."""

MAX_NAMED = 6
"""Tensors that a message names of each kind."""


@dataclass(frozen=True)
class Checkpoint:
    """What lies in a folder: nothing of it has been executed.

    Args:
      name: where it is from, for messages.
      config: the content of config.json.
      tensors: by name, on the CPU, in the dtypes of the file.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def read_config(location: str | os.PathLike[str], revision: str | None = None) -> dict[str, Any]:
    """The config.json of a folder or of a hub id: what lies there can be told from it without reading weights.

    Raises: CheckpointError where there is none, or none that is a JSON object.
    """
    path = _find(location, CONFIG, revision)
    if path is None:
        raise CheckpointError(f"{os.fspath(location)} has no {CONFIG}; give the folder or hub id of a head or a model")
    return read_json(path)


def read_checkpoint(location: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """Config and tensors of a folder or of a hub id.

    safetensors are preferred; files of torch are read with ``weights_only=True``, which executes nothing.

    Raises: CheckpointError for what is missing, damaged, or would have to be executed.
    """
    config = read_config(location, revision)
    for weights in WEIGHTS:
        index = _find(location, weights + INDEX, revision)
        if index is not None:
            return Checkpoint(os.fspath(location), config, _split(location, index, revision))
        path = _find(location, weights, revision)
        if path is not None:
            return Checkpoint(os.fspath(location), config, _tensors(path))
    raise CheckpointError(f"{os.fspath(location)} has no weights; looked for {', '.join(WEIGHTS)} and their indices")


def write_checkpoint(folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a folder, which is made; what was there stays until both are."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    beside = path / f".{WEIGHTS[0]}"
    with replacing(path / WEIGHTS[0], beside):
        save_file(copies, beside, metadata={"format": "pt"})
        keep_text(path / CONFIG, json.dumps(dict(config), indent=2) + "\n")


def weight_map(index: Path) -> dict[str, str]:
    """The file of every tensor, as an index beside files of weights has them.

    Raises: CheckpointError for an index that is damaged, and for one that names a file outside of its folder, or one of
      another kind.
    """
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; download or copy it again")
    suffix = Path(index.name.removesuffix(INDEX)).suffix
    for file in set(files.values()):
        if os.path.isabs(file) or "\0" in file or os.path.normpath(file).split(os.sep)[0] in ("..", "."):
            raise CheckpointError(
                f"{index} names {file!r}, which is no file in its folder: the checkpoint is damaged, or made to read "
                "other files; download it again from where you trust it"
            )
        if not file.endswith(suffix):
            raise CheckpointError(
                f"{index} names {file[:100]!r}, which is no {suffix} file as its weights are; download or copy it again"
            )
    return files


# -- files -----------------------------------------------------------------------------------------------------------


def _find(location: str | os.PathLike[str], file: str, revision: str | None) -> Path | None:
    """A file of a folder, or of a hub id, fetched if need be; None where there is none of this name."""
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
            f"{file} of {name} cannot be fetched ({detail}); it is not a folder here: check the spelling and the "
            "network, or give a folder"
        ) from error
    return None if found is None else Path(found)


def read_json(path: Path) -> dict[str, Any]:
    """A file that is one JSON object.

    Raises: CheckpointError for one that is none.
    """
    try:
        value = parsed_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download or copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object; download or copy it again")
    return value


def _split(location: str | os.PathLike[str], index: Path, revision: str | None) -> dict[str, Tensor]:
    """Tensors that are split over several files; of one that lies in two of them, that of the file in the index."""
    files = weight_map(index)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        path = _find(location, file, revision)
        if path is None:
            raise CheckpointError(f"{index} names {file}, which is not there; download or copy the checkpoint again")
        found = _tensors(path)
        tensors.update({name: found[name] for name in found if files.get(name) == file or name not in tensors})
    lost = sorted(files.keys() - tensors.keys())
    if lost:
        raise CheckpointError(f"{index} names tensors that its files lack: {_listed(lost)}; download it again")
    return tensors


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file."""
    try:
        if path.suffix == ".safetensors":
            return {name: _widened(tensor) for name, tensor in load_file(path).items()}
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, which would have to be executed to be read, or is damaged; that is "
            "refused. Copy it again, or convert it to safetensors where you trust it"
        ) from error
    except Exception as error:  # torch's reader raises whatever a damaged file makes it run into
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read ({detail}); it is truncated or damaged: copy it again") from error
    if isinstance(value, Mapping) and isinstance(value.get("state_dict"), Mapping):
        value = value["state_dict"]
    if not isinstance(value, Mapping) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not tensors by name; it is of another layout")
    return {str(name): tensor for name, tensor in value.items()}


def _widened(tensor: Tensor) -> Tensor:
    """Numbers of eight bits as bfloat16, which has all of them. Scales beside them are tensors that no layout knows."""
    return tensor.bfloat16() if tensor.dtype == torch.float8_e4m3fn else tensor


# -- strict checks ---------------------------------------------------------------------------------------------------


def differences(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> str:
    """How the names and shapes of tensors differ from those of a layout, in a sentence; "" where they agree.

    A matrix that has the other's shape the other way round is called transposed: {"fc": (4, 8)} against (8, 4).
    """
    transposed: list[str] = []
    wrong: list[str] = []
    for name in sorted(expected.keys() & found.keys()):
        want, have = expected[name], found[name]
        if want != have:
            is_turned = len(want) == 2 and want == have[::-1]
            (transposed if is_turned else wrong).append(f"{name} is {_shown(have)}, want {_shown(want)}")
    missing = [f"{name} {_shown(expected[name])}" for name in sorted(expected.keys() - found.keys())]
    extra = [f"{name} {_shown(found[name])}" for name in sorted(found.keys() - expected.keys())]
    kinds = {"missing": missing, "extra": extra, "transposed": transposed, "wrongly shaped": wrong}
    return "; ".join(f"{title}: {_listed(names)}" for title, names in kinds.items() if names)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Give a module the tensors of a checkpoint, in their own dtypes: all of its parameters, and no others.

    Args:
      tensors: by the names that the module has for them.
      name: of the checkpoint, for messages.

    Raises: CheckpointError, naming what is missing, extra, transposed or wrongly shaped, and what is not a number.
    """
    own = dict(module.named_parameters())
    found = differences(
        {key: tuple(tensor.shape) for key, tensor in own.items()},
        {key: tuple(tensor.shape) for key, tensor in tensors.items()},
    )
    if found:
        raise CheckpointError(f"the tensors of {name} are not those of this layout. {found}")
    bad = sorted(key for key, tensor in tensors.items() if not tensor.is_floating_point())
    if bad:
        kinds = ", ".join(f"{key} is {str(tensors[key].dtype).removeprefix('torch.')}" for key in bad[:MAX_NAMED])
        raise CheckpointError(
            f"weights of {name} are not floating-point numbers: {kinds}; quantized heads are not read"
        )
    broken = sorted(key for key, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    if broken:
        raise CheckpointError(f"weights of {name} hold NaN or infinite values: {_listed(broken)}; copy it again")
    for key, parameter in own.items():
        parameter.data = tensors[key].detach()


def integer(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    """A whole number, 1 or more, of a config.

    Raises: CheckpointError for a value that is none, and for one that is missing and has no default.
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
