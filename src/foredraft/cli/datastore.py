"""``foredraft datastore build | append | info | query``: the corpora that method ``rest`` drafts from."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console

from foredraft.cli.help import HelpGroup
from foredraft.cli.options import AsJson
from foredraft.cli.running import choose_model, exit_codes, put_json
from foredraft.engine.stats import counted
from foredraft.progress import stages
from foredraft.retrieval.datastore import Lookup, Match
from foredraft.retrieval.manifest import DatastoreManifest

EXAMPLES = """\
foredraft datastore build corpus.jsonl --out store
foredraft datastore query store 'def main'"""

app = typer.Typer(
    name="datastore",
    add_completion=False,
    help="Build and search the corpora that method rest drafts from.",
    epilog=EXAMPLES,
    cls=HelpGroup,
    no_args_is_help=True,
)

Corpora = Annotated[
    list[Path],
    typer.Argument(metavar="CORPUS...", help="Files or folders: text, JSONL or Parquet, also compressed."),
]
_TOKENIZER = ("--tokenizer", "-t")
Tokenizer = Annotated[
    str | None,
    typer.Option(
        *_TOKENIZER,
        metavar="MODEL",
        help="Tokenizer of the target. Default: zoo:smollm2 if it is installed, else zoo:tiny.",
    ),
]
SameTokenizer = Annotated[
    str | None,
    typer.Option(
        *_TOKENIZER,
        metavar="MODEL",
        help="The datastore's tokenizer, if it has moved.",
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The datastore.")]
Field = Annotated[str, typer.Option("--field", metavar="NAME", help="JSONL key or Parquet column of the text.")]


def _finite(value: float) -> float:
    """Refuse nan and inf, which are floats."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number of gigabytes")
    return value


Memory = Annotated[float, typer.Option("--memory", metavar="GB", callback=_finite, help="Memory for building.")]


