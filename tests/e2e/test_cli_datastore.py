"""``foretoken datastore``: the verbs, their JSON, their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from foretoken.cli import app


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
    assert "no end of the text" in run("query", out, "12345 67890")
    assert "2 shards" in run("info", out)


def test_refusals_have_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "CorpusError" in run("build", tmp_path / "empty.txt", "--out", tmp_path / "out", code=2)
    assert "DatastoreError" in run("info", tmp_path, code=2)
    assert "DatastoreError" in run("query", tmp_path, "text", code=2)
