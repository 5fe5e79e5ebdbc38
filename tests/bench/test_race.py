"""The race beside other engines, with engines that are made up: who takes part, at which settings, and what is said.

The made-up engines are processes that speak the protocol; they report the seconds that they are told to."""

from __future__ import annotations

import argparse
import ast
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import race as racing
from race import HERE, PEERS, ArmRow, Exported, Launch, Race, RaceOutcome, RaceRound, WorkerError, make
from rich.console import Console
from workers.foredraft_worker import Own
from workers.llamacpp_worker import ServerProcess, decode, decode_together
from workers.protocol import instruction_sets

from foredraft.bench import report
from foredraft.bench.workload import BenchPrompt
from foredraft.errors import ConfigError
from foredraft.folders import cache_folder

FAKE = """
import itertools, json, os
from .protocol import DecodedRows, Entry, EntrySettings, common_options, serve


def main():
    parser = common_options("")
    parser.add_argument("--plan", type=json.loads)
    options = parser.parse_args()
    plan = options.plan

    def text(prompt, length, departs_at):
        length = 2 if prompt[0] == 9 else length
        return [sum(prompt) % 50 + place + (departs_at is not None and place >= departs_at) for place in range(length)]

    def made(entry, speeds):
        turns = itertools.count()

        def run(prompts, length):
            departs_at = 2 if entry.get("varies") and next(turns) % 2 else entry.get("departs_at")
            with open(plan["calls"], "a") as calls:
                calls.write(json.dumps([plan["name"], entry["name"], prompts]) + "\\n")
            if plan.get("dies_at") in prompts:
                os._exit(7)
            rows = [text(ids, length, departs_at) for ids in prompts]
            num_first = sum(map(len, rows)) if entry.get("at_once") else len(rows)
            decoded = sum(map(len, rows)) - num_first
            seconds = speeds[1 if prompts[0][0] >= 100 else 0]
            return DecodedRows(rows, num_first, 0.5 if seconds > 0.01 else 0.4, decoded * seconds)

        def make():
            if speeds is None:
                raise RuntimeError("no such kernel")
            return run

        return make

    def candidates(entry):
        ways = entry["ways"].items()
        return lambda chosen: [EntrySettings({"way": way}, made(entry, speeds)) for way, speeds in ways]

    def start():
        if "broken" in plan:
            raise RuntimeError(plan["broken"])
        entries = [
            Entry(one["name"], one["kind"], one.get("numerics", "fake"), candidates(one), one.get("counts", True),
                  one.get("num_rows", 1))
            for one in plan["entries"]
        ]
        return plan["name"] + " 1.0", entries

    own = {
        "answer": lambda request: {"token_ids": text(request["prompt"], request["max_new_tokens"], None)},
        "gap": lambda request: {"gap": 0.25 + len(request["output"])},
    }
    serve(start, own)


main()
"""
PLAIN, LOOKUP = "plain", "no second model"


def entry(name: str, kind: str = PLAIN, slow: float = 0.01, tuned: float | None = None, **more: Any) -> dict[str, Any]:
    """An arm with one way to run: seconds per token on prompts that count, and on those for tuning."""
    return {"name": name, "kind": kind, "ways": {"only": [slow, slow if tuned is None else tuned]}, **more}


def options(**settings: Any) -> argparse.Namespace:
    """Options of the script, at their defaults otherwise."""
    return argparse.Namespace(**{**vars(racing.parser().parse_args([])), **settings})


