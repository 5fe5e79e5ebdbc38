"""``foredraft datastore build | append | info | query``: the corpora that method ``rest`` drafts from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console

from foredraft.cli.options import AsJson
from foredraft.cli.running import choose_model, exit_codes, put_json
from foredraft.engine.stats import counted
from foredraft.progress import stages
from foredraft.retrieval.datastore import Lookup, Match
from foredraft.retrieval.manifest import DatastoreManifest

app = typer.Typer(
    name="datastore",
    add_completion=False,
    help="Build and search the corpora that method rest drafts from.",
    no_args_is_help=True,
)

Corpora = Annotated[
    list[Path],
    typer.Argument(metavar="CORPUS...", help="Files or directories: text, JSONL, Parquet; also .gz, .xz, .bz2."),
]
_TOKENIZER = ("--tokenizer", "-t")
Tokenizer = Annotated[
    str | None,
    typer.Option(
        *_TOKENIZER,
        metavar="PATH|HUB_ID|zoo:NAME",
        help="Of the model that will draft from it; zoo:smollm2 where it is installed, else zoo:tiny.",
    ),
]
SameTokenizer = Annotated[
    str | None,
    typer.Option(
        *_TOKENIZER,
        metavar="PATH|HUB_ID|zoo:NAME",
        help="The tokenizer that the datastore was built with, if it has moved.",
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The datastore.")]
Field = Annotated[str, typer.Option("--field", help="Key of JSONL records and column of Parquet that hold the text.")]
Memory = Annotated[
    float, typer.Option("--memory", metavar="GB", help="Limit while building; decides the size of shards.")
]


@app.command("build")
def build_(
    corpora: Corpora,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Directory to write.")],
    tokenizer: Tokenizer = None,
    field: Field = "text",
    memory: Memory = 2.0,
    restart: Annotated[bool, typer.Option("--restart", help="Drop what the directory holds and start over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenise corpora and index them. Interrupted, the same command goes on where it stopped."""
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
    """Add corpora to a datastore; what is added counts as more recent."""
    with exit_codes():
        from foredraft.retrieval.build import append

        loaded = _tokenizer_of(folder, tokenizer)
    with exit_codes(), stages() as report:
        manifest = append(folder, corpora, loaded, field=field, memory_bytes=int(memory * 1e9), progress=report)
    _show(_facts(folder, manifest), as_json)


@app.command("info")
def info(folder: Folder, as_json: AsJson = False) -> None:
    """Check a datastore, checksums included, and say what it holds."""
    with exit_codes():
        from foredraft.retrieval.datastore import Datastore

        manifest = Datastore.open(folder).manifest
        facts = _facts(folder, manifest)
        facts["sources"] = [{"path": path, "num_bytes": size} for path, size in manifest.sources]
        _show(facts, as_json)


@app.command("query")
def query(
    folder: Folder,
    text: Annotated[str, typer.Argument(help="What to look up the end of.")],
    tokenizer: SameTokenizer = None,
    num_nodes: Annotated[int, typer.Option("--num-nodes", "-n", help="Nodes of the tree, root included.", min=2)] = 16,
    depth: Annotated[int, typer.Option("--depth", help="Longest continuation.", min=1, max=64)] = 10,
    as_json: AsJson = False,
) -> None:
    """Show what follows the longest known end of a text, and how often.

    It is looked up as method rest does by default.
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
    """The lookup of ``rest`` by default."""
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
    """The tokenizer that a datastore was built with: where its manifest says, unless the user says where else.

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
