"""The token view: who wrote each token of a step, and which branches were rejected where the draft ended."""

from __future__ import annotations

from typing import Any

from foredraft.engine.frontend import StreamOutput
from foredraft.tree import DraftTree
from foredraft.views.token_view import tell_drafts


class Letters:
    """Decodes token 1 as "a", 2 as "b" and so on."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(96 + token) for token in tokens)


#       0 (9)
#      /     \
#    1 (1)    2 (2)
#    /  \       \
# 3 (3) 4 (4)   5 (5)
TREE = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2), sources=("", "ngram", "suffix", "ngram", "suffix", "suffix"))


def step(*tokens: int, num_accepted: int) -> StreamOutput:
    """The tokens of a step that verified `TREE`."""
    return StreamOutput("r", 0, 0, "", (), list(tokens), num_accepted, tree=TREE)  # type: ignore[arg-type]


def told(delta: StreamOutput, tokenizer: Any, first: int = 0) -> dict[str, Any]:
    return tell_drafts(tokenizer, delta, slice(first, len(delta.token_ids)))


def test_rejected_branches_begin_where_they_leave_the_accepted_path() -> None:
    found = told(step(1, 4, 7, num_accepted=2), Letters())
    assert found["sources"] == ["ngram", "suffix", "target"]
    assert found["rejected"] == [
        {"after": 1, "text": "c", "token_ids": [3], "source": "ngram"},
        {"after": 0, "text": "be", "token_ids": [2, 5], "source": "suffix"},
    ]
    nothing = told(step(7, num_accepted=0), Letters())
    assert nothing["sources"] == ["target"]
    assert [(one["after"], one["text"]) for one in nothing["rejected"]] == [(0, "ac"), (0, "ad"), (0, "be")]


def test_branches_are_told_once_and_without_text_where_there_is_no_tokenizer() -> None:
    delta = step(1, 4, 7, num_accepted=2)
    assert tell_drafts(Letters(), delta, slice(0, 2)) == {"sources": ["ngram", "suffix"], "rejected": []}
    assert [one["text"] for one in told(delta, None, 2)["rejected"]] == ["", ""]