class Track:
    """Where made-up engines race."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "workers").mkdir()
        for name in ("__init__.py", "protocol.py"):
            shutil.copy(HERE / "workers" / name, folder / "workers" / name)
        (folder / "workers" / "fake.py").write_text(FAKE)
        self.calls = folder / "calls"

    def launch(self, name: str, entries: list[dict[str, Any]], **more: Any) -> Launch:
        plan = {"name": name, "entries": entries, "calls": str(self.calls), **more}
        arguments = (str(self.folder), f"--plan={json.dumps(plan)}")
        return Launch(name, name, Path(sys.executable), "fake", arguments, self.folder)

    def race(self, launches: list[Launch], dtype: str = "bfloat16", **settings: Any) -> Race:
        chosen = {"num_prompts": 2, "num_tuning_prompts": 1, "max_new_tokens": 6, "threads": 1, **settings}
        return Race(Exported(self.folder, "a model", dtype), dtype, launches, {}, options(**chosen))

    def run(self, launches: list[Launch], dtype: str = "bfloat16", **settings: Any) -> RaceOutcome:
        with self.race(launches, dtype, **settings) as race:
            return race.run(prompts(), lambda outcome: None)

    def decoded(self) -> list[tuple[str, str, Any]]:
        return [tuple(json.loads(line)) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Track:
    monkeypatch.setattr(racing, "SETTLING_SECONDS", 0.0)  # nothing computes here
    return Track(tmp_path)


def prompts() -> Iterator[BenchPrompt]:
    """Two that count (and one that is answered too shortly), then those for tuning."""
    for name, ids in (("a", (1, 2)), ("short", (9, 1)), ("b", (3, 4)), ("t", (100, 5)), ("u", (101, 6))):
        yield BenchPrompt(name, "kind", ids)


def rows(outcome: RaceOutcome) -> dict[str, ArmRow]:
    return {row.arm: row for row in outcome.rounds[0].rows}


def shown(outcome: RaceOutcome, width: int = 100) -> str:
    stream = io.StringIO()
    report.show(Console(file=stream, width=width), outcome.shown())
    return stream.getvalue()


OWN = [entry("plain", slow=0.02), entry("ngram", LOOKUP, slow=0.008, tuned=0.01)]


# -- a race ------------------------------------------------------------------------------------------------------


def test_ratios_are_those_of_the_times_and_texts_come_first(track: Track) -> None:
    """Also of what is known after each prompt; nothing is cut off, and workers end with the race."""
    peer = [entry("plain", slow=0.01), entry("lookup", LOOKUP, slow=0.004, departs_at=3)]
    known: list[RaceOutcome] = []
    with track.race([track.launch("foredraft", OWN), track.launch("other", peer)]) as race:
        processes = [worker.process for worker in race.workers]
        outcome = race.run(prompts(), known.append)
        assert all(process.poll() is None for process in processes)
    assert [process.poll() for process in processes] == [0, 0]
    (each,) = outcome.rounds
    assert {one.what: (one.arm, one.base, round(one.comparison.ratio, 6)) for one in each.verdicts} == {
        "plain": ("foredraft plain", "other plain", 0.5),
        "first token, plain": ("foredraft plain", "other plain", 0.8),
        "best without a second model": ("foredraft ngram", "other lookup", 0.5),
    }
    found = rows(outcome)
    assert found["other plain"].tokens_per_second == pytest.approx(100)
    same = found["other lookup"].sameness
    assert (same["num_same_rows"], same["num_rows"], same["same_share"]) == (0, 2, 0.5)
    departures = [(one["prompt"], one["position"], one["gap"]) for one in same["departures"]]
    assert departures == [("a", 3, 3.25), ("b", 3, 3.25)]
    assert outcome.skipped == ("short",)
    assert (outcome.prompts, outcome.tuning_prompts) == (("a", "b"), ("t",))
    assert [len(part.rounds[0].prompts) for part in known] == [1, 2, 2]
    assert [part.rounds[0].is_complete for part in known] == [False, False, True]
    for part, width in ((known[0], 100), (outcome, 80), (outcome, 140)):
        text = shown(part, width)
        assert text.index("same tokens") < text.index("tok/s")
        assert ("interrupted after 1" in text) == (part is known[0])
        assert "0.50" in text
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text


def test_every_prompt_runs_forwards_and_backwards_in_separate_processes(track: Track) -> None:
    track.run([track.launch("foredraft", OWN), track.launch("other", [entry("plain")])], num_prompts=1)
    timed = [(engine, arm) for engine, arm, ids in track.decoded() if ids == [[1, 2]]]
    order = [("foredraft", "plain"), ("foredraft", "ngram"), ("other", "plain")]
    assert timed == [*order, *order, *reversed(order)]  # the first three are the warm-up


def test_settings_and_best_arms_are_chosen_on_prompts_that_do_not_count(track: Track) -> None:
    """``late`` wins on the prompts that count; it must not be taken for that."""
    ways = {"early": [0.01, 0.001], "late": [0.0001, 0.002], "broken": None}
    peer = [entry("plain"), {"name": "lookup", "kind": LOOKUP, "ways": ways}]
    peer.append(entry("other lookup", LOOKUP, slow=0.0001, tuned=0.5))
    outcome = track.run([track.launch("foredraft", OWN), track.launch("other", peer)])
    assert rows(outcome)["other lookup"].settings == "way early"
    tried = outcome.tried["other lookup"]
    assert tried["way early"] == pytest.approx({"on_first": 1000, "on_all": 1000})
    assert tried["way late"] == pytest.approx({"on_first": 500, "on_all": 500})
    assert "no such kernel" in tried["way broken"]
    assert [one.base for one in outcome.rounds[0].verdicts] == ["other plain", "other plain", "other lookup"]


def test_quantised_arms_are_shown_apart_and_own_ones_compared_with_those_of_others(track: Track) -> None:
    own = [OWN[0], entry("plain int8", slow=0.002, counts=False)]
    peer = [entry("plain"), entry("plain q8_0", slow=0.004, counts=False)]
    outcome = track.run([track.launch("foredraft", own), track.launch("other", peer)])
    plain = {(one.arm, one.base): one.counts for one in outcome.rounds[0].verdicts if one.what == "plain"}
    assert plain == {
        ("foredraft plain", "other plain"): True,
        ("foredraft plain", "other plain q8_0"): False,
        ("foredraft plain int8", "other plain q8_0"): False,
    }
    text = shown(outcome)
    assert "other plain q8_0 *" in text
    assert "does not count" in text


# -- equality ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "dtype", "is_wrong"),
    [
        (entry("ngram", LOOKUP, departs_at=2), "float32", True),
        (entry("ngram", LOOKUP, departs_at=2), "bfloat16", False),
        (entry("plain int8", counts=False, numerics="float32, int8 weights", departs_at=2), "float32", False),
        (entry("ngram", LOOKUP, varies=True), "bfloat16", True),
    ],
)
def test_own_texts_that_differ_in_float32_or_from_run_to_run_hide_all_speeds(
    track: Track, own: dict[str, Any], dtype: str, is_wrong: bool
) -> None:
    """Arms with other weights are not held to the texts of full precision."""
    launches = [track.launch("foredraft", [OWN[0], own]), track.launch("other", [entry("plain", departs_at=1)])]
    outcome = track.run(launches, dtype)
    assert outcome.wrong == (("foredraft ngram",) if is_wrong else ())
    assert ("no speed is shown" in shown(outcome)) == is_wrong
    assert ("tok/s" in shown(outcome)) != is_wrong


# -- who takes part ----------------------------------------------------------------------------------------------


def test_what_takes_no_part_or_was_not_timed_is_named_with_its_reason(track: Track) -> None:
    """Engines that do not start, ways to decode of which nothing works, and tokens that all come at once."""
    own = [OWN[0], entry("ngram", LOOKUP, at_once=True)]
    peer = [entry("plain"), {"name": "lookup", "kind": LOOKUP, "ways": {"first": None, "second": None}}]
    lame = track.launch("lame", [], broken="no such model")
    outcome = track.run([track.launch("foredraft", own), lame, track.launch("other", peer)])
    assert list(outcome.engines) == ["foredraft", "other"]
    assert "no such model" in outcome.missing["lame"]
    assert "other lookup" not in rows(outcome)
    assert "way second: does not work: no such kernel" in outcome.missing["other lookup"]
    assert [one.arm for one in outcome.rounds[0].verdicts] == ["foredraft plain"] * 3  # also of the first token
    text = shown(outcome, 500)
    assert "missing  lame: " in text
    assert "all tokens came with the first step" in text


def test_an_engine_that_dies_is_an_error_with_its_log(track: Track) -> None:
    other = track.launch("other", [entry("plain")], dies_at=[3, 4])
    with pytest.raises(WorkerError, match=r"other ended \(exit code 7\); its log is .*other.log"):
        track.run([track.launch("foredraft", OWN), other])


def test_a_race_alone_is_no_race(track: Track) -> None:
    with pytest.raises(ConfigError, match="nothing to compare with"):
        track.run([track.launch("foredraft", OWN), track.launch("lame", [], broken="broken")])
    with pytest.raises(WorkerError, match="ours is broken"):
        track.run([track.launch("foredraft", [], broken="ours is broken"), track.launch("other", OWN)])


def test_too_few_prompts_are_refused(track: Track) -> None:
    with pytest.raises(ConfigError, match="4 prompts are to count and 1 are for choosing settings, and 4 have"):
        track.run([track.launch("foredraft", OWN), track.launch("other", OWN)], num_prompts=4)


# -- batches -----------------------------------------------------------------------------------------------------


def test_batches_run_in_groups_beside_single_rows(track: Track) -> None:
    own = [entry("plain", slow=0.02), entry("plain, 2 rows", slow=0.005, num_rows=2)]
    peer = [entry("plain", slow=0.01), entry("plain, 2 rows", slow=0.004, num_rows=2, departs_at=3)]
    launches = [track.launch("foredraft", own), track.launch("other", peer)]
    outcome = track.run(launches, batch_sizes=(2,), num_prompts=3)
    each: RaceRound = outcome.rounds[0]
    assert outcome.skipped == ()  # rows of batches go on past the end of their text
    assert each.prompts == ("group 0", "group 1")
    ratios = {(one.what, one.base): round(one.comparison.ratio, 6) for one in each.verdicts}
    assert ratios == {
        ("plain", "other plain"): 0.5,
        ("plain, 2 rows", "other plain, 2 rows"): 0.8,
        ("first token, plain", "other plain"): 0.8,
        ("first token, plain, 2 rows", "other plain, 2 rows"): 1.0,
        ("2 rows by one", "foredraft plain"): 4.0,
        ("2 rows by one", "other plain"): 2.5,
    }
    groups = [ids for engine, arm, ids in track.decoded() if (engine, arm) == ("other", "plain, 2 rows")]
    assert groups[-2:] == [[[3, 4], [1, 2]]] * 2  # the last group is filled up from the beginning
    alone = [ids for engine, arm, ids in track.decoded() if (engine, arm) == ("other", "plain")]
    assert alone[-1] == [[3, 4]]
    found = rows(outcome)
    same, single = found["other plain, 2 rows"].equality, found["other plain"].equality
    assert (same.num_prompts, same.num_identical) == (4, 1)  # one has ended by then
    assert (single.num_prompts, single.num_identical) == (2, 2)


# -- own methods -------------------------------------------------------------------------------------------------


def test_own_methods_are_sorted_by_what_they_need_and_whether_they_count() -> None:
    own = object.__new__(Own)
    own.numerics, own.quantization = "float32", None
    draft = {"method": "draft_model", "model": "zoo:tiny"}
    methods = {
        "draft_model": draft,
        "ngram": {"method": "ngram"},
        "suffix shared": {"method": "suffix", "shared": True},
        "both": {**draft, "method": "suffix+draft_model"},
        "quantized_self": {"method": "quantized_self"},
    }
    found = {one.name: (one.kind, one.counts) for one in own.entries(methods, [])}
    assert found == {
        "plain": (PLAIN, True),
        "draft_model": ("second model", True),
        "ngram": (LOOKUP, True),
        "suffix shared": (LOOKUP, False),
        "both": ("second model", True),
        "quantized_self": (LOOKUP, False),
    }
    names = [(one.name, one.num_rows) for one in own.entries({"ngram": methods["ngram"]}, [8])]
    assert names == [("plain", 1), ("plain, 8 rows", 8), ("ngram, 8 rows", 8)]
    own.quantization = "int8"
    found = {one.name: (one.kind, one.counts) for one in own.entries({"ngram": methods["ngram"]}, [])}
    assert found == {"plain int8": (PLAIN, False), "ngram int8": (LOOKUP, False)}


# -- environments ------------------------------------------------------------------------------------------------


def test_an_environment_is_made_once_and_completed_where_it_broke_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, calls, said = tmp_path / "status", tmp_path / "calls", list[str]()
    monkeypatch.setattr(racing, "say", said.append)

    def create(place: Path, with_pip: bool) -> None:
        python = place / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho "no such wheel"\nexit $(cat {status})\n')
        python.chmod(0o755)

    monkeypatch.setattr(racing.venv, "create", create)
    peer = PEERS["openvino"]
    status.write_text("1")
    with pytest.raises(ConfigError, match=r"pip install ended with 1: \.\.\.no such wheel"):
        make(peer, tmp_path)
    assert not racing.is_made(peer, tmp_path)
    status.write_text("0")
    make(peer, tmp_path)
    assert racing.is_made(peer, tmp_path)
    assert "uninstall --yes torchvision" in calls.read_text()
    done = calls.read_text()
    make(peer, tmp_path)
    assert calls.read_text() == done
    assert said[-1].endswith("is there")
    (tmp_path / "openvino" / "built").write_text("openvino-genai==1.0\n")
    make(peer, tmp_path)
    assert calls.read_text() != done


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(methods="ngram", peers_folder=tmp_path)
    found, missing = racing.launches(Exported(tmp_path, "a model", "bfloat16"), "bfloat16", given, PEERS.values())
    assert [launch.name for launch in found] == ["foredraft", "transformers"]
    command = f"python benchmarks/race.py --make-peers openvino --peers-folder {tmp_path}"
    assert missing["openvino"] == f"it is not installed; {command} does that"
    assert racing.main(["--peers", "openvino", "--peers-folder", str(tmp_path)]) == 2
    assert command in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "weights", "precision", "types"),
    [("bfloat16", "fp16", "bf16", ["bf16", "f16"]), ("float32", "fp32", "f32", ["f32"])],
)
def test_all_engines_hold_the_same_precision(
    tmp_path: Path, dtype: str, weights: str, precision: str, types: list[str]
) -> None:
    for name in ("openvino", "llamacpp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "built").touch()
    given = options(
        peers_folder=tmp_path,
        scale="100m",
        execution="packed",
        exactness="relaxed",
        quantised=True,
        batch_sizes=[8, 32],
    )
    found, missing = racing.launches(Exported(tmp_path, "a model", dtype), dtype, given, PEERS.values())
    own, openvino, llamacpp, transformers = (launch.arguments for launch in found)
    assert set(missing) == {"llamacpp-native", "ik-llama"}  # not installed here
    assert {f"--dtype={dtype}", "--scale=100m", "--execution=packed", "--exactness=relaxed"} <= set(own)
    assert own[-3:] == ("--quantised", "int8", "int4")
    assert ("--weights", weights, "--precision", precision, "--quantised", "int8", "int4") == openvino[4:]
    assert ("--types", *types, "--quantised", "q8_0", "q4_1", "q4_0", "q4_k_m") == llamacpp[4:]
    assert transformers[4:6] == ("--dtype", dtype)
    assert all(launch.arguments[:4] == (str(tmp_path), "--batch-sizes", "8", "32") for launch in found)


def test_a_gguf_file_races_as_it_is_beside_engines_that_read_one(tmp_path: Path) -> None:
    for name in ("llamacpp", "llamacpp-native", "ik-llama"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "built").touch()
    (tmp_path / "llamacpp-native" / "program").write_text("/built/llama-server")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    peers = [racing.PEERS[name] for name in ("llamacpp", "llamacpp-native", "ik-llama")]

    def arguments(model: str, is_gguf: bool) -> dict[str, list[str]]:
        exported = Exported(tmp_path, "a model", "bfloat16", is_gguf)
        given = options(peers_folder=tmp_path, model=model)
        found, missing = racing.launches(exported, "bfloat16", given, peers)
        assert set(missing) == (set() if is_gguf else {"ik-llama"})
        return {launch.name: list(launch.arguments[2:]) for launch in found}

    stored = arguments(str(file), True)
    assert stored["llamacpp"] == ["--types", "stored"]
    assert stored["llamacpp-native"] == ["--types", "stored", "--binary", "/built/llama-server"]
    assert stored["ik-llama"] == []
    assert arguments("zoo:tiny", False)["llamacpp"] == ["--types", "bf16", "f16"]


FAKE_LLAMA_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "-m" in sys.argv and sys.argv[sys.argv.index("-m") + 1] == "broken":
    sys.exit("no such model")

class Answers(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.reply("{}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count, first = asked["max_tokens"], len(asked["prompt"])
        if asked.get("stream"):
            parts = [{"__verbose": {"tokens": [first + place]}} for place in range(count)]
            lines = [json.dumps(part) for part in [*parts, {"__verbose": {"tokens": []}}]] + ["[DONE]"]
            return self.reply("".join(f"data: {line}\\n\\n" for line in lines))
        timings = {"predicted_ms": 500.0, "predicted_n": count}
        tokens = [len(sys.argv), *range(1, count)]
        self.reply(json.dumps({"__verbose": {"tokens": tokens}, "timings": timings}))

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""


def test_a_llama_server_is_asked_as_the_wheel_is_and_ends_with_its_arm(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{FAKE_LLAMA_SERVER}")
    program.chmod(0o755)
    server = ServerProcess(str(program), "target.gguf", None, {"weights": "stored"}, 2, 2)
    one = decode(server)([[5, 6]], 4)
    assert (one.rows[0][1:], one.num_first, one.decode_seconds) == ([1, 2, 3], 1, 0.5)
    both = decode_together(server)([[5], [5, 6]], 3)
    assert both.rows == [[1, 2, 3], [2, 3, 4]]
    drafted = {"weights": "stored", "drafted": 3, "p-min": 0.5}
    drafting = ServerProcess(str(program), "target.gguf", "draft.gguf", drafted, 2, 1)
    assert decode(drafting)([[5]], 4).rows[0][0] > one.rows[0][0]  # it was started with more options
    running = server.process
    del server
    assert running.wait(10) != 0
    with pytest.raises(RuntimeError, match=r"llama-server ended with 1: .*no such model"):
        ServerProcess(str(program), "broken", None, {}, 1, 1)


def test_the_instruction_sets_of_a_build_are_named() -> None:
    info = "system_info: n_threads = 2 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | AVX512_BF16 = 1 | LLAMAFILE = 1 |"
    assert instruction_sets(info) == ", uses AVX2 AVX512_BF16"
    assert instruction_sets("") == ""


def test_workers_of_other_engines_import_nothing_of_this_package() -> None:
    """They run in environments that do not have it."""
    for path in (HERE / "workers").glob("*.py"):
        if path.name in ("foredraft_worker.py", "transformers_worker.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert not (node.module or "").startswith("foredraft"), path.name
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert (HERE / "workers" / f"{node.module}.py").exists()
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("foredraft") for alias in node.names), path.name


# -- the script ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_script_races_beside_an_engine_in_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This library and transformers are real here; the third engine is made up and says something else."""
    shutil.copytree(cache_folder("native"), tmp_path / "cache" / "native")  # they are not compiled again
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    track = Track(tmp_path)
    plan = {"name": "made up", "entries": [entry("plain", departs_at=0)], "calls": str(track.calls)}
    python = tmp_path / "envs" / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -I -c "$3" {tmp_path} workers.fake {tmp_path} --threads 1 '
        f"--plan='{json.dumps(plan)}'\n"
    )
    python.chmod(0o755)
    (tmp_path / "envs" / "openvino" / "built").touch()
    output = tmp_path / "race.json"
    given = ["--model", "zoo:tiny", "--dtype", "float32", "--threads", "1", "--max-new-tokens", "16"]
    given += ["--num-prompts", "2", "--num-tuning-prompts", "1", "--methods", "ngram,draft_model"]
    narrow = ["--assisted-lengths", "2", "--lookup-lengths", "3"]
    assert racing.main([*given, *narrow, "--peers-folder", str(tmp_path / "envs"), "--out", str(output)]) == 0
    race = json.loads(output.read_text())["race"]
    assert list(race["engines"]) == ["foredraft", "openvino", "transformers"]
    assert list(race["missing"]) == ["llamacpp", "llamacpp-native", "ik-llama"]
    (each,) = race["rounds"]
    same = {row["arm"]: row["sameness"]["num_same_rows"] for row in each["rows"]}
    assert same.pop("OpenVINO plain") == 0
    assert set(same.values()) == {2}
    assert {one["what"] for one in each["verdicts"]} == {
        "plain", "best without a second model", "best with a second model"
    }  # fmt: skip
    assert (tmp_path / "cache" / "peers" / "models").exists()
    assert "llamacpp takes no part" in capsys.readouterr().err
