"""Iterates of Jacobi decoding, block by block, for inspection and for training.

The public function is ``foredraft.trajectory``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.config.sampling import SamplingParams
from foredraft.drafters.iterate.jacobi import Guesses
from foredraft.engine.drafter import Drafter, DrafterFacts, DraftSize, Needs, PromptChunk, StepResult
from foredraft.engine.frontend import FrozenList
from foredraft.engine.row import Row
from foredraft.engine.stats import CAUSES, counted
from foredraft.errors import ConfigError, PromptError
from foredraft.folders import write_text
from foredraft.llm import LLM, ModelLike
from foredraft.methods.iterate import INITIAL_GUESS
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.prompts.prompts import PromptLike, read_prompts
from foredraft.tree import DraftTree

_NUMBER_WIDTH = 4
"""Width of the column with the iteration number, in characters."""

_LEGEND = {
    "certain": ("=", "certain: this token and all before it are right"),
    "early": ("+", "right early: an earlier token is still wrong"),
    "wrong": (" ", "not right yet"),
    "cut": ("-", "cut off: not verified in this iteration"),
}
"""Mark and meaning of each token state, by CSS class."""

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 0 0 1.5em }
td, th { padding: 2px 6px; font: 12px/1.5 ui-monospace, monospace; white-space: pre; border: 1px solid #fff }
th { text-align: right; font-weight: normal; color: #666 }
.certain { background: #cfe8cf } .early { background: #cfe0f5 } .wrong { background: #f0f0f0; color: #777 }
.cut { color: #aaa }
"""


def trajectory(
    model: LLM | ModelLike,
    prompt: PromptLike,
    block: int = 16,
    sampling_params: SamplingParams | None = None,
    *,
    initial_guess: str = "repeat",
    **model_options: Any,
) -> Trajectory:
    """Decode block by block with Jacobi iterations and keep every iterate.

    Source: Jacobi decoding (Santilli et al. 2023, arXiv:2305.10427). Consistency models are trained on its trajectories
      (CLLM, Kou et al. 2024, arXiv:2403.00835).

    Args:
      model: an `LLM`, or a model from which an `LLM` can be made.
      prompt: one prompt: text, token ids, or a mapping.
      block: number of tokens that are iterated together, 1 or more.
      sampling_params: sampling parameters; greedy with 64 tokens by default.
      initial_guess: first guess for every block, as in the method ``jacobi``.
      model_options: arguments of a new `LLM`.

    Returns: the trajectory. The output of a trajectory equals that of plain decoding.
    Raises: ConfigError, PromptError; NumericsError if the model returns NaN.
    Exactness: the last iterate of a block is the fixed point. The fixed point is reached after at most as many
      iterations as the block has tokens. If a forward pass verifies fewer tokens than the block has, only the first
      tokens of the block are iterated, and `Block.verified` counts them.
    Randomness: the seed of the parameters. Every iteration of a position uses the same noise as the final choice.
    """
    INITIAL_GUESS.read("trajectory", "initial_guess", initial_guess)
    if block < 1:
        raise ConfigError(f"block is {block}; it must be 1 token or more")
    params = SamplingParams(temperature=0.0, max_tokens=64) if sampling_params is None else sampling_params
    if params.n != 1:
        raise ConfigError(f"n is {params.n}; a trajectory has one sample, so n must be 1")
    llm = model if isinstance(model, LLM) else LLM(model, **model_options)
    params = params.filled(llm.sampling_defaults)
    read = read_prompts(prompt, llm.tokenizer)
    if len(read) != 1:
        raise PromptError(f"trajectory takes one prompt, not {len(read)}; call it once per prompt")
    recorder = BlockRecorder(block, initial_guess)
    with llm.engine(recorder) as engine:
        row = engine.add_request(read[0].token_ids, params)[0]
        for outputs in engine.run():
            if error := next((output.error for output in outputs if output.error is not None), None):
                raise error
    recorder.close(row)
    return Trajectory(
        FrozenList(row.token_ids[: row.num_prompt_tokens]),
        tuple(recorder.blocks),
        row.finish_reason,
        row.seed,
        llm.tokenizer,
    )


