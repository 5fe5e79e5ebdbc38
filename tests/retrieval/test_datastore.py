"""The datastore equals brute force, and refuses what is damaged, foreign or unreadable."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import zoo
from foredraft.errors import ConfigError, DatastoreError, TokenizerMismatchError
from foredraft.loading.models import load_tokenizer
from foredraft.retrieval.build import append, build, from_tokens
from foredraft.retrieval.corpus import PIECE_CHARACTERS, CorpusFile, cut, find_files
from foredraft.retrieval.datastore import SHORTER_WEIGHT, Datastore, Lookup, known_end
from foredraft.retrieval.growth import ESCAPE, TreeLimits
from foredraft.retrieval.manifest import DatastoreManifest, fingerprint_of
from foredraft.retrieval.shard import decode, encode, width_of

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "away", "from", "dog", "that"]


@cache
def tokenizer() -> Any:
    return load_tokenizer("zoo:tiny")


def sentences(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, size=random.integers(1, 30))) for _ in range(count)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(200)))
    return path


# -- equals brute force ----------------------------------------------------------------------------------------------

Documents = list[list[int]]


def occurrences(documents: Documents, context: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Recency and continuation of every occurrence that something follows, by looking everywhere."""
    place, size = 0, len(context)
    for document in documents:
        for start in range(len(document) - size):
            if document[start : start + size] == list(context):
                yield place + start, document[start + size :]
        place += len(document) + 1


def brute_force(documents: Documents, context: list[int], how: Lookup, num_nodes: int) -> tuple[int, int, Any]:
    """Length, hits, and {path: weight} of the best nodes, by the definition."""
    lengths = range(min(how.match_max, len(context)), how.match_min - 1, -1)
    length = next((n for n in lengths if any(occurrences(documents, context[-n:]))), 0)
    if length == 0:
        return 0, 0, {}
    hits = list(occurrences(documents, context[-length:]))
    groups = [(hits, length, 1.0)]
    if len(hits) < how.few_hits and length > how.match_min:
        more = list(occurrences(documents, context[-(length - 1) :]))
        if len(more) > len(hits):
            groups = [(hits, length, 1 - SHORTER_WEIGHT), (more, length - 1, SHORTER_WEIGHT)]
    weight: dict[tuple[int, ...], float] = defaultdict(float)
    recency: dict[tuple[int, ...], int] = defaultdict(int)
    for found, size, share in groups:
        for place, text in found:
            for depth in range(1, min(how.depth, len(text)) + 1):
                weight[tuple(text[:depth])] += share
                recency[tuple(text[:depth])] = max(recency[tuple(text[:depth])], place + size)
    best = sorted(weight, key=lambda path: (-weight[path], -recency[path], len(path)))[: num_nodes - 1]
    total = sum(len(found) * share for found, _, share in groups) + ESCAPE
    return length, len(hits), {path: weight[path] / total for path in best}


@given(
    documents=st.integers(1, 6).flatmap(
        lambda top: st.lists(st.lists(st.integers(0, top), max_size=25), min_size=1, max_size=6).filter(any)
    ),
    context=st.lists(st.integers(0, 6), max_size=8),
    match_min=st.integers(1, 2),
    shard_tokens=st.sampled_from([1, 12, 1000]),
    few_hits=st.sampled_from([0, 3, 8]),
    num_nodes=st.integers(2, 12),
)
@settings(max_examples=80, deadline=None)
def test_a_lookup_equals_brute_force(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Documents,
    context: list[int],
    match_min: int,
    shard_tokens: int,
    few_hits: int,
    num_nodes: int,
) -> None:
    """Match length, hits, nodes, their order and scores; over any number of shards, documents kept apart."""
    folder = tmp_path_factory.mktemp("store")
    from_tokens(documents, folder, vocab_size=8, max_shard_tokens=shard_tokens)
    how = Lookup(match_min=match_min, match_max=5, depth=4, few_hits=few_hits)
    length, num_hits, nodes = brute_force([d for d in documents if d], context, how, num_nodes)
    store = Datastore.open(folder)
    match = store.query(context, how)
    if match is None:
        assert length == 0
        return
    assert (match.length, match.num_hits) == (length, num_hits)
    tree = match.trie.tree(99, TreeLimits(num_nodes, 4))
    assert {tree.path_tokens(node): tree.scores[node] for node in range(1, len(tree))} == pytest.approx(nodes)
    if shard_tokens == 1000:  # one shard: positions are the definition's, so the order is too
        assert [tree.path_tokens(node) for node in range(1, len(tree))] == list(nodes)


