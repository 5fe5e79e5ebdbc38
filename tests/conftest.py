"""Settings for the whole suite. A room of tests has the name of the room of the source that it is about."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import ALWAYS, ARCHITECTURES, REFUSED
from foredraft import zoo
from foredraft.errors import ConfigError
from foredraft.loading.models import adapter_of, is_zoo, load_model
from foredraft.native.library import library
from foredraft.testing import governed, ungoverned
from foredraft.zoo.conversion import weights_file

TESTS = Path(__file__).resolve().parent
sys.path += [str(room) for room in TESTS.rglob("*/") if any(room.glob("test_*.py"))]  # tests that others begin with
CACHE = TESTS.parent / ".cache"
os.environ.setdefault("FOREDRAFT_CACHE", str(CACHE))  # not the user's; one for all versions and workers

_PACKAGE = zoo.manifest("smollm2").package
HAS_SMOLLM2 = _PACKAGE is not None and weights_file(_PACKAGE) is not None
NEEDS_SMOLLM2 = HAS_SMOLLM2 or bool(os.environ.get("FOREDRAFT_TEST_SMOLLM2"))
"""Whether set-up has installed the weights of zoo:smollm2, so that a test of it that is skipped has failed."""


def pytest_collection_finish() -> None:
    """What modules hold stays: later collections leave it out, which took a quarter of a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Tiny matrices: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    """A test may change their number."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ungoverned() -> Iterator[None]:
    """Drafts are as long as they may be, whatever the machine; tests of the governor ask for ``_governed``."""
    with ungoverned():
        yield


@pytest.fixture
def _governed() -> Iterator[None]:
    with governed():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Where there are no kernels (Arm, for instance), tests that ask for packed weights are skipped."""
    try:
        return (yield)
    except ConfigError as error:
        if library() is not None or "execution='packed' needs" not in str(error):
            raise
        pytest.skip(str(error))


RARE = frozenset({*ARCHITECTURES, *REFUSED}) - ALWAYS
"""Architectures whose tests are slow ones."""

QUICK = frozenset({"test_execution", "test_inflate", "test_model_state"})
"""Modules whose tests of any architecture belong to the fast part."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of rare architectures as slow, and settings that `sample` leaves out as full."""
    sampled: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if name in RARE and item.path.stem not in QUICK:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("sample") and not item.get_closest_marker("full"):
            sampled.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for settings in sampled.values():
        (number,) = settings[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        kept = {round((place + 0.5) * len(settings) / number - 0.5) for place in range(number)}
        for place, item in enumerate(settings):
            if place not in kept and len(settings) > number:
                item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True)
def _smollm2_or_skip(request: pytest.FixtureRequest) -> None:
    """Tests of zoo:smollm2 run wherever its weights are."""
    if request.node.get_closest_marker("smollm2") and not NEEDS_SMOLLM2 and not zoo.is_available("smollm2"):
        pytest.skip(str(zoo.why_missing("smollm2")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test of zoo:smollm2 that is skipped fails where the weights are, unless the machine packs nothing."""
    report = yield
    is_skipped = report.skipped and not hasattr(report, "wasxfail") and library() is not None
    if is_skipped and item.get_closest_marker("smollm2") and NEEDS_SMOLLM2:
        report.outcome = "failed"
        report.longrepr = f"skipped, though the weights of zoo:smollm2 are installed: {report.longrepr}"
    return report


_LOADED: dict[Any, Any] = {}
_ADAPTED: dict[int, tuple[tuple[str, ...], Any]] = {}


@pytest.fixture
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the zoo are loaded and packed once for all that ask for this: what they do then is the claim.

    An `LLM` gets its target as `LLM.with_speculative_config` hands it on.
    """

    def load(model: Any, **options: Any) -> Any:
        key = (str(model), *sorted(options.items(), key=str))
        if not isinstance(model, str) or not is_zoo(model):
            return load_model(model, **options)
        if key not in _LOADED:
            _LOADED[key] = load_model(model, **options)
        return _LOADED[key]

    def adapt(loaded: Any, *options: str) -> Any:
        given = next((key for key, one in _LOADED.items() if one is loaded), None)
        if given is None:
            return adapter_of(loaded, *options)
        held, lm = _ADAPTED.get(id(loaded), (options, None))
        if lm is None:
            _ADAPTED[id(loaded)] = held, lm = options, adapter_of(loaded, *options)
        return lm if held == options else adapter_of(load_model(given[0], **dict(given[1:])), *options)

    monkeypatch.setattr("foredraft.llm.load_model", load)
    monkeypatch.setattr("foredraft.llm.adapter_of", adapt)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium on this machine; apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
