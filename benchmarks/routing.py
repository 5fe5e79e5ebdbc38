"""What routing by beginnings is worth, on up to 1,000 replicas: a simulation in which only the router is real.

    python benchmarks/routing.py --replicas 2,10,100,1000

Chats come at random; each turn repeats the conversation before it. A replica runs ``--rows`` requests at once and keeps
the beginnings of its last ``--kept`` texts. Times of service are those of one engine: ``--prompt-ms`` for each token of
a prompt that it has not kept, ``--token-ms`` for each token of the answer (measure both with `foretoken serve` and
``/metrics``). Requests come at ``--load`` times the rate at which replicas would be busy without any hit.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from foretoken.serve.ray.affinity import Affinity

BLOCK = 64


@dataclass
class Machine:
    """A replica: what it keeps, and until when it works."""

    kept: OrderedDict[int, int] = field(default_factory=OrderedDict)
    load: int = 0
    served: int = 0

    def read(self, chat: int, length: int, most: int) -> int:
        """Tokens of a prompt that are not there yet."""
        known = min(self.kept.pop(chat, 0), length) // BLOCK * BLOCK
        self.kept[chat] = length
        while len(self.kept) > most:
            self.kept.popitem(last=False)
        return length - known


def ids_of(chat: int, length: int) -> list[int]:
    return [(chat * 2654435761 + place) % 49152 for place in range(length)]


def simulate(num: int, way: str, options: argparse.Namespace) -> str:
    draw = random.Random(options.seed)
    machines = {str(place): Machine() for place in range(num)}
    affinity = Affinity(block=BLOCK, balance=options.balance)
    mean_seconds = (options.prompt * options.prompt_ms + options.answer * options.token_ms) / 1e3
    rate = options.load * num * options.rows / mean_seconds
    chats: list[tuple[int, int]] = []
    ends: list[tuple[float, str]] = []
    now, spent, read, asked = 0.0, 0.0, 0, 0
    excess: list[float] = []
    firsts: list[float] = []
    num_open = max(4 * num, 8)
    for number in range(options.requests):
        now += draw.expovariate(rate)
        while ends and ends[0][0] <= now:
            machines[heapq.heappop(ends)[1]].load -= 1
        if len(chats) < num_open or draw.random() < 0.2:
            chats.append((number, int(draw.expovariate(1 / options.prompt)) + BLOCK))
        place = draw.randrange(max(0, len(chats) - num_open), len(chats))
        chat, length = chats[place]
        chats[place] = chat, length + options.answer + 32
        loads = {name: machine.load for name, machine in machines.items()}
        ids = ids_of(chat, length)
        began = time.process_time()
        if way == "prefix":
            name = affinity.choose(ids, "", loads)
        elif way == "random":
            name = draw.choice(list(loads))
        else:
            name = min(draw.sample(list(loads), min(2, num)), key=loads.__getitem__)
        spent += time.process_time() - began
        machine = machines[name]
        new = machine.read(chat, length, options.kept)
        machine.load, machine.served = machine.load + 1, machine.served + 1
        slow = max(1.0, machine.load / options.rows)
        first = new * options.prompt_ms / 1e3 * slow
        heapq.heappush(ends, (now + first + options.answer * options.token_ms / 1e3 * slow, name))
        firsts.append(first)
        read, asked = read + new, asked + length
        if number > options.requests // 5:
            mean = sum(loads.values()) / num
            excess.append(max(loads.values()) / mean if mean >= 4 else 1.0)
    counts = [machine.served for machine in machines.values()]
    firsts.sort()
    return (
        f"| {num} | {way} | {1 - read / asked:.2f} | {1e3 * firsts[len(firsts) // 2]:.0f} / "
        f"{1e3 * firsts[int(0.95 * len(firsts))]:.0f} | {max(counts) / (sum(counts) / num):.2f} | "
        f"{sum(excess) / max(1, len(excess)):.2f} | {1e6 * spent / options.requests:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="2,10,100,1000")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--kept", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=400, help="Mean tokens of the first turn.")
    parser.add_argument("--answer", type=int, default=100)
    parser.add_argument("--prompt-ms", type=float, default=1.5)
    parser.add_argument("--token-ms", type=float, default=25.0)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--balance", type=float, default=1.3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| replicas | way | share of prompt tokens kept | first token p50 / p95, ms | served, max / mean | "
          "load, max / mean | router, us |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for num in map(int, options.replicas.split(",")):
        for way in ("prefix", "two choices", "random"):
            print(simulate(num, way, options), flush=True)


if __name__ == "__main__":
    main()
