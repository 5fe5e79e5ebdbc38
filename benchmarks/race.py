"""Compare the speed of Foredraft and other engines on the same weights and token ids, each in a process of its own.

    python benchmarks/race.py --make-peers openvino llamacpp            # once: an environment for each
    python benchmarks/race.py --model qwen2.5-1.5b-q4_k_m.gguf --draft-model qwen2.5-0.5b-q4_k_m.gguf
    python benchmarks/race.py --peers all --model zoo:smollm2 --dtype bfloat16 --out race.json
    python benchmarks/race.py --peers openvino transformers --batch-sizes 8 32 --num-prompts 48
    python benchmarks/race.py --peers llamacpp --methods 'ngram,{"method": "suffix"}' --kinds again maths
    python benchmarks/race.py --peers transformers --model zoo:tiny --scale 100m --context 1500

Outputs are compared first. Every engine runs with the settings that were fastest on other prompts. One process computes
while the others sleep. Exit codes: 0 done; 2 refused; 3 outputs of Foredraft differ where they must be equal (then no
speed is shown); 130 interrupted. ``--out`` is written after every prompt. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, Self

import torch
from pairs import load_pair, padded, scaled
from rich.console import Console, Group
from rich.text import Text
from workers.foredraft_worker import cast
from workers.protocol import DRAFT, LOOKUP, PLAIN, STORED, cpu_seconds_of, process_ids

from foredraft import zoo
from foredraft.bench.candidates import read_candidates
from foredraft.bench.equality import Equality, check
from foredraft.bench.outcome import same_of
from foredraft.bench.provenance import provenance
from foredraft.bench.report import WHY_NOTHING, Column, figure, load_lines, plain_data, show, table
from foredraft.bench.trial import Arm, Comparison, Run, Sampling, Trial, compare, in_groups, interleave, rows_of
from foredraft.bench.workload import BenchPrompt, load_prompts, prompts_of_kinds, read_questions, select
from foredraft.engine.stats import counted
from foredraft.errors import ConfigError, ForedraftError
from foredraft.folders import cache_folder, keep_json
from foredraft.gguf.header import is_gguf, part_names
from foredraft.loading.models import is_zoo, load_model, load_tokenizer
from foredraft.tune.scale import sizes

HERE = Path(__file__).parent
OWN = "foredraft"
ALL = "all"
COMPARED = {"plain": (PLAIN,), "best without a second model": (PLAIN, LOOKUP), "best with a second model": (DRAFT,)}
"""What is compared, and the kinds of arms among which each engine's best is taken."""

MAX_FLOAT32_GAP = 1e-4
"""Largest gap in logits at which two float32 computations may choose differently."""

SETTLING_SECONDS = 0.02  # between two requests, so that threads of the worker before have gone to sleep
_PATIENCE_SECONDS = 5.0  # with a worker whose input has ended
_WORTH_TIMING = 0.5  # of the budget: answers shorter than that are left out
_BUSY = 0.05  # share of a processor that a waiting engine may use before it is told
_BOOT = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
"""Runs a worker in an environment without this package: its folder comes last on the path, so that it hides nothing."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- engines -----------------------------------------------------------------------------------------------------------

OPENVINO = {"float32": ("fp32", "f32"), "bfloat16": ("fp16", "bf16"), "float16": ("fp16", "f16")}
"""Weights as stored and arithmetic; optimum stores no bfloat16, and float16 holds what matters of it."""
GGUF = {"float32": ("f32",), "bfloat16": ("bf16", "f16"), "float16": ("f16",)}
"""Weights among which llama.cpp's fastest are taken: half precision of either kind."""
QUANTISED = {OWN: ("int8", "int4"), "openvino": ("int8", "int4"), "llamacpp": ("q8_0", "q4_1", "q4_0", "q4_k_m")}


@dataclass(frozen=True)
class Peer:
    """Another engine.

    Args:
      label: in tables.
      arguments: of its worker, by the dtype and the options of the race.
      packages: of its environment; none for an engine that this library's own environment holds.
      unwanted: packages that come along and are taken out.
      size: of the environment, for people.
      worker: the module among the workers, without ``_worker``.
      build: compiles what no wheel brings, in the folder of the environment, and returns the path of the program that
        the worker is to run. Raises ConfigError.
      reads_checkpoints: it takes part where ``--model`` is a checkpoint.
    """

    name: str
    label: str
    arguments: Callable[[str, argparse.Namespace], list[str]]
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    size: str = ""
    worker: str = ""
    build: Callable[[Path], Path] | None = None
    reads_checkpoints: bool = True


def _list(option: str, values: Iterable[object]) -> list[str]:
    return [option, *map(str, values)]


def _quantised(name: str, options: argparse.Namespace) -> list[str]:
    return _list("--quantised", QUANTISED[name]) if options.quantised else []


def _openvino(dtype: str, options: argparse.Namespace) -> list[str]:
    weights, precision = OPENVINO[dtype]
    return ["--weights", weights, "--precision", precision, *_quantised("openvino", options)]


def _llamacpp(dtype: str, options: argparse.Namespace) -> list[str]:
    types = (STORED,) if is_gguf(Path(options.model).expanduser()) else GGUF[dtype]
    return [*_list("--types", types), *_quantised("llamacpp", options)]


def _transformers(dtype: str, options: argparse.Namespace) -> list[str]:
    lengths = _list("--assisted-lengths", options.assisted_lengths) + _list("--lookup-lengths", options.lookup_lengths)
    return ["--dtype", dtype, *lengths]


