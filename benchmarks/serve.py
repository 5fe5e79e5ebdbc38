"""Put load on servers of the OpenAI API: tokens per second and times to the first token, by number of clients.

    python benchmarks/serve.py --server plain=http://127.0.0.1:8000,plain --server llama.cpp=http://127.0.0.1:8001 \\
        --pid plain=4711 --pid llama.cpp=4712 --llm none --clients 1 4 8 16 --rounds 2 --turns 3

Every client requests one streamed chat answer after another, over its own connection. Servers take turns with the
same prompts. A server whose process id is given is stopped (SIGSTOP) while another is measured. No server gets a
prompt twice, so no prompt is cached. Two names of one process are one server, though: the second finds the prompts of
the first in the cache, unless the server was started with `--num-cached-prefixes 0`. Tokens are counted by the
model's tokenizer in the received text, so servers that send several tokens in a chunk are counted alike. Time is
measured from the first request of a turn to the end of its last answer. `--llm METHOD` also decodes the same rows
with `LLM` in this process, as many at once as there are clients, and compares the outputs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import signal
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from foredraft import LLM, SamplingParams
from foredraft.bench.workload import read_questions

EVENT = re.compile(rb"^data: (\{.*\})\r?$", re.MULTILINE)
MANNERS = ("", "Please explain: ", "Tell me in detail. ", "I would like to know. ", "Answer at length. ")
"""Before every question, so that there are more prompts than questions."""


@dataclass(frozen=True)
class Address:
    """A server under test.

    Args:
      name: in tables.
      model: that requests ask for.
      pid: of its process, stopped while others are measured; None to let it run.
      options: fields of every request.
    """

    name: str
    url: str
    model: str
    pid: int | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Answered:
    """One answer. Times are in seconds from the request.

    Args:
      first: when the first piece of text came.
      ended: when all had come.
      num_chunks: events with text.
    """

    text: str
    first: float
    ended: float
    num_chunks: int


@dataclass(frozen=True)
class Turn:
    """What all clients got in one turn of a server, within so many seconds."""

    answers: list[Answered]
    seconds: float


async def ask(server: Address, prompt: str, max_tokens: int) -> Answered:
    """A streamed chat answer over a new connection; events are read after the last one has come."""
    place = urlsplit(server.url)
    given = {"model": server.model, "messages": [{"role": "user", "content": prompt}], "stream": True}
    body = json.dumps({**given, "temperature": 0, "max_tokens": max_tokens, **server.options}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    started = perf_counter()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(head.encode() + body)
    pieces: list[tuple[float, bytes]] = []
    while piece := await reader.read(65536):
        pieces.append((perf_counter() - started, piece))
    writer.close()
    return _read(pieces)


def _read(pieces: Sequence[tuple[float, bytes]]) -> Answered:
    whole = b"".join(piece for _, piece in pieces)
    ends, length = [], 0
    for _, piece in pieces:
        length += len(piece)
        ends.append(length)
    text, times = "", []
    for event in EVENT.finditer(whole):
        found = json.loads(event[1])
        if "choices" not in found:
            raise SystemExit(f"a server answers {found}")
        said = found["choices"][0]["delta"].get("content") if found["choices"] else None
        if said:
            text += said
            times.append(next(time for (time, _), end in zip(pieces, ends, strict=True) if end >= event.end()))
    if not times:
        raise SystemExit(f"a server answers {whole[:500]!r}")
    return Answered(text, times[0], pieces[-1][0], len(times))


async def load(server: Address, prompts: Sequence[str], num_clients: int, max_tokens: int) -> Turn:
    """All prompts, shared among clients that each wait for an answer before they ask again."""
    answers: dict[int, Answered] = {}
    waiting = iter(enumerate(prompts))

    async def client() -> None:
        for place, prompt in waiting:
            answers[place] = await ask(server, prompt, max_tokens)

    started = perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return Turn([answers[place] for place in range(len(prompts))], perf_counter() - started)


@contextlib.contextmanager
def running(server: Address) -> Iterator[None]:
    """Let a stopped server run for a while."""
    if server.pid is not None:
        os.kill(server.pid, signal.SIGCONT)
    try:
        yield
    finally:
        if server.pid is not None:
            os.kill(server.pid, signal.SIGSTOP)


def of_llm(llm: LLM, prompts: Sequence[str], num_rows: int, max_tokens: int) -> Turn:
    """The same rows without a server, as many at once as there are clients, each round after the last."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    texts: list[str] = []
    started = perf_counter()
    for place in range(0, len(prompts), num_rows):
        asked: Any = [[{"role": "user", "content": prompt}] for prompt in prompts[place : place + num_rows]]
        texts += [output.outputs[0].text for output in llm.chat(asked, params, use_tqdm=False)]
    return Turn([Answered(text, 0.0, 0.0, 0) for text in texts], perf_counter() - started)


