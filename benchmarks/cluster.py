"""A cluster of `foretoken serve --replicas` under load and under fire: what clients see, beside what they should.

    python benchmarks/cluster.py kill --model zoo:tiny --rounds 20
    python benchmarks/cluster.py overhead --model zoo:smollm2
    python benchmarks/cluster.py update --model zoo:tiny

"update" runs `foretoken.serve.ray.build` behind Ray's own proxy: while clients ask without a break, another drafter is
deployed, replicas come and go, and nobody may see an error. Every text is compared
with the one that `foretoken.LLM` gives for the same request in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from foretoken.config.sampling import SamplingParams
from foretoken.llm import LLM

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
    times: list[float] = field(default_factory=list)
    error: str = ""
    is_done: bool = False
    failovers: int = 0

    @property
    def samples(self) -> list[tuple[Any, ...]]:
        return [tuple(self.texts[index]) for index in sorted(self.texts)]

    @property
    def longest_pause(self) -> float:
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def hear(self, chunk: dict[str, Any]) -> None:
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
        self.times.append(time.perf_counter())


def stream(address: str, body: Mapping[str, Any], timeout: float = 120.0) -> Heard:
    """One request of a client that counts what it gets."""
    heard = Heard()
    asked = {**body, "stream": True, "return_token_ids": True}
    try:
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=timeout) as response:
            if response.status_code != 200:
                response.read()
                heard.error = f"{response.status_code}: {response.text[:300]}"
                return heard
            heard.times.append(time.perf_counter())
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    heard.is_done = True
                elif line.startswith("data: "):
                    heard.hear(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        heard.error = f"{type(error).__name__}: {error}"
    return heard


@dataclass(frozen=True)
class Cluster:
    """A server with its replicas, in processes that can be killed."""

    address: str
    process: subprocess.Popen[str]

    def replicas(self) -> dict[str, int]:
        """Process ids by name, of those that the page of figures knows."""
        page = httpx.get(f"{self.address}/metrics", timeout=10).text
        lines = [line for line in page.splitlines() if line.startswith("foretoken:replica_info{")]
        labels = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
        found = {label["replica"]: int(label["pid"]) for label in labels}
        return {name: pid for name, pid in found.items() if _is_running(pid)}

    def wait_for(self, num_replicas: int, seconds: float = 480.0) -> dict[str, int]:
        """Replicas, once there are so many."""
        deadline = time.monotonic() + seconds
        while len(found := self.replicas()) < num_replicas:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {num_replicas} replicas after {seconds:g} seconds")
            time.sleep(0.2)
        return found


def _is_running(pid: int) -> bool:
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
    command = [sys.executable, "-m", "foretoken", "serve", model, "--port", "0", *options]
    if num_replicas is not None:
        command += ["--replicas", str(num_replicas)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
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
        address = next((re.findall(r"http://[\d.:]+", line)[0] for line in said if "foretoken: serving" in line), None)
        if address is None:
            raise RuntimeError(f"the server did not start: {''.join(said)[-3000:]}")
        yield Cluster(address, process)
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(45)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        listener.join(10)
        if process.stderr is not None and not listener.is_alive():
            process.stderr.close()


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


def under_fire(running: Cluster, bodies: Sequence[dict[str, Any]], kill: Any, delay: float) -> list[Heard]:
    """All streams at once; ``kill`` is called after so many seconds."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [pool.submit(stream, running.address, body) for body in bodies]
        time.sleep(delay)
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
    llm = LLM(options.model, options.method, max_num_seqs=16)
    pulse = Pulse()
    bodies = [request_of(place, options.max_tokens) for place in range(options.streams)]
    expected = references(llm, bodies)
    draw = random.Random(options.seed)
    pauses: list[float] = []
    num_wrong = num_moved = 0
    method = ["--method", options.method] if options.method else ["--no-speculation"]
    del llm
    with cluster(options.model, options.replicas, "--max-num-seqs", str(options.streams), *method) as running:
        for turn in range(options.rounds):
            pids = running.wait_for(options.replicas)
            time.sleep(1.0)  # until the router has heard of it
            victim = draw.choice(sorted(pids.values()))
            sign = signal.SIGSTOP if options.hang else signal.SIGKILL
            delay = draw.uniform(0.05, options.within)
            pulse.longest()
            heard = under_fire(running, bodies, lambda: os.kill(victim, sign), delay)  # noqa: B023
            if options.hang:
                os.kill(victim, signal.SIGKILL)
            wrong = differences(heard, expected)
            moved = [one for one in heard if one.failovers]
            stopped = pulse.longest()
            if stopped < MOST_STOPPED:
                pauses += [one.longest_pause for one in moved]
            else:
                print(f"  clients did not run for {stopped:.1f} s, so that pauses do not count", flush=True)
            num_moved += len(moved)
            num_wrong += len(wrong)
            print(f"round {turn}: killed {victim} after {delay:.2f} s, {len(moved)} streams moved", flush=True)
            for line in wrong:
                print("  ", line[:600], flush=True)
    print(
        f"{options.model}: {options.rounds} kills under {options.streams} streams, {num_moved} streams moved, "
        f"{num_wrong} wrong; "
        f"of {len(pauses)} pauses p50 {quantile(pauses, 0.5):.2f} s, p95 {quantile(pauses, 0.95):.2f} s, "
        f"longest {max(pauses, default=0.0):.2f} s"
    )
    return 1 if num_wrong else 0


