"""Reading heads: what lies there is read without being executed, and what does not fit is refused with its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foredraft.errors import CheckpointError, ConfigError
from foredraft.heads.checkpoint import differences, fill, integer, read_checkpoint, read_config, write_checkpoint
from foredraft.heads.vocabulary import DraftVocabulary

TENSORS = {"fc.weight": torch.arange(8.0).view(2, 4), "fc.bias": torch.ones(2)}


def folder_with(path: Path, name: str, tensors: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"hidden_size": 4}', encoding="utf-8")
    torch.save(tensors, path / name)
    return path


class TestReading:
    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "head", {"hidden_size": 4}, TENSORS)
        checkpoint = read_checkpoint(tmp_path / "head")
        assert checkpoint.config == {"hidden_size": 4} == read_config(tmp_path / "head")
        assert checkpoint.shapes == {"fc.weight": (2, 4), "fc.bias": (2,)}
        assert all(torch.equal(checkpoint.tensors[name], TENSORS[name]) for name in TENSORS)

    def test_eight_bits_are_read_as_the_same_numbers_in_bfloat16(self, tmp_path: Path) -> None:
        """All 256 patterns but the two that are not numbers; a layer can then be moved to the dtype of its target."""
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        numbers = every[~every.float().isnan()]
        write_checkpoint(tmp_path, {}, {"fc.weight": numbers[None]})
        read = read_checkpoint(tmp_path).tensors["fc.weight"]
        assert read.dtype == torch.bfloat16
        assert torch.equal(read.float(), numbers.float()[None])
        assert len(numbers) == 254

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
    @pytest.mark.parametrize("wrap", [dict, lambda tensors: {"state_dict": tensors}])
    def test_files_of_torch_are_read(self, tmp_path: Path, name: str, wrap: Any) -> None:
        folder = folder_with(tmp_path, name, wrap(TENSORS))
        assert read_checkpoint(folder).shapes == {"fc.weight": (2, 4), "fc.bias": (2,)}

    def test_safetensors_come_before_files_of_torch(self, tmp_path: Path) -> None:
        folder_with(tmp_path, "pytorch_model.bin", {"other": torch.zeros(1)})
        write_checkpoint(tmp_path, {}, TENSORS)
        assert set(read_checkpoint(tmp_path).tensors) == set(TENSORS)

    def test_split_files_are_read_by_their_index(self, tmp_path: Path) -> None:
        for number, name in enumerate(TENSORS):
            folder_with(tmp_path, f"part{number}.bin", {name: TENSORS[name]})
        index = tmp_path / "pytorch_model.bin.index.json"
        files = {"fc.weight": "part0.bin", "fc.bias": "part1.bin"}
        index.write_text(json.dumps({"weight_map": files}), encoding="utf-8")
        assert set(read_checkpoint(tmp_path).tensors) == set(TENSORS)
        index.write_text(json.dumps({"weight_map": {**files, "lost": "part1.bin"}}), encoding="utf-8")
        with pytest.raises(CheckpointError, match="lost"):
            read_checkpoint(tmp_path)
        index.write_text(json.dumps({"weight_map": {"fc.weight": "../part0.bin"}}), encoding="utf-8")
        with pytest.raises(CheckpointError, match="not a file in its folder"):
            read_checkpoint(tmp_path)


class Executed:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


class TestRefusals:
    def test_nothing_is_executed(self, tmp_path: Path) -> None:
        marker = str(tmp_path / "executed")
        folder = folder_with(tmp_path / "head", "pytorch_model.bin", {"fc": Executed(marker)})
        with pytest.raises(CheckpointError, match="would execute code"):
            read_checkpoint(folder)
        assert not os.path.exists(marker)
        torch.load(folder / "pytorch_model.bin", weights_only=False)  # the control: it would have
        assert os.path.exists(marker)

    def test_what_is_missing_or_damaged_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            read_checkpoint(tmp_path)
        (tmp_path / "config.json").write_text("{", encoding="utf-8")
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_checkpoint(tmp_path)
        (tmp_path / "config.json").write_text("[]", encoding="utf-8")
        with pytest.raises(CheckpointError, match="contains no JSON object"):
            read_checkpoint(tmp_path)
        (tmp_path / "config.json").write_text("{}", encoding="utf-8")
        with pytest.raises(CheckpointError, match="has no weights"):
            read_checkpoint(tmp_path)
        for name in ("model.safetensors", "pytorch_model.bin"):
            (tmp_path / name).write_bytes(b"not a checkpoint")
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(tmp_path)
            (tmp_path / name).unlink()
        folder_with(tmp_path, "pytorch_model.bin", {"fc": {"weight": torch.zeros(1)}})
        with pytest.raises(CheckpointError, match="not a checkpoint of a head"):
            read_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
            read_checkpoint(tmp_path / "nowhere")

    @pytest.mark.parametrize("is_zip", [True, False])
    def test_a_file_of_torch_that_was_cut_is_refused_wherever_it_ends(self, tmp_path: Path, is_zip: bool) -> None:
        """The older form raises struct.error, IndexError and KeyError, and names half a class at some cuts."""
        (tmp_path / "config.json").write_text("{}", encoding="utf-8")
        file = tmp_path / "pytorch_model.bin"
        torch.save(TENSORS, file, _use_new_zipfile_serialization=is_zip)
        whole = file.read_bytes()
        for length in range(0, len(whole), 1 if not is_zip else 7):
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match="damaged"):
                read_checkpoint(tmp_path)

    def test_differences_are_named_by_kind(self) -> None:
        want = {"a": (2, 4), "b": (3,), "c": (5, 5), "d": (1,)}
        found = differences(want, {"a": (4, 2), "b": (4,), "c": (5, 5), "e": (7,)})
        assert found == (
            "missing: d 1; extra: e 7; transposed: a is 4x2, expected 2x4; wrongly shaped: b is 4, expected 3"
        )
        assert not differences(want, want)
        many = differences({f"layer{i}": (1,) for i in range(20)}, {})
        assert "and 14 more" in many

    def test_a_module_is_filled_or_left_alone(self) -> None:
        module = nn.Linear(4, 2)
        weights = {"weight": TENSORS["fc.weight"], "bias": TENSORS["fc.bias"]}
        fill(module, weights, "a head")
        assert torch.equal(module.weight, weights["weight"])
        for tensors, message in (
            ({"weight": weights["weight"]}, "missing: bias 2"),
            ({**weights, "scale": torch.ones(1)}, "extra: scale 1"),
            ({**weights, "weight": torch.zeros(4, 2)}, "transposed: weight is 4x2, expected 2x4"),
            ({**weights, "bias": torch.ones(2, dtype=torch.int8)}, "bias is int8"),
            ({**weights, "bias": torch.tensor([1.0, torch.nan])}, "NaN or infinite values: bias"),
        ):
            with pytest.raises(CheckpointError, match=message):
                fill(module, tensors, "a head")
            assert torch.equal(module.weight, weights["weight"])

    @pytest.mark.parametrize("value", [None, 0, -1, 1.5, "4", True])
    def test_numbers_of_a_config_are_checked(self, value: Any) -> None:
        with pytest.raises(CheckpointError, match="hidden_size"):
            integer({"hidden_size": value}, "hidden_size", "a head")
        assert integer({}, "hidden_size", "a head", 3) == 3


class TestVocabulary:
    def test_the_map_is_there_and_back(self) -> None:
        vocabulary = DraftVocabulary.of([9, 2, 5], 10)
        assert len(vocabulary) == 3
        assert vocabulary.d2t.tolist() == [2, 4, 7]
        assert vocabulary.t2d.nonzero()[:, 0].tolist() == [2, 5, 9]
        again = DraftVocabulary.published(vocabulary.d2t, vocabulary.t2d, 3, 10)
        assert torch.equal(again.target_ids, vocabulary.target_ids)
        assert vocabulary.rows_of(torch.tensor([[0, 2], [9, 5]])).tolist() == [[-1, 0], [2, 1]]
        wide = vocabulary.spread(torch.tensor([[1.0, 2.0, 3.0]]))
        assert wide[0, [2, 5, 9]].tolist() == [1.0, 2.0, 3.0]
        assert int(wide.isinf().sum()) == 7

    def test_a_full_one_changes_nothing(self) -> None:
        vocabulary = DraftVocabulary.full(4)
        layer = torch.randn(4, 2)
        assert vocabulary.is_full
        assert vocabulary.spread(layer.T) is not None
        assert vocabulary.rows_of_layer(layer) is layer
        assert torch.equal(DraftVocabulary.of([3, 1], 4).rows_of_layer(layer), layer[[1, 3]])

    def test_the_most_frequent_tokens_are_kept(self) -> None:
        counts = {3: 5, 1: 5, 7: 9, 0: 1}
        assert DraftVocabulary.most_frequent(counts, 3, 10).target_ids.tolist() == [1, 3, 7]
        assert DraftVocabulary.most_frequent(counts, 3, 10, always=[9]).target_ids.tolist() == [1, 7, 9]
        assert len(DraftVocabulary.most_frequent(counts, 20, 10)) == 10
        with pytest.raises(ConfigError, match="cannot keep 2"):
            DraftVocabulary.most_frequent(counts, 1, 10, always=[8, 9])

    def test_eos_must_be_among_them(self) -> None:
        vocabulary = DraftVocabulary.of([2, 5], 10)
        vocabulary.check_eos([5, 7], "a head")
        vocabulary.check_eos([], "a head")
        with pytest.raises(CheckpointError, match=r"EOS tokens \[7\]"):
            vocabulary.check_eos([7], "a head")

    @pytest.mark.parametrize(
        ("d2t", "t2d", "message"),
        [
            (torch.tensor([2, 4]), None, "2.* rows|3 rows"),
            (torch.tensor([2.0, 4.0, 7.0]), None, "whole numbers"),
            (torch.tensor([2, 1, 7]), None, "not ascending"),
            (torch.tensor([2, 4, 8]), None, "another target"),
            (torch.tensor([-1, 4, 7]), None, "another target"),
            (torch.tensor([2, 4, 7]), torch.zeros(11, dtype=torch.bool), "for another target"),
            (torch.tensor([2, 4, 7]), torch.ones(10, dtype=torch.bool), "is inconsistent"),
        ],
    )
    def test_maps_that_cannot_be_are_refused(self, d2t: torch.Tensor, t2d: torch.Tensor | None, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            DraftVocabulary.published(d2t, t2d, 3, 10)