def prompts_of(count: int) -> list[str]:
    """Different from each other."""
    questions = [question.text for question in read_questions() if len(question.text) < 400]
    found = [f"{manner}{question}" for manner in MANNERS for question in questions]
    if count > len(found):
        raise SystemExit(f"{count} prompts are needed, and there are {len(found)}; ask for fewer turns or rounds")
    return found[:count]


def row_of(llm: LLM, name: str, num_clients: int, turns: Sequence[Turn], wanted: Sequence[Turn]) -> dict[str, Any]:
    """Figures of a server at one number of clients: medians of its turns, times of all its answers."""
    assert llm.tokenizer is not None
    counts = [sum(len(llm.tokenizer(each.text)["input_ids"]) for each in turn.answers) for turn in turns]
    rates = [count / turn.seconds for count, turn in zip(counts, turns, strict=True)]
    answers = [answer for turn in turns for answer in turn.answers]
    others = [answer for turn in wanted for answer in turn.answers]
    firsts = sorted(answer.first for answer in answers)
    same = sum(ours.text == theirs.text for ours, theirs in zip(answers, others, strict=False))
    return {
        "server": name,
        "clients": num_clients,
        "tokens_per_second": round(statistics.median(rates), 1),
        "least": round(min(rates), 1),
        "most": round(max(rates), 1),
        "first_p50_ms": round(1e3 * firsts[len(firsts) // 2], 1),
        "first_p95_ms": round(1e3 * firsts[math.ceil(0.95 * len(firsts)) - 1], 1),
        "tokens_per_chunk": round(sum(counts) / max(1, sum(answer.num_chunks for answer in answers)), 2),
        "texts_of_llm": f"{same} of {len(answers)}" if others else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL[,MODEL]")
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID")
    parser.add_argument("--options", action="append", default=[], metavar="NAME=JSON", help="fields of every request")
    parser.add_argument("--model", default="zoo:smollm2", help="model of --llm; its tokenizer counts tokens")
    parser.add_argument("--llm", action="append", default=[], metavar="METHOD", help="also decode without a server")
    parser.add_argument(
        "--prefill-chunk-size", type=int, default=64, help="chunk size of --llm; 64 is the default of the server"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    pids = {name: int(pid) for name, _, pid in (given.partition("=") for given in options.pid)}
    fields = {name: json.loads(sent) for name, _, sent in (given.partition("=") for given in options.options)}
    servers = []
    for given in options.server:
        name, _, where = given.partition("=")
        url, _, model = where.partition(",")
        servers.append(Address(name, url, model or options.model, pids.get(name), fields.get(name, {})))
    llm = LLM(options.model, num_cached_prefixes=8, prefill_chunk_size=options.prefill_chunk_size)
    llms = {f"LLM {method}": llm.with_speculative_config(method) for method in options.llm}
    prompts = iter(prompts_of(sum(each * (options.rounds * options.turns + 1) for each in options.clients)))
    for num_clients in options.clients:
        found: dict[str, list[Turn]] = {}
        for turn in range(options.turns + 1):  # the first one warms
            asked = list(islice(prompts, num_clients * (options.rounds if turn else 1)))
            for name, made in llms.items():
                found.setdefault(name, []).append(of_llm(made, asked, num_clients, options.max_tokens))
            for server in servers:
                with running(server):
                    made_turn = asyncio.run(load(server, asked, num_clients, options.max_tokens))
                found.setdefault(server.name, []).append(made_turn)
        found = {name: turns[1:] for name, turns in found.items()}
        wanted = found[next(iter(llms))] if llms else []
        for name, turns in found.items():
            print(json.dumps(row_of(llm, name, num_clients, turns, wanted)), flush=True)


if __name__ == "__main__":
    main()
