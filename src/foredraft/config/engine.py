"""Configuration of an engine, sizes of memory as people write them, and the guarantee relative to plain decoding."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from foredraft.config.acceptance import MATCH, RULES, AcceptanceRule, TypicalLimits
from foredraft.errors import ConfigError
from foredraft.native.abi import MOST_NODES

UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}
CGROUP = Path("/sys/fs/cgroup")


def memory_size(name: str, value: object) -> int | str:
    """A number of bytes, from a whole number, "500MB" or "1.5GiB"; a share like "40%" stays one, see `share_of`.

    Raises: ConfigError for anything else, and for nothing.
    """
    text = str(value).strip().upper().replace(" ", "")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%|[KMG]?I?B|)", text)
    if isinstance(value, bool) or not isinstance(value, (int, str)) or match is None or match[2] not in (*UNITS, "%"):
        raise ConfigError(f"{name} is {value!r}; give a number of bytes, a size like 500MB or 2GB, or a share like 40%")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"{name} is {value!r}, and a share is up to 100%; give a number of bytes")
        return text
    size = int(number * UNITS[unit])
    if size < 1:
        raise ConfigError(f"{name} is {value!r}; it must be 1 byte or more")
    return size


def size_text(num_bytes: int) -> str:
    """A number of bytes for people: "500.0 MB" or "2.1 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"


def share_of(name: str, share: str, available: int | None) -> int:
    """Bytes of a share like "40%".

    Args:
      available: bytes that it is of; None where the system does not say.

    Raises: ConfigError where that is not known.
    """
    if available is None:
        raise ConfigError(f"{name} is {share!r}, and it is not known what is available; give a number of bytes")
    return int(available * float(share.rstrip("%")) / 100)


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP, own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Memory that can still be allocated: what the system has, or what is left of a limit if that is less.

    The limits of this process' address space and data (``ulimit -v``, ``ulimit -d``) hold, and those of its own cgroup
    and of all above it, in both versions. Files that a cgroup has in the cache and does not use (a model that was just
    read) count as free, as they do in MemAvailable.

    Args:
      meminfo: what the system has.
      cgroup: where the hierarchy of cgroups is mounted.
      own: which of them this process is in.

    Returns: bytes; None where neither is told.
    """
    lines = _read(meminfo).splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for line in ["0::/", "0:memory:/", *_read(own).splitlines()]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _left(cgroup, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _left(cgroup / "memory", path, names)
    return min(found + _left_of_process(), default=None)


def _left_of_process(statm: Path = Path("/proc/self/statm")) -> list[int]:
    """Memory left of the limits of this process (``ulimit``); empty where there are none."""
    fields = _read(statm).split()
    if len(fields) < 6 or find_spec("resource") is None:
        return []
    import resource

    held = ((resource.RLIMIT_AS, fields[0]), (resource.RLIMIT_DATA, fields[5]))
    limits = [(resource.getrlimit(kind)[0], int(pages) * resource.getpagesize()) for kind, pages in held]
    return [max(0, most - used) for most, used in limits if most != resource.RLIM_INFINITY]


def _left(mount: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Memory left of the limits of a cgroup and of those above it.

    Args:
      names: of the files with limit and usage, and of the line of memory.stat that says what could be dropped.
    """
    left = []
    place = mount / path.strip("/")
    for folder in (place, *place.parents):
        most, held = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
        if most.isdigit() and held.isdigit():
            stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
            left.append(max(0, int(most) - int(held) + int(stat.get(names[2], 0))))
        if folder == mount:
            break
    return left


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of scheduling and verification.

    Args:
      max_num_seqs: rows that run at once.
      max_model_len: limit for prompt and output together; the model's context by default.
      prefill_chunk_size: prompt tokens of one row per prefill step. Running rows wait for at most so many tokens before
        they go on: smaller chunks mean shorter pauses and a longer time to the first token.
      acceptance: "match", "standard" (rejection), "block", or "typical", which changes the distribution of the text.
      exactness: "default": where steps run by the library's own kernels, plain and speculative decoding agree bit for
        bit, whatever the draft, and drafts have 64 nodes at most; elsewhere near-ties may fall differently. "relaxed":
        drafts of any size, and near-ties may fall differently everywhere.
      typical: what "typical" accepts.
      max_kv_bytes: memory of the target's keys and values: a number of bytes, "500MB", "2GB", or "40%" of what is
        available on the model's device when the engine is made. Rows wait, or leave for a while, as it asks for; a
        request that does not limit its output ends where it would not fit alone. None for no limit.
      contains_faults: an exception of a drafter ends its drafting for the rows that it was working on, and one of a
        logits processor, or while text is looked at, ends its row with the reason "error"; nothing else is touched.
        Otherwise such exceptions are raised, which ends all rows that run.
      output_scores, output_logits: return processed scores and raw logits of every emitted token.

    Attributes:
      rule: the acceptance rule, read in every step.
    """

    max_num_seqs: int = 16
    max_model_len: int | None = None
    prefill_chunk_size: int = 512
    acceptance: str = MATCH.name
    exactness: str = "default"
    typical: TypicalLimits = field(default_factory=TypicalLimits)
    max_kv_bytes: int | str | None = None
    contains_faults: bool = False
    output_scores: bool = False
    output_logits: bool = False
    rule: AcceptanceRule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("prefill_chunk_size", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more")
        if self.acceptance not in RULES:
            raise ConfigError(f"acceptance is {self.acceptance!r}; choose one of {', '.join(RULES)}")
        if self.exactness == "strict":
            raise ConfigError(
                "exactness='strict', which ran every step at one fixed shape, is gone, since native models keep the "
                "bits of plain decoding by default; see LLM.promise (or foredraft info MODEL) for what a model keeps "
                "and why, choose another dtype or a model that is native, or judge outputs by foredraft verify"
            )
        if self.exactness not in ("default", "relaxed"):
            raise ConfigError(f"exactness is {self.exactness!r}; choose default or relaxed")
        object.__setattr__(self, "rule", RULES[self.acceptance])
        if self.max_kv_bytes is not None:
            object.__setattr__(self, "max_kv_bytes", memory_size("max_kv_bytes", self.max_kv_bytes))


@dataclass(frozen=True)
class Promise:
    """Guarantee for a row, relative to plain decoding of the same request under the same ``exactness``.

    Args:
      kind: "native": the same bits for any draft, since the library's own kernels compute every row and node by itself;
        "near-ties": the same tokens, except where two of them are so close that rounding decides.
      reason: why it is not native; empty where it is.

    Attributes:
      keeps_bits: whether log-probabilities have the bits of plain decoding, too.
      max_nodes: the largest draft of a row that is covered, root included.
    """

    kind: Literal["native", "near-ties"]
    reason: str = ""
    keeps_bits: bool = field(init=False, repr=False, compare=False)
    max_nodes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keeps_bits", self.kind == "native")
        object.__setattr__(self, "max_nodes", MOST_NODES if self.keeps_bits else sys.maxsize)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": self.kind, "reason": self.reason, "keeps_bits": self.keeps_bits}

    def describe(self) -> str:
        """One line for people."""
        what = {
            "native": "same bits as plain decoding for any draft",
            "near-ties": "same tokens as plain decoding but for near-ties",
        }[self.kind]
        return f"{self.kind}: {what}" + (f" ({self.reason})" if self.reason else "")


@lru_cache(maxsize=64)
def promised(kind: Literal["native", "near-ties"], reason: str = "") -> Promise:
    """A promise that is made once: engines read it in every step."""
    return Promise(kind, reason)
