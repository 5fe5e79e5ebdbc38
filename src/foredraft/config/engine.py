"""Configuration of an engine, memory sizes as users write them, and the guarantee relative to plain decoding."""

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
    """Return a memory size in bytes, given a whole number, "500MB" or "1.5GiB".

    A share such as "40%" stays text; `share_of` converts it.

    Raises: ConfigError for anything else, and for sizes below 1 byte.
    """
    text = str(value).strip().upper().replace(" ", "")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%|[KMG]?I?B|)", text)
    if isinstance(value, bool) or not isinstance(value, (int, str)) or match is None or match[2] not in (*UNITS, "%"):
        raise ConfigError(f"{name} is {value!r}; give a number of bytes, a size like 500MB or 2GB, or a share like 40%")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"{name} is {value!r}; a share is more than 0% and at most 100%")
        return text
    size = int(number * UNITS[unit])
    if size < 1:
        raise ConfigError(f"{name} is {value!r}; it must be 1 byte or more")
    return size


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in a readable form: "500.0 MB" or "2.1 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"


def share_of(name: str, share: str, available: int | None) -> int:
    """Return the bytes of a share such as "40%".

    Args:
      available: all available bytes, or None if the system does not report them.

    Raises: ConfigError if the available memory is not known.
    """
    if available is None:
        raise ConfigError(f"{name} is {share!r}, but the available memory is not known; give a number of bytes")
    return int(available * float(share.rstrip("%")) / 100)


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP, own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the memory that can still be allocated: free memory of the system, or the remainder under a limit if that
    is less.

    The limits considered are those of this process' address space and data (``ulimit -v``, ``ulimit -d``), of its
    cgroup and of all cgroups above it, in both cgroup versions. Unused page cache of a cgroup (a model that was just
    read) counts as free, as it does in MemAvailable.

    Args:
      meminfo: file with the system's memory figures.
      cgroup: mount point of the cgroup hierarchy.
      own: file that lists the cgroups of this process.

    Returns: bytes; None if neither the system nor a limit reports any.
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
    """Return the memory that each limit of this process (``ulimit``) leaves; empty without limits."""
    fields = _read(statm).split()
    if len(fields) < 6 or find_spec("resource") is None:
        return []
    import resource

    held = ((resource.RLIMIT_AS, fields[0]), (resource.RLIMIT_DATA, fields[5]))
    limits = [(resource.getrlimit(kind)[0], int(pages) * resource.getpagesize()) for kind, pages in held]
    return [max(0, most - used) for most, used in limits if most != resource.RLIM_INFINITY]


def _left(mount: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Return the memory that the limits of a cgroup and of those above it leave.

    Args:
      mount: mount point of the controller.
      path: path of the cgroup below the mount point.
      names: names of the files with limit and usage, and the key in memory.stat of reclaimable bytes.
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
      max_num_seqs: limit on rows that run at once.
      max_model_len: limit of prompt and output together; by default the model's context length.
      prefill_chunk_size: prompt tokens of one row per prefill step. Running rows wait for at most this many tokens, so
        smaller chunks mean shorter pauses and a longer time to first token.
      acceptance: "match", "standard" (rejection sampling), "block" or "typical", which changes the output distribution.
      exactness: "default" or "relaxed". With "default", a model that runs on the library's own kernels gives bit for
        bit the output of plain decoding, for any draft. Drafts then have at most 64 nodes. Other models agree up to
        rounding. With "relaxed", drafts have any size, and all models agree up to rounding.
      typical: limits of the rule "typical".
      max_kv_bytes: limit on memory for the target's keys and values: a number of bytes, "500MB", "2GB", or "40%". A
        percentage refers to the memory available on the model's device when the engine is made. Rows wait or are
        preempted to keep within it. A request without an output limit ends when it alone would exceed it. None for no
        limit.
      contains_faults: limit the effect of exceptions. An exception in a drafter ends drafting for the rows that it was
        drafting for. An exception in a logits processor, or in code that reads the text, ends its row with the reason
        "error". If False, such an exception is raised and ends all running rows.
      output_scores, output_logits: return processed scores and raw logits of every emitted token.

    Attributes:
      rule: the acceptance rule, stored here because every step reads it.
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
                "exactness='strict', which ran every step at one fixed shape, was removed, since native models give "
                "the bits of plain decoding by default; foredraft info MODEL (LLM.guarantee) tells how "
                "exact a model is and why. Choose another dtype or model, or check outputs with foredraft verify"
            )
        if self.exactness not in ("default", "relaxed"):
            raise ConfigError(f"exactness is {self.exactness!r}; choose default or relaxed")
        object.__setattr__(self, "rule", RULES[self.acceptance])
        if self.max_kv_bytes is not None:
            object.__setattr__(self, "max_kv_bytes", memory_size("max_kv_bytes", self.max_kv_bytes))


@dataclass(frozen=True)
class Guarantee:
    """Guarantee for a row, relative to plain decoding of the same request under the same ``exactness``.

    Args:
      kind: "bit-identical" or "up to rounding". "bit-identical": the same bits for any draft, because the library's own
        kernels compute every row and node independently. "up to rounding": the same tokens, except where two tokens
        have scores so close that rounding decides.
      reason: why the guarantee is not "bit-identical"; empty if it is.

    Attributes:
      keeps_bits: whether log-probabilities also have the bits of plain decoding.
      max_nodes: limit on nodes of a draft that the guarantee covers, root included.
    """

    kind: Literal["bit-identical", "up to rounding"]
    reason: str = ""
    keeps_bits: bool = field(init=False, repr=False, compare=False)
    max_nodes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keeps_bits", self.kind == "bit-identical")
        object.__setattr__(self, "max_nodes", MOST_NODES if self.keeps_bits else sys.maxsize)

    def as_dict(self) -> dict[str, Any]:
        """Return the guarantee as plain data."""
        return {"kind": self.kind, "reason": self.reason, "keeps_bits": self.keeps_bits}

    def describe(self) -> str:
        """Return one line for users."""
        what = {
            "bit-identical": "bit-identical to plain decoding",
            "up to rounding": "same tokens as plain decoding up to rounding",
        }[self.kind]
        return f"{what} ({self.reason})" if self.reason else what


@lru_cache(maxsize=64)
def guaranteed(kind: Literal["bit-identical", "up to rounding"], reason: str = "") -> Guarantee:
    """Return a guarantee from a cache, because engines read it in every step."""
    return Guarantee(kind, reason)
