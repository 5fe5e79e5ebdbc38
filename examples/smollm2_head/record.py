"""Write the record of a head in the zoo: digests of its training prompts, and its origin."""

from __future__ import annotations

import argparse
import io
import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
from answers import rows_of
from prompts import load_tokenizer
from train import is_held_out

from foredraft.train.examples import is_evaluation, prompt_digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, required=True, help="of answers.py, or xz-compressed")
    parser.add_argument("--prompts", type=Path, required=True, help="of prompts.py")
    parser.add_argument("--trained-on", type=Path, required=True)
    options = parser.parse_args()
    data = options.answers.read_bytes()
    answers = np.load(io.BytesIO(lzma.decompress(data) if options.answers.suffix == ".xz" else data))
    prompts = np.load(options.prompts)
    before, closing = int(prompts["num_before"]), len(prompts["closing"])
    tokenizer = load_tokenizer()
    digests, kinds = set(), Counter()
    for row, kind in zip(rows_of(answers, "prompt"), answers["kinds"].tolist(), strict=True):
        text = tokenizer.decode(row[before:-closing])
        if is_evaluation(text):
            raise SystemExit(f"a prompt is one of an evaluation set: {text!r}")
        if not is_held_out(row):
            digests.add(prompt_digest(text)[:8])
            kinds[kind] += 1
    options.trained_on.write_text("".join(f"{digest}\n" for digest in sorted(digests)))
    print(json.dumps({"prompts": len(digests), "by_kind": dict(kinds)}))


if __name__ == "__main__":
    main()