def test_limits_of_shape_hold(tmp_path: Path) -> None:
    from_tokens([[1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 5, 6], [1, 7, 8]], tmp_path, vocab_size=9)
    trie = Datastore.open(tmp_path).query([1], Lookup(match_min=1)).trie
    paths = lambda shape: [tree.path_tokens(n) for tree in [trie.tree(1, shape)] for n in range(1, len(tree))]  # noqa: E731
    assert paths(TreeLimits(9, 2)) == [(2,), (2, 4), (7,), (7, 8), (5,), (5, 6), (2, 3)]
    assert paths(TreeLimits(9, 2, 1)) == [(2,), (2, 4)]
    assert paths(TreeLimits(9, 2, 2)) == [(2,), (2, 4), (7,), (7, 8), (2, 3)]
    assert paths(TreeLimits(9, 1)) == [(2,), (7,), (5,)]
    assert paths(TreeLimits(3, 2)) == [(2,), (2, 4)]
    assert paths(TreeLimits(9, 2, min_score=0.3)) == [(2,), (2, 4)]


def test_many_hits_keep_their_proportions(tmp_path: Path) -> None:
    """300 hits at 3 : 1, of which 100 are read: the counts that come back are still 3 : 1."""
    from_tokens([[1, 2]] * 225 + [[1, 3]] * 75, tmp_path, vocab_size=9)
    match = Datastore.open(tmp_path).query([1], Lookup(match_min=1, max_hits=100))
    assert match is not None
    tree = match.trie.tree(1, TreeLimits(9, 2))
    assert match.num_hits == 300
    scores = dict(zip(tree.tokens[1:], tree.scores[1:], strict=True))
    assert scores == pytest.approx({2: 0.75, 3: 0.25}, abs=0.01)
    assert scores[2] == pytest.approx(3 * scores[3])


@pytest.mark.parametrize(("vocab_size", "width"), [(1, 1), (255, 1), (256, 2), (65535, 2), (65536, 3), (1 << 24, 4)])
def test_ids_take_the_narrowest_width_that_leaves_a_separator(vocab_size: int, width: int, tmp_path: Path) -> None:
    assert width_of(vocab_size) == width
    ids = [0, vocab_size - 1, vocab_size // 2]
    assert decode(np.frombuffer(encode(ids, width), np.uint8), width).tolist() == ids
    from_tokens([ids, [*ids, 0]], tmp_path, vocab_size=vocab_size)
    match = Datastore.open(tmp_path).query(ids, Lookup(few_hits=0))
    assert (match.length, match.trie.tree(1, TreeLimits(9, 3)).tokens[1:]) == (3, (0,))


def test_ids_beyond_the_vocabulary_match_nothing(tmp_path: Path) -> None:
    from_tokens([[1, 2, 3]], tmp_path, vocab_size=200)
    store = Datastore.open(tmp_path)
    assert store.query([255, 70000]) is None
    assert store.query([]) is None
    match = store.query([300, 1, 2])
    assert match.length == 2
    assert list(known_end([1, 9, 2, 3], 5)) == [2, 3]


# -- building --------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("shard")}


def test_text_jsonl_and_parquet_hold_the_same_documents(tmp_path: Path) -> None:
    texts = [*sentences(30), "ends here"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stores = {"jsonl": tmp_path / "a.jsonl"}
    (tmp_path / "files").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "files" / f"{number:03d}.txt").write_text(text)
    stores["text"] = tmp_path / "files"
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    stores["parquet"] = tmp_path / "a.parquet"
    built = {}
    for kind, source in stores.items():
        manifest = build([source], tokenizer(), tmp_path / kind)
        assert manifest.num_documents == len(texts)
        built[kind] = contents(tmp_path / kind)
    assert built["jsonl"] == built["text"] == built["parquet"]


def test_shards_hold_all_documents_in_order(corpus: Path, tmp_path: Path) -> None:
    manifest = build([corpus], tokenizer(), tmp_path / "out", max_shard_tokens=300)
    assert len(manifest.shards) > 5
    assert max(shard.num_tokens for shard in manifest.shards) <= 300 + 1
    ids: list[int] = []
    for shard in manifest.shards:
        data = np.frombuffer((tmp_path / "out" / shard.tokens.name).read_bytes(), np.uint8)
        ids += [token for token in decode(data, 2).tolist() if token != 65535]
    assert ids == [token for text in sentences(200) for token in tokenizer()(text)["input_ids"]]


def test_append_adds_recent_shards_and_keeps_the_old(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = build([corpus], tokenizer(), out)
    more = tmp_path / "more.txt"
    more.write_text("a zebra walked over the mat")
    after = append(out, [more], tokenizer())
    assert after.shards[:-1] == before.shards
    assert [name for name, _ in after.sources] == [str(corpus), str(more)]
    match = Datastore.open(out).query(tokenizer()(" zebra walked over")["input_ids"])
    assert match.length >= 4


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.jsonl", b'{"text": ""}\n\n', "contain no tokens"),
        ("binary.txt", b"\x7fELF\x02\x01\x01" + bytes(100), "NUL"),
        ("latin.txt", "café".encode("latin-1"), "not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": "b\n', "line 2 is not JSON"),
        ("other.jsonl", b'{"body": "a"}\n', "its keys: body"),
        ("list.jsonl", b"[1]\n", "no text in 'text'"),
        ("cut.jsonl.xz", b"\xfd7zXZ\x00", "cannot be decompressed"),
        ("broken.parquet", b"PAR1 no", "Parquet|pyarrow"),
    ],
)
def test_a_corpus_that_is_none_is_refused_by_name(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatastoreError, match=message):
        build([tmp_path / name], tokenizer(), tmp_path / "out")


def test_a_corpus_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match="does not exist"):
        find_files([tmp_path / "nothing"])
    with pytest.raises(DatastoreError, match="empty"):
        find_files([tmp_path])


