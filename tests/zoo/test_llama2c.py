"""The llama2.c reader against an independent forward pass and an independent tokenizer, and against published text."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.errors import CheckpointError
from foredraft.testing import llama2c

STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260K"
HEADER = (24, 20, 2, 4, 2, 300, 16)  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len


def write_checkpoint(path: Path, header: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    """The file as llama2.c's export writes it; the rotary tables are filled with nonsense that no reader may use."""
    dim, hidden, layers, heads, kv_heads, vocab, context = header
    keys, half = dim // heads * kv_heads, dim // heads // 2
    shapes = [
        ("embedding", (abs(vocab), dim)),
        ("rms_att", (layers, dim)),
        ("wq", (layers, dim, dim)),
        ("wk", (layers, keys, dim)),
        ("wv", (layers, keys, dim)),
        ("wo", (layers, dim, dim)),
        ("rms_ffn", (layers, dim)),
        ("w1", (layers, hidden, dim)),
        ("w2", (layers, dim, hidden)),
        ("w3", (layers, hidden, dim)),
        ("rms_final", (dim,)),
        ("freq_real", (context, half)),
        ("freq_imag", (context, half)),
    ] + ([("classifier", (abs(vocab), dim))] if vocab < 0 else [])
    generator = np.random.default_rng(seed)
    weights = {name: generator.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes}
    path.write_bytes(struct.pack("<7i", *header) + b"".join(weights[name].tobytes() for name, _ in shapes))
    return weights


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + 1e-5) * weight


def rotate(vector: np.ndarray, position: int, head_dim: int) -> np.ndarray:
    """run.c: neighbouring entries turn together, the angle falling with the index inside the head."""
    turned = vector.copy()
    for i in range(0, len(vector), 2):
        angle = position / 10000.0 ** ((i % head_dim) / head_dim)
        a, b = vector[i], vector[i + 1]
        turned[i] = a * np.cos(angle) - b * np.sin(angle)
        turned[i + 1] = a * np.sin(angle) + b * np.cos(angle)
    return turned


def naive_logits(weights: dict[str, np.ndarray], header: tuple[int, ...], ids: list[int]) -> np.ndarray:
    """run.c's forward, position by position, in float64."""
    dim, _, layers, heads, kv_heads, _, _ = header
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    size, group = dim // heads, heads // kv_heads
    keys, values, rows = [[[] for _ in range(layers)] for _ in range(2)] + [[]]
    for position, token in enumerate(ids):
        x = w["embedding"][token].copy()
        for layer in range(layers):
            normed = rms(x, w["rms_att"][layer])
            query = rotate(w["wq"][layer] @ normed, position, size)
            keys[layer].append(rotate(w["wk"][layer] @ normed, position, size))
            values[layer].append(w["wv"][layer] @ normed)
            mixed = np.zeros(dim)
            for head in range(heads):
                mine = slice(head * size, (head + 1) * size)
                theirs = slice(head // group * size, (head // group + 1) * size)
                scores = np.array([query[mine] @ key[theirs] for key in keys[layer]]) / np.sqrt(size)
                chances = np.exp(scores - scores.max())
                chances /= chances.sum()
                mixed[mine] = sum(c * value[theirs] for c, value in zip(chances, values[layer], strict=True))
            x = x + w["wo"][layer] @ mixed
            normed = rms(x, w["rms_ffn"][layer])
            gate = w["w1"][layer] @ normed
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ normed))
        rows.append(w.get("classifier", w["embedding"]) @ rms(x, w["rms_final"]))
    return np.array(rows)


WORDS = ["t", "h", "e", "a", " ", "o", "n", "é", "th", "he", "the", " t", " th", " the", "an", " a", "on", "one", "ea"]


def vocabulary(size: int = 300) -> list[tuple[float, bytes]]:
    entries = [(0.0, b"<unk>"), (0.0, b"\n<s>\n"), (0.0, b"\n</s>\n")]
    entries += [(0.0, f"<0x{value:02X}>".encode()) for value in range(256)]
    entries += [(-float(rank), word.encode()) for rank, word in enumerate(WORDS)]
    return entries + [(-1e9, f"<unused{index}>".encode()) for index in range(size - len(entries))]


def write_tokenizer(path: Path, entries: list[tuple[float, bytes]]) -> None:
    body = b"".join(struct.pack("<fi", score, len(piece)) + piece for score, piece in entries)
    path.write_bytes(struct.pack("<i", max(len(piece) for _, piece in entries)) + body)


def naive_encode(entries: list[tuple[float, bytes]], text: str) -> list[int]:
    """run.c's encode: characters or bytes, then the best-scored pair (leftmost first) joined until none is left."""
    ids = {piece: index for index, (_, piece) in enumerate(entries)}
    tokens = [1]
    for character in ([" "] if text else []) + list(text):
        raw = character.encode()
        tokens += [ids[raw]] if raw in ids else [byte + 3 for byte in raw]
    while True:
        best, place = -1e10, -1
        for index in range(len(tokens) - 1):
            merged = ids.get(entries[tokens[index]][1] + entries[tokens[index + 1]][1])
            if merged is not None and entries[merged][0] > best:
                best, place, union = entries[merged][0], index, merged
        if place < 0:
            return tokens
        tokens[place : place + 2] = [union]