_LLAMA_CPP = "2026.10.11549"
"""Of the wheel, and of its source distribution, which contains llama.cpp."""
_CMAKE = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF")
_WITHOUT = tuple(f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI"))


def build_llama_server(place: Path) -> Path:
    """Compile llama-server for this processor, from the llama.cpp in the source distribution of xllamacpp.

    Args:
      place: an environment with cmake.

    Raises: ConfigError with the end of what a step has printed.
    """
    python, cmake, sources = str(place / "bin" / "python"), str(place / "bin" / "cmake"), place / "sources"
    wanted = ["--no-deps", "--no-binary", ":all:", "-d", str(sources), f"xllamacpp=={_LLAMA_CPP}"]
    _step(place, "pip download", [python, "-m", "pip", "download", "-q", *wanted])
    with tarfile.open(sources / f"xllamacpp-{_LLAMA_CPP}.tar.gz") as archive:
        archive.extractall(sources, filter="data")
    source, build = sources / f"xllamacpp-{_LLAMA_CPP}" / "thirdparty" / "llama.cpp", place / "build"
    _step(place, "cmake", [cmake, "-S", str(source), "-B", str(build), *_CMAKE, *_WITHOUT])
    jobs = ["-j", str(os.cpu_count() or 1)]
    _step(place, "cmake --build", [cmake, "--build", str(build), "--target", "llama-server", *jobs])
    return build / "bin" / "llama-server"


def _step(place: Path, what: str, command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ConfigError(
            f"{place} is not finished: {what} ended with {done.returncode}: ...{done.stdout.strip()[-800:]}"
        )


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "openvino",
            "OpenVINO",
            _openvino,
            ("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
            ("torchvision",),  # its build for another torch breaks the export
            "1.7 GB",
        ),
        Peer(
            "llamacpp",
            "llama.cpp",
            _llamacpp,
            (f"xllamacpp=={_LLAMA_CPP}", "gguf==0.19.0", "safetensors", "numpy"),
            size="0.2 GB",
        ),
        Peer(
            "llamacpp-native",
            "llama.cpp (native)",
            _llamacpp,
            ("cmake", "gguf==0.19.0", "safetensors", "numpy"),
            size="0.5 GB, compiles for ten minutes on two cores",
            worker="llamacpp",
            build=build_llama_server,
        ),
        Peer(
            "ik-llama",
            "ik_llama.cpp",
            lambda dtype, options: [],
            ("ik-llama-cpp-python==0.1.5", "numpy"),
            size="0.1 GB",
            worker="ik_llama",
            reads_checkpoints=False,
        ),
        Peer("transformers", "transformers", _transformers),
    )
}


def peers_of(names: Iterable[str]) -> list[Peer]:
    """The engines of some names; "all" are those of `PEERS`."""
    return list(PEERS.values()) if ALL in names else [PEERS[name] for name in dict.fromkeys(names)]


def is_made(peer: Peer, folder: Path) -> bool:
    """Whether its environment was made to the end."""
    return not peer.packages or (folder / peer.name / "built").exists()


def command_that_makes(peer: Peer, folder: Path) -> str:
    """What to type."""
    place = "" if folder == default_folder() else f" --peers-folder {folder}"
    return f"python benchmarks/race.py --make-peers {peer.name}{place}"


def default_folder() -> Path:
    """The folder of all environments, in the cache."""
    return cache_folder("peers", "environments")


def make(peer: Peer, folder: Path) -> None:
    """Make one environment. An unfinished one is completed, one of other versions brought up to date.

    Raises: ConfigError with the complaint of pip or of the compiler.
    """
    place, wanted = folder / peer.name, "\n".join(peer.packages) + "\n"
    if not peer.packages:
        say(f"{peer.name}: needs no environment of its own")
        return
    if is_made(peer, folder) and (place / "built").read_text() == wanted:
        say(f"{peer.name}: {place} is there")
        return
    say(f"{peer.name}: making {place} ({peer.size})")
    place.mkdir(parents=True, exist_ok=True)
    venv.create(place, with_pip=True)
    constraints = place / "constraints.txt"  # else a dependency takes a newer torch and gigabytes beside it
    constraints.write_text("\n".join(one for one in peer.packages if one.startswith("torch==")) + "\n")
    steps = [("install", "--only-binary", ":all:", "-c", str(constraints), *peer.packages)]
    steps += [("uninstall", "--yes", *peer.unwanted)] if peer.unwanted else []
    for step in steps:
        pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _step(place, f"pip {step[0]}", [*pip, *step])
    if peer.build is not None:
        (place / "program").write_text(str(peer.build(place)))
    (place / "built").write_text(wanted)
    say(f"{peer.name}: done")


@dataclass(frozen=True)
class Launch:
    """How to start a worker.

    Args:
      name: by which a user knows the engine.
      label: in front of the names of its arms.
      python: None for this library's own.
      worker: the module among the workers.
      folder: that holds the folder of workers.
    """

    name: str
    label: str
    python: Path | None
    worker: str
    arguments: tuple[str, ...]
    folder: Path = HERE

    def command(self) -> list[str]:
        python = [sys.executable] if self.python is None else [str(self.python), "-I"]
        return [*python, "-c", _BOOT, str(self.folder), f"workers.{self.worker}", *self.arguments]


