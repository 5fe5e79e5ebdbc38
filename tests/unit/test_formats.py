"""Files of other programs are refused by one message, whatever kind of file was wanted.

The formats of foredraft carry its name. A file that another program wrote in a layout of the same shape must neither be
read nor be written over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from foredraft import zoo
from foredraft.drafters.parts.adjacency import AdjacencyMatrix
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.ngram_storage import NGramStorage
from foredraft.drafters.parts.state_file import save_state
from foredraft.engine.profiles import Profile
from foredraft.errors import ForedraftError
from foredraft.heads.checkpoint import read_checkpoint
from foredraft.heads.medusa_hydra_layouts import read_hydra
from foredraft.heads.recognition import SHARED_OUTPUT
from foredraft.retrieval.history import OutputHistory
from foredraft.retrieval.manifest import MANIFEST, DatastoreManifest


def profile(folder: Path) -> None:
    file = folder / "profile.json"
    file.write_text(json.dumps({"method": "ngram", "facts": {}, "costs": [], "drafting_seconds": {}}))
    Profile.load(file)


def layer_set(folder: Path) -> None:
    file = folder / "layers.json"
    file.write_text(json.dumps({"format": "otherwise-layer-set", "num_layers": 4}))
    LayerSet.load(file)


def datastore(folder: Path) -> None:
    source = Path(zoo.path("tiny", "target")).parent / "datastore" / MANIFEST
    (folder / MANIFEST).write_text(source.read_text().replace("foredraft", "otherwise"))
    DatastoreManifest.read(folder)


def storage(folder: Path) -> None:
    file = folder / "storage.safetensors"
    save_state(file, {"tokens2": np.zeros(1, dtype=np.int32)}, {"format": "otherwise nasd 1"})
    NGramStorage(3, 4).load(file, 100)


def adjacency(folder: Path) -> None:
    file = folder / "matrix.safetensors"
    save_state(file, {"candidates": np.zeros((4, 2), dtype=np.int32)}, {"format": "otherwise token_recycling 1"})
    AdjacencyMatrix.load(file, 4, 2)


def history(folder: Path) -> None:
    file = folder / "history.npz"
    with file.open("wb") as opened:
        np.savez(opened, format=np.array("otherwise-history-1"), fingerprint="", tokens=[1], ends=[1])
    OutputHistory().load(file)


def head(folder: Path) -> None:
    source = Path(zoo.path("tiny", "target")).parent / "hydra"
    config = json.loads((source / "config.json").read_text())
    config["otherwise_shared_output"] = config.pop(SHARED_OUTPUT)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(source / "model.safetensors"), folder / "model.safetensors")
    target = json.loads((Path(zoo.path("tiny", "target")) / "config.json").read_text())
    read_hydra(read_checkpoint(folder), target["hidden_size"], target["vocab_size"])


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (profile, "profile"),
        (layer_set, "layer set"),
        (datastore, "datastore"),
        (storage, "n-gram storage"),
        (adjacency, "adjacency matrix"),
        (history, "history"),
        (head, "head"),
    ],
)
def test_files_of_other_programs_are_refused(read: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match=f"is not a foredraft {name} file; create one with "):
        read(tmp_path)
