"""What the scripts for other engines share: prompts in, medians out."""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Answer:
    """Text of an answer, and its decoding: tokens after the first, and the seconds they took."""

    text: str
    num_tokens: int
    decode_seconds: float


def same_start(text: str, wanted: str) -> bool:
    """Whether two texts agree as far as the shorter one goes; spaces at the ends aside."""
    text, wanted = text.strip(), wanted.strip()
    length = min(len(text), len(wanted))
    return length > 0 and text[:length] == wanted[:length]


def first_of_each(records: list[dict], limit: int) -> list[dict]:
    """The first records of every group."""
    groups = dict.fromkeys(record["group"] for record in records)
    return [record for group in groups for record in [r for r in records if r["group"] == group][:limit]]


def measure(
    folder: Path,
    arms: dict[str, Callable[[dict], Answer]],
    decode: Callable[[list[int]], str],
    repeats: int,
    limit: int,
) -> list[dict]:
    """Run all arms over all prompts, interleaved; speed and share of right texts by arm and group of prompts."""
    records = first_of_each(json.loads((folder / "prompts.json").read_text()), limit)
    answers: dict[tuple[str, str], list[Answer]] = {}
    right: dict[tuple[str, str], list[bool]] = {}
    for run in arms.values():
        run(records[0])
    for record in records:
        wanted = decode(record["reference_ids"])
        for name in [*arms, *reversed(arms)] * repeats:
            answer = arms[name](record)
            answers.setdefault((name, record["group"]), []).append(answer)
            right.setdefault((name, record["group"]), []).append(same_start(answer.text, wanted))
    return [
        {
            "arm": name,
            "group": group,
            "tokens_per_second": sum(a.num_tokens for a in found) / sum(a.decode_seconds for a in found),
            "median_of_runs": statistics.median(a.num_tokens / a.decode_seconds for a in found if a.num_tokens),
            "num_tokens": sum(a.num_tokens for a in found),
            "same_text": sum(right[name, group]) / len(found),
        }
        for (name, group), found in answers.items()
    ]