def launches(
    exported: Exported, dtype: str, options: argparse.Namespace, peers: Iterable[Peer]
) -> tuple[list[Launch], dict[str, str]]:
    """This library first, then the engines that are installed; and why the others are missing.

    Without ``--methods`` batches are of plain decoding; single rows are drafted by the lookups that suit most models,
    and by the second model if there is one, alone and combined.
    """
    usual = "draft_model,ngram,suffix,suffix+draft_model" if exported.has_draft else "ngram,suffix"
    names = options.methods or (None if options.batch_sizes else usual)
    methods = {} if names is None else read_candidates(names, options.draft_model, options.num_speculative_tokens)
    own = {
        "model": options.model,
        "dtype": dtype,
        "scale": options.scale,
        "execution": options.execution,
        "exactness": options.exactness,
        **({} if options.activations is None else {"activations": options.activations}),
        "methods": json.dumps(methods),
    }
    common = [str(exported.folder), *_list("--batch-sizes", options.batch_sizes)]
    given = [*common, *(f"--{name}={value}" for name, value in own.items()), *_quantised(OWN, options)]
    found, missing = [Launch(OWN, OWN, None, "foredraft_worker", tuple(given))], {}
    folder = options.peers_folder
    for peer in peers:
        if not is_made(peer, folder):
            missing[peer.name] = f"it is not installed; {command_that_makes(peer, folder)} does that"
            continue
        if not (exported.is_gguf or peer.reads_checkpoints):
            missing[peer.name] = "it reads GGUF files alone"
            continue
        python = folder / peer.name / "bin" / "python" if peer.packages else None
        program = [] if peer.build is None else ["--binary", (folder / peer.name / "program").read_text()]
        arguments = (*common, *peer.arguments(dtype, options), *program)
        found.append(Launch(peer.name, peer.label, python, f"{peer.worker or peer.name}_worker", arguments))
    return found, missing


# -- checkpoints and prompts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """A folder with ``target`` and, where there is a second model, ``draft``: checkpoints in float32, which holds half
    precision exactly. Engines leave there what they convert them to. Of a GGUF file, ``target`` has the configuration
    and the tokenizer alone, and ``target-stored.gguf`` is a link to the file; likewise for ``draft``.

    Args:
      models: for tables.
      dtype: that the checkpoint is computed in where nothing else is asked for.
      is_gguf: the models are GGUF files.
    """

    folder: Path
    models: str
    dtype: str
    is_gguf: bool = False

    @property
    def has_draft(self) -> bool:
        return (self.folder / "draft").exists()


def export(model: str, draft_model: str | None, scale: str) -> Exported:
    """The checkpoints of a model and of its drafter, where it has one; written where they are not there yet.

    Raises: CheckpointError, ConfigError.
    """
    parts = [model, *([] if draft_model is None else [draft_model])]
    if any(map(_is_gguf, parts)) and not (all(map(_is_gguf, parts)) and sizes(scale) is None):
        raise ConfigError("a GGUF file races as it is: without --scale, and with a GGUF file as --draft-model")
    folder = cache_folder("peers", "models", folder_name(model, draft_model, scale))
    facts = folder / "facts.json"
    if not facts.exists():
        say(f"exporting {model} to {folder}")
        unfinished = folder.with_name(f"{folder.name}-unfinished-{os.getpid()}")
        try:
            if _is_gguf(model):
                _link(dict(zip(("target", "draft"), parts, strict=False)), unfinished)
            else:
                _write(model, draft_model, scale, unfinished)
            unfinished.replace(folder)
        except OSError:
            if not facts.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(folder, **json.loads(facts.read_text(encoding="utf-8")))


def _is_gguf(model: str) -> bool:
    return not is_zoo(model) and is_gguf(Path(model).expanduser())


def _link(files: Mapping[str, str], out: Path) -> None:
    labels, dtype = [], ""
    for part, name in files.items():
        loaded = load_model(name)
        loaded.model.config.save_pretrained(out / part)
        loaded.model.generation_config.save_pretrained(out / part)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(out / part)
        path = Path(name).expanduser().resolve()
        (out / f"{part}-{STORED}.gguf").symlink_to(path)
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        labels.append(f"{path.name} ({path.stat().st_size / 1e6:,.0f} MB, SHA-256 {digest})")
        dtype = dtype or str(loaded.model.dtype).removeprefix("torch.")
    facts = {"models": " + ".join(labels), "dtype": dtype, "is_gguf": True}
    (out / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _write(model: str, draft_model: str | None, scale: str, out: Path) -> None:
    pair = load_pair(model, draft_model, "auto")
    dtype = str(pair.target.dtype).removeprefix("torch.")
    for part in (pair.target, pair.drafter):
        if part is not None:
            cast(part, torch.float32)
    big = scaled(pair, scale)
    for name, part in {"target": big.target, "draft": big.drafter}.items():
        if part is not None:
            part.save_pretrained(out / name)
            if pair.tokenizer is not None:
                pair.tokenizer.save_pretrained(out / name)
    facts = {"models": big.label, "dtype": dtype}
    (out / "facts.json").write_text(json.dumps(facts), encoding="utf-8")  # last: its presence says that all is there


def folder_name(model: str, draft_model: str | None, scale: str) -> str:
    """Readable, and another one for other files under the same name."""
    parts = [model, *([] if draft_model is None else [draft_model]), scale]
    readable = re.sub(r"[^\w.-]+", "-", " ".join(Path(part).name for part in parts)).strip("-")
    files = [_files(part) for part in parts[:-1]]
    return f"{readable}-{hashlib.sha256(repr((parts, files)).encode()).hexdigest()[:10]}"


def _files(model: str) -> list[tuple[str, int, int]]:
    """What lies in the model's folder: names, sizes and times; nothing for a hub id."""
    folder = zoo.path(model) if is_zoo(model) else Path(model).expanduser()
    if folder.is_file():
        every = [folder.with_name(name) for name in part_names(folder.name)]
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in every if file.exists()]
    if not folder.is_dir():
        return []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]


