"""Prepare the training texts of zoo:tiny: read, format, split, and write them as JSON lines by source.

    python examples/tiny_pair/texts.py --corpora CORPORA --out TEXTS

CORPORA is a folder of xz-compressed JSON lines with a field ``text``, named as `FORMATS` lists them; all are public,
and the README beside the weights names their origins and licences. Every document is in ``SOURCE.train.jsonl`` or
``SOURCE.valid.jsonl``: the split is a hash of the document, so it does not move when a source grows or is reordered.
``beginnings.jsonl`` has the beginnings of training documents, prompts for ``foredraft train --raw``.

- conversation: ``<|user|>question\\n<|assistant|>answer<|end|>\\n``, one such pair per exchange;
- every document, conversations included, ends with ``<|endoftext|>``.
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

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PER_MILLE = 12
BOOK_CHUNK_CHARS = 6000
BEGINNING_CHARS = 200

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
        raise ValueError(f"{path}: the last {len(buffered)} characters are not a JSON record; is the file cut?")


def exchange(question: str, answer: str) -> str:
    return f"<|user|>{question.strip()}\n<|assistant|>{answer.strip()}<|end|>\n"


def plain(text: str) -> Iterator[str]:
    yield text.strip() + "\n"


def book(text: str) -> Iterator[str]:
    """Pieces of the size of chapters, cut at paragraph ends; underscores and markdown heading marks are noise here."""
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


def held_out(document: str) -> bool:
    digest = hashlib.blake2b(document.encode("utf8"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 1000 < HELD_OUT_PER_MILLE


def beginnings(documents: list[str], count: int) -> Iterator[str]:
    """Beginnings of a seeded choice of documents, cut between words."""
    chosen = list(documents)
    random.Random("beginnings").shuffle(chosen)
    for document in chosen[:count]:
        yield document[:BEGINNING_CHARS].rsplit(" ", 1)[0] if len(document) > BEGINNING_CHARS else document


def write(corpora: Path, out: Path, num_beginnings: int) -> None:
    """Write all files; documents of a source and split are shuffled, by a seed of their own."""
    groups: dict[tuple[str, str], list[str]] = {}
    for source, document in documents(corpora):
        groups.setdefault((source, "valid" if held_out(document) else "train"), []).append(document)
    out.mkdir(parents=True, exist_ok=True)
    prompts: list[str] = []
    for (source, split), texts in groups.items():
        random.Random(f"{source} {split}").shuffle(texts)
        lines = [json.dumps({"text": text + END_OF_TEXT}) + "\n" for text in texts]
        (out / f"{source}.{split}.jsonl").write_text("".join(lines), encoding="utf8")
        if split == "train":
            prompts += beginnings(texts, num_beginnings // len(FORMATS))
        print(f"{source:14s} {split:5s} {len(texts):7d} documents")
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (out / "beginnings.jsonl").write_text("".join(lines), encoding="utf8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beginnings", type=int, default=6000)
    options = parser.parse_args()
    write(options.corpora, options.out, options.beginnings)
