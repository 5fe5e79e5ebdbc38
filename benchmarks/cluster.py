"""Test a cluster of `foredraft serve --replicas` under load and with failures, and compare what clients receive.

    python benchmarks/cluster.py kill --model zoo:tiny --rounds 20
    python benchmarks/cluster.py overhead --model zoo:smollm2
    python benchmarks/cluster.py update --model zoo:tiny --other zoo:smollm2
    python benchmarks/cluster.py nodes --model zoo:tiny --rounds 5
    python benchmarks/cluster.py overload --model zoo:tiny
    python benchmarks/cluster.py absent --model zoo:tiny
    python benchmarks/cluster.py scale --model zoo:tiny --streams 40 --seconds 60
    python benchmarks/cluster.py job --model zoo:tiny --prompts 1000
    python benchmarks/cluster.py chats --model zoo:smollm2 --method none --prompts 24 --streams 6 --max-tokens 24
    python benchmarks/cluster.py router

Every output is compared with that of `foredraft.LLM` for the same request in this process.

kill: kill replicas while they answer.
nodes, absent: kill one raylet (nodes) or all raylets (absent) of a cluster of three nodes and a head.
overload: one client requests far more than the cluster can compute, while another one sends single requests.
job: kill two workers of `foredraft generate --out --replicas`.
chats: count the prompt tokens that replicas had read before.
update: run `foredraft.serve.ray.build` behind Ray's own proxy. While clients send requests without a break, another
drafter is deployed, replicas are added and removed, or another model is deployed. No client may receive an error.
scale: deploy the shipped configuration and let the load rise and fall.
router: simulate up to 1,000 replicas around the real router. Chats arrive at random, and each turn repeats the
conversation before it. The rate is `LOAD` times the rate at which replicas would be busy without cached prefixes.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import lzma
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from serve import Address, Answered, Turn, load, prompts_of

from foredraft.config.sampling import SamplingParams
from foredraft.llm import LLM
from foredraft.serve.ray.affinity import Affinity

START_SECONDS = 240.0
MOST_STOPPED = 0.5
"""Seconds that clients may have been stopped by the system in a round whose pauses count."""
PROMPTS = (
    "The quick brown fox",
    "Once upon a time there was a girl who",
    "List three colours and what they are used for:",
    "In the year 1900 the city of",
    "def fibonacci(n):",
    "The capital of France is a city that",
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 1.0, "stop": ["zq", " of the", "ing"], "min_tokens": 40},
    {"temperature": 1.0, "structured_outputs": {"regex": "([a-z]{2,9} ){30,60}[a-z]+"}},
    {"temperature": 0.9, "n": 3, "logprobs": 2},
    {"temperature": 0.0, "structured_outputs": {"json": {
        "type": "object",
        "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 4, "maxItems": 9}},
        "required": ["names"],
        "additionalProperties": False,
    }}},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "logit_bias": {"17": 1.5}},
)  # fmt: skip


def request_of(place: int, max_tokens: int) -> dict[str, Any]:
    """One of a varied series: greedy, sampled, with penalties, stop strings, grammars, several samples."""
    kind = KINDS[place % len(KINDS)]
    ignores = {} if "stop" in kind or "structured_outputs" in kind else {"ignore_eos": True}
    prompt = PROMPTS[place % len(PROMPTS)]
    return {"prompt": prompt, "max_tokens": max_tokens, "seed": 1000 + place, **kind, **ignores}


def references(llm: LLM, bodies: Sequence[dict[str, Any]]) -> list[list[tuple[Any, ...]]]:
    """Ids, text and end of every sample."""
    prompts = [body["prompt"] for body in bodies]
    params = [SamplingParams.from_dict({k: v for k, v in body.items() if k != "prompt"}) for body in bodies]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [(list(text.token_ids), text.text, text.finish_reason, text.stop_reason) for text in output.outputs]
        for output in outputs
    ]


@dataclass
class Heard:
    """What a client has heard of one stream."""

    texts: dict[int, list[Any]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    """Of events that brought tokens."""
    error: str = ""
    is_done: bool = False
    failovers: int = 0
    status: int = 0
    retry_after: str = ""

    @property
    def samples(self) -> list[tuple[Any, ...]]:
        return [tuple(self.texts[index]) for index in sorted(self.texts)]

    @property
    def longest_pause(self) -> float:
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)

    @property
    def num_tokens(self) -> int:
        return sum(len(text[0]) for text in self.texts.values())

    def hear(self, chunk: dict[str, Any]) -> None:
        now = time.perf_counter()
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
        self.failovers += chunk.get("failover", {}).get("count", 0)
        for choice in chunk.get("choices", ()):
            text = self.texts.setdefault(choice["index"], [[], "", None, None])
            text[0] += choice.get("token_ids", [])
            text[1] += choice["text"]
            text[2] = choice["finish_reason"] or text[2]
            text[3] = choice["stop_reason"] if choice["stop_reason"] is not None else text[3]
            if choice.get("logprobs"):
                self.logprobs.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
        self.times.append(now)
        if any(choice.get("token_ids") for choice in chunk.get("choices", ())):
            self.token_times.append(now)


def stream(
    address: str, body: Mapping[str, Any], timeout: float = 300.0, key: str = "none", heard: Heard | None = None
) -> Heard:
    """One request of a client that counts what it gets.

    Args:
      heard: filled while the stream runs, for others to look at.
    """
    heard = Heard() if heard is None else heard
    headers = {"Authorization": f"Bearer {key}"}
    asked = {**body, "stream": True, "return_token_ids": True}
    try:
        # certificates would take each client 50 ms of a processor: 40 at once are behind the server that they measure
        with httpx.Client(timeout=timeout, headers=headers, verify=False) as client:
            heard.began = time.perf_counter()
            _hear(client, f"{address}/v1/completions", asked, heard)
    except httpx.HTTPError as error:
        heard.error = f"{type(error).__name__}: {error}"
    return heard


def _hear(client: httpx.Client, url: str, asked: dict[str, Any], heard: Heard) -> None:
    with client.stream("POST", url, json=asked) as response:
        heard.status = response.status_code
        if response.status_code != 200:
            response.read()
            heard.retry_after = response.headers.get("retry-after", "")
            heard.error = f"{response.status_code}: {response.text[:300]}"
            return
        heard.times.append(time.perf_counter())
        for line in response.iter_lines():
            if line == "data: [DONE]":
                heard.is_done = True
            elif line.startswith("data: "):
                heard.hear(json.loads(line.removeprefix("data: ")))


@dataclass(frozen=True)
class Cluster:
    """A server with its replicas, in processes that can be killed."""

    address: str
    process: subprocess.Popen[str]

    def replicas(self) -> dict[str, int]:
        """Process ids by name, of those that the page of figures knows."""
        headers = {"Authorization": "Bearer one"}  # where there are keys, this is one
        page = httpx.get(f"{self.address}/metrics", timeout=60, headers=headers).text
        lines = [line for line in page.splitlines() if line.startswith("foredraft:replica_info{")]
        labels = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
        found = {label["replica"]: int(label["pid"]) for label in labels}
        return {name: pid for name, pid in found.items() if is_running(pid)}

    def wait_for(self, num_replicas: int, seconds: float = 480.0) -> dict[str, int]:
        """Replicas, once there are so many."""
        deadline = time.monotonic() + seconds
        while len(found := self.replicas()) < num_replicas:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {num_replicas} replicas after {seconds:g} seconds")
            time.sleep(0.2)
        return found


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def cluster(
    model: str, num_replicas: int | None, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A server that runs; plain `serve` without replicas. It ends with the block, whatever happens."""
    command = [sys.executable, "-m", "foredraft", "serve", model, "--port", "0", *options]
    if num_replicas is not None:
        command += ["--replicas", str(num_replicas)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, process_group=0,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )  # fmt: skip
    said: list[str] = []
    log = open(path, "a") if (path := os.environ.get("CLUSTER_LOG")) else None  # noqa: SIM115
    found = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if log is not None:
                log.write(line)
                log.flush()
            if "serving" in line and "http" in line:
                found.set()
        found.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        found.wait(START_SECONDS)
        address = next((re.findall(r"http://[\d.:]+", line)[0] for line in said if "foredraft: serving" in line), None)
        if address is None:
            raise RuntimeError(f"the server did not start: {''.join(said)[-3000:]}")
        yield Cluster(address, process)
    finally:
        process.send_signal(signal.SIGINT)
        _await_end(process)
        listener.join(10)
        if process.stderr is not None and not listener.is_alive():
            process.stderr.close()


