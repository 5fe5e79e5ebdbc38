"""The text the tiny pair is trained on: read, formatted, split, tokenised once, then served in blocks.

Formats (one tokenizer for all of them):

- conversation: ``<|user|>question\\n<|assistant|>answer<|end|>\\n``, one such pair per exchange;
- every document, conversations included, ends with ``<|endoftext|>``.

``python training/data.py --corpora CORPORA --tokenizer DIR --out SHARDS`` writes one uint16 array per source and
split. The split is a hash of the document, so it does not move when a source grows or is reordered.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import lzma
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PER_MILLE = 12
BOOK_CHUNK_CHARS = 6000

Formatter = Callable[[str], Iterator[str]]


def records(path: Path) -> Iterator[str]:
    """The ``text`` of every record; a record that a raw line break cut in two is joined again."""
    buffered = ""
    with lzma.open(path, "rt", encoding="utf8", newline="\n") as lines:
        for line in lines:
            buffered += line
            try:
                record = json.loads(buffered, strict=False)
            except json.JSONDecodeError:
                continue
            buffered = ""
            yield record["text"]
    if buffered:
        raise ValueError(f"{path}: the last {len(buffered)} characters are no JSON record; is the file cut?")


def exchange(question: str, answer: str) -> str:
    return f"<|user|>{question.strip()}\n<|assistant|>{answer.strip()}<|end|>\n"


def plain(text: str) -> Iterator[str]:
    yield text.strip() + "\n"


def book(text: str) -> Iterator[str]:
    """Chapters-sized pieces cut at paragraph ends; underscores and markdown heading marks are noise here."""
    text = re.sub(r"(?<!\w)_([^_\n]+)_(?!\w)", r"\1", text)
    piece: list[str] = []
    size = 0
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split()).lstrip("# ").strip()
        if not paragraph:
            continue
        piece.append(paragraph)
        size += len(paragraph)
        if size >= BOOK_CHUNK_CHARS:
            yield "\n\n".join(piece) + "\n"
            piece, size = [], 0
    if piece:
        yield "\n\n".join(piece) + "\n"


def dialogue(text: str) -> Iterator[str]:
    """``A:`` speaks as the user, ``B:`` as the assistant; consecutive lines of one speaker are joined."""
    turns: list[tuple[str, str]] = []
    for line in text.splitlines():
        speaker, _, said = line.partition(":")
        said = said.strip()
        if speaker not in {"A", "B"} or not said:
            continue
        if turns and turns[-1][0] == speaker:
            turns[-1] = (speaker, f"{turns[-1][1]} {said}")
        else:
            turns.append((speaker, said))
    pairs = [
        (first[1], second[1]) for first, second in itertools.pairwise(turns) if first[0] == "A" and second[0] == "B"
    ]
    if pairs:
        yield "".join(exchange(*pair) for pair in pairs)


def arithmetic(text: str) -> Iterator[str]:
    question, found, answer = text.partition("\nAnswer:")
    if found:
        yield exchange(question.removeprefix("Question:"), answer)


def command(text: str) -> Iterator[str]:
    name = text.partition("\n")[0].lstrip("# ").strip()
    body = text.partition("\n")[2]
    body = "\n".join(line for line in body.splitlines() if "More information:" not in line)
    body = re.sub(r"\n{2,}(?=`)", "\n", re.sub(r"^> ", "", body, flags=re.M))
    yield exchange(f"How do I use the command {name}?", body)


FORMATS: dict[str, tuple[str, Formatter]] = {
    "stories": ("stories_ccby", plain),
    "books": ("books_children", book),
    "dialogue": ("dialogue_selfdialogue", dialogue),
    "gsm8k": ("gsm8k_train", arithmetic),
    "tldr": ("tldr_pages", command),
    "factbook": ("factbook", plain),
}


def standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if parts & {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}:
            continue
        text = path.read_text(encoding="utf8", errors="ignore")
        if len(text) > 200:
            yield text.strip() + "\n"


def documents(corpora: Path) -> Iterator[tuple[str, str]]:
    """Every (source, document), formatted, in a fixed order."""
    for source, (name, form) in FORMATS.items():
        for text in records(corpora / f"{name}.jsonl.xz"):
            for document in form(text):
                yield source, document
    for document in standard_library():
        yield "python", document


def extra_held_out(evaluation: Path) -> Iterator[tuple[str, str]]:
    """Text that no training run of ours has seen: GSM8K's test split and three whole books."""
    test = evaluation / "gsm8k" / "test.jsonl"
    if test.exists():
        for line in test.read_text(encoding="utf8").splitlines():
            record = json.loads(line)
            yield "unseen_gsm8k", exchange(record["question"], re.sub(r"<<[^>]*>>", "", record["answer"]))
    for path in sorted((evaluation / "long_docs").glob("*.txt")):
        for piece in book(path.read_text(encoding="utf8")):
            yield "unseen_books", piece