@pytest.mark.parametrize("vocab", [300, -300], ids=["shared classifier", "own classifier"])
def test_a_written_checkpoint_gives_the_logits_of_an_independent_forward(tmp_path: Path, vocab: int) -> None:
    header = (*HEADER[:5], vocab, HEADER[6])
    weights = write_checkpoint(tmp_path / "model.bin", header)
    model = llama2c.load_model(tmp_path / "model.bin")
    ids = [1, 5, 299, 17, 5, 120, 3, 44]
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0].numpy()
    expected = naive_logits(weights, header, ids)
    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (vocab > 0)


def test_load_gives_a_pair_that_generates(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.bin", HEADER)
    write_tokenizer(tmp_path / "tokenizer.bin", vocabulary())
    model, tokenizer = llama2c.load(tmp_path / "model.bin", tmp_path / "tokenizer.bin", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 16
    assert model.generation_config.eos_token_id == [1, 2]
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    "text", ["", "the one", "  an é ü 🙂", "\n\tone<s>the</s>", "<unk><0x41>", "eeethheethethe the", " on"]
)
def test_encoding_is_that_of_run_c(tmp_path: Path, text: str) -> None:
    entries = vocabulary()
    write_tokenizer(tmp_path / "tokenizer.bin", entries)
    tokenizer = llama2c.load_tokenizer(tmp_path / "tokenizer.bin", 300)
    assert tokenizer.encode(text) == naive_encode(entries, text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_encoding_of_random_texts_is_that_of_run_c(tmp_path: Path) -> None:
    entries = vocabulary()
    write_tokenizer(tmp_path / "tokenizer.bin", entries)
    tokenizer = llama2c.load_tokenizer(tmp_path / "tokenizer.bin", 300)
    generator = random.Random(3)
    for _ in range(300):
        text = "".join(generator.choice("thea onéx") for _ in range(generator.randrange(30)))
        assert tokenizer.encode(text) == naive_encode(entries, text), text


def test_truncated_and_oversized_checkpoints_name_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    write_checkpoint(path, HEADER)
    content = path.read_bytes()
    for changed, message in [
        (content[:-8], f"holds {len(content) - 8} bytes, but its header asks for {len(content)} \\(8 missing"),
        (content + b"1234", f"holds {len(content) + 4} bytes, but its header asks for {len(content)} \\(4 too many"),
        (content[:11], "holds 11 bytes; the header alone takes 28"),
        (b"", "holds 0 bytes"),
        (struct.pack("<7i", 24, 20, 2, 5, 2, 300, 16) + content[28:], "n_heads=5"),
        (struct.pack("<7i", 0x616B3432, 1, 0, 0, 0, 0, 0) + content[28:], "versioned llama2.c checkpoint \\(version 1"),
        (struct.pack("<7i", 24, -20, 2, 4, 2, 300, 16) + content[28:], "hidden_dim=-20"),
    ]:
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            llama2c.load_model(path)


def test_truncated_and_foreign_tokenizers_name_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.bin"
    write_tokenizer(path, vocabulary())
    content = path.read_bytes()
    for changed, size, message in [
        (content[:-3], 300, f"ends inside token 299 of 300: it holds {len(content) - 3} bytes"),
        (content[:2], 300, "ends inside token 0 of 300: it holds 2 bytes"),
        (content, 301, "ends inside token 300 of 301"),
        (content, 299, "its first 299 tokens take"),
        (content[:4] + struct.pack("<fi", 0.0, -7) + content[12:], 300, "ends inside token 0"),
        (content[:-4] + b"\xff\xfe\xfd\xfc", 300, "token 299 holds .* not UTF-8"),
    ]:
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            llama2c.load_tokenizer(path, size)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.bin cannot be read"):
        llama2c.load_model(tmp_path / "nothing.bin")


@pytest.fixture(scope="module")
def stories():
    if not STORIES.is_dir():
        pytest.skip(f"{STORIES} is not here")
    return llama2c.load(STORIES / "stories260K.bin", STORIES / "tok512.bin")


def published_text() -> str:
    return (STORIES / "stories260K.md").read_text(encoding="utf8").split("-t 0.0\n", 1)[1].split("\n```")[0]


def test_published_greedy_text_is_reproduced(stories) -> None:
    """257 greedy tokens with BOS, the whole published continuation, character for character."""
    model, tokenizer = stories
    ids = torch.tensor([tokenizer.encode("")])
    assert ids.tolist() == [[1]]
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=256, do_sample=False)
    assert found.shape == (1, 257)
    assert tokenizer.decode(found[0], skip_special_tokens=True) == published_text()


def test_published_vocabulary_encodes_as_run_c(stories) -> None:
    tokenizer = stories[1]
    entries = read_tokenizer(STORIES / "tok512.bin")
    generator = random.Random(11)
    text = published_text()
    pieces = [text[begin : begin + 60] for begin in range(0, len(text), 60)]
    pieces += ["".join(generator.choice("ab etnhio.!  \"'sdLyé\n") for _ in range(40)) for _ in range(200)]
    for piece in pieces:
        assert tokenizer.encode(piece) == naive_encode(entries, piece), piece
        assert tokenizer.decode(tokenizer.encode(piece), skip_special_tokens=True) == piece


def read_tokenizer(path: Path) -> list[tuple[float, bytes]]:
    content, begin, entries = path.read_bytes(), 4, []
    while begin < len(content):
        score, length = struct.unpack_from("<fi", content, begin)
        entries.append((score, content[begin + 8 : begin + 8 + length]))
        begin += 8 + length
    return entries