def _await_end(process: subprocess.Popen[str]) -> None:
    """Wait for a process that was asked to end, and end it and its children where it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(45)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


class Pulse:
    """Notices that this process did not run: what clients waited for then says nothing of the server."""

    def __init__(self) -> None:
        self._longest = 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        last = time.perf_counter()
        while True:
            time.sleep(0.05)
            now = time.perf_counter()
            self._longest, last = max(self._longest, now - last), now

    def longest(self) -> float:
        """Seconds without a beat since this was asked last."""
        longest, self._longest = self._longest, 0.0
        return longest


def under_fire(
    running: Cluster, bodies: Sequence[dict[str, Any]], kill: Callable[[], object], delay: float | None
) -> list[Heard]:
    """All streams at once; ``kill`` is called after so many seconds, or else once all of them have brought tokens."""
    heard = [Heard() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [
            pool.submit(stream, running.address, body, heard=one) for body, one in zip(bodies, heard, strict=True)
        ]
        if delay is not None:
            time.sleep(delay)
        else:
            while not all(one.token_times or each.done() for one, each in zip(heard, streams, strict=True)):
                time.sleep(0.01)
        kill()
        return [each.result() for each in streams]


def differences(heard: Sequence[Heard], expected: Sequence[Sequence[tuple[Any, ...]]]) -> list[str]:
    """What clients should not have seen; nothing where all is well."""
    found = []
    for place, (one, wanted) in enumerate(zip(heard, expected, strict=True)):
        if one.error or not one.is_done:
            found.append(f"stream {place}: {one.error or 'no [DONE]'}")
        elif one.samples != list(wanted):
            found.append(f"stream {place}: {one.samples} instead of {list(wanted)}")
        if any(len(one.logprobs[index]) != len(one.texts[index][0]) for index in one.logprobs):
            found.append(f"stream {place}: log-probabilities are missing")
    return found


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def kill(options: argparse.Namespace) -> int:
    """Kill a replica in the middle of streams, again and again."""

    def strike(victim: int) -> None:
        os.kill(victim, signal.SIGSTOP if options.hang else signal.SIGKILL)

    rows = ["--max-num-seqs", str(options.streams), "--method", options.method]
    return _rounds(options, cluster(options.model, options.replicas, *rows), strike)


SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}


def _raylets(num_cpus: Sequence[int]) -> Any:
    """A cluster in this process, with a raylet for each number of processors; the first one is the head."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as Ray spells it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster as Machines

    machines = Machines(initialize_head=True, head_node_args={"num_cpus": num_cpus[0], **SMALL})
    for num in num_cpus[1:]:
        machines.add_node(num_cpus=num, **SMALL)
    return machines


def raylets(options: argparse.Namespace) -> int:
    """A cluster with a raylet for each replica, until standard input ends."""
    machines = _raylets([1] * options.replicas)
    try:
        print(f"raylets at {machines.address}", flush=True)
        sys.stdin.read()
    finally:
        machines.shutdown()
    return 0