def held_out(document: str) -> bool:
    digest = hashlib.blake2b(document.encode("utf8"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 1000 < HELD_OUT_PER_MILLE


def write_shards(corpora: Path, evaluation: Path | None, tokenizer_dir: Path, out: Path, seed: int = 0) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    groups: dict[tuple[str, str], list[str]] = {}
    for source, document in documents(corpora):
        groups.setdefault((source, "valid" if held_out(document) else "train"), []).append(document)
    if evaluation is not None:
        for source, document in extra_held_out(evaluation):
            groups.setdefault((source, "valid"), []).append(document)
    out.mkdir(parents=True, exist_ok=True)
    for (source, split), texts in groups.items():
        random.Random(f"{seed} {source} {split}").shuffle(texts)
        ids: list[int] = []
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(end)
        np.save(out / f"{source}.{split}.npy", np.asarray(ids, dtype=np.uint16))
        print(f"{source:14s} {split:5s} {len(texts):7d} documents {len(ids):9d} tokens")


class Stream:
    """Blocks of one source, front to back; every new pass starts at another offset. Its state is two numbers."""

    def __init__(self, ids: np.ndarray, seed: int) -> None:
        self.ids, self.seed = ids, seed
        self.epoch, self.position = 0, 0

    def block(self, length: int) -> np.ndarray:
        if self.position + length > len(self.ids):
            self.epoch += 1
            self.position = random.Random(self.seed * 1_000_003 + self.epoch).randrange(length)
        piece = self.ids[self.position : self.position + length]
        self.position += length
        return piece

    def state(self) -> list[int]:
        return [self.epoch, self.position]

    def restore(self, state: list[int]) -> None:
        self.epoch, self.position = state


class Mixture:
    """Rows drawn from the sources by weight; exactly resumable from ``state()``."""

    def __init__(self, shards: Path, weights: dict[str, float], seed: int) -> None:
        missing = [name for name in weights if not (shards / f"{name}.train.npy").exists()]
        if missing:
            raise FileNotFoundError(f"no training shard for {missing} in {shards}; run training/data.py first")
        self.names = sorted(weights)
        self.chances = np.array([weights[name] for name in self.names]) / sum(weights.values())
        self.streams = {
            name: Stream(np.load(shards / f"{name}.train.npy"), seed + index) for index, name in enumerate(self.names)
        }
        self.random = np.random.Generator(np.random.PCG64(seed))

    def batch(self, rows: int, length: int) -> np.ndarray:
        chosen = self.random.choice(len(self.names), size=rows, p=self.chances)
        return np.stack([self.streams[self.names[index]].block(length) for index in chosen]).astype(np.int64)

    def state(self) -> dict[str, object]:
        streams = {name: stream.state() for name, stream in self.streams.items()}
        return {"random": self.random.bit_generator.state, "streams": streams}

    def restore(self, state: dict) -> None:
        self.random.bit_generator.state = state["random"]
        for name, position in state["streams"].items():
            if name in self.streams:
                self.streams[name].restore(position)


def held_out_shards(shards: Path) -> dict[str, np.ndarray]:
    return {path.name.split(".")[0]: np.load(path) for path in sorted(shards.glob("*.valid.npy"))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="tokenise the corpora into shards")
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument(
        "--evaluation", type=Path, help="data/eval: adds GSM8K test and whole books to the held-out set"
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_shards(options.corpora, options.evaluation, options.tokenizer, options.out)
