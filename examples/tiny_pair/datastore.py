"""Make the datastore of zoo:tiny: a small part of the training data of the pair, in the same formats.

    python examples/tiny_pair/datastore.py --corpora CORPORA --out src/foredraft/zoo/tiny/datastore

It takes documents of each source in a shuffled order, up to a number of characters. Held-out documents are left out,
and no evaluation set is among the sources. Stories are left out because each would need a credit of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

from texts import END_OF_TEXT, documents, held_out

from foredraft.loading.models import load_tokenizer
from foredraft.retrieval.build import build

CHARACTERS = {
    "gsm8k": 700_000,
    "dialogue": 700_000,
    "tldr": 500_000,
    "python": 500_000,
    "factbook": 150_000,
    "books": 150_000,
}
PIECE_CHARACTERS = 4_000  # of long documents only the beginning: many files are worth more than a few whole ones


def selected(corpora: Path) -> dict[str, list[str]]:
    """Documents per source, up to its share."""
    by_source: dict[str, list[str]] = {source: [] for source in CHARACTERS}
    for source, document in documents(corpora):
        if source in by_source and not held_out(document):
            by_source[source].append(document[:PIECE_CHARACTERS])
    chosen = {}
    for source, texts in by_source.items():
        random.Random(f"datastore {source}").shuffle(texts)
        size, kept = 0, []
        for text in texts:
            if size + len(text) > CHARACTERS[source]:
                break
            size += len(text)
            kept.append(text)
        chosen[source] = kept
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for source, texts in selected(arguments.corpora).items():
            path = Path(folder) / f"{source}.jsonl"
            path.write_text("".join(json.dumps({"text": text + END_OF_TEXT}) + "\n" for text in texts))
            files.append(path)
        manifest = build(files, load_tokenizer("zoo:tiny"), arguments.out, tokenizer_name="zoo:tiny", restart=True)
    (arguments.out / ".lock").unlink()
    text = (arguments.out / "manifest.json").read_text().replace(str(Path(folder)) + "/", "")
    (arguments.out / "manifest.json").write_text(text)
    print(f"{manifest.num_tokens} tokens, {manifest.num_documents} documents, {manifest.num_bytes} bytes")


if __name__ == "__main__":
    main()