def test_long_text_is_cut_at_line_ends_and_stays_one_document(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(120_000))
    (tmp_path / "long.txt").write_text(text)
    pieces = list(CorpusFile(tmp_path / "long.txt").pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 2
    assert all(piece.text.endswith("\n") and len(piece.text) <= PIECE_CHARACTERS for piece in pieces[:-1])
    assert cut("x" * (PIECE_CHARACTERS + 1)) == ["x" * PIECE_CHARACTERS, "x"]


def damage(kind: str, folder: Path) -> None:
    tokens, index, manifest = folder / "shard-00000.tokens", folder / "shard-00000.index", folder / "manifest.json"
    if kind == "truncated":
        index.write_bytes(index.read_bytes()[:-4])
    elif kind == "changed":
        data = bytearray(tokens.read_bytes())
        data[10] ^= 1
        tokens.write_bytes(bytes(data))
    elif kind == "missing":
        index.unlink()
    elif kind == "half a manifest":
        manifest.write_text(manifest.read_text()[:100])
    elif kind == "foreign":
        manifest.write_text(json.dumps({"format": "something", "version": 1}))
    elif kind == "later":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2}))
    elif kind == "no manifest":
        manifest.unlink()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "truncated or replaced"),
        ("changed", "checksum differs"),
        ("missing", "is missing"),
        ("half a manifest", "damaged"),
        ("foreign", "not a foredraft datastore file"),
        ("later", "not a foredraft datastore file"),
        ("no manifest", "no datastore"),
    ],
)
def test_a_datastore_that_is_not_whole_is_refused(kind: str, message: str, corpus: Path, tmp_path: Path) -> None:
    build([corpus], tokenizer(), tmp_path / "out")
    Datastore.open(tmp_path / "out").close()
    damage(kind, tmp_path / "out")
    with pytest.raises(DatastoreError, match=message):
        Datastore.open(tmp_path / "out")


def test_a_datastore_of_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    build([corpus], tokenizer(), tmp_path / "out")
    other = load_tokenizer("zoo:tiny")
    other.add_tokens(["<|other|>"])
    assert fingerprint_of(other) != fingerprint_of(tokenizer())
    with pytest.raises(TokenizerMismatchError, match="fingerprint"):
        Datastore.open(tmp_path / "out", tokenizer=other)
    with pytest.raises(TokenizerMismatchError, match="fingerprint"):
        append(tmp_path / "out", [corpus], other)
    with pytest.raises(TokenizerMismatchError, match="the model has 100 tokens"):
        Datastore.open(tmp_path / "out", vocab_size=100)


def test_a_directory_that_cannot_be_written_is_reported(corpus: Path, tmp_path: Path) -> None:
    """A file in the place of the directory stands for a read-only one, which the superuser may write to."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DatastoreError, match="choose a directory that you may write to"):
        build([corpus], tokenizer(), tmp_path / "file" / "out")


def test_too_little_memory_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too small"):
        build([corpus], tokenizer(), tmp_path / "out", memory_bytes=10**8)


def test_the_datastore_of_the_zoo_is_whole_and_names_its_sources() -> None:
    store = Datastore.open(zoo.asset("tiny", "datastore"), tokenizer=tokenizer(), vocab_size=4096)
    assert store.manifest.num_tokens > 500_000
    assert store.manifest.num_bytes < 6_000_000
    assert all("/" not in name for name, _ in store.manifest.sources)
    match = store.query(tokenizer()("<|user|>How many apples does she have")["input_ids"])
    assert match.length >= 3
    assert isinstance(store.manifest, DatastoreManifest)
