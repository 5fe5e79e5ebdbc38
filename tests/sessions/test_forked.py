"""Processes that are forked from one with a model say the same, and wait for no thread that they do not have."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKED = """
import faulthandler, os, sys, threading
import foretoken
from foretoken.errors import UnsupportedModelError

llm = foretoken.LLM("zoo:tiny", speculative_config={"method": "ngram"}, **eval(sys.argv[1]))
prompts = ["A dog and a cat. " * 30, "Once upon a time"]
short = foretoken.SamplingParams(max_tokens=6, temperature=0.7, seed=3)

def texts(model):
    return [one.outputs[0].text for one in model.generate(prompts, short, use_tqdm=False)]

def child():
    faulthandler.dump_traceback_later(120, exit=True)  # which ends it with status 1
    try:
        os._exit(0 if texts(llm) == want else 3)
    except UnsupportedModelError as error:
        print(error, flush=True)
        os._exit(4)

def fork():
    number = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) if number else child()

want = texts(llm)
idle = fork()
inside, may_end = threading.Event(), threading.Event()

def generate():
    long = foretoken.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logits_processors=[pause])
    llm.generate(prompts, long, use_tqdm=False)

def pause(token_ids, logits):
    inside.set()
    may_end.wait()
    return logits

thread = threading.Thread(target=generate)
thread.start()
inside.wait()
busy = fork()
may_end.set()
thread.join()
print(idle, busy, texts(llm) == want)
"""


def run(arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, arguments],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
@pytest.mark.parametrize("arguments", ["{}", "{'execution': 'eager', 'dtype': 'float32'}"])
def test_forked_processes_say_the_same(arguments: str) -> None:
    assert run(arguments) == ["0 0 True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_layers_that_are_compiled_for_more_threads_are_refused_in_them() -> None:
    said = run("{'execution': 'compiled'}")
    if said[-1] == "0 0 True":
        pytest.skip("nothing is compiled here")
    assert said[-1] == "4 4 True"
    assert all("lost when it was forked" in line for line in said[:-1])
