"""Loading and saving of checkpoints with integer codes for linear layers, without a dequantised copy."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.folders import check_new_folder, filling
from foredraft.heads.checkpoint import CONFIG, read_checkpoint, write_checkpoint
from foredraft.loading.checkpoint_errors import check_layers
from foredraft.loading.compressed import METHOD, VERSION, parts_of
from foredraft.loading.layouts import LAYOUTS, check_optional, codes_of, settings_of
from foredraft.model.building import build, without_weights
from foredraft.model.execution.forwards import replacement
from foredraft.model.execution.packing import PackedExperts, PackedLinear, named_weights, released
from foredraft.model.execution.rounding import roundable, take_codes
from foredraft.model.support import model_name
from foredraft.native.codes import Codes, Kind, QuantLayout, StoredCodes
from foredraft.native.packed_matmul import CodesMatrix

# -- reading -------------------------------------------------------------------------------------------------------


def load_codes(location: str, revision: str | None, config: Any, dtype: torch.dtype) -> tuple[Any, str]:
    """Load a checkpoint in one of `LAYOUTS`. Its linear layers multiply by the codes in the checkpoint.

    Args:
      location: a directory or hub id.
      revision: branch, tag or commit of a hub id.
      config: configuration of the model, whose quantisation settings the layout supports.
      dtype: dtype of all other tensors.

    Returns: the model in evaluation mode, and a readable list of its weight types.
    Raises: CheckpointError, UnsupportedModelError.
    """
    settings = settings_of(config)
    layout, tensors = LAYOUTS[settings["quant_method"]], read_checkpoint(location, revision).tensors
    check_layers(location, config, len(tensors))
    layers = [name.removesuffix(f".{layout.mark}") for name in tensors if name.endswith(f".{layout.mark}")]
    parts = {
        layer: {part: tensors[f"{layer}.{part}"] for part in layout.parts if f"{layer}.{part}" in tensors}
        for layer in layers
    }
    if not layers:
        raise CheckpointError(
            f"config.json of {location} states weights in the layout of {layout.method}, but no layer is stored in it; "
            "if the weights are not quantised, remove quantization_config there, else download the checkpoint again"
        )
    of_codes = {f"{layer}.{part}" for layer, found in parts.items() for part in found}
    state = {name: tensor for name, tensor in tensors.items() if name not in of_codes}
    config = copy.deepcopy(config)
    del config.quantization_config
    structure = without_weights(config)
    linear = set(roundable(structure))
    plain = {name for name, module in structure.named_modules() if module in linear}
    stored, reordered = dict[str, StoredCodes](), []
    for layer in layers:
        found = codes_of(settings, layer, parts[layer])
        form, shape = found.codes.form, found.codes.numbers.shape
        reordered += [layer] * (found.order is not None)
        if layer in plain and layer not in reordered:
            stored[layer] = _stored(settings, layer, parts[layer], form, shape)
            state[f"{layer}.weight"] = released(shape, dtype)
        else:
            state[f"{layer}.weight"] = found.dense().to(dtype)
    check_optional(location, settings, parts)
    model = _built(location, revision, type(structure), config, state, dtype)
    take_codes(model, {model.get_submodule(layer): codes for layer, codes in stored.items()}, dtype=dtype)
    others = [layer for layer in layers if layer not in stored and layer not in reordered]
    notes = [f"{len(reordered)} with reordered inputs"] if reordered else []
    notes += [f"{len(others)} that are not linear layers in this model, like {others[0]}"] if others else []
    return model, "; dequantised are ".join([_listed(each.form.kind for each in stored.values()), *notes])


def _stored(
    settings: Mapping[str, Any], layer: str, parts: Mapping[str, torch.Tensor], form: QuantLayout, shape: torch.Size
) -> StoredCodes:
    """Return the weight of a layer, which is unpacked when it is read."""
    kept: list[Codes] = []  # the unpacked weight, while it is read part by part

    def read(first: int, last: int) -> Codes:
        if first == 0:
            kept[:] = [codes_of(settings, layer, parts).codes]
        found = kept[0].part(first, last)
        if last == shape[0]:
            kept.clear()
        return found

    return StoredCodes(shape, form, read)


def _built(
    location: str,
    revision: str | None,
    kind: type,
    config: Any,
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Build the model of a checkpoint."""
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    model, missing, unexpected = build(kind, config, state, dtype)
    left = [name for name in unexpected if name.endswith((".bias", ".scales")) and state[name].any()]
    if left:
        raise UnsupportedModelError(
            f"{location} contains {left[0]}, which transformers' {model.config.model_type} model does not have, so its "
            "output would be wrong; load the original model and quantise it with quantization='int8'"
        )
    if missing:
        raise CheckpointError(
            f"{location} lacks {len(missing)} weights of its configuration ({', '.join(missing[:3])}, ...), which "
            "would have random values; download or save the checkpoint again"
        )
    with suppress(OSError):  # a checkpoint may have no generation config
        model.generation_config = GenerationConfig.from_pretrained(location, revision=revision or "main")
    found: PreTrainedModel = model
    return found


