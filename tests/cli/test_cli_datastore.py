"""``foredraft datastore``: the verbs, their JSON, their exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from foredraft import zoo
from foredraft.cli import app
from foredraft.methods.lookup import RestOptions


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["datastore", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in arguments and code == 0 else result.output


def test_build_info_append_query(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The little bird sat on the green tree and sang.")
    (tmp_path / "b.jsonl").write_text('{"body": "The little bird sat on the green tree and slept."}\n')
    out = tmp_path / "out"
    built = run("build", tmp_path / "a.txt", "--tokenizer", "zoo:tiny", "--out", out, "--json")
    assert (built["num_documents"], built["num_shards"], built["tokenizer"]) == (1, 1, "zoo:tiny")
    appended = run("append", out, tmp_path / "b.jsonl", "--field", "body", "--json")
    assert (appended["num_documents"], appended["num_shards"]) == (2, 2)
    info = run("info", out, "--json")
    assert [Path(source["path"]).name for source in info["sources"]] == ["a.txt", "b.jsonl"]
    answer = run("query", out, "sat on the green tree and", "--json")
    assert answer["num_hits"] == 2
    assert len(answer["continuations"]) == 2
    assert "tokens match, 2 times" in run("query", out, "sat on the green tree and")
    assert "no end of the text" in run("query", out, "12345 67890 §")
    assert "2 shards" in run("info", out)


def test_a_query_looks_up_what_rest_would(tmp_path: Path) -> None:
    """From one token on, which is where rest begins; and with the tokenizer that the datastore was built with."""
    (tmp_path / "a.txt").write_text("The little bird sat on the green tree.")
    tokenizer = zoo.path("tiny", "tokenizer")
    run("build", tmp_path / "a.txt", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    answer = run("query", tmp_path / "out", "never seen bird", "--json")
    assert (answer["match"], answer["match_tokens"]) == (" bird", RestOptions.retrieval_match_min)
    (one,) = answer["continuations"]
    assert (one["share"], one["score"]) == (1.0, 0.5)  # the only one there is; rest counts something unknown beside it
    assert "1.000  ' sat on" in run("query", tmp_path / "out", "never seen bird")


def test_the_manifest_names_the_tokenizer(tmp_path: Path) -> None:
    """Whatever the default model is; where it has gone, the user says where it is."""
    text = tmp_path / "a.txt"
    text.write_text("The little bird sat on the green tree.")
    moved, out = tmp_path / "tokenizer", tmp_path / "out"
    shutil.copytree(zoo.path("tiny", "tokenizer"), moved)
    other = json.loads((moved / "tokenizer.json").read_text())
    other["model"]["vocab"] = {word: 4095 - number for word, number in other["model"]["vocab"].items()}
    (moved / "tokenizer.json").write_text(json.dumps(other))
    run("build", text, "--tokenizer", moved, "--out", out)
    assert run("query", out, "on the green", "--json")["match"].endswith(" green")
    assert run("append", out, text, "--json")["num_documents"] == 2
    moved.rename(tmp_path / "elsewhere")
    said = " ".join(run("query", out, "on the green", code=2).split())
    assert f"was built with the tokenizer {moved}, which cannot be loaded" in said
    assert "Give its location with --tokenizer" in said
    assert "green" in run("query", out, "on the green", "--tokenizer", tmp_path / "elsewhere")


def test_refusals_have_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    build = ("build", tmp_path / "empty.txt", "--tokenizer", "zoo:tiny", "--out", tmp_path / "out")
    for refused in (build, ("info", tmp_path), ("query", tmp_path, "text")):
        said = run(*refused, code=2)
        assert "foredraft: error: " in said
        assert "DatastoreError" not in said