@contextmanager
def raylets_running(num: int) -> Iterator[str]:
    """The address of a cluster of so many raylets; it ends with the block, whatever happens."""
    process = subprocess.Popen(
        [sys.executable, __file__, "raylets", "--replicas", str(num)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    said: list[str] = []
    listener = threading.Thread(target=lambda: said.extend(iter(process.stdout.readline, "")), daemon=True)
    listener.start()
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := [line.split()[-1] for line in said if line.startswith("raylets at ")]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the raylets did not start: {''.join(said)[-3000:]}")
            time.sleep(0.05)
        yield found[0]
    finally:
        process.stdin.close()
        _await_end(process)
        listener.join(10)
        if not listener.is_alive():
            process.stdout.close()


def nodes(options: argparse.Namespace) -> int:
    """Kill the raylet of a replica, and so its machine, again and again; another machine comes in its place."""
    machines = _raylets([0, *[1] * (options.replicas + 1)])
    try:

        def strike(victim: int) -> None:
            os.kill(_parent(victim), signal.SIGKILL)

        rows = ["--max-num-seqs", str(options.streams), "--method", options.method]
        running = cluster(options.model, options.replicas, "--ray-address", machines.address, *rows)
        return _rounds(options, running, strike, lambda: machines.add_node(num_cpus=1, wait=False, **SMALL))
    finally:
        machines.shutdown()


def _rounds(
    options: argparse.Namespace,
    started: AbstractContextManager[Cluster],
    strike: Callable[[int], None],
    mend: Callable[[], object] = lambda: None,
) -> int:
    """Strike at a replica under streams, again and again.

    Args:
      strike: given the process of a replica.
      mend: called after each round.
    """
    llm = LLM(options.model, options.method, max_num_seqs=16)
    pulse = Pulse()
    bodies = [request_of(place, options.max_tokens) for place in range(options.streams)]
    expected = references(llm, bodies)
    draw = random.Random(options.seed)
    pauses: list[float] = []
    num_wrong = num_moved = 0
    del llm
    with started as running:
        for turn in range(options.rounds):
            pids = running.wait_for(options.replicas)
            time.sleep(1.0)  # until the router has heard of it
            victim = draw.choice(sorted(pids.values()))
            delay = draw.uniform(0.05, options.within)
            pulse.longest()
            heard = under_fire(running, bodies, lambda: strike(victim), delay)  # noqa: B023
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            mend()
            wrong = differences(heard, expected)
            moved = [one for one in heard if one.failovers]
            stopped = pulse.longest()
            if stopped < MOST_STOPPED:
                pauses += [one.longest_pause for one in moved]
            else:
                print(f"  clients did not run for {stopped:.1f} s, so that pauses do not count", flush=True)
            num_moved += len(moved)
            num_wrong += len(wrong)
            print(f"round {turn}: {victim} after {delay:.2f} s, {len(moved)} streams moved", flush=True)
            for line in wrong:
                print("  ", line[:600], flush=True)
    print(
        f"{options.what} {options.model}: {options.rounds} times under {options.streams} streams, {num_moved} streams "
        f"moved, {num_wrong} wrong; of {len(pauses)} pauses p50 {quantile(pauses, 0.5):.2f} s, "
        f"p95 {quantile(pauses, 0.95):.2f} s, longest {max(pauses, default=0.0):.2f} s"
    )
    return 1 if num_wrong else 0


FLOOD = 36
"""Requests that the large client has open at once; the small one has a single one."""
AFTER_SECONDS = 15.0


@dataclass(frozen=True)
class Asked:
    """One request: of which kind, when it was sent, and what came of it."""

    place: int
    at: float
    took: float
    heard: Heard


def ask_until(
    is_over: threading.Event, address: str, bodies: Sequence[dict[str, Any]], key: str, place: int, into: list[Asked]
) -> None:
    """One request after another, of all kinds in turn."""
    while not is_over.is_set():
        began = time.perf_counter()
        heard = stream(address, bodies[place % len(bodies)], key=key)
        into.append(Asked(place % len(bodies), began, time.perf_counter() - began, heard))
        place += 1
        if heard.status == 429:
            is_over.wait(float(heard.retry_after))


def overload(options: argparse.Namespace) -> int:
    """One client floods, another sends one request after another: alone, beside the flood, and after it.

    While replicas start, requests are asked for too.
    """
    bodies = [request_of(place, options.max_tokens) for place in range(options.streams)]
    expected = references(LLM(options.model, options.method, max_num_seqs=16), bodies)
    (port,) = _free_ports(1)
    limits = ["--max-num-seqs", "2", "--max-queued-requests", "16", "--api-key", "one", "--api-key", "two"]
    limits += ["--method", options.method, "--port", str(port)]
    small: list[Asked] = []
    large: list[Asked] = []
    ends: list[float] = []
    is_over, is_calm = threading.Event(), threading.Event()
    pulse = Pulse()
    with ThreadPoolExecutor(FLOOD + 1) as pool:
        early = pool.submit(_asked_while_loading, f"http://127.0.0.1:{port}", bodies[0])
        with cluster(options.model, options.replicas, *limits) as running:
            running.wait_for(options.replicas)
            refused_early = early.result()
            pulse.longest()
            single = pool.submit(ask_until, is_calm, running.address, bodies, "two", 0, small)
            time.sleep(options.seconds / 2)
            ends.append(time.perf_counter())
            flood = [
                pool.submit(ask_until, is_over, running.address, bodies, "one", place, large) for place in range(FLOOD)
            ]
            time.sleep(options.seconds)
            is_over.set()
            ends.append(time.perf_counter())
            for client in flood:
                client.result()
            ends.append(time.perf_counter())
            time.sleep(AFTER_SECONDS)
            is_calm.set()
            single.result()
    wrong = [one for one in refused_early if one != (503, "1", "loading", "service_unavailable_error")]
    phases = {
        "alone": [one for one in small if one.at + one.took < ends[0]],
        "beside": [one for one in small if ends[0] <= one.at < ends[1]],
        "after": [one for one in small if one.at >= ends[1]],
    }
    print(f"while loading: {len(refused_early)} refusals with 503; {len(wrong)} of them wrong")
    for name, asked in {"one, flooding": large, **{f"two, {name}": each for name, each in phases.items()}}.items():
        served = [one for one in asked if one.heard.status == 200]
        refused = [one.heard for one in asked if one.heard.status != 200]
        wrong += differences([one.heard for one in served], [expected[one.place] for one in served])
        wrong += [
            one.error for one in refused if (one.status, one.retry_after) != (429, "1") or "queue_full" not in one.error
        ]
        took = [one.took for one in served]
        print(
            f"client {name}: {len(served)} answers, {len(refused)} refusals with 429; answers took p50 "
            f"{quantile(took, 0.5):.2f} s, p95 {quantile(took, 0.95):.2f} s", flush=True,
        )  # fmt: skip
    tokens = {
        name: sum(one.heard.num_tokens for one in asked if ends[0] <= one.at + one.took < ends[1])
        for name, asked in (("one", large), ("two", small))
    }
    share = tokens["two"] / max(1, sum(tokens.values()))
    usual = quantile([one.took for one in phases["alone"]], 0.95)
    calm = next((one.at + one.took for one in phases["after"] if one.took <= usual), float("nan"))
    print(
        f"{options.model}: while client one had {FLOOD} requests open and client two a single one, two got "
        f"{tokens['two']} of {sum(tokens.values())} tokens ({share:.2f}; in order of arrival at most "
        f"{1 / (FLOOD + 1):.2f}); the last request of the flood ended {ends[2] - ends[1]:.2f} s after the flood, and "
        f"an answer that took client two no longer than the p95 of before ({usual:.2f} s) {calm - ends[1]:.2f} s after "
        f"it; {len(wrong)} wrong; this process was stopped for {pulse.longest():.2f} s at most"
    )
    for line in wrong[:10]:
        print("  ", str(line)[:600])
    return 1 if wrong else 0


def _asked_while_loading(address: str, body: Mapping[str, Any]) -> list[tuple[int, str, str, str]]:
    """Status, Retry-After, code and type of every refusal until the first answer."""
    found = []
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(verify=False, timeout=300, headers={"Authorization": "Bearer two"}) as client:
        while time.monotonic() < deadline:
            time.sleep(0.2)
            try:
                answer = client.post(f"{address}/v1/completions", json=dict(body))
            except httpx.TransportError:
                continue  # nobody listens yet
            if answer.status_code == 200:
                return found
            error = answer.json()["error"]
            found.append((answer.status_code, answer.headers.get("retry-after", ""), error["code"], error["type"]))
    raise TimeoutError(f"no answer within {START_SECONDS:g} seconds")


def absent(options: argparse.Namespace) -> int:
    """Kill all machines of the replicas under streams, ask on, and give the cluster a new machine."""
    bodies = [request_of(place, options.max_tokens) for place in range(options.streams)]
    expected = references(LLM(options.model, options.method, max_num_seqs=16), bodies)
    machines = _raylets([0, *[1] * options.replicas])
    try:
        rows = ["--max-num-seqs", str(options.streams), "--method", options.method]
        with cluster(options.model, options.replicas, "--ray-address", machines.address, *rows) as running:
            victims = running.wait_for(options.replicas)

            def strike() -> None:
                for victim in victims.values():
                    os.kill(_parent(victim), signal.SIGKILL)
                    os.kill(victim, signal.SIGKILL)

            began = time.perf_counter()
            heard = under_fire(running, bodies, strike, None)
            ended = [one for one in heard if "no_replicas" in one.error or "replicas_lost" in one.error]
            done = [(one, wanted) for one, wanted in zip(heard, expected, strict=True) if one not in ended]
            wrong = differences([one for one, _ in done], [wanted for _, wanted in done])
            print(
                f"all machines killed under {len(bodies)} streams: {len(done)} were complete, {len(ended)} ended with "
                f"an error event within {time.perf_counter() - began:.1f} s: {sorted({one.error for one in ended})}",
                flush=True,
            )
            began = time.perf_counter()
            refused = stream(running.address, bodies[0])
            took = time.perf_counter() - began
            print(
                f"then a request: {refused.error}, Retry-After {refused.retry_after!r}, after {took:.1f} s", flush=True
            )
            if (refused.status, refused.retry_after) != (503, "1") or "no_replicas" not in refused.error:
                wrong.append(refused.error)
            machines.add_node(num_cpus=1, **SMALL)
            began = time.perf_counter()
            while (last := stream(running.address, bodies[0])).status == 503:
                time.sleep(float(last.retry_after))
            print(
                f"{options.model}: an answer {time.perf_counter() - began:.1f} s after a machine was added", flush=True
            )
            wrong += differences([last], [expected[0]])
    finally:
        machines.shutdown()
    print(f"{len(wrong)} wrong")
    for line in wrong[:10]:
        print("  ", line[:600])
    return 1 if wrong else 0


def job(options: argparse.Namespace) -> int:
    """Many prompts into a file, on this machine and by two workers, of which one is killed, twice."""
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        lines = [f"{draw.choice(PROMPTS)} {place} {draw.choice(PROMPTS)}" for place in range(options.prompts)]
        prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines), encoding="utf-8")
        command = [
            sys.executable, "-m", "foredraft", "generate", "--model", options.model, "--raw",
            "--method", options.method, "--max-new-tokens", str(options.max_tokens), "--temperature", "1",
            "--seed", "5", "--prompts-file", str(prompts),
        ]  # fmt: skip
        whole, parts = Path(folder, "whole.jsonl"), Path(folder, "parts.jsonl")
        subprocess.run([*command, "--out", str(whole)], check=True, stderr=subprocess.DEVNULL)
        process = subprocess.Popen(
            [*command, "--out", str(parts), "--replicas", "2"], stderr=subprocess.DEVNULL, start_new_session=True
        )
        killed = []
        for share in (0.2, 0.6):
            while process.poll() is None and _num_lines(parts) < share * options.prompts:
                time.sleep(0.05)
            workers = [pid for pid in _descendants(process.pid) if "ray::Worker" in _command(pid)]
            if workers:
                victim = draw.choice(workers)
                os.kill(victim, signal.SIGKILL)
                killed.append(_num_lines(parts))
        code = process.wait()
        is_equal = whole.read_bytes() == parts.read_bytes()
        print(
            f"{options.model}: {_num_lines(parts)} of {options.prompts} results, workers killed after {killed}; exit "
            f"status {code}, {'equal line for line' if is_equal else 'NOT equal'}"
        )
    return 0 if is_equal and len(killed) == 2 and code == 0 else 1


