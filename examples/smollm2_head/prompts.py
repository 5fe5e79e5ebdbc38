"""Make the prompts for training a head of SmolLM2: questions, and beginnings of questions that it completes itself.

The result is an .npz for a machine without the corpora and without the tokenizer. It has the tokens of the prompts in
the chat template, the tokens of beginnings of a user's turn (Magpie, Xu et al. 2024, arXiv:2406.08464), the tokens that
close a turn, and hashes of ten consecutive words of the evaluation sets. Prompts are checked against these hashes, in
this script and after completion.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from foredraft import zoo
from foredraft.train.examples import is_evaluation

MARK = "\u2402turn\u2402"
LONGEST = 640
"""Tokens of a prompt; longer ones are left out."""

PASSAGE_TASKS = (
    "Summarize: {}",
    "Summarize: {}",
    "Summarize the following text.\n\n{}",
    "{}\n\nGive this text a title and explain it in a few sentences.",
    "Extract the names and dates in this text as a list.\n\n{}",
    "Rewrite this text in simpler words.\n\n{}",
    "Continue this text.\n\n{}",
    "{}\nWhat is this about?",
)
QUESTION_WORDS = ("What", "Who", "When", "Where", "How", "Why", "Which", "Describe", "Explain")
OPENERS = {
    "question": (
        *("Who ", "Who played ", "Who wrote ", "When did ", "When was ", "Where is ", "Where did ", "What is the "),
        *("What does ", "How many ", "How long ", "Which ", "What year did ", "Who sang ", "What type of ", "Why is "),
    ),
    "translation": ("Translate German to English: ",),
    "task": (
        *(
            "Write a ",
            "Write a Python ",
            "Write a C++ program ",
            "Compose a ",
            "Draft a ",
            "Describe ",
            "Imagine you are ",
        ),
        *("Pretend to be ", "Explain ", "Given ", "Develop a ", "Implement ", "Solve ", "If ", "How do ", "How can I "),
        *(
            "What are the ",
            "Analyze ",
            "Suppose ",
            "Discuss ",
            "Compare ",
            "Provide ",
            "List ",
            "Edit ",
            "Edit the following ",
        ),
        *(
            "Please assume the role of ",
            "Create a ",
            "Evaluate the following ",
            "Can you ",
            "I want you to ",
            "Summarize: ",
        ),
    ),
}


def records(file: Path) -> Iterator[dict[str, Any]]:
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def passages(corpora: Path, rng: random.Random, count: int) -> Iterator[str]:
    """Pieces of 60 to 420 words, by whole paragraphs, of texts of several kinds in turn."""
    pieces: list[list[str]] = []
    for name in ("factbook", "books_children", "stories_ccby", "peps", "rust_book", "rust_rfcs"):
        found = []
        for record in records(corpora / f"{name}.jsonl.xz"):
            paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", record["text"])]
            start = 0
            while start < len(paragraphs):
                wanted, taken = rng.choice((60, 120, 200, 300, 420)), []
                while start < len(paragraphs) and sum(len(part.split()) for part in taken) < wanted:
                    taken.append(paragraphs[start])
                    start += 1
                text = "\n".join(taken)
                if 40 <= len(text.split()) <= 460:
                    found.append(text)
        rng.shuffle(found)
        pieces.append(found)
    for place in range(count):
        yield pieces[place % len(pieces)][place // len(pieces) % len(pieces[place % len(pieces)])]


def commands(corpora: Path, rng: random.Random, count: int) -> Iterator[str]:
    found = list(records(corpora / "tldr_pages.jsonl.xz"))
    for record in rng.sample(found, count):
        lines = record["text"].splitlines()
        asks = [line[2:].rstrip(":") for line in lines if line.startswith("- ")]
        if asks and rng.random() < 0.6:
            ask = rng.choice(asks)
            yield f"Write a shell command: {ask[:1].lower()}{ask[1:]}."
        else:
            yield f"What does the command {lines[0].removeprefix('# ')} do?"


def shingles(text: str) -> set[int]:
    """Hashes of every ten words in a row."""
    words = re.findall(r"\w+", text.lower())
    return {
        int.from_bytes(hashlib.blake2b(" ".join(words[i : i + 10]).encode(), digest_size=8).digest(), "little")
        for i in range(max(1, len(words) - 9))
    }


def evaluation_shingles(folder: Path) -> set[int]:
    found: set[int] = set()
    for file in sorted(folder.rglob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            texts = [entry.get("prompt"), entry.get("text"), entry.get("question"), *entry.get("turns", ())]
            for text in texts:
                if isinstance(text, str):
                    found |= shingles(text)
    return found


def packed(rows: list[list[int]]) -> dict[str, np.ndarray]:
    """Rows of tokens of unequal lengths as two arrays."""
    return {
        "tokens": np.concatenate([np.asarray(row, np.uint16) for row in rows]),
        "lengths": np.asarray([len(row) for row in rows], np.int32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--corpora", type=Path, required=True, help="folder of xz-compressed JSON lines")
    parser.add_argument("--answers", type=Path, required=True, help="prompts (and answers) that exist already")
    parser.add_argument("--evaluation", type=Path, required=True, help="folder of sets that must not be trained on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", type=int, default=14_000, help="prompts that the model makes up from nothing")
    parser.add_argument("--opened", type=int, default=16_000, help="prompts that it makes up from a first word or two")
    parser.add_argument("--passages", type=int, default=9_000)
    parser.add_argument("--asked-passages", type=int, default=4_000, help="passages after which it asks a question")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    tokenizer = load_tokenizer()
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=True, tokenize=False
    )
    before, after = template.split(MARK)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    known = evaluation_shingles(options.evaluation)
    whole: list[tuple[str, str]] = [(entry["kind"], entry["prompt"]) for entry in records(options.answers)]
    taken = {prompt for _, prompt in whole}
    for record in records(options.corpora / "gsm8k_train.jsonl.xz"):
        question = record["text"].split("\nAnswer:")[0].removeprefix("Question: ")
        if question not in taken:
            whole.append(("maths", question))
    for text in commands(options.corpora, rng, 2_500):
        whole.append(("command", text))
    for text in passages(options.corpora, rng, options.passages):
        whole.append(("passage", rng.choice(PASSAGE_TASKS).format(text)))
    begun: list[tuple[str, str]] = [("self", "")] * options.own
    kinds = ("question", "task", "question", "task", "translation")
    for place in range(options.opened):
        kind = kinds[place % len(kinds)]
        begun.append((kind, rng.choice(OPENERS[kind])))
    for text in passages(options.corpora, random.Random(options.seed + 1), options.asked_passages):
        begun.append(("passage", f"{text}\n{rng.choice(QUESTION_WORDS)}"))
    prompts, prompt_kinds, left_out = [], [], 0
    for kind, text in whole:
        row = ids(before + text + after)
        if len(row) > LONGEST or is_evaluation(text) or shingles(text) & known:
            left_out += 1
            continue
        prompts.append(row)
        prompt_kinds.append(kind)
    beginnings, beginning_kinds = [], []
    for kind, text in begun:
        row = ids(before + text.rstrip(" "))
        if len(row) <= LONGEST - 64 and not (len(text.split()) > 10 and shingles(text) & known):
            beginnings.append(row)
            beginning_kinds.append(kind)
    arrays = {f"prompt_{key}": value for key, value in packed(prompts).items()}
    arrays |= {f"beginning_{key}": value for key, value in packed(beginnings).items()}
    np.savez_compressed(
        options.out,
        **arrays,
        prompt_kinds=np.asarray(prompt_kinds),
        beginning_kinds=np.asarray(beginning_kinds),
        num_before=np.asarray(len(ids(before))),
        closing=np.asarray(ids(after), np.uint16),
        shingles=np.fromiter(known, np.uint64, len(known)),
    )
    print(f"{len(prompts)} prompts ({left_out} left out), {len(beginnings)} beginnings -> {options.out}")


def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(zoo.path("smollm2", "tokenizer"), local_files_only=True)


if __name__ == "__main__":
    main()
