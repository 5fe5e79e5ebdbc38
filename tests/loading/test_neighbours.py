"""Beside other programs: how long threads wait, how many there are, and results that do not depend on either."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from foredraft import machine
from foredraft.machine import cpu_quota
from foredraft.native import library as native
from foredraft.native import threads
from foredraft.native.packed_matmul import NativeMatrix
from foredraft.native.threads import FEW_STEPS, MOST_STEPS, WINDOW, Helpers, keep_to_quota, threads_note

# ---- the cgroup's quota ---------------------------------------------------------------------------------------------

V2 = "31 23 0:27 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 23 0:27 {shown} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
OTHERS = "22 1 8:1 / / rw - ext4 /dev/root rw\n40 23 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def system(root: Path, own: str, mount: str, files: dict[str, str]) -> Path:
    """A file system of a process in a cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own + "\n")
    (root / "proc/self/mountinfo").write_text(OTHERS + mount + "\n")
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "cpu.max": "400000 100000"}, 0.5),
        ({"a/b/cpu.max": "200000 100000", "a/cpu.max": "max 100000"}, 2.0),
        ({"a/b/cpu.max": "rubbish"}, None),
        ({"a/c/cpu.max": "100000 100000"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_quota_is_the_least_of_all_levels(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(system(tmp_path, "0::/a/b", V2.format(shown="/"), files)) == quota


@pytest.mark.parametrize(
    ("shown", "own"), [("/docker/abc", "/docker/abc"), ("/", "/"), ("/docker/abc", "/"), ("/../..", "/")], ids=str
)
def test_a_container_sees_its_own_cgroup_at_the_top(tmp_path: Path, shown: str, own: str) -> None:
    assert cpu_quota(system(tmp_path, f"0::{own}", V2.format(shown=shown), {"cpu.max": "300000 100000"})) == 3.0


@pytest.mark.parametrize(("microseconds", "quota"), [("-1", None), ("50000", 0.5), ("800000", 8.0)])
def test_the_first_version_of_cgroups(tmp_path: Path, microseconds: str, quota: float | None) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/pod/cpu.cfs_quota_us": microseconds,
        "cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
    }
    own = "5:memory:/elsewhere\n4:cpu,cpuacct:/pod\n0::/"
    assert cpu_quota(system(tmp_path, own, V1.format(shown="/"), files)) == quota


def test_systems_without_cgroups_have_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads that torch is told; it counts eight processors, and so many threads to begin with."""
    told = [8]
    monkeypatch.setattr(threads, "num_cpus", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: told[-1])
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    for name in threads.CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    return told


@pytest.mark.parametrize(
    ("quota", "told", "note"),
    [
        (2.0, [8, 2], "2 threads (the cgroup's quota, of 8 processors)"),
        (1.4, [8, 1], "1 thread (the cgroup's quota, of 8 processors)"),
        (0.1, [8, 1], "1 thread (the cgroup's quota, of 8 processors)"),
        (8.0, [8], ""),
        (64.0, [8], ""),
    ],
)
def test_threads_keep_to_the_quota(torch_threads: list[int], quota: float, told: list[int], note: str) -> None:
    keep_to_quota(quota)
    assert torch_threads == told
    assert threads_note(quota) == note


def test_threads_that_were_chosen_stay(torch_threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch_threads.append(6)
    keep_to_quota(2.0)
    assert torch_threads == [8, 6]
    torch_threads.append(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    keep_to_quota(2.0)
    assert torch_threads == [8, 6, 8]
    assert threads_note(2.0) == ""


# ---- how long threads wait ------------------------------------------------------------------------------------------

SAYS = "import sys, {}; from os import environ; print(*map(environ.get, {}), 'torch' in sys.modules)"
VARIABLES = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("modules", "chosen", "said"),
    [
        ("foredraft", {}, f"{machine.SPINS} None False"),
        ("torch, foredraft", {}, "None None True"),
        ("foredraft", {"GOMP_SPINCOUNT": "7"}, "7 None False"),
        ("foredraft", {"OMP_WAIT_POLICY": "active"}, "None active False"),
    ],
    ids=str,
)
def test_brief_waits_are_asked_for_before_torch_is_imported(modules: str, chosen: dict[str, str], said: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | chosen
    command = [sys.executable, "-c", SAYS.format(modules, VARIABLES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


# ---- fewer threads --------------------------------------------------------------------------------------------------


class World:
    """Steps that compute 10 ms and take as long as others let them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_threads: int = 8) -> None:
        self.now = self.computed = 0.0
        self.limits: list[int] = []
        monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
        self.helpers = Helpers(self.limits.append, lambda: self.now, lambda: self.computed)

    def steps(self, count: int, ratio: float) -> None:
        for _ in range(count):
            with self.helpers.watched():
                self.computed += 0.01
                self.now += 0.01 * ratio


def test_threads_are_all_used_while_nobody_else_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.steps(1000, 1.1)
    world.steps(WINDOW // 3, 20.0)  # for once
    world.steps(1000, 1.1)
    assert world.limits == [8]


def test_fewer_threads_where_steps_wait_and_all_of_them_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A burst of others changes threads and no figure to speak of, so nothing is said of it."""
    world = World(monkeypatch)
    with caplog.at_level(logging.INFO, "foredraft"):
        world.steps(3 * WINDOW + 100, 5.0)
        assert world.limits == [8, 4, 2, 1]
        assert world.helpers.num_threads == 1
        del caplog.records[:]
        world.steps(4 * FEW_STEPS + WINDOW, 1.0)
        assert world.limits == [8, 4, 2, 1, 2, 4, 8]
        assert [record.getMessage() for record in caplog.records] == ["kernels run on 8 threads again"]
        world.steps(2 * FEW_STEPS, 1.0)
        del caplog.records[:]
        world.steps(WINDOW, 5.0)
        world.steps(4 * FEW_STEPS, 1.0)
        assert world.limits[-2:] == [4, 8]
    assert not caplog.records


@pytest.mark.parametrize("calm", [2.0, 1.0], ids=["on any number of threads", "on all threads alone"])
def test_others_are_told_of_once_where_steps_go_on_to_wait(
    calm: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where fewer threads do not help: a trial of more fails, or steps wait all the same."""
    world = World(monkeypatch, num_threads=2)
    with caplog.at_level(logging.INFO, "foredraft"):
        for _ in range(1000):
            world.steps(1, 5.0 if world.helpers.num_threads != 1 else calm)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        f"other programs have kept the processors busy for {FEW_STEPS} steps, which took 5.0 times their own computing "
        "time, so speeds measured meanwhile are too low; kernels run on 1 of 2 threads until the load drops"
    )


def test_more_threads_are_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads always wait, one never does."""
    world = World(monkeypatch, num_threads=2)
    trials = []
    for step in range(20 * MOST_STEPS):
        world.steps(1, 5.0 if world.helpers.num_threads != 1 else 1.0)
        if world.limits[len(trials) * 2 + 2 :]:
            trials.append(step)
    gaps = [after - before for before, after in pairwise(trials)]
    assert gaps[0] < 3 * FEW_STEPS
    assert gaps == sorted(gaps)
    assert MOST_STEPS <= gaps[-1] <= MOST_STEPS + 2 * WINDOW


def test_another_number_of_threads_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.steps(WINDOW, 5.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    world.steps(1, 1.0)
    assert world.limits == [8, 4, 3]


# ---- shared work ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels() -> native.Library:
    found = native.library()
    if found is None:
        pytest.skip("no kernels here")
    return found


def products(kernels: native.Library) -> list[tuple[NativeMatrix, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 64, 96), (3, 608, 1000), (17, 96, 4000), (70, 256, 515), (5, 32, 7)]
    return [
        (
            NativeMatrix(torch.randn(outputs, inputs, generator=generator), None, kernels),
            torch.randn(rows, inputs, generator=generator),
        )
        for rows, inputs, outputs in shapes
    ]


@pytest.mark.usefixtures("threads_of_torch")
def test_the_number_of_threads_makes_no_difference(kernels: native.Library) -> None:
    """Nor does changing it, or limiting it, from one call to the next."""
    made = products(kernels)
    torch.set_num_threads(1)
    wanted = [matrix(x) for matrix, x in made]
    for turn in range(40):
        torch.set_num_threads((2, 3, 1, 7)[turn % 4])
        kernels.helpers.limit((256, 2, 1)[turn % 3])
        for (matrix, x), want in zip(made, wanted, strict=True):
            assert torch.equal(matrix(x), want)
    kernels.helpers.limit(256)


@pytest.mark.usefixtures("threads_of_torch")
def test_calls_from_several_threads_at_once(kernels: native.Library) -> None:
    made = products(kernels)
    wanted = [matrix(x) for matrix, x in made]
    wrong = []

    def work() -> None:
        torch.set_num_threads(3)
        for turn in range(60):
            matrix, x = made[turn % len(made)]
            if not torch.equal(matrix(x), wanted[turn % len(made)]):
                wrong.append(turn)

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