WAYS = ("beginnings", "fewest requests")


@dataclass
class Talk:
    """A chat: what its user says turn after turn, and what was said so far by each way's model."""

    says: list[str]
    said: dict[str, list[dict[str, str]]] = field(default_factory=lambda: {way: [] for way in WAYS})


def _talks(path: str, count: int, turns: int) -> list[Talk]:
    """The first dialogues in which one side speaks so often."""
    found = []
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            says = [each.removeprefix("A: ") for each in json.loads(line)["text"].split("\n") if each.startswith("A: ")]
            if len(says) >= turns:
                found.append(Talk(says[:turns]))
            if len(found) == count:
                return found
    raise SystemExit(f"{path} has {len(found)} dialogues of {turns} turns; ask for fewer with --prompts")


def chats(options: argparse.Namespace) -> int:
    """Chats of the shared data, turn after turn, by two ways of routing in turn: what replicas need not read again.

    Users say what they say in the data; answers are the model's own, so that all ways see the same chats. Each way has
    replicas of its own, which keep the beginnings of as many texts as there would be for each if chats were shared out
    evenly, and half as many more.
    """
    import ray
    from ray import serve

    from foredraft.serve.ray import deployment
    from foredraft.serve.ray.launch import start_ray

    talks = _talks(options.data, options.prompts, options.turns)
    llm = {
        "max_num_seqs": options.streams,
        "prefill_chunk_size": 64,
        "num_cached_prefixes": 3 * len(talks) // (2 * options.replicas),
    }
    start_ray(None, options.replicas * len(WAYS))
    (port,) = _free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    firsts: dict[str, list[float]] = {way: [] for way in WAYS}
    read, cached = Counter[str](), Counter[str]()
    pulse, draw = Pulse(), random.Random(options.seed)
    try:
        for place, way in enumerate(WAYS):
            config = {
                "model": options.model, "served_model_name": [way], "speculative_config": options.method, "llm": llm,
                "num_replicas": options.replicas, "routing": {"max_blocks": 0} if way == "fewest requests" else {},
            }  # fmt: skip
            serve.run(deployment.build(config), name=f"way{place}", route_prefix=f"/{place}")

        def ask(way: str, talk: Talk) -> float:
            talk.said[way].append({"role": "user", "content": talk.says[len(talk.said[way]) // 2]})
            asked = {"messages": talk.said[way], "max_tokens": options.max_tokens, "temperature": 0.0, "stream": True}
            asked["stream_options"] = {"include_usage": True}
            url = f"http://127.0.0.1:{port}/{WAYS.index(way)}/v1/chat/completions"
            first, text, usage = 0.0, "", {}
            with httpx.Client(verify=False, timeout=300) as client:
                began = time.perf_counter()
                with client.stream("POST", url, json=asked) as response:
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            chunk = json.loads(line.removeprefix("data: "))
                            said = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
                            if said:
                                first, text = first or time.perf_counter() - began, text + said
                            usage = chunk.get("usage") or usage
            talk.said[way].append({"role": "assistant", "content": text})
            read[way] += usage["prompt_tokens"]
            cached[way] += usage["prompt_tokens_details"]["cached_tokens"]
            return first

        for turn in range(options.turns):
            order = draw.sample(talks, len(talks))
            pulse.longest()
            came = {}
            for place in range(len(WAYS)):
                way = WAYS[(place + turn) % len(WAYS)]
                with ThreadPoolExecutor(options.streams) as pool:
                    came[way] = list(pool.map(ask, [way] * len(order), order))
            if (stopped := pulse.longest()) < MOST_STOPPED:
                for way, each in came.items():
                    firsts[way] += each
            else:
                print(f"turn {turn}: times left out, stopped for {stopped:.1f} s", flush=True)
        time.sleep(2.0)  # until replicas have told their figures
        page = httpx.get(f"http://127.0.0.1:{port}/0/metrics", timeout=60).text
        for way in WAYS:
            told = rf'^foredraft:request_queue_time_seconds_count\{{.*model_name="{way}".*\}} (\S+)$'
            counts = [float(each) for each in re.findall(told, page, re.M)]
            ratios = [one / other for one, other in zip(firsts[way], firsts[WAYS[-1]], strict=True)]
            print(
                f"{way}: {cached[way] / read[way]:.2f} of {read[way]} prompt tokens kept; first token p50 "
                f"{1e3 * quantile(firsts[way], 0.5):.0f} ms, p95 {1e3 * quantile(firsts[way], 0.95):.0f} ms, mean "
                f"{1e3 * statistics.mean(firsts[way]):.0f} ms, median by that of fewest requests "
                f"{statistics.median(ratios):.2f}; requests by replica {counts}, most by mean "
                f"{max(counts) / statistics.mean(counts):.2f}", flush=True,
            )  # fmt: skip
    finally:
        serve.shutdown()
        ray.shutdown()
    num_wrong = sum(talk.said[way] != talk.said[WAYS[-1]] for talk in talks for way in WAYS)
    print(f"{options.model}: {len(talks)} chats of {options.turns} turns, {num_wrong} whose texts hang on the routing")
    return 1 if num_wrong else 0


BLOCK, KEPT, ROWS, LOAD = 64, 8, 16, 0.6
"""Of a simulated replica: tokens of a block, texts whose beginnings it keeps, requests at once, and how busy it is."""
PROMPT_SECONDS, TOKEN_SECONDS = 1.5e-3, 25e-3
"""For a token of a prompt that is not kept, and for one of an answer: measured on `foredraft serve`."""
FIRST_TURN, ANSWER, NUM_REQUESTS = 400, 100, 20_000
"""Tokens, and requests of all chats."""


@dataclass
class Machine:
    """A replica that is simulated: what it keeps, its requests, and how many it has served."""

    kept: OrderedDict[int, int] = field(default_factory=OrderedDict)
    load: int = 0
    served: int = 0

    def read(self, chat: int, length: int) -> int:
        """Tokens of a prompt that are not there yet."""
        known = min(self.kept.pop(chat, 0), length) // BLOCK * BLOCK
        self.kept[chat] = length
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return length - known


def simulated(num: int, way: str, seed: int) -> str:
    """A line of the table, of so many replicas."""
    draw, affinity = random.Random(seed), Affinity(block=BLOCK)
    machines = {str(place): Machine() for place in range(num)}
    rate = LOAD * num * ROWS / (FIRST_TURN * PROMPT_SECONDS + ANSWER * TOKEN_SECONDS)
    chats: list[tuple[int, int]] = []
    ends: list[tuple[float, str]] = []
    now, spent, read, asked, num_open = 0.0, 0.0, 0, 0, max(4 * num, 8)
    excess: list[float] = []
    firsts: list[float] = []
    for number in range(NUM_REQUESTS):
        now += draw.expovariate(rate)
        while ends and ends[0][0] <= now:
            machines[heapq.heappop(ends)[1]].load -= 1
        if len(chats) < num_open or draw.random() < 0.2:
            chats.append((number, int(draw.expovariate(1 / FIRST_TURN)) + BLOCK))
        place = draw.randrange(max(0, len(chats) - num_open), len(chats))
        chat, length = chats[place]
        chats[place] = chat, length + ANSWER + 32
        loads = {name: machine.load for name, machine in machines.items()}
        ids = [(chat * 2654435761 + place) % 49152 for place in range(length)]
        began = time.process_time()
        if way == "prefix":
            name = affinity.choose(ids, "", loads)
        else:
            several = draw.sample(list(loads), min(2 if way == "two choices" else 1, num))
            name = min(several, key=loads.__getitem__)
        spent += time.process_time() - began
        machine = machines[name]
        new = machine.read(chat, length)
        machine.load, machine.served = machine.load + 1, machine.served + 1
        slow = max(1.0, machine.load / ROWS)
        firsts.append(new * PROMPT_SECONDS * slow)
        heapq.heappush(ends, (now + firsts[-1] + ANSWER * TOKEN_SECONDS * slow, name))
        read, asked = read + new, asked + length
        if number > NUM_REQUESTS // 5:
            mean = sum(loads.values()) / num
            excess.append(max(loads.values()) / mean if mean >= 4 else 1.0)
    counts = [machine.served for machine in machines.values()]
    return (
        f"| {num} | {way} | {1 - read / asked:.2f} | {1e3 * quantile(firsts, 0.5):.0f} / "
        f"{1e3 * quantile(firsts, 0.95):.0f} | {max(counts) / statistics.mean(counts):.2f} | "
        f"{statistics.mean(excess):.2f} | {1e6 * spent / NUM_REQUESTS:.0f} |"
    )


def router(options: argparse.Namespace) -> int:
    """What routing by beginnings is worth: a simulation in which only the router is real."""
    print("| replicas | way | share of prompt tokens kept | first token p50 / p95, ms | served, max / mean | "
          "load, max / mean | router, us |\n" + "|---" * 7 + "|")  # fmt: skip
    for num, way in itertools.product((2, 10, 100, 1000), ("prefix", "two choices", "random")):
        print(simulated(num, way, options.seed), flush=True)
    return 0


SHIPPED = Path(__file__).parents[1] / "examples" / "serve" / "cluster.yaml"


@contextmanager
def deployed(changes: Mapping[str, Any], scaling: Mapping[str, Any], num_cpus: int) -> Iterator[Cluster]:
    """The shipped file, with other arguments, by `serve deploy` on a cluster of this machine that ends with the block.

    Args:
      num_cpus: that the cluster is told of, whatever the machine has.
    """
    given = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    arguments = given["applications"][0]["args"]
    arguments |= changes
    arguments["autoscaling"] |= scaling
    ports = _free_ports(3)
    given["http_options"] = {"host": "127.0.0.1", "port": ports[0]}
    folder = Path(sys.executable).parent
    command = [str(folder / "ray"), "start", "--head", "--block", f"--port={ports[1]}", f"--num-cpus={num_cpus}"]
    command += [f"--dashboard-port={ports[2]}", f"--object-store-memory={SMALL['object_store_memory']}"]
    environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # Ray 2.60 asks for one
    silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    process = subprocess.Popen(command, process_group=0, **silent)
    serve = [str(folder / "serve")]
    where = ["--address", f"http://127.0.0.1:{ports[2]}"]
    try:
        with tempfile.TemporaryDirectory() as place:
            file = Path(place, "cluster.yaml")
            file.write_text(yaml.safe_dump(given), encoding="utf-8")
            deadline = time.monotonic() + START_SECONDS
            while subprocess.run([*serve, "deploy", str(file), *where], check=False, **silent).returncode:
                if time.monotonic() > deadline:
                    raise RuntimeError("serve deploy did not succeed")
                time.sleep(1.0)
        while (status := _status([*serve, "status", *where], environment)) != "RUNNING":
            if time.monotonic() > deadline or status == "DEPLOY_FAILED":
                raise RuntimeError(f"the application is {status or 'not known'}")
            time.sleep(1.0)
        yield Cluster(f"http://127.0.0.1:{ports[0]}", process)
    finally:
        subprocess.run([*serve, "shutdown", "-y", *where], check=False, timeout=120, **silent)
        process.terminate()
        _await_end(process)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _status(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Of the one application; empty while there is none."""
    told = subprocess.run(command, check=False, capture_output=True, text=True, env=environment).stdout
    applications = (yaml.safe_load(told) or {}).get("applications", {}) if told else {}
    return next((one["status"] for one in applications.values()), "")


def scale(options: argparse.Namespace) -> int:
    """Deploy the shipped file, ask once, let load come and go, and see replicas come and go with it."""
    bodies = [request_of(place, options.max_tokens) for place in range(8)]
    expected = references(LLM(options.model, "suffix", max_num_seqs=16), bodies)
    changes = {"model": options.model, "num_cpus": 1}
    scaling = {"upscale_delay_s": 3.0, "downscale_delay_s": 10.0}
    asked: list[Asked] = []
    is_over, began = threading.Event(), time.perf_counter()
    with deployed(changes, scaling, 8) as running:
        print(f"deployed after {time.perf_counter() - began:.1f} s", flush=True)
        first = stream(running.address, bodies[0])
        wrong = differences([first], [expected[0]])
        print(f"first answer: {first.num_tokens} tokens, {len(wrong)} wrong", flush=True)
        began = time.perf_counter()
        told = most = 0
        with ThreadPoolExecutor(options.streams) as pool:
            clients = [
                pool.submit(ask_until, is_over, running.address, bodies, "none", place, asked)
                for place in range(options.streams)
            ]
            while (at := time.perf_counter() - began) < options.seconds + 2 * START_SECONDS:
                if at > options.seconds and (most > 2 or at > START_SECONDS):
                    is_over.set()
                if (num := len(running.replicas())) != told:
                    print(f"{at:.0f} s: {num} replicas, {sum(not one.done() for one in clients)} clients", flush=True)
                    told, most = num, max(most, num)
                if is_over.is_set() and num == 2 and all(one.done() for one in clients):
                    break
                time.sleep(1.0)
            is_over.set()
            for client in clients:
                client.result()
        last = stream(running.address, bodies[0])
        wrong += differences([last], [expected[0]])
    wrong += differences([one.heard for one in asked], [expected[one.place] for one in asked])
    moved = sum(one.heard.failovers for one in asked)
    print(
        f"{options.model}: {options.streams} clients for {options.seconds:g} s, {len(asked)} answers, {moved} moved, "
        f"{most} replicas at most and {told} at the end, {len(wrong)} wrong"
    )
    for line in wrong[:10]:
        print("  ", line[:600])
    return 1 if wrong or most <= 2 or told != 2 else 0


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _descendants(pid: int) -> list[int]:
    parents = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                parents[int(place.name)] = _parent(int(place.name))
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


@dataclass(frozen=True)
class Seen:
    """What clients saw of one server in one turn; times are medians, in seconds.

    Args:
      between: seconds from one token to the next.
      rate: tokens per second of all clients.
      cost: processor seconds of the server for each token.
    """

    first: float
    between: float
    rate: float
    cost: float


def measured(
    running: Cluster, model: str, prompts: Sequence[str], clients: int, max_tokens: int, is_streamed: bool = True
) -> tuple[Seen, list[str]]:
    """One turn of so many clients, and the texts that they got."""
    server = Address("", running.address, model, None, {"ignore_eos": True})
    before = _processor_seconds(running.process.pid)
    turn = (
        asyncio.run(load(server, prompts, clients, max_tokens))
        if is_streamed
        else _whole(server, prompts, clients, max_tokens)
    )
    num_tokens = len(prompts) * max_tokens
    seen = Seen(
        statistics.median(one.first for one in turn.answers),
        statistics.median((one.ended - one.first) / (max_tokens - 1) for one in turn.answers),
        num_tokens / turn.seconds,
        (_processor_seconds(running.process.pid) - before) / num_tokens,
    )
    return seen, [one.text for one in turn.answers]


def _whole(server: Address, prompts: Sequence[str], clients: int, max_tokens: int) -> Turn:
    """The same, of answers that come in one piece."""

    def ask(prompt: str) -> Answered:
        given = {"model": server.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        began = time.perf_counter()
        answer = client.post(
            f"{server.url}/v1/chat/completions", json={**given, "max_tokens": max_tokens, **server.options}
        )
        took = time.perf_counter() - began
        return Answered(answer.json()["choices"][0]["message"]["content"], took, took, 1)

    began = time.perf_counter()
    with (
        httpx.Client(timeout=300, limits=httpx.Limits(max_connections=clients)) as client,
        ThreadPoolExecutor(clients) as pool,
    ):
        return Turn(list(pool.map(ask, prompts)), time.perf_counter() - began)


def _processor_seconds(pid: int) -> float:
    """Of a process and all below it that run."""
    total = 0.0
    for each in [pid, *_descendants(pid)]:
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


OVERHEAD = ((1, 4, True), (8, 16, True), (32, 64, False))
"""Clients at once, requests of a turn, and whether answers are streamed."""


def overhead(options: argparse.Namespace) -> int:
    """Plain `serve`, a cluster of one and one of two, each engine of one thread, in turn with the same prompts.

    Turns in which this process was stopped are left out for all servers.
    """
    seen: dict[tuple[int, str], list[Seen]] = {}
    num_wrong = 0
    pulse = Pulse()
    questions = prompts_of(100)
    prompts = (f"Question {number}: {question}" for number in itertools.count() for question in questions)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(cluster(options.model, num, "--method", options.method))
            for name, num in (("serve", None), ("cluster of 1", 1), ("cluster of 2", 2))
        }
        for num, running in enumerate(servers.values()):
            if num:
                running.wait_for(num)
            measured(running, options.model, list(itertools.islice(prompts, 8)), 8, 16)
        for turn in range(options.rounds):
            names = [*servers][turn % 3 :] + [*servers][: turn % 3]
            for clients, num, is_streamed in OVERHEAD:
                asked = list(itertools.islice(prompts, num))
                pulse.longest()
                found = {
                    name: measured(servers[name], options.model, asked, clients, options.max_tokens, is_streamed)
                    for name in names
                }
                num_wrong += sum(texts != found["serve"][1] for _, texts in found.values())
                if (stopped := pulse.longest()) >= MOST_STOPPED:
                    print(f"turn {turn}, {clients} clients: left out, stopped for {stopped:.1f} s", flush=True)
                    continue
                for name, (one, _) in found.items():
                    seen.setdefault((clients, name), []).append(one)
    for clients, _, is_streamed in OVERHEAD:
        plain, single = seen[clients, "serve"], seen[clients, "cluster of 1"]
        for name in servers:
            turns = seen[clients, name]
            said = [
                f"{label} {_spread([scale * getattr(one, what) for one in turns], digits)}, by serve "
                f"{_ratio(turns, plain, what)}"
                for what, label, scale, digits in (
                    *((("first", "first token ms", 1e3, 1), ("between", "between ms", 1e3, 2)) if is_streamed else ()),
                    ("rate", "tokens/s", 1, 0),
                    ("cost", "processor ms a token", 1e3, 2),
                )
            ]
            print(f"{clients} clients, {name}, {len(turns)} turns: {'; '.join(said)}")
        print(f"{clients} clients: tokens/s of 2 replicas by 1 {_ratio(seen[clients, 'cluster of 2'], single, 'rate')}")
    print(f"{num_wrong} turns of a cluster with another text than plain serve")
    return 1 if num_wrong else 0


def _ratio(ours: Sequence[Seen], theirs: Sequence[Seen], what: str) -> str:
    return _spread([getattr(a, what) / getattr(b, what) for a, b in zip(ours, theirs, strict=True)], 2)


def _spread(values: Sequence[float], digits: int) -> str:
    """The median, with the least and the most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def update(options: argparse.Namespace) -> int:
    """Deploy anew under streams: another drafter, one replica more, one replica."""
    import ray
    from ray import serve

    from foredraft.serve.ray import build
    from foredraft.serve.ray.launch import start_ray

    bodies = [request_of(place, options.max_tokens) for place in range(options.streams)]
    models = [options.model, *([options.other] if options.other else [])]
    expected = [references(LLM(model, max_num_seqs=16), bodies) for model in models]
    config = {"model": options.model, "num_cpus": 1, "num_replicas": options.replicas, "drain_seconds": 60.0}
    config["served_model_name"] = ["served"]
    start_ray(None, options.replicas + 2)
    (port,) = _free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    is_over = threading.Event()
    wrong: list[str] = []
    counts: list[int] = []
    by_model = [0] * len(models)

    def ask(place: int) -> None:
        while not is_over.is_set():
            heard = stream(f"http://127.0.0.1:{port}", bodies[place])
            found = [differences([heard], [each[place]]) for each in expected]
            if [] in found:
                by_model[found.index([])] += 1
            else:
                wrong.extend(found[0])
            counts.append(heard.failovers)

    changes = [
        ("deployed", {}),
        ("another drafter", {"speculative_config": "suffix"}),
        ("one replica more", {"num_replicas": options.replicas + 1}),
        ("one replica", {"num_replicas": 1}),
    ]
    if options.other:
        changes[2:] = [("another model", {"model": options.other})]
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            for label, change in changes:
                config |= change
                serve.run(build(config), name="foredraft", route_prefix="/")
                if label == "deployed":
                    clients = [pool.submit(ask, place) for place in range(len(bodies))]
                time.sleep(10.0)
                print(
                    f"{label}: {len(counts)} answers so far, {sum(counts)} moved, {len(wrong)} wrong, "
                    f"by model {by_model}",
                    flush=True,
                )
            is_over.set()
            for client in clients:
                client.result()
    finally:
        is_over.set()
        serve.shutdown()
        ray.shutdown()
    print(f"{options.model}: {len(counts)} answers, by model {by_model}, {sum(counts)} moved, {len(wrong)} wrong")
    for line in wrong[:10]:
        print("  ", line[:600])
    return 1 if wrong else 0


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--within", type=float, default=1.5, help="Latest time of the kill, in seconds.")
    parser.add_argument("--hang", action="store_true", help="Stop the process instead of killing it.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--other", help="update: model that replaces the first one.")
    parser.add_argument("--prompts", type=int, default=1000, help="Number of prompts of job, or of chats.")
    parser.add_argument("--turns", type=int, default=8, help="chats: turns of each chat.")
    parser.add_argument(
        "--data", default="../shared/data/corpora/dialogue_selfdialogue.jsonl.xz", help="chats: dialogues."
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="Duration of overload and scale.")
    options = parser.parse_args(given)
    return WHAT[options.what](options)


WHAT = {
    "kill": kill,
    "nodes": nodes,
    "scale": scale,
    "overload": overload,
    "absent": absent,
    "job": job,
    "chats": chats,
    "router": router,
    "overhead": overhead,
    "update": update,
    "raylets": raylets,
}


if __name__ == "__main__":
    sys.exit(main())
