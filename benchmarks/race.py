"""Engines beside each other on the same weights, prompts and machine, in turns: run with this library's python.

    python benchmarks/build_peers.py             # once: environments for the other engines, in runs/envs
    python benchmarks/race.py zoo:smollm2 --dtype bfloat16 --out race.json [--limit 10] [--max-new-tokens 48]
        [--repeats 1] [--threads 2]
    python benchmarks/race.py zoo:tiny --out dense.json --dense     # plain arms, with and without zeros in the weights

The model (zoo:NAME, a directory, a hub id; Llama architecture) is exported to runs/race first, unless it is a folder
that benchmarks/export_pair.py wrote.

Every engine runs in a process of its own with an environment of its own. All models are loaded once; then one process
computes at a time, while the others sleep: every prompt runs through all arms forwards and backwards (A B C C B A).
Greedy, 2 threads, in --dtype unless the name of an arm says otherwise, to the end of the text or to the budget. Times
are of decoding alone: what follows the first emission. transformers' settings are tuned on the prompts first.

In float32 own arms must say what transformers says; otherwise no speed is shown and the exit code is 3. In bfloat16
engines round differently, so shares of equal texts and the logit gaps where they part are shown. Results so far are
written after every prompt.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from export_pair import export
from peers.client import Launch, RemoteArm, Worker

from foretoken.bench.arms import Sampling
from foretoken.bench.equality import MAX_FLOAT32_GAP, first_difference
from foretoken.bench.measure import Trial, compare, interleave
from foretoken.bench.report import plain_data
from foretoken.bench.workload import Prompt, repeated_share

TRANSFORMERS, OWN = "transformers plain", "ours plain"
GREEDY = Sampling()
EXIT_DIFFERS = 3
ENGINES = ("foretoken", "openvino", "llamacpp", "llamacpp-f16")
ROOT = Path(__file__).resolve().parents[1]
ENVS = ROOT / "runs" / "envs"
EXPORTS = ROOT / "runs" / "race"
OPENVINO = {"float32": ("fp32", "f32"), "bfloat16": ("fp16", "bf16"), "float16": ("fp16", "f16")}
"""Weights as stored and arithmetic; OpenVINO stores no bfloat16, and float16 holds what matters of it."""
GGUF = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def launches(options: argparse.Namespace, folder: Path, suffix: str = "") -> list[Launch]:
    """How the engines start on one folder of checkpoints."""
    common = (str(folder), *(("--plain-only",) if options.dense else ()))
    tuning = [f"--max-new-tokens={options.max_new_tokens}", f"--dtype={options.dtype}"]
    weights, precision = OPENVINO[options.dtype]
    kind = GGUF[options.dtype]
    for name in ("assisted_lengths", "lookup_lengths"):
        if getattr(options, name):
            tuning += [f"--{name.replace('_', '-')}", *map(str, getattr(options, name))]
    python = {name: options.envs / name / "bin" / "python" for name in ("openvino", "llamacpp")}
    every = {
        "foretoken": Launch("", Path(sys.executable), "foretoken_worker.py", (*common, *tuning), suffix),
        "openvino": Launch(
            "OpenVINO",
            python["openvino"],
            "openvino_worker.py",
            (*common, "--weights", weights, "--precision", precision),
            suffix,
        ),
        "llamacpp": Launch("llama.cpp", python["llamacpp"], "llamacpp_worker.py", (*common, "--type", kind), suffix),
        "llamacpp-f16": Launch(
            "llama.cpp f16", python["llamacpp"], "llamacpp_worker.py", (*common, "--type", "f16"), suffix
        ),
    }
    wanted = options.engines or [name for name in ENGINES if name != f"llamacpp-{kind}"]
    missing = [name for name in wanted if not every[name].python.exists()]
    if missing:
        raise SystemExit(
            f"{every[missing[0]].python} is missing; python benchmarks/build_peers.py --envs {options.envs}"
        )
    return [every[name] for name in wanted]


def exported(options: argparse.Namespace) -> Path:
    """The folder to race on, written first where a model is named."""
    folder = Path(options.model)
    if (folder / "prompts.json").exists():
        return folder
    num_prompts = max(12, options.limit)  # some answers turn out too short to time
    name = re.sub(r"[^\w.-]+", "-", options.model).strip("-")
    folder = EXPORTS / f"{name}-{num_prompts}"
    if not (folder / "prompts.json").exists():
        print(f"exporting {options.model} to {folder}", file=sys.stderr, flush=True)
        export(options.model, folder, num_prompts=num_prompts, max_new_tokens=options.max_new_tokens)
    return folder


def own_cpu_seconds(workers: list[Worker]) -> Callable[[], float]:
    """Of the driver and all workers."""
    return lambda: time.process_time() + sum(worker.cpu_seconds() for worker in workers)


def equality(trial: Trial, arms: list[RemoteArm], reference: RemoteArm) -> dict[str, dict[str, Any]]:
    """Of every arm: prompts with the reference's tokens, and where and how near the others leave them."""
    expected = trial.outputs(reference.name)
    found = {}
    for arm in arms:
        divergences = []
        for prompt, wanted, got in zip(trial.prompts, expected, trial.outputs(arm.name), strict=True):
            place = first_difference(wanted, got)
            if place is None:
                continue
            pair = [tokens[place] if place < len(tokens) else -1 for tokens in (wanted, got)]
            gap = float("inf")
            if -1 not in pair:
                request = {"prompt": prompt.token_ids, "output": wanted[:place], "one": pair[0], "other": pair[1]}
                gap = reference.worker.ask(verb="gap", **request)["gap"]
            divergences.append({"prompt": prompt.name, "position": place, "tokens": pair, "gap": gap})
        repeatable = all(len({run.token_ids for run in runs}) == 1 for runs in trial.runs[arm.name])
        found[arm.name] = {
            "num_identical": len(expected) - len(divergences),
            "largest_gap": max((one["gap"] for one in divergences), default=0.0),
            "repeatable": repeatable,
            "divergences": divergences,
        }
    return found


