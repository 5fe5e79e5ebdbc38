"""Memory of keys and values of a server: its default limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.serve import served as served_module
from foredraft.serve.ray.config import ClusterConfig
from foredraft.serve.served import with_kv_limit
from serving import MODEL


def test_replicas_count_as_engines_of_one_machine() -> None:
    """As many as there may be at once, with every way of drafting."""
    assert ClusterConfig.of({"model": MODEL, "num_replicas": 2, "drafting": ["plain=none"]}).num_engines == 4
    assert ClusterConfig.of({"model": MODEL, "autoscaling": {"min_replicas": 1, "max_replicas": 3}}).num_engines == 3


def test_where_there_is_no_default_limit_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(served_module, "available_on", lambda _: None)
    with caplog.at_level(logging.INFO, logger="foredraft"):
        assert with_kv_limit({}, 1).get("max_kv_bytes") is None
    assert "keys and values: no limit, because the device does not report" in caplog.text


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ([], "40%"),
        (["--drafting", "plain=none"], "20%"),
        (["--drafting", "plain=none", "--drafting", "other=ngram"], "13.3%"),
        (["--max-kv-bytes", "3MB"], "3MB"),
        (["--max-kv-bytes", "none"], None),
    ],
)
def test_the_command_line_gives_the_limit_to_the_model(
    options: list[str], limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def run(load: Callable[[], object], *_: object, **__: object) -> SimpleNamespace:
        load()
        return SimpleNamespace(run_until_end=lambda: True)

    monkeypatch.setattr("foredraft.cli.serve.load_llm", lambda *_, **options: given.update(options))
    monkeypatch.setattr("foredraft.serve.served.ServedModels.over", lambda *_: None)
    monkeypatch.setattr("foredraft.serve.server.Server", run)
    result = CliRunner().invoke(app, ["serve", MODEL, *options])
    assert result.exit_code == 0, result.output
    assert given["max_kv_bytes"] == limit
