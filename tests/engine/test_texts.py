"""Stop strings and streamed text: one text per row, which is cut where a stop string ends it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from foredraft import LLM, SamplingParams
from foredraft.engine.frontend import Completion
from foredraft.engine.row import Row, RowOutput
from foredraft.engine.stopping import Detokenizer, StopChecker
from foredraft.testing import toy_model

SPECIAL = 256
ALPHABET = [*b"abc", *"é😀".encode(), SPECIAL]


class Bytes:
    """A tokenizer of bytes and one special token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        special = b"" if skip_special_tokens else b"<s>"
        return b"".join(special if i == SPECIAL else bytes([i]) for i in ids).decode("utf-8", errors="replace")


def decode(ids: Sequence[int], params: SamplingParams) -> str:
    return Bytes().decode(ids, params.skip_special_tokens)


def expected(ids: Sequence[int], params: SamplingParams) -> tuple[int, str | None, str]:
    """Number of tokens, stop string and text of an output, by decoding every prefix of it as a whole."""
    known = 0
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count], params)
        if text.endswith("\ufffd") or len(text) <= known:
            continue
        matches = [  # by where they end; of those that end together the longest
            (end, end - len(stop), stop)
            for stop in params.stop_strings
            for end in range(max(known + 1, len(stop)), len(text) + 1)
            if text[:end].endswith(stop)
        ]
        known = len(text)
        if matches and count >= params.min_tokens:
            end, start, stop = min(matches)
            return count, stop, text[: end if params.include_stop_str_in_output else start]
    return len(ids), None, decode(ids, params)


def row_of(params: SamplingParams, checker: StopChecker) -> Row:
    sampler: Any = None
    return Row(0, "0", 0, [0], 1, params, seed=0, sampler=sampler, max_length=100, checker=checker)


def decoded(
    ids: Sequence[int], params: SamplingParams, steps: random.Random, tokenizer: Any
) -> tuple[int, str | None, list[str]]:
    """Number of tokens, stop string and released pieces, in steps of several tokens."""
    checker = StopChecker(params, [], 1, 1 + len(ids), tokenizer)
    row = row_of(params, checker)
    completion = Completion(row, 0)
    pieces: list[str] = []
    while True:
        tokens: list[int] = []
        finish = None
        for token in ids[row.num_output_tokens :][: steps.randint(1, 5)]:
            tokens.append(token)
            finish = checker.check(token)
            if finish is not None:
                break
        row.token_ids += tokens
        row.finish_reason = None if finish is None else finish.reason
        sources = ["drafter"] * (len(tokens) - 1) + ["target"]
        segments, texts = completion.take(RowOutput(row, tuple(tokens), len(tokens) - 1), sources)
        pieces.append("".join(text for text, _ in segments))
        assert pieces[-1] == "".join(texts)
        assert len(texts) == len(tokens)
        if finish is not None:
            assert "".join(pieces) == completion.output().text
            return completion.num_tokens, finish.cause if finish.reason == "stop" else None, pieces


@pytest.mark.parametrize("keep_stop", [False, True])
@pytest.mark.parametrize("skip_special", [False, True])
def test_random_outputs_are_cut_and_released_as_by_decoding_them_anew(keep_stop: bool, skip_special: bool) -> None:
    """Stop strings across tokens and steps, within each other, unfinished characters, special tokens, `min_tokens`."""
    rng = random.Random(17)
    num_stopped = 0
    for _ in range(300):
        ids = rng.choices(ALPHABET, weights=[4, 4, 4, *[1] * 6, 2], k=rng.randint(1, 24))
        ids = [*ids, *rng.choice(["", "é", "😀b"]).encode()]
        stops = ["".join(rng.choices(["a", "b", "c", "é", "<", "s>"], k=rng.randint(1, 3))) for _ in range(2)]
        params = SamplingParams(
            max_tokens=64,
            stop=stops[: rng.randint(0, 2)],
            min_tokens=rng.choice([0, 0, 5]),
            include_stop_str_in_output=keep_stop,
            skip_special_tokens=skip_special,
        )
        want = expected(ids, params)
        num_tokens, stop, pieces = decoded(ids, params, rng, Bytes())
        assert (num_tokens, stop, "".join(pieces)) == want, (ids, params)
        num_stopped += stop is not None
    assert 50 < num_stopped < 250