def rows(trial: Trial, arms: list[RemoteArm], bases: list[str]) -> list[dict[str, Any]]:
    """Speed and ratios of every arm, and all that they were computed from."""
    return [
        {
            "arm": arm.name,
            "numerics": arm.worker.facts["numerics"],
            "tokens_per_second": trial.tokens_per_second(arm.name),
            "comparisons": [plain_data(compare(trial, arm.name, base)) for base in bases if base != arm.name],
            "repeated_share": repeated_share(trial.outputs(arm.name)),
            "num_busy_threads": arm.num_busy_threads,
            "runs": [
                [{"num_decoded": run.num_decoded, "decode_seconds": run.decode_seconds,
                  "first_seconds": run.first_seconds} for run in runs]
                for runs in trial.runs[arm.name]
            ],
        }
        for arm in arms
    ]  # fmt: skip


def table_of(found: dict[str, Any], bases: list[str]) -> str:
    """Markdown."""
    heads = ["arm", "tok/s", *(f"x {base}" for base in bases), "same text", "threads"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in found["rows"]:
        ratios = {one["base"]: f"{one['ratio']:.2f} ({one['low']:.2f}-{one['high']:.2f})" for one in row["comparisons"]
                  if one["ratio"] is not None}  # fmt: skip
        same = found["equality"].get(row["arm"])
        shown = f"{same['num_identical']}/{found['num_prompts']}" if same else ""
        cells = [row["arm"], f"{row['tokens_per_second']:.1f}", *(ratios.get(base, "1") for base in bases), shown]
        cells.append(f"{row['num_busy_threads']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def idle_shares(workers: list[Worker], started: list[tuple[float, float, float]], wall: float) -> dict[str, float]:
    """Share of one processor that each worker used while another one was asked."""
    shares = {}
    for worker, (cpu, busy_cpu, busy) in zip(workers, started, strict=True):
        idle_cpu = worker.cpu_seconds() - cpu - (worker.busy_cpu_seconds - busy_cpu)
        idle = wall - (worker.busy_seconds - busy)
        shares[" ".join([worker.facts["engine"], worker.facts["numerics"], worker.launch.suffix]).strip()] = (
            max(0.0, idle_cpu) / idle if idle > 0 else 0.0
        )
    return shares


class Race:
    """All workers, and what they have shown so far."""

    def __init__(self, workers: list[Worker], options: argparse.Namespace, result: dict[str, Any]) -> None:
        self._workers = workers
        self._options = options
        self._result = result
        wanted = options.arms or ["*"]
        everyone = [arm for worker in workers for arm in worker.arms()]
        self.arms = [arm for arm in everyone if any(fnmatch(arm.name, pattern) for pattern in wanted)]
        self._judged = [arm.name for arm in self.arms if arm.name.startswith("ours") and not arm.worker.launch.suffix]
        self._bases = [name for name in (TRANSFORMERS, OWN) if any(arm.name == name for arm in self.arms)]

    def group(self, name: str, prompts: list[Prompt]) -> bool:
        """Race over one group of prompts; whether own arms said what they must."""
        tuned = self._tune(prompts)
        for arm in self.arms:
            arm.cpu_seconds = arm.seconds = 0.0
        started = time.perf_counter()
        before = [(worker.cpu_seconds(), worker.busy_cpu_seconds, worker.busy_seconds) for worker in self._workers]

        def note(trial: Trial, is_last: bool = False) -> dict[str, Any]:
            found: dict[str, Any] = {
                "num_prompts": len(trial.prompts),
                "runs_per_prompt": 2 * self._options.repeats,
                "other_cpu_share": trial.other_cpu_share,
                "idle_cpu_shares": idle_shares(self._workers, before, time.perf_counter() - started),
                "tuned": tuned,
                "equality": self._equality(trial) if is_last else {},
                "rows": rows(trial, self.arms, self._bases),
            }
            if self._options.dense:
                found["dense_over_zeros"] = self._dense_over_zeros(trial)
            self._result["groups"][name] = found
            self._options.out.write_text(json.dumps(plain_data(self._result), indent=1) + "\n", encoding="utf-8")
            minutes = (time.perf_counter() - started) / 60
            print(f"{name}: {len(trial.prompts)}/{len(prompts)} prompts, {minutes:.1f} min, others used "
                  f"{trial.other_cpu_share:.0%}", file=sys.stderr, flush=True)  # fmt: skip
            return found

        length, repeats = self._options.max_new_tokens, self._options.repeats
        own = own_cpu_seconds(self._workers)
        trial = interleave(self.arms, prompts, GREEDY, length, repeats, note, own)
        return self._show(name, note(trial, is_last=True))

    def _tune(self, prompts: list[Prompt]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for worker in self._workers:
            if worker.launch.script == "foretoken_worker.py" and not self._options.untuned:
                print("tuning transformers", worker.launch.suffix, file=sys.stderr, flush=True)
                chosen = worker.ask(verb="tune", prompts=[prompt.token_ids for prompt in prompts])["tuned"]
                found |= {f"{name} {worker.launch.suffix}".strip(): speeds for name, speeds in chosen.items()}
        return found

    def _equality(self, trial: Trial) -> dict[str, Any]:
        """Against transformers on the same weights."""
        found: dict[str, Any] = {}
        for suffix in dict.fromkeys(arm.worker.launch.suffix for arm in self.arms):
            same = [arm for arm in self.arms if arm.worker.launch.suffix == suffix]
            reference = next((arm for arm in same if arm.name.startswith(TRANSFORMERS)), None)
            if reference is not None:
                found |= equality(trial, same, reference)
        return found

    def _dense_over_zeros(self, trial: Trial) -> dict[str, Any]:
        """Of every engine: speed on weights without zeros by speed on weights with zeros."""
        names = [arm.name for arm in self.arms if arm.worker.launch.suffix]
        return {name: plain_data(compare(trial, name, name.removesuffix(" (dense)"))) for name in names}

    def _show(self, name: str, found: dict[str, Any]) -> bool:
        own = {arm: same for arm, same in found["equality"].items() if arm in self._judged}
        is_judged = self._options.dtype == "float32"
        wrong = [
            arm
            for arm, same in own.items()
            if not same["repeatable"] or (is_judged and same["largest_gap"] >= MAX_FLOAT32_GAP)
        ]
        if wrong:
            print(f"{name}: {', '.join(wrong)} differ from transformers, so no speed is shown; see {self._options.out}")
            return False
        print(f"\n{name}: {found['num_prompts']} prompts, {found['runs_per_prompt']} interleaved runs each\n")
        print(table_of(plain_data(found), self._bases))
        if self._options.dense:
            self._show_dense(found)
        print(
            f"\nothers used {found['other_cpu_share']:.0%} of the processors; transformers: {', '.join(found['tuned'])}"
        )
        for arm, same in found["equality"].items():
            for one in same["divergences"]:
                print(f"{arm} leaves transformers on {one['prompt']} at {one['position']}: gap {one['gap']:.2g}")
        print("share of one processor used while others were asked: "
              + ", ".join(f"{worker} {share:.1%}" for worker, share in found["idle_cpu_shares"].items()))  # fmt: skip
        return True

    def _show_dense(self, found: dict[str, Any]) -> None:
        print("\n| arm | dense / zeros: speed |\n|---|---|")
        for name, ratio in found["dense_over_zeros"].items():
            print(f"| {name} | {ratio['ratio']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f}) |")


def prompts_of(folder: Path, limit: int) -> dict[str, list[Prompt]]:
    """The first exported prompts of every group."""
    records = json.loads((folder / "prompts.json").read_text())
    groups: dict[str, list[Prompt]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append(
            Prompt(record["name"], record["group"], tuple(record["prompt_ids"]))
        )
    return {name: prompts[:limit] for name, prompts in groups.items()}


def memory_of(worker: Worker) -> dict[str, Any]:
    """What a worker held after each arm was loaded (in this order), and its peak at the end."""
    return {"after_loading": worker.facts["memory"], "peak_bytes": worker.peak_bytes}


def show_memory(workers: list[Worker]) -> None:
    print("\n| engine | peak with plain alone, MiB | peak with all arms, MiB | arms |\n|---|---|---|---|")
    for worker in workers:
        memory = worker.facts["memory"]
        plain = next(sizes for name, sizes in memory.items() if name.endswith("plain"))["peak_bytes"]
        label = " ".join([worker.facts["engine"], worker.facts["numerics"], worker.launch.suffix]).strip()
        print(f"| {label} | {plain >> 20} | {worker.peak_bytes >> 20} | {len(memory)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="zoo:NAME, a directory, a hub id, or what benchmarks/export_pair.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=tuple(GGUF), default="float32")
    parser.add_argument("--envs", type=Path, default=ENVS, help="of benchmarks/build_peers.py")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="all by default")
    parser.add_argument("--arms", nargs="+", help="patterns of names, such as '*plain*' 'ours *'; all by default")
    parser.add_argument("--groups", nargs="+", help="of prompts; all by default")
    parser.add_argument("--limit", type=int, default=10, help="prompts per group")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--assisted-lengths", type=int, nargs="+")
    parser.add_argument("--lookup-lengths", type=int, nargs="+")
    parser.add_argument("--untuned", action="store_true", help="first settings of transformers instead of the best")
    parser.add_argument("--dense", action="store_true", help="plain arms alone, with and without zeros in the weights")
    options = parser.parse_args()
    folder = exported(options)
    starts = launches(options, folder)
    if options.dense:
        starts += launches(options, folder / "dense", "(dense)")
    logs = Path(tempfile.mkdtemp(prefix="race-"))
    with ExitStack() as stack:
        workers = []
        for place, launch in enumerate(starts):
            log, started = logs / f"{place}.log", time.perf_counter()
            workers.append(stack.enter_context(Worker(launch, options.threads, log)))
            print(f"{launch.script} {launch.suffix}: {len(workers[-1].facts['arms'])} arms in "
                  f"{time.perf_counter() - started:.0f} s; log {log}", file=sys.stderr, flush=True)  # fmt: skip
        result: dict[str, Any] = {
            "options": {name: str(value) for name, value in vars(options).items()},
            "workers": {f"{place} {worker.facts['engine']}": worker.facts for place, worker in enumerate(workers)},
            "groups": {},
        }
        race = Race(workers, options, result)
        passed = []
        for name, prompts in prompts_of(folder, options.limit).items():
            if not options.groups or name in options.groups:
                passed.append(race.group(name, prompts))
        show_memory(workers)
        result["memory"] = [memory_of(worker) for worker in workers]
        options.out.write_text(json.dumps(plain_data(result), indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(passed) else EXIT_DIFFERS)


if __name__ == "__main__":
    main()
