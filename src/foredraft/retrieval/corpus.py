"""Corpora as a stream of pieces of documents: text, JSONL and Parquet, plain or compressed."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from foredraft.errors import DatastoreError
from foredraft.extras import install_command
from foredraft.folders import parsed_json

PIECE_CHARACTERS = 1 << 19
"""Length of the longest text that is tokenised at once. The limit bounds the memory for reading."""

_BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 1024

_MARKUP = {".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".log"}
_CODE = {
    ".py",
    ".pyi",
    ".js",
    ".ts",
    ".java",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".rs",
    ".go",
    ".rb",
    ".sh",
    ".sql",
    ".css",
}
_RECORDS = {".jsonl", ".ndjson", ".parquet"}
TEXT_SUFFIXES = _MARKUP | _CODE | _RECORDS | {".yaml", ".yml", ".toml", ".ini", ".cfg"}
"""Suffixes of the files that are read from a directory. A file given by its own path is read whatever its suffix."""

_COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


class TextPiece(NamedTuple):
    """Text of one document. A long document is cut into pieces, at line ends where possible.

    Args:
      text: text of the piece; empty only if the piece marks the end of a document.
      ends_document: True for the last piece of a document.
      bytes_read: number of bytes read from the file, compressed bytes for a compressed file.
    """

    text: str
    ends_document: bool
    bytes_read: int


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus.

    Args:
      path: path of the file.
      field: name of the text in JSONL records and Parquet rows.
    """

    path: Path
    field: str = "text"

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def kind(self) -> str:
        """Type of the file, ``text``, ``jsonl`` or ``parquet``, from the name without ``.gz``, ``.xz`` or ``.bz2``."""
        suffix = self.path.suffix.lower()
        if suffix in _COMPRESSED:
            suffix = Path(self.path.stem).suffix.lower()
        return {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(suffix, "text")

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the documents in order, in the same pieces every time.

        Raises: DatastoreError for a file that is not text or JSON, or records without the field.
        """
        if self.kind == "parquet":
            yield from self._parquet()
            return
        with self._readable() as (raw, lines):
            yield from self._jsonl(raw, lines) if self.kind == "jsonl" else self._text(raw, lines)

    @contextmanager
    def _readable(self) -> Iterator[tuple[BinaryIO, IO[str]]]:
        opened = _COMPRESSED.get(self.path.suffix.lower(), open)
        try:
            with self.path.open("rb") as raw:
                if opened is open:
                    with self.path.open(encoding="utf-8-sig", newline="") as lines:
                        yield cast("BinaryIO", lines.buffer), lines
                else:
                    with cast("Any", opened)(raw, "rt", encoding="utf-8-sig") as lines:
                        yield cast("BinaryIO", raw), lines
        except DatastoreError:
            raise
        except UnicodeDecodeError as error:
            raise DatastoreError(
                f"{self.path} is not UTF-8 text (byte {error.object[error.start]:#04x}: {error.reason}); convert it, "
                "or leave it out"
            ) from None
        except (lzma.LZMAError, gzip.BadGzipFile, EOFError) as error:
            raise DatastoreError(f"{self.path} cannot be decompressed: {error}; copy it again") from None
        except OSError as error:
            raise DatastoreError(f"{self.path} cannot be read: {error.strerror or error}; check the path") from None

    def _text(self, raw: BinaryIO, file: IO[str]) -> Iterator[TextPiece]:
        """Yield the whole file as one document."""
        rest = ""
        while block := file.read(PIECE_CHARACTERS):
            self._check_text(block)
            *pieces, rest = cut(rest + block)
            for piece in pieces:
                yield TextPiece(piece, False, raw.tell())
        yield TextPiece(rest, True, raw.tell())

    def _jsonl(self, raw: BinaryIO, lines: IO[str]) -> Iterator[TextPiece]:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from _document(self._json_text(line, number), raw.tell())

    def _json_text(self, line: str, number: int) -> str:
        try:
            record = parsed_json(line, strict=False)
        except ValueError as error:
            raise DatastoreError(
                f"{self.path}, line {number} is not JSON: {error}; repair it, or rename the file to .txt"
            ) from None
        return self._field_of(record, f"line {number}")

    def _field_of(self, record: Any, place: str) -> str:
        text = record.get(self.field) if isinstance(record, dict) else record
        if not isinstance(text, str):
            what = f"its keys: {', '.join(map(str, record))}" if isinstance(record, dict) else "it is no object"
            raise DatastoreError(
                f"{self.path}, {place} has no text in {self.field!r} ({what}); name the field with --field"
            )
        self._check_text(text)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DatastoreError(
                f"{self.path}, {place} contains {text[error.start]!r}, half of a surrogate pair; repair the text"
            ) from None
        return text

    def _check_text(self, text: str) -> None:
        if "\0" in text:
            raise DatastoreError(f"{self.path} contains NUL characters, so it is binary, not text; leave it out")

    def _parquet(self) -> Iterator[TextPiece]:
        try:
            import pyarrow.parquet as parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise DatastoreError(
                f"reading {self.path} needs pyarrow ({error}); convert it to JSONL, or install pyarrow with: "
                f"{install_command('datastore')}"
            ) from None
        try:
            file = parquet.ParquetFile(self.path)
            names = file.schema_arrow.names
        except Exception as error:  # Arrow raises many types of errors for a damaged file
            raise DatastoreError(f"{self.path} is not a readable Parquet file: {error}") from None
        if self.field not in names:
            raise DatastoreError(
                f"{self.path} has no column {self.field!r} (its columns: {', '.join(names)}); name it with --field"
            )
        size, done = self.num_bytes, 0
        for batch in file.iter_batches(batch_size=256, columns=[self.field]):
            done += len(batch)
            for text in batch.column(0).to_pylist():
                if text:
                    yield from _document(
                        self._field_of({self.field: text}, f"row {done}"), size * done // file.metadata.num_rows
                    )


def _document(text: str, bytes_read: int) -> Iterator[TextPiece]:
    *pieces, rest = cut(text)
    for piece in pieces:
        yield TextPiece(piece, False, bytes_read)
    yield TextPiece(rest, True, bytes_read)


def batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield batches of about 1 MiB of text, so that the tokenizer can work in parallel."""
    batch: list[TextPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS or len(batch) == BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def cut(text: str) -> list[str]:
    """Cut a text into pieces of at most `PIECE_CHARACTERS`, after a line end where possible. The last may be empty."""
    pieces = []
    while len(text) > PIECE_CHARACTERS:
        end = text.rfind("\n", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]


def find_files(corpora: Sequence[str | Path], field: str = "text") -> list[CorpusFile]:
    """Return the files of a corpus: the given files, and all files in the given directories with a known suffix.

    Raises: DatastoreError for a path that does not exist, and if there is nothing to read.
    """
    files = [file for corpus in corpora for file in _files(Path(corpus).expanduser())]
    if not files:
        raise DatastoreError(
            "the corpus is empty: no file was given, or the directories contain no text, JSONL or Parquet files"
        )
    empty = [file for file in files if file.stat().st_size == 0]
    if len(empty) == len(files):
        raise DatastoreError(
            f"the corpus is empty: {', '.join(map(str, empty[:3]))} has 0 bytes; give a file with text"
        )
    return [CorpusFile(file, field) for file in files if file not in empty]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and _looks_like_text(file, path))
    if not path.exists():
        raise DatastoreError(f"{path} does not exist; give files or directories")
    return [path]


def _looks_like_text(file: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in file.relative_to(root).parts):
        return False
    suffix = file.suffix.lower()
    return suffix in TEXT_SUFFIXES or (
        suffix in _COMPRESSED and Path(file.stem).suffix.lower() in TEXT_SUFFIXES - {".parquet"}
    )