# -- bytes for characters that have no token of their own ------------------------------------------------------------

WORDS = ("\u2581", "H", "i", "\u2581H", "\u2581Hi", "!")
BOS, EOS = 1, 2


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral and Gemma have it: a run of bytes that is not UTF-8 decodes to as many marks."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: place for place, token in enumerate(tokens)}
    merges = [("\u2581", "H"), ("\u2581H", "i")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def bytes_of(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


HI, MARK = (3 + 256 + WORDS.index(word) for word in ("\u2581Hi", "!"))
ENDS: list[tuple[list[int], str]] = [
    (bytes_of("🙂🙂"), "🙂🙂"),
    (bytes_of("🙂🙂")[:7], "🙂\ufffd\ufffd\ufffd"),
    (bytes_of("你好吗朋友")[:14], "你好吗朋\ufffd\ufffd"),
    (bytes_of("你好")[:5], "你\ufffd\ufffd"),
    (bytes_of("好")[:1], "\ufffd"),
    ([*bytes_of("你好")[:5], HI], "你\ufffd\ufffd Hi"),
    ([HI, *bytes_of("你")[:2], HI, *bytes_of("你好")[:4]], "Hi\ufffd\ufffd Hi你\ufffd"),
    ([*bytes_of("你好")[:4], *bytes_of("你好")[:4]], "你\ufffd\ufffd\ufffd\ufffd\ufffd"),
    ([HI, 3 + 0xFF, 3 + 0xFF], "Hi\ufffd\ufffd"),
]


@pytest.mark.parametrize(("script", "text"), ENDS)
def test_complete_characters_stay_where_bytes_after_them_form_none(script: list[int], text: str) -> None:
    """The decoder alone gives up the whole run. Every token appends, and nothing is taken back."""
    detokenizer = Detokenizer(byte_fallback())
    pieces = [detokenizer.append(token) for token in script]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text == text
    assert detokenizer.rest() == detokenizer.finish() == ""


@pytest.mark.sample(2)
@pytest.mark.parametrize("end", ["budget", "eos", "stop token", "stop string", "stop string that is not said"])
@pytest.mark.parametrize("method", ["ngram", pytest.param(None, marks=pytest.mark.full)])
def test_streamed_and_final_text_are_one_wherever_an_answer_ends(method: str | None, end: str) -> None:
    """Inside of a character, too; with a stop string after it."""
    tokenizer = byte_fallback()
    model = toy_model(len(tokenizer), dtype=torch.float32)
    model.generation_config.eos_token_id = EOS
    llm = LLM(model, method, tokenizer=tokenizer)
    for script, text in ENDS:
        options: dict[str, Any] = {"max_tokens": len(script)}
        said = list(script)
        if end != "budget":
            said.append({"eos": EOS, "stop token": HI}.get(end, MARK))
            options["max_tokens"] = len(said) + 1
        if end == "stop token":
            if HI in script:
                continue
            options["stop_token_ids"] = [HI]
            text += " Hi"
        elif end.startswith("stop string"):
            options["stop"] = ["zzz" if end.endswith("said") else "!"]
            text += "!" if end.endswith("said") else ""

        def forced(ids: torch.Tensor, logits: torch.Tensor, said: list[int] = said) -> torch.Tensor:
            place = ids.shape[1] - 1
            logits = torch.full_like(logits, -1e4)
            logits[:, said[place] if place < len(said) else EOS] = 0.0
            return logits

        params = SamplingParams(temperature=0, logits_processors=[forced], **options)
        (whole,) = llm.generate([[BOS]], params)
        with llm.stream([[BOS]], params) as stream:
            streamed = "".join(piece for delta in stream for piece, _ in delta.segments)
        assert whole.outputs[0].text == streamed == text, script
