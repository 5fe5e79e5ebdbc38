"""How the engines of a race are started."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.bench.candidates import Candidate
from foretoken.bench.peers.client import Launch
from foretoken.bench.peers.environments import Peer, command_that_makes, is_installed, python_of
from foretoken.bench.peers.export import Exported
from foretoken.bench.peers.outcome import OWN

OPENVINO = {"float32": ("fp32", "f32"), "bfloat16": ("fp16", "bf16"), "float16": ("fp16", "f16")}
"""Weights as stored and arithmetic; optimum stores no bfloat16, and float16 holds what matters of it."""
GGUF = {"float32": ("f32",), "bfloat16": ("bf16", "f16"), "float16": ("f16",)}
"""Weights among which llama.cpp's fastest are taken: half precision of either kind."""
QUANTISED = {"openvino": ("int8", "int4"), "llamacpp": ("q8_0", "q4_1", "q4_0")}


@dataclass(frozen=True)
class Arming:
    """What takes part beside plain decoding, and among what it is chosen.

    Args:
      methods: of this library; they race at their settings as given.
      execution, exactness: of this library.
      quantised: whether engines also run with quantised weights, which do not count.
      assisted_lengths, lookup_lengths: numbers of draft tokens among which transformers is tuned.
    """

    methods: Seq[Candidate]
    execution: str
    exactness: str
    quantised: bool
    assisted_lengths: Seq[int]
    lookup_lengths: Seq[int]
    batch_sizes: Seq[int] = ()


def default_methods(has_draft: bool) -> str:
    """Without a second model the two lookups that suit most models; with one, it alone and combined as well."""
    return "draft_model,ngram,suffix,suffix+draft_model" if has_draft else "ngram,suffix"


def launches(
    exported: Exported, model: str, scale: str, dtype: str, arming: Arming, peers: Iterable[Peer], folder: Path
) -> tuple[list[Launch], dict[str, str]]:
    """This library first, then the engines that are installed; and why the others are missing."""
    found = [_own(exported, model, scale, dtype, arming)]
    missing = {}
    for peer in peers:
        if not is_installed(peer, folder):
            missing[peer.name] = f"it is not installed; {command_that_makes(peer, folder)} does that"
            continue
        python = python_of(peer, folder) if peer.has_environment else None
        arguments = _ARGUMENTS[peer.name](dtype, arming)
        found.append(Launch(peer.name, peer.label, python, peer.worker, (*_common(exported, arming), *arguments)))
    return found, missing


def _common(exported: Exported, arming: Arming) -> list[str]:
    return [str(exported.folder), *_list("--batch-sizes", arming.batch_sizes)]


def _own(exported: Exported, model: str, scale: str, dtype: str, arming: Arming) -> Launch:
    given: Mapping[str, Any] = {method.name: method.given for method in arming.methods}
    options = {
        "model": model,
        "dtype": dtype,
        "scale": scale,
        "execution": arming.execution,
        "exactness": arming.exactness,
        "methods": json.dumps(given),
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return Launch(OWN, OWN, None, "foretoken_worker", (*_common(exported, arming), *arguments))


def _openvino(dtype: str, arming: Arming) -> list[str]:
    weights, precision = OPENVINO[dtype]
    return ["--weights", weights, "--precision", precision, *_quantised("openvino", arming)]


def _llamacpp(dtype: str, arming: Arming) -> list[str]:
    return [*_list("--types", GGUF[dtype]), *_quantised("llamacpp", arming)]


def _transformers(dtype: str, arming: Arming) -> list[str]:
    lengths = _list("--assisted-lengths", arming.assisted_lengths) + _list("--lookup-lengths", arming.lookup_lengths)
    return ["--dtype", dtype, *lengths]


def _quantised(name: str, arming: Arming) -> list[str]:
    return _list("--quantised", QUANTISED[name]) if arming.quantised else []


def _list(option: str, values: Iterable[object]) -> list[str]:
    return [option, *map(str, values)]


_ARGUMENTS = {"openvino": _openvino, "llamacpp": _llamacpp, "transformers": _transformers}