@app.command("build")
def build_(
    corpora: Corpora,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder for the datastore.")],
    tokenizer: Tokenizer = None,
    field: Field = "text",
    memory: Memory = 2.0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the folder's content and build from the beginning.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build a datastore from corpora. After an interrupt, the same command continues."""
    with exit_codes():
        from foredraft.loading.models import load_tokenizer

        name = choose_model(tokenizer)
        loaded = load_tokenizer(name)
    with exit_codes(), stages() as report:
        from foredraft.retrieval.build import build

        manifest = build(
            corpora,
            loaded,
            out,
            tokenizer_name=name,
            field=field,
            memory_bytes=int(memory * 1e9),
            restart=restart,
            progress=report,
        )
    _show(_facts(out, manifest), as_json)


@app.command("append")
def append_(
    folder: Folder,
    corpora: Corpora,
    tokenizer: SameTokenizer = None,
    field: Field = "text",
    memory: Memory = 2.0,
    as_json: AsJson = False,
) -> None:
    """Add corpora to a datastore. Appended corpora count as more recent."""
    with exit_codes():
        from foredraft.retrieval.build import append

        loaded = _tokenizer_of(folder, tokenizer)
    with exit_codes(), stages() as report:
        manifest = append(folder, corpora, loaded, field=field, memory_bytes=int(memory * 1e9), progress=report)
    _show(_facts(folder, manifest), as_json)


@app.command("info")
def info(folder: Folder, as_json: AsJson = False) -> None:
    """Check a datastore with its checksums, and show its content."""
    with exit_codes():
        from foredraft.retrieval.datastore import Datastore

        manifest = Datastore.open(folder).manifest
        facts = _facts(folder, manifest)
        facts["sources"] = [{"path": path, "num_bytes": size} for path, size in manifest.sources]
        _show(facts, as_json)


@app.command("query")
def query(
    folder: Folder,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text whose end is looked up.")],
    tokenizer: SameTokenizer = None,
    num_nodes: Annotated[
        int, typer.Option("--num-nodes", "-n", metavar="N", help="Nodes of the tree with its root.", min=2)
    ] = 16,
    depth: Annotated[
        int, typer.Option("--depth", metavar="N", help="Longest continuation in tokens.", min=1, max=64)
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Show continuations of the longest known end of a text, and their frequency.

    The settings are the defaults of method rest.
    """
    with exit_codes():
        from foredraft.retrieval.datastore import Datastore

        loaded = _tokenizer_of(folder, tokenizer)
        datastore = Datastore.open(folder, tokenizer=loaded, checksums=False)
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        start = perf_counter()
        match = datastore.query(ids, _lookup(depth))
        answer = _answer(match, ids, loaded, num_nodes, depth)
        answer["seconds"] = perf_counter() - start
        if as_json:
            put_json(answer)
        else:
            _show_answer(answer)


def _lookup(depth: int) -> Lookup:
    """Default lookup of method ``rest``."""
    from foredraft.methods.lookup import RestOptions
    from foredraft.retrieval.datastore import Lookup

    return Lookup(
        match_min=RestOptions.retrieval_match_min,
        match_max=RestOptions.retrieval_match_max,
        max_hits=RestOptions.retrieval_max_hits,
        depth=depth,
    )


def _answer(match: Match | None, ids: list[int], tokenizer: Any, num_nodes: int, depth: int) -> dict[str, Any]:
    from foredraft.retrieval.growth import TreeLimits

    if match is None:
        return {"match": "", "match_tokens": 0, "num_hits": 0, "continuations": []}
    tree = match.trie.tree(ids[-1], TreeLimits(num_nodes, depth))
    leaves = [(tree.path_tokens(leaf), (tree.scores or ())[leaf]) for leaf in tree.leaves if leaf]
    return {
        "match": tokenizer.decode(ids[-match.length :]),
        "match_tokens": match.length,
        "num_hits": match.num_hits,
        "continuations": [
            {
                "text": tokenizer.decode(path),
                "token_ids": list(path),
                "share": match.trie.share(score),
                "score": score,
            }
            for path, score in leaves
        ],
    }


def _show_answer(answer: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    if not answer["match_tokens"]:
        console.print("no end of the text is known")
        return
    console.print(f"{answer['match_tokens']} tokens match, {answer['num_hits']} times: {answer['match']!r}")
    for one in answer["continuations"]:
        console.print(f"  {one['share']:.3f}  {one['text']!r}")


def _facts(folder: Path, manifest: DatastoreManifest) -> dict[str, Any]:
    return {
        "datastore": str(folder),
        "num_tokens": manifest.num_tokens,
        "num_documents": manifest.num_documents,
        "num_bytes": manifest.num_bytes,
        "num_shards": len(manifest.shards),
        "tokenizer": manifest.tokenizer,
        "fingerprint": manifest.fingerprint,
        "vocab_size": manifest.vocab_size,
        "bytes_per_token_id": manifest.width,
        "shards": [asdict(shard) for shard in manifest.shards],
    }


def _show(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        put_json(facts)
        return
    console = Console(highlight=False, markup=False)
    console.print(
        f"{facts['datastore']}: {facts['num_tokens']:,} tokens of {counted(facts['num_documents'], 'document')} in "
        f"{counted(facts['num_shards'], 'shard')}, {facts['num_bytes'] / 1e6:.1f} MB"
    )
    console.print(
        f"tokenizer {facts['tokenizer']}, {facts['vocab_size']:,} ids, {facts['bytes_per_token_id']} bytes each"
    )


def _tokenizer_of(folder: Path, named: str | None) -> Any:
    """Tokenizer of a datastore: the one given, else the one in its manifest.

    Raises: DatastoreError, CheckpointError.
    """
    from foredraft.errors import CheckpointError, ConfigError
    from foredraft.loading.models import load_tokenizer
    from foredraft.retrieval.manifest import DatastoreManifest

    if named is not None:
        return load_tokenizer(named)
    name = DatastoreManifest.read(folder.expanduser()).tokenizer
    try:
        return load_tokenizer(name)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"{folder} was built with the tokenizer {name}, which cannot be loaded: {error}. Give its location "
            "with --tokenizer"
        ) from None