def _listed(kinds: Iterator[Kind]) -> str:
    """List kinds with their counts: ``210 of 4 bits by 32 and 1 of 8 bits``."""
    found = Counter(f"{bits} bits" + (f" by {group}" if group else "") for bits, group, _ in kinds)
    return " and ".join(f"{count} of {kind}" for kind, count in found.most_common())


# -- writing -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def save_compressed(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None,
    is_instruct: bool | None = None,
) -> None:
    """Save a model whose layers multiply by codes as a checkpoint in the layout of compressed-tensors.

    Args:
      model: the model.
      folder: a new or empty folder.
      tokenizer: tokenizer that is saved with the model.
      is_instruct: whether plain text is a message to the model; None if its chat template decides.

    Raises: ConfigError for a folder that is not empty or cannot be written, for weights that the layout cannot
      represent, and for experts in codes. After an error, the folder contains nothing that could be loaded.
    """
    path = check_new_folder(folder)
    codes = dict(_codes_by_name(model))
    if not codes:
        raise ConfigError(
            f"{model_name(model)} has no layer that multiplies by integer codes; load it by name with "
            "quantization='int8' or 'int4', on a CPU with kernels for them"
        )
    tensors = dict(_dense_by_name(model, codes))
    for name, found in codes.items():
        try:
            whole = found if found.bits in (4, 8) else found.in_bytes()
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts_of(whole).items()}
        except ValueError as error:
            raise ConfigError(
                f"{name} cannot be saved in the layout of compressed-tensors ({error}, since it was quantised before); "
                "keep the original file, or load the model with quantization='int8'"
            ) from None
    config = copy.deepcopy(model.config)
    output = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    if output in codes:
        config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.quantization_config = _settings(model, codes)
    try:
        with filling(path, CONFIG) as part:
            write_checkpoint(part, config.to_dict(), tensors)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
                if is_instruct is not None:
                    _note(Path(part) / "tokenizer_config.json", {IS_INSTRUCT: is_instruct})
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be written ({' '.join(str(error).split())[:200]}), and nothing was left there; free space, "
            "or name another folder"
        ) from error


IS_INSTRUCT = "foredraft_is_instruct"
"""Key of a tokenizer's config: whether plain text is a message to the model, if its template does not decide that."""


def _note(file: Path, entries: Mapping[str, Any]) -> None:
    """Add entries to a JSON file."""
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**written, **entries}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _codes_by_name(model: nn.Module) -> Iterator[tuple[str, Codes]]:
    for name, module in model.named_modules():
        forward = replacement(module)
        experts = forward.products if isinstance(forward, PackedExperts) else ()
        if any(isinstance(product.matrix, CodesMatrix) for product in experts):
            raise ConfigError(
                f"{name} contains experts in integer codes, which cannot be saved; keep the original files, and load "
                "them in the same way again"
            )
        codes = forward.codes() if isinstance(forward, PackedLinear) else None
        if codes is None:
            continue
        if type(module) is not nn.Linear:
            raise ConfigError(
                f"{name} is not a plain linear layer, and the compressed-tensors layout supports no other layer"
            )
        yield name, codes


def _dense_by_name(model: nn.Module, codes: Mapping[str, Codes]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all other weights; of tied weights only the first."""
    seen = set()
    for name, weight, packed in named_weights(model):
        if (packed is not None and name.removesuffix(".weight") in codes) or weight.data_ptr() in seen:
            continue
        if packed is not None:  # the module's own weight may be released
            yield name, packed.dense().to(weight.dtype)
        else:
            seen.add(weight.data_ptr())
            yield name, weight.data


def _settings(model: nn.Module, codes: Mapping[str, Codes]) -> dict[str, Any]:
    """Return the entry ``quantization_config`` of the configuration."""
    most = Counter(each.kind for each in codes.values())
    groups: dict[str, Any] = {}
    for number, kind in enumerate(sorted(most, key=most.__getitem__)):  # readers use the first group that fits a layer
        bits, group, zeros = kind
        names = [name for name, each in codes.items() if each.kind == kind]
        groups[f"group_{number}"] = {
            "targets": names if number < len(most) - 1 else ["Linear"],
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": not zeros,
                "strategy": "group" if group else "channel",
                "group_size": group or None,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
            "input_activations": None,
            "output_activations": None,
        }
    left = [name for name, module in model.named_modules() if type(module) is nn.Linear and name not in codes]
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": left,
        "kv_cache_scheme": None,
    }
