"""Processes that are forked from one with a model say the same, and wait for no thread that they do not have."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

FORKED = """
import faulthandler, os, sys, threading
import foredraft
import torch
from foredraft.errors import UnsupportedModelError
from foredraft.testing import toy_model

prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 11] * 35}, {"prompt_token_ids": [5, 6]}]
short = foredraft.SamplingParams(max_tokens=6, temperature=0.7, seed=3)

def texts(model):
    return [one.outputs[0].token_ids for one in model.generate(prompts, short, use_tqdm=False)]

def child(llm, want):
    faulthandler.dump_traceback_later(120, exit=True)  # which ends it with status 1
    try:
        os._exit(0 if texts(llm) == want else 3)
    except UnsupportedModelError as error:
        print(error, flush=True)
        os._exit(4)

def fork(llm, want):
    number = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) if number else child(llm, want)

def check(model, **options):
    llm = foredraft.LLM(model, speculative_config={"method": "ngram"}, **options)
    want = texts(llm)
    idle = fork(llm, want)
    inside, may_end = threading.Event(), threading.Event()

    def generate():
        long = foredraft.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logits_processors=[pause])
        llm.generate(prompts, long, use_tqdm=False)

    def pause(token_ids, logits):
        inside.set()
        may_end.wait()
        return logits

    thread = threading.Thread(target=generate)
    thread.start()
    inside.wait()
    busy = fork(llm, want)
    may_end.set()
    thread.join()
    print(idle, busy, texts(llm) == want, flush=True)

check("zoo:tiny")
check(toy_model(64, dtype=torch.float32), execution="compiled")
"""


@cache
def run() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_forked_processes_say_the_same() -> None:
    assert run()[0] == "0 0 True"


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_layers_that_are_compiled_for_more_threads_are_refused_in_them() -> None:
    said = run()[1:]
    if said[-1] == "0 0 True":
        pytest.skip("nothing is compiled here")
    assert said[-1] == "4 4 True"
    assert len(said) == 3
    assert all("lost when it was forked" in line for line in said[:-1])
