"""How an engine schedules and verifies."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.config.acceptance import MATCH, RULES, AcceptanceRule, TypicalLimits
from foretoken.config.memory import memory_size
from foretoken.errors import ConfigError


@dataclass(frozen=True)
class EngineConfig:
    """How rows are scheduled and verified.

    Args:
      max_num_seqs: rows that run at once.
      max_model_len: limit for prompt and output together; the model's context by default.
      prefill_chunk_size: prompt tokens of one row per prefill step. Running rows wait for at most so many tokens before
        they go on: smaller chunks mean shorter pauses and a longer time to the first token.
      acceptance: "match", "standard" (rejection), "block", or "typical", which changes the law of the text.
      exactness: "default": where steps run by the library's own kernels, plain and speculative decoding agree bit for
        bit, whatever the draft, and drafts have 64 nodes at most; elsewhere near-ties may fall differently. "strict":
        the same bits elsewhere, too, by running every step at one shape, where drafts are chains; refused for models
        with experts. "relaxed": drafts of any size, bits where they come by themselves.
      strict_width: number of nodes that a draft, its root included, has at that one shape; plain decoding runs at it,
        too, so compare results of one width. Without meaning where the library's own kernels run.
      typical: what "typical" accepts.
      max_kv_bytes: memory of the target's keys and values: a number of bytes, "500MB", "2GB", or "40%" of what is
        available on the model's device when the engine is made. Rows wait, or leave for a while, as it asks for. None
        for no limit.
      contains_faults: an exception of a drafter ends its drafting for the rows that it was working on, and one of a
        logits processor, or while text is looked at, ends its row with the reason "error"; nothing else is touched.
        Otherwise such exceptions are raised, which ends all rows that run.
      output_scores, output_logits: return processed scores and raw logits of every emitted token.
    """

    max_num_seqs: int = 16
    max_model_len: int | None = None
    prefill_chunk_size: int = 512
    acceptance: str = MATCH.name
    exactness: str = "default"
    strict_width: int = 16
    typical: TypicalLimits = field(default_factory=TypicalLimits)
    max_kv_bytes: int | str | None = None
    contains_faults: bool = False
    output_scores: bool = False
    output_logits: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("prefill_chunk_size", 1), ("strict_width", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more")
        if self.acceptance not in RULES:
            raise ConfigError(f"acceptance is {self.acceptance!r}; choose one of {', '.join(RULES)}")
        if self.exactness not in ("default", "strict", "relaxed"):
            raise ConfigError(f"exactness is {self.exactness!r}; choose default, strict or relaxed")

        if self.max_kv_bytes is not None:
            object.__setattr__(self, "max_kv_bytes", memory_size("max_kv_bytes", self.max_kv_bytes))

    @property
    def rule(self) -> AcceptanceRule:
        """How drafts are accepted."""
        return RULES[self.acceptance]
