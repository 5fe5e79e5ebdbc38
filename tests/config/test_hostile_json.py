"""JSON of users that Python's reader gives up on: nested too deeply, or with a number of thousands of digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft.config.written import read_text
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.engine.profiles import Profile
from foredraft.errors import ForedraftError
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.rank_tree import RankTree
from foredraft.prompts.prompt_files import read_prompts_file
from foredraft.retrieval.corpus import find_files

TEXTS = {"deep": "[" * 100_000, "deep objects": '{"a":' * 50_000, "long": "9" * 5000}
READERS: dict[str, Callable[[Path], Any]] = {
    "config": lambda file: read_text(file.read_text()),
    "config in a file": lambda file: read_text(f"@{file}"),
    "tree": RankTree.load,
    "layer set": LayerSet.load,
    "profile": Profile.load,
    "draft vocabulary": lambda file: DraftVocabulary.load(file, 64),
    "prompts": read_prompts_file,
    "corpus": lambda file: list(find_files([file])[0].pieces()),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_cannot_be_parsed_is_refused_in_one_line(read: Callable[[Path], Any], text: str, tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    file.write_text(text)
    with pytest.raises(ForedraftError) as refused:
        read(file)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_ids_beyond_any_tensor_are_no_draft_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(f"[1, {10**30}]")
    with pytest.raises(ForedraftError, match="which are not token ids"):
        DraftVocabulary.load(tmp_path / "ids.json", 64)