@dataclass(frozen=True)
class Block:
    """Tokens that were iterated together.

    Args:
      start: position of the first token in prompt and output together.
      initial: initial guess.
      iterates: tokens after each iteration, truncated to the output if generation ended inside the block.
      verified: number of leading tokens that each iteration verified; the other tokens were left unchanged.
      cuts: number of guesses that were not verified because of a limit on drafts, by its cause
        (`foredraft.engine.stats.CAUSES`), summed over all iterations.
    """

    start: int
    initial: tuple[int, ...]
    iterates: tuple[tuple[int, ...], ...]
    verified: tuple[int, ...] = ()
    cuts: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.initial)

    @property
    def fixed_point(self) -> tuple[int, ...]:
        """Tokens of plain decoding. Another iteration would not change them."""
        return self.iterates[-1]

    @property
    def num_iterations(self) -> int:
        """Number of iterations, each one forward pass, until all tokens were certain."""
        return len(self.iterates)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Initial guess and iterates. The fixed point is repeated unless the last two iterates are already equal, so
        that y(j + 1) = y(j) at the end.

        The repetition needs no forward pass, because the last iterate was chosen after tokens that it does not change.
        """
        states = (self.initial, *self.iterates)
        return states if states[-2:] == (self.fixed_point,) * 2 else (*states, self.fixed_point)

    @property
    def settled(self) -> tuple[int, ...]:
        """Iteration from which each position stays right; 0 for a right initial guess."""
        states = [self.initial, *self.iterates]
        return tuple(
            next(i + 1 for i in range(len(states) - 1, -2, -1) if i < 0 or states[i][place] != token)
            for place, token in enumerate(self.fixed_point)
        )

    @property
    def right_early(self) -> tuple[bool, ...]:
        """Whether each position was right earlier than with one token per iteration."""
        return tuple(iteration <= place for place, iteration in enumerate(self.settled))


@dataclass(frozen=True, repr=False)
class Trajectory:
    """Output of Jacobi decoding, with the iterations that led to it.

    Args:
      prompt_token_ids: token ids of the prompt.
      blocks: blocks in the order of the output.
      finish_reason: "stop" or "length".
      seed: seed of the row.
      tokenizer: tokenizer for the views; None to show token ids.
    """

    prompt_token_ids: FrozenList[int]
    blocks: tuple[Block, ...]
    finish_reason: str | None
    seed: int
    tokenizer: PreTrainedTokenizerBase | None = None

    def __repr__(self) -> str:
        return (
            f"Trajectory({len(self.prompt_token_ids)} prompt_token_ids, {len(self.token_ids)} token_ids in "
            f"{self.num_iterations} iterations, finish_reason={self.finish_reason!r}, seed={self.seed})"
        )

    @property
    def token_ids(self) -> FrozenList[int]:
        """Output: the fixed points of all blocks, concatenated."""
        return FrozenList(token for block in self.blocks for token in block.fixed_point)

    @property
    def num_iterations(self) -> int:
        """Number of the target's forward passes after the prompt."""
        return sum(block.num_iterations for block in self.blocks)

    @property
    def tokens_per_iteration(self) -> float:
        """Tokens per iteration: the gain of Jacobi decoding with these blocks on this output."""
        return len(self.token_ids) / self.num_iterations if self.blocks else 0.0

    @property
    def num_right_early(self) -> int:
        """Number of positions that were right earlier than with one token per iteration."""
        return sum(sum(block.right_early) for block in self.blocks)

    def text(self, width: int | None = None) -> str:
        """Return a table per block with a line per iteration. The mark = shows certain tokens, and + shows tokens that
        are right early.

        The last line repeats the one before it, which shows convergence (`Block.states`).

        Args:
          width: maximum number of characters per line; wider tables are split into parts, one below the other.
        """
        lines = [self._summary, *(f"  {mark!r} {words}" for mark, words in self._legend.values())]
        for number, block in enumerate(self.blocks):
            table = [[_LEGEND[state][0] + word for word, state in row] for row in self._cells(block)]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["", _title(number, block)]
            for start, end in _parts(widths, width):
                if end - start < len(widths):
                    lines.append(f"     positions {block.start + start} to {block.start + end - 1}")
                for iteration, row in enumerate(table):
                    cells = map(str.ljust, row[start:end], widths[start:end])
                    lines.append(f"{iteration:>4} {' '.join(cells)}".rstrip())
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Return the tables of `text` as one HTML page without external resources."""
        legend = " ".join(
            f'<span class="{state}">&nbsp;{escape(words)}&nbsp;</span>' for state, (_, words) in self._legend.items()
        )
        tables = []
        for number, block in enumerate(self.blocks):
            rows = []
            for iteration, row in enumerate(self._cells(block)):
                cells = "".join(f'<td class="{state}">{escape(word)}</td>' for word, state in row)
                rows.append(f"<tr><th>{iteration}</th>{cells}</tr>")
            tables.append(f"<h3>{escape(_title(number, block))}</h3><table>{''.join(rows)}</table>")
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Jacobi trajectory</title>'
            f"<style>{_STYLE}</style></head><body><h2>Jacobi trajectory</h2><p>{escape(self._summary)}</p>"
            f"<p>{legend}</p>{''.join(tables)}</body></html>\n"
        )

    @property
    def _summary(self) -> str:
        return (
            f"{len(self.token_ids)} tokens in {self.num_iterations} iterations "
            f"({self.tokens_per_iteration:.2f} each), {self.num_right_early} positions right early"
        )

    @property
    def _legend(self) -> dict[str, tuple[str, str]]:
        """Marks and meanings of the states in the tables."""
        has_cuts = any(block.cuts for block in self.blocks)
        return {state: meaning for state, meaning in _LEGEND.items() if has_cuts or state != "cut"}

    def _cells(self, block: Block) -> Iterator[list[tuple[str, str]]]:
        """Yield the tokens and their states, for the initial guess and every iterate, with the last one repeated."""
        reaches = (len(block), *(block.verified or [len(block)] * block.num_iterations), len(block))
        for iterate, reach in zip(block.states, reaches, strict=False):  # the last one only if `states` repeats it
            right = [token == wanted for token, wanted in zip(iterate, block.fixed_point, strict=True)]
            num_certain = right.index(False) if False in right else len(right)
            states = [
                "cut" if place >= reach else "early" if is_right else "wrong" for place, is_right in enumerate(right)
            ]
            states[:num_certain] = ["certain"] * num_certain
            yield [(self._word(token), state) for token, state in zip(iterate, states, strict=True)]

    def _word(self, token: int) -> str:
        """Text of a token with control characters escaped; its id if there is no tokenizer."""
        if self.tokenizer is None:
            return str(token)
        decoded = str(self.tokenizer.decode([token], skip_special_tokens=False))
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in decoded) or "''"

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one mapping per block, including all tokens before it: an example for consistency training."""
        prefix = list(self.prompt_token_ids)
        for number, block in enumerate(self.blocks):
            yield {
                "block": number,
                "start": block.start,
                "prefix_token_ids": list(prefix),
                "initial": list(block.initial),
                "iterates": [list(iterate) for iterate in block.iterates],
                "fixed_point": list(block.fixed_point),
                "num_iterations": block.num_iterations,
                "settled": list(block.settled),
                "verified": list(block.verified),
                "cuts": dict(block.cuts),
                "seed": self.seed,
            }
            prefix += block.fixed_point

    def write_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write `records`, one JSON object per line.

        Raises: ConfigError if the file cannot be written.
        """
        write_text(path, "".join(json.dumps(record) + "\n" for record in self.records()))


class BlockRecorder(Drafter):
    """Drafter that runs Jacobi iterations of one row in fixed blocks, and records them.

    A block of m tokens is fed as the pending token and the first m - 1 guesses. The m choices of the target are the
    next iterate.
    """

    facts = DrafterFacts("jacobi-blocks")

    def __init__(self, size: int, initial_guess: str) -> None:
        self.blocks: list[Block] = []
        self._cut_before: Counter[str] = Counter()  # cuts up to the newest iterate, by cause
        self._size = size
        self._initial_guess = initial_guess

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        self._vocab_size = target.vocab_size
        return Needs(choices=True)

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        self._guesses = Guesses(rows[0], self._initial_guess, self._vocab_size)

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        row, length = rows[0], len(rows[0].token_ids)
        if not self.blocks or length == self.blocks[-1].start + len(self.blocks[-1]):
            size = min(self._size, row.num_remaining_tokens)
            self.blocks.append(Block(length, tuple(self._guesses.first(size)), ()))
            self._guesses.drop(size)
        block = self.blocks[-1]
        return [DraftTree.chain(row.pending, _newest(block)[length - block.start : -1], source=self.name)]

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):  # empty in the last step
            block, choices = self.blocks[-1], result.features.choices
            before = len(row.token_ids) - len(result.emitted) - block.start  # tokens that were certain before the step
            newest, end = _newest(block), before + len(choices)
            self._add(row, (*newest[:before], *choices, *newest[end:]), end)

    def _add(self, row: Row, iterate: tuple[int, ...], num_verified: int) -> None:
        block, cut = self.blocks[-1], Counter(row.stats.num_cut_tokens)
        self.blocks[-1] = replace(
            block,
            iterates=(*block.iterates, iterate),
            verified=(*block.verified, num_verified),
            cuts=Counter(block.cuts) + (cut - self._cut_before),
        )
        self._cut_before = cut

    def close(self, row: Row) -> None:
        """Add the iterate of the last step, which `observe` does not receive, and truncate the last block to the
        output."""
        if not self.blocks:
            return
        last = tuple(row.token_ids[self.blocks[-1].start :])
        self._add(row, last, len(last))
        block = self.blocks[-1]
        self.blocks[-1] = replace(
            block,
            initial=block.initial[: len(last)],
            iterates=tuple(iterate[: len(last)] for iterate in block.iterates),
            verified=tuple(min(count, len(last)) for count in block.verified),
        )


def _newest(block: Block) -> tuple[int, ...]:
    """Current tokens of a block."""
    return block.iterates[-1] if block.iterates else block.initial


def _parts(widths: list[int], limit: int | None) -> Iterator[tuple[int, int]]:
    """Yield ranges of columns that fit. Example: widths [5, 5, 5] in 17 characters, 4 of them for the iteration number,
    give (0, 2), (2, 3)."""
    start, used = 0, _NUMBER_WIDTH
    for place, size in enumerate(widths):
        if limit is not None and place > start and used + 1 + size > limit:
            yield start, place
            start, used = place, _NUMBER_WIDTH
        used += 1 + size
    yield start, len(widths)


def _title(number: int, block: Block) -> str:
    """Title line of a block, with the number of tokens that limits cut off."""
    last = block.start + len(block) - 1
    said = (
        f"block {number}, positions {block.start} to {last}: {block.num_iterations} iterations for {len(block)} tokens"
    )
    cut = [f"{counted(count, 'guess')} cut off by {CAUSES[cause]}" for cause, count in sorted(block.cuts.items())]
    return "; ".join([said, *cut])
