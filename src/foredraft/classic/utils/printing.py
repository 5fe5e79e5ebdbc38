"""Debug output for ``debug=True``: the drafted, accepted and sampled tokens of every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from foredraft.classic.trace import DraftedToken, Step
from foredraft.errors import ShapeError

__all__ = ["beam_search_step", "describe", "printer", "show", "speculative_step"]

RULE = "=" * 39


def show(step: Step, output: Sequence[int], tokenizer: Any = None, title: str = "Speculative Step") -> None:
    """Print a step; see `describe`."""
    print(describe(step, output, tokenizer, title), flush=True)


def printer(
    prompt: Sequence[int], tokenizer: Any = None, title: str = "Speculative Step"
) -> Callable[[Step, list[int]], None]:
    """Return a function that prints every step of one call, from the step and the whole text after it."""
    return lambda step, text: show(step, text[len(prompt) :], tokenizer, title)


def describe(step: Step, output: Sequence[int], tokenizer: Any = None, title: str = "Speculative Step") -> str:
    """Return a step as text: position, gamma, every draft with q and its outcome, and the final sample.

    Positions are counted from 1, so a draft after 10 tokens starts at [11].

    Args:
      output: all generated tokens.
      tokenizer: object with ``decode``; None shows ids.
    """
    entropy = "" if step.normalised_entropy is None else f", Entropy: {step.normalised_entropy:.3f}"
    lines = [
        f" {title} ".center(38, "="),
        f"Position: {step.position}, Gamma: {step.gamma}, Accepted: {step.accepted}{entropy}",
        "",
    ]
    if step.drafts:
        lines += ["Drafts (Drafter):", *(f"  {_drafted(draft, tokenizer)}" for draft in step.drafts), ""]
    if step.final_token is not None:
        origin = "adjusted distribution" if step.is_adjusted else "target distribution"
        place = step.position + step.accepted + 1
        lines += ["Final Sample:", f"  [{place}]: {_text([step.final_token], tokenizer)} ({origin})", ""]
    return "\n".join([*lines, f"Generated: {_text(output, tokenizer)}", RULE])


def speculative_step(
    tokenizer: Any,
    generated: Tensor,
    input_ids: Tensor,
    n: int,
    prompt_len: int,
    current_position: int,
    corrected_gamma: int,
    *,
    q: Tensor | None = None,
    p: Tensor | None = None,
    r: Tensor | None = None,
    skip_sample_adjustment: bool = False,
) -> Step:
    """Print a step of a user's own loop from its tensors.

    Args:
      tokenizer: object with ``decode``; None shows ids.
      generated: (1, T), tokens with the drafts from ``current_position`` on.
      input_ids: (1, T), tokens with the accepted drafts from ``current_position`` on, and the final sample after them.
      n: number of accepted drafts.
      prompt_len, current_position, corrected_gamma: start of the output, start of the drafts, and number of drafts.
      q, p: probabilities of the drafter and the target (1, drafts or more, V) at the drafts; None leaves them out.
      r: random numbers of the acceptance tests, (drafts,) or more; None if tokens were compared.
      skip_sample_adjustment: True if the final sample after a rejection is from the target's distribution.

    Returns: the step, with the same content as a step of `last_trace`; `DraftedToken.ratio` is p/q.
    Raises: ShapeError for tensors with fewer positions than drafts.
    """
    tokens = generated[0, current_position : current_position + corrected_gamma].tolist()
    draft_probs, target_probs = _at(tokens, "q", q), _at(tokens, "p", p)
    if r is not None and r.numel() < len(tokens):
        raise ShapeError(f"r has {r.numel()} numbers for {len(tokens)} drafts; give one for every draft")
    uniforms = [None] * len(tokens) if r is None else r.flatten().tolist()
    drafts = tuple(
        DraftedToken(
            position=current_position + i,
            token=token,
            draft_prob=draft_probs[i],
            target_prob=target_probs[i] if i <= n else None,
            uniform=uniforms[i] if i <= n else None,
            accepted=None if i > n else i < n,
        )
        for i, token in enumerate(tokens)
    )
    final = int(input_ids[0, current_position + n])
    is_adjusted = r is not None and n < len(tokens) and not skip_sample_adjustment
    step = Step(current_position, corrected_gamma, None, drafts, n, final, is_adjusted, 0.0, 0.0, 0.0)
    show(step, input_ids[0, prompt_len : current_position + n + 1].tolist(), tokenizer)
    return step


def _at(tokens: Sequence[int], name: str, probs: Tensor | None) -> Sequence[float | None]:
    """Return the probability of every token in a tensor (1, drafts or more, V)."""
    if probs is None:
        return [None] * len(tokens)
    if probs.ndim != 3 or probs.shape[1] < len(tokens):
        raise ShapeError(
            f"{name} has shape {tuple(probs.shape)} for {len(tokens)} drafts; use (1, drafts, V), one row per draft"
        )
    return [float(probs[0, i, token]) for i, token in enumerate(tokens)]


def beam_search_step(
    length: int,
    running: Sequence[tuple[float, Sequence[int]]],
    finished: Sequence[tuple[float, Sequence[int]]],
    tokenizer: Any = None,
) -> None:
    """Print the running and the ended beams, with their scores and tokens."""
    lines = [
        f"  ({score:.3f}) {_text(tokens, tokenizer)}{end}"
        for beams, end in ((running, ""), (finished, " (finished)"))
        for score, tokens in beams
    ]
    print("\n".join([" Beam Search Step ".center(38, "="), f"Length: {length}", *lines, RULE]), flush=True)


def _drafted(draft: DraftedToken, tokenizer: Any) -> str:
    prob = "" if draft.draft_prob is None else f" (q={draft.draft_prob:.2f})"
    return f"[{draft.position + 1}]: {_text([draft.token], tokenizer)}{prob} {_verdict(draft)}"


def _verdict(draft: DraftedToken) -> str:
    """Return a sign, and for a rejection the test: r against p/q, or a comparison with the target's token."""
    if draft.accepted is None:
        return "- (not reached)"
    if draft.accepted:
        return "✓"
    if draft.uniform is not None:
        return f"✗ (rejected: r={draft.uniform:.2f} > p/q={draft.ratio or 0.0:.2f})"
    ratio = "" if draft.ratio is None else f", p/q={draft.ratio:.2f}"
    return f"✗ (rejected: differs from the target's token{ratio})"


def _text(tokens: Sequence[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return str(tokens[0]) if len(tokens) == 1 else str(list(tokens))
    text: str = tokenizer.decode(list(tokens))
    return f'"{_on_one_line(text)}"'


def _on_one_line(text: str) -> str:
    """Replace every character that ends a line by its escape sequence, such as \\n."""
    return "".join(repr(char)[1:-1] if char.splitlines() == [""] else char for char in text)
