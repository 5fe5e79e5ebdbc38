"""The other engines by name: environments for them, made by one command from wheels alone, and how they are started."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.bench.candidates import MethodCandidate
from foredraft.bench.peers.client import Launch
from foredraft.bench.peers.export import Exported
from foredraft.bench.peers.outcome import OWN
from foredraft.config.written import by_comma
from foredraft.errors import ConfigError
from foredraft.folders import cache_folder

ALL = "all"
_DONE = "built"
_TAIL = 800  # characters of pip's complaint

OPENVINO = {"float32": ("fp32", "f32"), "bfloat16": ("fp16", "bf16"), "float16": ("fp16", "f16")}
"""Weights as stored and arithmetic; optimum stores no bfloat16, and float16 holds what matters of it."""
GGUF = {"float32": ("f32",), "bfloat16": ("bf16", "f16"), "float16": ("f16",)}
"""Weights among which llama.cpp's fastest are taken: half precision of either kind."""
QUANTISED = {OWN: ("int8", "int4"), "openvino": ("int8", "int4"), "llamacpp": ("q8_0", "q4_1", "q4_0", "q4_k_m")}


@dataclass(frozen=True)
class Arming:
    """What takes part beside plain decoding, and among what it is chosen.

    Args:
      methods: of this library; they race at their settings as given.
      execution, exactness: of this library.
      quantised: whether engines also run with quantised weights, which do not count.
      assisted_lengths, lookup_lengths: numbers of draft tokens among which transformers is tuned.
    """

    methods: Seq[MethodCandidate]
    execution: str
    exactness: str
    quantised: bool
    assisted_lengths: Seq[int]
    lookup_lengths: Seq[int]
    batch_sizes: Seq[int] = ()


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


@dataclass(frozen=True)
class Peer:
    """Another engine.

    Args:
      label: in tables.
      worker: the module in `foredraft.bench.peers.workers`.
      arguments: of it, by the dtype and what takes part.
      packages: of its environment; none for an engine that this library's own environment holds.
      unwanted: packages that come along and are taken out.
      size: of the environment, for people.
    """

    name: str
    label: str
    worker: str
    arguments: Callable[[str, Arming], list[str]]
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    size: str = ""

    @property
    def has_environment(self) -> bool:
        return bool(self.packages)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "openvino",
            "OpenVINO",
            "openvino_worker",
            _openvino,
            ("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
            ("torchvision",),  # its build for another torch breaks the export
            "1.7 GB",
        ),
        Peer(
            "llamacpp",
            "llama.cpp",
            "llamacpp_worker",
            _llamacpp,
            ("xllamacpp==2026.10.11549", "gguf==0.19.0", "safetensors", "numpy"),
            size="0.2 GB",
        ),
        Peer("transformers", "transformers", "transformers_worker", _transformers),
    )
}


def read_peers(text: str, option: str) -> list[Peer]:
    """The engines that a user names, by comma; "all" are those of `PEERS`.

    Raises: ConfigError for a name that is none of them.
    """
    names = by_comma(text)
    unknown = [name for name in names if name not in (*PEERS, ALL)]
    if unknown or not names:
        what = f"holds {unknown[0]!r}" if unknown else "is empty"
        raise ConfigError(f"{option} {what}; choose among {', '.join((*PEERS, ALL))}")
    return list(PEERS.values()) if ALL in names else [PEERS[name] for name in dict.fromkeys(names)]


def environments(folder: Path | None) -> Path:
    """The folder of all environments: the one given, else in the cache."""
    return cache_folder("peers", "environments") if folder is None else folder.expanduser()


def python_of(peer: Peer, folder: Path) -> Path:
    """The interpreter that runs an engine; it need not exist."""
    return folder / peer.name / "bin" / "python" if peer.has_environment else Path(sys.executable)


def is_installed(peer: Peer, folder: Path) -> bool:
    """Whether its environment was made to the end."""
    return not peer.has_environment or (folder / peer.name / _DONE).exists()


def check_installed(peers: Iterable[Peer], folder: Path) -> None:
    """Some are enough for a race.

    Raises: ConfigError where none is installed, naming the commands that do that.
    """
    named = list(peers)
    if not any(is_installed(peer, folder) for peer in named):
        commands = ", ".join(command_that_makes(peer, folder) for peer in named)
        raise ConfigError(f"there is nothing to compare with: no engine of --peers is installed; run {commands}")


def command_that_makes(peer: Peer, folder: Path) -> str:
    """What to type."""
    place = "" if folder == environments(None) else f" --peers-folder {folder}"
    return f"foredraft bench --make-peers {peer.name}{place}"


def make(peer: Peer, folder: Path, say: Callable[[str], None]) -> None:
    """Make one environment. An unfinished one is completed, one of other versions brought up to date.

    Raises: ConfigError with pip's complaint.
    """
    place, wanted = folder / peer.name, "\n".join(peer.packages) + "\n"
    if not peer.has_environment:
        say(f"{peer.name}: needs no environment of its own")
        return
    if is_installed(peer, folder) and (place / _DONE).read_text() == wanted:
        say(f"{peer.name}: {place} is there")
        return
    say(f"{peer.name}: making {place}" + (f" ({peer.size})" if peer.size else ""))
    place.mkdir(parents=True, exist_ok=True)
    venv.create(place, with_pip=True)
    constraints = place / "constraints.txt"  # else a dependency takes a newer torch and gigabytes beside it
    constraints.write_text("\n".join(one for one in peer.packages if one.startswith("torch==")) + "\n")
    _pip(peer, place, "install", "--only-binary", ":all:", "-c", str(constraints), *peer.packages)
    if peer.unwanted:
        _pip(peer, place, "uninstall", "--yes", *peer.unwanted)
    (place / _DONE).write_text(wanted)
    say(f"{peer.name}: done")


def _pip(peer: Peer, place: Path, *arguments: str) -> None:
    command = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ConfigError(
            f"the environment of {peer.name} in {place} is not finished: pip {arguments[0]} ended with "
            f"{done.returncode}: ...{done.stdout.strip()[-_TAIL:]}"
        )


# -- a race ----------------------------------------------------------------------------------------------------


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
        arguments = peer.arguments(dtype, arming)
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
    own = (*_common(exported, arming), *arguments, *_quantised(OWN, arming))
    return Launch(OWN, OWN, None, "foredraft_worker", own)