def prompts_of(
    target: Path, options: argparse.Namespace, answer: Callable[[tuple[int, ...]], Sequence[int]]
) -> Iterator[BenchPrompt]:
    """Prompts of the kinds in turn; those that leave no room for the output are left out.

    Args:
      target: the checkpoint.
      answer: as in `prompts_of_kinds`.

    Raises: ConfigError for a kind that no prompt has.
    """
    tokenizer: Any = load_tokenizer(target) if (target / "tokenizer_config.json").exists() else None
    most = json.loads((target / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    room = None if most is None else most - options.max_new_tokens
    questions = read_questions(options.prompts_file)
    if options.context is not None:
        prompts = load_prompts(tokenizer, select(questions, len(questions)))
        return iter(padded(tokenizer, prompts, options.context, room))
    return prompts_of_kinds(tokenizer, questions, options.kinds, room, answer)


# -- workers -----------------------------------------------------------------------------------------------------------


class WorkerError(ForedraftError):
    """A worker ended, or reports an exception."""


class Worker:
    """One engine in a process of its own. It computes only while it is asked.

    Use it as a context manager: the process ends with the block.

    Args:
      log: what the engine writes beside its answers.

    Attributes:
      plain_peak_bytes: the largest resident size of the process that has decoded plainly, and nothing else yet.
      load_seconds: from the name of the model to an engine that decodes plainly; imports of Python are not counted.
      failed: ways to decode that do not work, and why.

    Raises: WorkerError where the engine does not start.
    """

    def __init__(self, launch: Launch, threads: int, log: Path) -> None:
        self.launch = launch
        self.busy_cpu_seconds = self.busy_seconds = 0.0
        self.plain_peak_bytes = 0
        self.arms: list[RemoteArm] = []
        self.failed: dict[str, str] = {}
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [*launch.command(), "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the driver, which ends the workers
            )
        try:
            described = self._answer()
            self.engine: str = described["engine"]
            self.load_seconds: float = described["start_seconds"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """The end of its input ends it; if that does not help, it is killed."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer.

        Raises: WorkerError.
        """
        time.sleep(SETTLING_SECONDS)
        started = time.perf_counter()
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # reading tells how it ended
        found = self._answer()
        self.busy_seconds += time.perf_counter() - started
        self.busy_cpu_seconds += found["cpu_seconds"]
        return found

    def _answer(self) -> dict[str, Any]:
        stdout = self.process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            code = self.process.wait()
            raise WorkerError(f"the worker of {self.launch.name} ended (exit code {code}); its log is {self._log}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(found.get("trace", ""))
            raise WorkerError(f"{self.launch.name}: {found['error']}; its log is {self._log}")
        return found

    def enter(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Make its arms, each with the settings that are fastest on these prompts.

        Raises: WorkerError.
        """
        found = self.ask(verb="enter", prompts=[list(ids) for ids in prompts], max_new_tokens=max_new_tokens)
        self.plain_peak_bytes, self.failed = found["peak_bytes"], found["failed"]
        self.load_seconds += found["load_seconds"]
        self.arms = [RemoteArm(self, facts) for facts in found["arms"]]

    def cpu_seconds(self) -> float:
        """Of the process and those that it started, whoever asked; 0 where the system does not report it."""
        return cpu_seconds_of(process_ids(self.process.pid))


class RemoteArm(Arm):
    """An arm in another process, greedy: one row ends where the model ends it, rows of a batch at the budget.

    Args:
      facts: the worker's description of it.
    """

    def __init__(self, worker: Worker, facts: Mapping[str, Any]) -> None:
        self.name = f"{worker.launch.label} {facts['name']}"
        self.worker = worker
        self.facts = facts
        self.num_rows: int = facts["num_rows"]
        self.cpu_seconds = self.seconds = 0.0

    def run(self, prompt_ids: Sequence[Any], max_new_tokens: int, sampling: Sampling) -> Run:
        """All prompts of a group, or the first of them for an arm of one row."""
        prompts = [list(ids) for ids in rows_of(prompt_ids)[: self.num_rows]]
        found = self.worker.ask(verb="run", arm=self.facts["name"], prompts=prompts, max_new_tokens=max_new_tokens)
        self.cpu_seconds += found["cpu_seconds"]
        self.seconds += found["first_seconds"] + found["decode_seconds"]
        rows = tuple(tuple(row) for row in found["rows"])
        tokens = tuple(chain.from_iterable(rows))
        return Run(tokens, found["num_first"], found["first_seconds"], found["decode_seconds"], rows=rows)


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArmRow:
    """One arm.

    Args:
      engine: as the user names it.
      counts: False for other weights than the checkpoint's, and for what learns from one request for the next.
      tuned_tokens_per_second: on the prompts on which settings were chosen, and which do not count.
      first_token_seconds: median over the prompts, from the request to the first token.
      num_busy_threads: processor seconds per second of its runs.
      runs: per prompt, of every run: tokens decoded, seconds of decoding, seconds before.
    """

    arm: str
    engine: str
    kind: str
    num_rows: int
    settings: str
    numerics: str
    counts: bool
    tuned_tokens_per_second: float
    tokens_per_second: float
    first_token_seconds: float
    num_busy_threads: float
    equality: Equality = field(repr=False)
    runs: tuple[tuple[tuple[int, float, float], ...], ...]

    @classmethod
    def of(cls, trial: Trial, arm: RemoteArm, equality: Equality) -> ArmRow:
        """The results of a trial for an arm."""
        facts = {name: arm.facts[name] for name in ("kind", "settings", "numerics", "counts")}
        return cls(
            arm=arm.name,
            engine=arm.worker.launch.name,
            num_rows=arm.num_rows,
            **facts,
            tuned_tokens_per_second=arm.facts["tuned_tokens_per_second"],
            tokens_per_second=trial.tokens_per_second(arm.name),
            first_token_seconds=statistics.median(
                statistics.median(run.first_seconds for run in runs) for runs in trial.runs[arm.name]
            ),
            num_busy_threads=arm.cpu_seconds / arm.seconds if arm.seconds else 0.0,
            equality=equality,
            runs=tuple(
                tuple((run.num_decoded, run.decode_seconds, run.first_seconds) for run in runs)
                for runs in trial.runs[arm.name]
            ),
        )

    @property
    def sameness(self) -> dict[str, Any]:
        """Its texts beside those of foredraft's plain decoding, as results have it.

        ``tokens`` are those of the reference and of the arm where a row departs, -1 where one has ended.
        """
        found = self.equality
        return {
            "num_rows": found.num_prompts,
            "num_same_rows": found.num_identical,
            "same_share": found.same_share,
            "is_repeatable": found.is_repeatable,
            "departures": [
                {"prompt": one.prompt, "position": one.position, "tokens": (one.expected, one.found), "gap": one.gap}
                for one in found.divergences
            ],
            "largest_gap": found.largest_gap,
        }


@dataclass(frozen=True)
class EngineRatio:
    """One arm relative to another, each the best of its engine on the prompts that do not count.

    Args:
      counts: both sides do.
    """

    what: str
    arm: str
    base: str
    counts: bool
    comparison: Comparison


@dataclass(frozen=True)
class RaceRound:
    """All arms of one number of rows over one set of prompts.

    Args:
      prompts: prompts, or groups of them.
      idle_shares: of one processor, what every worker used while another one was asked.
      is_complete: all prompts are done.
      wrong: own arms whose texts break the guarantee of full precision; then no speed is shown.
    """

    title: str
    num_rows: int
    prompts: tuple[str, ...]
    runs_per_prompt: int
    other_cpu_share: float
    idle_shares: Mapping[str, float]
    rows: tuple[ArmRow, ...]
    verdicts: tuple[EngineRatio, ...]
    wrong: tuple[str, ...]
    is_complete: bool

    def shown(self) -> Iterator[Group | Text]:
        """Texts first, speeds and ratios afterwards."""
        title = self.title if self.is_complete else f"{self.title}, interrupted after {len(self.prompts)}"
        yield table(f"texts beside foredraft's plain decoding: {title}", _TEXT_COLUMNS, self.rows, is_wide=True)
        yield Text(
            "same tokens: before the first difference of a row; gap: by how much foredraft's target prefers one token "
            "to the other there, in logits",
            "dim",
        )
        if self.wrong:
            names = ", ".join(self.wrong)
            yield Text(f"{names}: texts differ where equality is promised, so no speed is shown", "red")
            return
        yield table(f"speed of decoding: {title}", _SPEED_COLUMNS, self.rows, is_wide=True)
        told = f"greedy, {counted(self.runs_per_prompt, 'interleaved run')} each; threads: processor seconds per second"
        told += "" if all(row.counts for row in self.rows) else "; *: shown, and does not count"
        if any(math.isnan(row.tokens_per_second) for row in self.rows):
            told += f"; {WHY_NOTHING}"
        yield Text(told, "dim")
        yield table(f"ratios: {title}", _VERDICT_COLUMNS, self.verdicts, is_wide=True)
        yield Text(
            "ratio: of tokens per second (first token: of one by the seconds before it), median of the prompts, and "
            "its interval by bootstrap over them; each engine with its arm that was fastest on the prompts that do not "
            "count",
            "dim",
        )
        yield from load_lines(self.other_cpu_share)
        for name, share in self.idle_shares.items():
            if share > _BUSY:
                yield Text(f"{name} used {share:.0%} of a processor while others were asked", "yellow")


def _label(row: ArmRow) -> str:
    return row.arm + ("" if row.counts else " *")


def _interval(found: Comparison) -> str:
    if found.num_prompts < 2:
        return "one prompt" if found.num_prompts else ""
    return f"{found.low:.2f}-{found.high:.2f}"


_TEXT_COLUMNS = (
    Column("arm", _label, is_text=True),
    Column(
        "same rows", lambda row: same_of(row.equality) + ("" if row.equality.is_repeatable else " (not repeatable)")
    ),
    Column("same tokens", lambda row: f"{row.equality.same_share:.1%}"),
    Column("largest gap", lambda row: f"{row.equality.largest_gap:.2g}"),
)
_SPEED_COLUMNS = (
    Column("arm", _label, is_text=True),
    Column("tok/s", lambda row: figure(row.tokens_per_second, 1)),
    Column("first token", lambda row: f"{row.first_token_seconds:.2f} s"),
    Column("threads", lambda row: f"{row.num_busy_threads:.1f}"),
    Column("settings", lambda row: f"{row.settings}; {row.numerics}" if row.settings else row.numerics, is_text=True),
)
_VERDICT_COLUMNS = (
    Column("what", lambda one: one.what, is_text=True),
    Column("arm", lambda one: one.arm, is_text=True),
    Column("by", lambda one: one.base + ("" if one.counts else " *"), is_text=True),
    Column("ratio", lambda one: figure(one.comparison.ratio)),
    Column("95 % interval", lambda one: _interval(one.comparison)),
)


@dataclass(frozen=True)
class RaceOutcome:
    """A whole race.

    Args:
      engines: with their versions, by name.
      plain_peak_bytes: of every engine, the largest resident size of a process that has only decoded plainly.
      load_seconds: of every engine, from the name of the model to plain decoding, without imports of Python.
      missing: engines that take no part, and why.
      skipped: prompts whose answers are too short to be timed.
      tried: of every arm, the tokens per second of all settings on the prompts that do not count.
    """

    models: str
    dtype: str
    engines: Mapping[str, str]
    plain_peak_bytes: Mapping[str, int]
    load_seconds: Mapping[str, float]
    missing: Mapping[str, str]
    prompts: tuple[str, ...]
    tuning_prompts: tuple[str, ...]
    skipped: tuple[str, ...]
    tried: Mapping[str, Mapping[str, Any]]
    rounds: tuple[RaceRound, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        return tuple(name for each in self.rounds for name in each.wrong)

    def shown(self) -> Iterator[Group | Text]:
        """Everything but the conditions."""
        for name, engine in self.engines.items():
            memory = f"{self.plain_peak_bytes[name] / 1e6:.0f} MB at most with plain decoding alone"
            yield Text(f"engine   {engine}: {memory}, loaded in {self.load_seconds[name]:.1f} s")
        for name, reason in self.missing.items():
            yield Text(f"missing  {name}: {reason}", "yellow", no_wrap=True)
        if self.prompts:
            skipped = f"; {len(self.skipped)} with short answers left out" if self.skipped else ""
            chosen = f"settings were chosen on {len(self.tuning_prompts)} others"
            yield Text(f"prompts  {len(self.prompts)} that count; {chosen}{skipped}")
        for each in self.rounds:
            yield from each.shown()


def best_of(
    arms: Sequence[RemoteArm], engine: str, kinds: Sequence[str], num_rows: int, counts: bool
) -> RemoteArm | None:
    """The arm of an engine that was the fastest on the tuning prompts; None where it has none of these kinds."""
    some = [
        arm
        for arm in arms
        if arm.worker.launch.name == engine
        and arm.facts["kind"] in kinds
        and arm.num_rows == num_rows
        and arm.facts["counts"] == counts
    ]
    return max(some, key=lambda arm: arm.facts["tuned_tokens_per_second"], default=None)


def verdicts(trial: Trial, arms: Sequence[RemoteArm]) -> list[EngineRatio]:
    """This library by every other engine, arm by arm of a kind; batches by the single row of their engine."""
    peers = [name for name in dict.fromkeys(arm.worker.launch.name for arm in arms) if name != OWN]
    sizes = sorted({arm.num_rows for arm in arms})
    present = {arm.facts["kind"] for arm in arms}
    found = []
    for num_rows, (what, kinds) in product(sizes, COMPARED.items()):
        if kinds[-1] not in present:
            continue
        for peer, (we_count, they_count) in product(peers, ((True, True), (True, False), (False, False))):
            ours = best_of(arms, OWN, kinds, num_rows, we_count)
            theirs = best_of(arms, peer, kinds, num_rows, they_count)
            if ours is not None and theirs is not None:
                title = what if num_rows == 1 else f"{what}, {num_rows} rows"
                counts = we_count and they_count
                found.append(EngineRatio(title, ours.name, theirs.name, counts, compare(trial, ours.name, theirs.name)))
                if kinds == (PLAIN,):
                    comparison = compare(_of_first_tokens(trial), ours.name, theirs.name)
                    found.append(EngineRatio(f"first token, {title}", ours.name, theirs.name, counts, comparison))
    for name, num_rows in product((OWN, *peers), sizes):
        batch, alone = best_of(arms, name, (PLAIN,), num_rows, True), best_of(arms, name, (PLAIN,), 1, True)
        if num_rows > 1 and batch is not None and alone is not None:
            comparison = compare(trial, batch.name, alone.name)
            found.append(EngineRatio(f"{num_rows} rows by one", batch.name, alone.name, True, comparison))
    return found


def _of_first_tokens(trial: Trial) -> Trial:
    """The trial as if the first token were all that was decoded."""
    runs = {
        arm: [
            [replace(run, num_first=len(run.token_ids) - 1, decode_seconds=run.first_seconds) for run in some]
            for some in prompts
        ]
        for arm, prompts in trial.runs.items()
    }
    return replace(trial, runs=runs)


# -- the race ----------------------------------------------------------------------------------------------------------


class Race:
    """Holds the processes; use it as a context manager.

    Args:
      exported: in whose folder the engines' logs lie until the next race.
      launches: of all engines, this library's own first.
      missing: engines that take no part, and why.

    Raises: WorkerError where this library's own worker does not start, ConfigError where no other one does.
    """

    def __init__(
        self,
        exported: Exported,
        dtype: str,
        launches: Sequence[Launch],
        missing: Mapping[str, str],
        options: argparse.Namespace,
    ) -> None:
        self._exported = exported
        self._dtype = dtype
        self._options = options
        self._missing = dict(missing)
        self._counting: list[BenchPrompt] = []
        self._tuning: list[BenchPrompt] = []
        self._skipped: list[str] = []
        self._rounds: list[RaceRound] = []
        self._gaps: dict[tuple[object, ...], float] = {}
        self._stack = ExitStack()
        self.workers: list[Worker] = []
        try:
            self._start(launches, exported.folder / "logs")
        except BaseException:
            self._stack.close()
            raise

    def _start(self, launches: Sequence[Launch], logs: Path) -> None:
        logs.mkdir(exist_ok=True)
        for launch in launches:
            say(f"starting {launch.name}")
            try:
                worker = Worker(launch, self._options.threads, logs / f"{launch.name}.log")
            except WorkerError as error:
                if launch.name == OWN:
                    raise
                self._missing[launch.name] = str(error)
                continue
            self.workers.append(self._stack.enter_context(worker))
        self._check_company()

    def _check_company(self) -> None:
        if len(self.workers) < 2:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._missing.items())
            raise ConfigError(f"no other engine takes part ({reasons}), so there is nothing to compare with")

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    # -- prompts -----------------------------------------------------------------------------------------------

    def answer(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """This library's greedy answer to a prompt, to the end of the text or the budget."""
        length = self._options.max_new_tokens
        return tuple(self.workers[0].ask(verb="answer", prompt=list(ids), max_new_tokens=length)["token_ids"])

    def _choose(self, prompts: Iterator[BenchPrompt]) -> None:
        """The first prompts whose answers are long enough count; the next ones are for tuning.

        Raises: ConfigError when there are too few.
        """
        options = self._options
        wanted = options.num_prompts + options.num_tuning_prompts
        shortest = max(2, round(_WORTH_TIMING * options.max_new_tokens))
        chosen: list[BenchPrompt] = []
        for prompt in prompts:
            if len(chosen) == wanted:
                break
            if options.batch_sizes or len(self.answer(prompt.token_ids)) >= shortest:
                chosen.append(prompt)
            else:
                self._skipped.append(prompt.name)
        if len(chosen) < wanted:
            found_ones = "are there" if options.batch_sizes else f"have answers of {shortest} tokens"
            raise ConfigError(
                f"{options.num_prompts} prompts are to count and {options.num_tuning_prompts} are for choosing "
                f"settings, and {len(chosen)} {found_ones}; ask for fewer with "
                "--num-prompts, or give more with --prompts-file"
            )
        self._counting, self._tuning = chosen[: options.num_prompts], chosen[options.num_prompts :]

    # -- rounds ------------------------------------------------------------------------------------------------

    def run(self, prompts: Iterator[BenchPrompt], on_prompt: Callable[[RaceOutcome], None]) -> RaceOutcome:
        """Choose settings on some prompts and race on others.

        Args:
          prompts: as many as are needed are taken.
          on_prompt: told of what is known so far, after every prompt.

        Raises: ConfigError, WorkerError.
        """
        self._choose(prompts)
        self._enter()
        for size in self._options.batch_sizes or (1,):
            self._rounds.append(self._round(size, on_prompt))
            on_prompt(self.outcome())
        return self.outcome()

    def _enter(self) -> None:
        """An engine that breaks off takes no further part, nor does a way to decode none of whose settings works."""
        tuning = [prompt.token_ids for prompt in self._tuning]
        for worker in list(self.workers):
            say(f"choosing settings: {worker.launch.label}")
            try:
                worker.enter(tuning, self._options.max_new_tokens)
            except WorkerError as error:
                if worker.launch.name == OWN:
                    raise
                self._missing[worker.launch.name] = str(error)
                self.workers.remove(worker)
                continue
            self._missing |= {f"{worker.launch.label} {name}": reason for name, reason in worker.failed.items()}
        self._check_company()

    def _round(self, size: int, on_prompt: Callable[[RaceOutcome], None]) -> RaceRound:
        arms = [arm for worker in self.workers for arm in worker.arms if arm.num_rows in (1, size)]
        for arm in arms:
            arm.cpu_seconds = arm.seconds = 0.0
        items = self._counting if size == 1 else in_groups(self._counting, size)
        title = f"one row, {len(items)} prompts" if size == 1 else f"{size} rows, {len(items)} groups"
        before = [(worker.cpu_seconds(), worker.busy_cpu_seconds, worker.busy_seconds) for worker in self.workers]
        started, options = time.perf_counter(), self._options

        def found_by(trial: Trial, is_complete: bool) -> RaceRound:
            found = check(trial, self._gap, self._reference(size), [arm.name for arm in arms])
            return RaceRound(
                title=title,
                num_rows=size,
                prompts=tuple(prompt.name for prompt in trial.prompts),
                runs_per_prompt=2 * options.repeats,
                other_cpu_share=trial.other_cpu_share,
                idle_shares=self._idle_shares(before, time.perf_counter() - started),
                rows=tuple(ArmRow.of(trial, arm, same) for arm, same in zip(arms, found, strict=True)),
                verdicts=tuple(verdicts(trial, arms)),
                wrong=tuple(arm.name for arm, same in zip(arms, found, strict=True) if self._is_wrong(arm, same)),
                is_complete=is_complete,
            )

        def note(trial: Trial) -> None:
            say(f"{title}: {len(trial.prompts)} done")
            on_prompt(self.outcome(found_by(trial, False)))

        trial = interleave(
            arms, items, Sampling(), options.max_new_tokens, options.repeats, note, self._own_cpu_seconds
        )
        return found_by(trial, True)

    def _own_cpu_seconds(self) -> float:
        """Of the driver and all workers."""
        return time.process_time() + sum(worker.cpu_seconds() for worker in self.workers)

    def _idle_shares(self, before: Sequence[tuple[float, float, float]], wall: float) -> dict[str, float]:
        shares = {}
        for worker, (cpu, busy_cpu, busy) in zip(self.workers, before, strict=True):
            idle_cpu = worker.cpu_seconds() - cpu - (worker.busy_cpu_seconds - busy_cpu)
            idle = wall - (worker.busy_seconds - busy)
            shares[worker.launch.name] = max(0.0, idle_cpu) / idle if idle > 0 else 0.0
        return shares

    # -- texts -------------------------------------------------------------------------------------------------

    def _reference(self, size: int) -> str:
        """This library's plain decoding of as many rows."""
        arms = self.workers[0].arms
        return next(arm.name for arm in arms if arm.facts["kind"] == PLAIN and arm.num_rows == size)

    def _gap(self, ids: Sequence[int], output: Sequence[int], one: int, other: int) -> float:
        """By how much this library's target prefers one token to another, in logits; asked for once."""
        key = tuple(ids), tuple(output), one, other
        if key not in self._gaps:
            request = {"prompt": list(ids), "output": list(output), "one": one, "other": other}
            self._gaps[key] = self.workers[0].ask(verb="gap", **request)["gap"]
        return self._gaps[key]

    def _is_wrong(self, arm: RemoteArm, found: Equality) -> bool:
        """Own arms always say the same again; in float32 they and transformers say what plain decoding says, but those
        with other weights."""
        engine = arm.worker.launch.name
        if engine == OWN and not found.is_repeatable:
            return True
        if self._dtype != "float32" or engine not in (OWN, "transformers"):
            return False
        if engine == OWN and arm.facts["numerics"] != self.workers[0].arms[0].facts["numerics"]:
            return False  # it has other weights
        return not (found.is_repeatable and found.passes(MAX_FLOAT32_GAP))

    def outcome(self, unfinished: RaceRound | None = None) -> RaceOutcome:
        """What is known so far."""
        return RaceOutcome(
            models=self._exported.models,
            dtype=self._dtype,
            engines={worker.launch.name: worker.engine for worker in self.workers},
            plain_peak_bytes={worker.launch.name: worker.plain_peak_bytes for worker in self.workers},
            load_seconds={worker.launch.name: worker.load_seconds for worker in self.workers},
            missing=dict(self._missing),
            prompts=tuple(prompt.name for prompt in self._counting),
            tuning_prompts=tuple(prompt.name for prompt in self._tuning),
            skipped=tuple(self._skipped),
            tried={arm.name: arm.facts["tried"] for worker in self.workers for arm in worker.arms},
            rounds=(*self._rounds, *([unfinished] if unfinished is not None else [])),
        )


# -- the script --------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*PEERS, ALL)
    made.add_argument("--peers", nargs="+", choices=names, default=[ALL])
    made.add_argument(
        "--make-peers", nargs="+", choices=names, help="create the environments of these engines, and exit"
    )
    made.add_argument("--peers-folder", type=Path, default=default_folder(), help="folder of the environments")
    made.add_argument("--model", default="zoo:smollm2")
    made.add_argument("--draft-model")
    made.add_argument("--scale", default="none", help="make the target wider: none, 100m or HIDDENxFFN")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--execution", default="auto")
    made.add_argument("--exactness", default="default")
    made.add_argument("--activations", choices=["int8"], help="activations of Foredraft, as in foredraft bench")
    made.add_argument("--methods", help="methods of Foredraft, as in foredraft bench")
    made.add_argument("--num-speculative-tokens", "-k", type=int)
    made.add_argument(
        "--quantised", action="store_true", help="also measure int8 and 4-bit weights, outside of the ranking"
    )
    made.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[], help="batch sizes to measure instead of single rows"
    )
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--prompts-file", type=Path)
    made.add_argument("--kinds", nargs="+", help="kinds of prompts; again is a question that is asked again")
    made.add_argument("--context", type=int, help="pad all prompts at the front to this many tokens")
    made.add_argument(
        "--num-prompts", type=int, default=24, help="measured prompts; with --batch-sizes in all groups together"
    )
    made.add_argument("--num-tuning-prompts", type=int, default=4, help="further prompts, for choosing settings")
    made.add_argument("--max-new-tokens", type=int, default=48)
    made.add_argument("--repeats", type=int, default=1, help="rounds of A B B A")
    made.add_argument("--assisted-lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8], help="lengths to try")
    made.add_argument("--lookup-lengths", type=int, nargs="+", default=[2, 3, 5, 8, 10, 15], help="lengths to try")
    made.add_argument("--out", type=Path)
    return made


def race(options: argparse.Namespace) -> int:
    """Race, show and keep; the exit code.

    Raises: ForedraftError.
    """
    peers = peers_of(options.peers)
    if not any(is_made(peer, options.peers_folder) for peer in peers):
        commands = ", ".join(command_that_makes(peer, options.peers_folder) for peer in peers)
        raise ConfigError(f"there is nothing to compare with: no engine of --peers is installed; run {commands}")
    exported = export(options.model, options.draft_model, options.scale)
    dtype = exported.dtype if options.dtype == "auto" else options.dtype
    if dtype not in OPENVINO:
        raise ConfigError(f"--dtype is {dtype!r}; other engines run in {', '.join(OPENVINO)}")
    conditions = {"provenance": {**provenance(), "num_threads": options.threads}, "settings": vars(options)}
    latest: list[RaceOutcome] = []

    def keep(outcome: RaceOutcome) -> None:
        latest[:] = [outcome]
        if options.out is not None:
            settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
            keep_json(options.out, plain_data({**conditions, "settings": settings, "race": outcome}))

    code = 0
    engines, missing = launches(exported, dtype, options, peers)
    for name, reason in missing.items():
        say(f"{name} takes no part: {reason}")
    try:
        with Race(exported, dtype, engines, missing, options) as running:
            running.run(prompts_of(exported.folder / "target", options, running.answer), keep)
    except KeyboardInterrupt:
        code = 130
    if latest:
        facts = conditions["provenance"]
        print(f"{exported.models}, {dtype}, {facts['cpu']}, {options.threads} threads, commit {facts['commit']}")
        show(Console(highlight=False), latest[0].shown())
        code = code or (3 if latest[0].wrong else 0)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.make_peers is not None:
            for peer in peers_of(options.make_peers):
                make(peer, options.peers_folder)
            return 0
        return race(options)
    except ForedraftError as error:
        say(f"{type(error).__name__}: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