def overhead(options: argparse.Namespace) -> int:
    """Time to the first token and between tokens, plain `serve` and the cluster, by clients at once."""
    method = ["--no-speculation"]
    body = {"prompt": PROMPTS[0], "max_tokens": options.max_tokens, "temperature": 0.0, "ignore_eos": True}
    for label, num in (("serve", None), ("cluster of 1", 1), ("cluster of 2", 2)):
        with cluster(options.model, num, *method) as running:
            stream(running.address, body)
            for clients in (1, 8):
                started = time.perf_counter()
                with ThreadPoolExecutor(clients) as pool:
                    heard = list(pool.map(lambda _: stream(running.address, body), range(clients * 3)))
                took = time.perf_counter() - started
                first = [one.times[1] - one.times[0] for one in heard]
                gaps = [(one.times[-1] - one.times[1]) / (len(one.times) - 2) for one in heard]
                tokens = sum(len(one.texts[0][0]) for one in heard)
                print(
                    f"{label}, {clients} clients: first after headers {1e3 * statistics.median(first):.1f} ms, "
                    f"between {1e3 * statistics.median(gaps):.2f} ms, {tokens / took:.0f} tokens/s", flush=True,
                )  # fmt: skip
    return 0


def update(options: argparse.Namespace) -> int:
    """Deploy anew under streams: another drafter, one replica more, one replica."""
    import ray
    from ray import serve

    from foretoken.serve.ray import build
    from foretoken.serve.ray.launch import start_ray

    bodies = [request_of(place, options.max_tokens) for place in range(options.streams)]
    expected = references(LLM(options.model, max_num_seqs=16), bodies)
    config = {"model": options.model, "num_cpus": 1, "num_replicas": options.replicas, "drain_seconds": 30.0}
    start_ray(None, options.replicas + 2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    is_over = threading.Event()
    wrong: list[str] = []
    counts: list[int] = []

    def ask(place: int) -> None:
        while not is_over.is_set():
            heard = stream(f"http://127.0.0.1:{port}", bodies[place])
            wrong.extend(differences([heard], [expected[place]]))
            counts.append(heard.failovers)

    changes = [
        ("deployed", {}),
        ("another drafter", {"speculative_config": "suffix"}),
        ("one replica more", {"num_replicas": options.replicas + 1}),
        ("one replica", {"num_replicas": 1}),
    ]
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            for label, change in changes:
                config |= change
                serve.run(build(config), name="foretoken", route_prefix="/")
                if label == "deployed":
                    clients = [pool.submit(ask, place) for place in range(len(bodies))]
                time.sleep(10.0)
                print(f"{label}: {len(counts)} answers so far, {sum(counts)} moved, {len(wrong)} wrong", flush=True)
            is_over.set()
            for client in clients:
                client.result()
    finally:
        is_over.set()
        serve.shutdown()
        ray.shutdown()
    print(f"{options.model}: {len(counts)} answers, {sum(counts)} moved, {len(wrong)} wrong")
    for line in wrong[:10]:
        print("  ", line[:600])
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "overhead", "update"])
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--within", type=float, default=1.5, help="Seconds in which the kill comes.")
    parser.add_argument("--hang", action="store_true", help="Stop the process instead of killing it.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return {"kill": kill, "overhead": overhead, "update": update}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
