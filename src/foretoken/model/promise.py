"""What a model keeps of plain decoding whatever is drafted."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

from foretoken.native.abi import MOST_NODES

__all__ = ["MOST_NODES", "Promise"]


@dataclass(frozen=True)
class Promise:
    """What holds of a text, compared with plain decoding of the same request under the same ``exactness``.

    Args:
      kind: "native": the same bits for any draft, since the library's own kernels compute every row and node by itself;
        "fixed": the same bits for chains, since every step runs at one shape; "near-ties": the same tokens, but where
        two of them are so close that rounding decides.
      reason: why it is not native; empty where it is.
    """

    kind: Literal["native", "fixed", "near-ties"]
    reason: str = ""

    @property
    def keeps_bits(self) -> bool:
        """Whether log-probabilities have the bits of plain decoding, too."""
        return self.kind != "near-ties"

    @property
    def max_nodes(self) -> int:
        """The largest draft of a row that it covers, root included."""
        return MOST_NODES if self.kind == "native" else sys.maxsize

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "keeps_bits": self.keeps_bits}

    def describe(self) -> str:
        """One line for people."""
        what = {
            "native": "same bits as plain decoding for any draft",
            "fixed": "same bits as plain decoding, for chains at one fixed shape",
            "near-ties": "same tokens as plain decoding but for near-ties",
        }[self.kind]
        return f"{self.kind}: {what}" + (f" ({self.reason})" if self.reason else "")
