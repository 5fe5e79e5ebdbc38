"""``foredraft train``: a drafter for a target, from prompts, with the accepted length measured as it grows."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from foredraft.cli.options import AsJson, EngineOptions, Loading, numbers, takes_groups
from foredraft.cli.running import choose_model, exit_codes, load_llm, put_json, writing
from foredraft.folders import only_writer

if TYPE_CHECKING:
    from foredraft.train.run import Training


@takes_groups
def train(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="medusa, hydra, hydra++, eagle, eagle2, eagle3 or draft_model.")
    ],
    loading: Loading,
    rows: Annotated[EngineOptions, "max_num_seqs", "max_kv_bytes"],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the drafter and all that is kept.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--model",
            "-m",
            metavar="PATH|HUB_ID|zoo:NAME",
            help="The target; zoo:smollm2 where it is installed, else zoo:tiny.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE|DIR",
            help="JSON lines with prompt, text or turns, and answer where there is one (.xz too), or .txt.",
        ),
    ] = None,
    own_prompts: Annotated[
        int, typer.Option("--own-prompts", metavar="N", help="Prompts that the target asks itself (chat models).")
    ] = 0,
    epochs: Annotated[float, typer.Option(help="How often the answers are gone through; 0.5 is half of them.")] = 1.0,
    batch_tokens: Annotated[int, typer.Option(help="Answer tokens of one step of the optimiser.")] = 1024,
    forward_tokens: Annotated[
        int | None,
        typer.Option(help="Of texts side by side in a forward, padding included; one text on a CPU, 32768 on a GPU."),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Its peak; it rises at first and falls as a cosine.")] = 8e-4,
    draft_vocabulary_size: Annotated[int, typer.Option(help="Tokens that can be drafted: the most frequent.")] = 8192,
    num_heads: Annotated[int, typer.Option(help="Of Medusa and Hydra: the longest draft.")] = 4,
    num_layers: Annotated[
        int | None,
        typer.Option(
            help="Of the MLP of each head (medusa, hydra 1; hydra++ 4), or of a draft_model that begins at random (4)."
        ),
    ] = None,
    intermediate_size: Annotated[
        int | None,
        typer.Option(help="hydra++, eagle, eagle3: of the MLP of their decoder layer; the target's by default."),
    ] = None,
    unrolled_steps: Annotated[int, typer.Option(help="Of EAGLE-3: steps of a draft that are trained.")] = 4,
    input_noise: Annotated[float, typer.Option(help="hydra, hydra++: strength of noise (NEFTune's alpha).")] = 0.0,
    from_layers: Annotated[
        str, typer.Option(metavar="N,N,..", help="draft_model: layers of the target that its own begin as.")
    ] = "",
    hidden_size: Annotated[int, typer.Option(help="draft_model: width of these; 0 is the target's.")] = 0,
    own_embeddings: Annotated[
        bool, typer.Option("--own-embeddings", help="draft_model: train embeddings too, instead of using the target's.")
    ] = False,
    start: Annotated[Path | None, typer.Option(metavar="DIR", help="draft_model: go on from this drafter.")] = None,
    total_variation: Annotated[
        float, typer.Option(metavar="SHARE", help="draft_model: of the loss; the rest is forward KL.")
    ] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Of answers that are made here.")] = 256,
    held_out: Annotated[int, typer.Option(metavar="N", help="One prompt in N is measured with, not trained on.")] = 64,
    evaluate_tokens: Annotated[int, typer.Option(help="Answer tokens between measurements of tau.")] = 100_000,
    patience: Annotated[int, typer.Option(help="Measurements without a better tau that end training; 0: none.")] = 5,
    features: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the target's features here; trainings may share them.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts are texts to go on with: no chat template.")] = False,
    seed: Annotated[int, typer.Option(help="Of the drafter, the order of examples, and answers.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try a few answers and two steps, say memory and time, stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for a target, and measure how many of its tokens the target takes.

    Answers of prompts that have none are made by the target. Interrupted at any moment, the same command goes on. The
    folder can be named as --draft-model afterwards.
    """
    with exit_codes(), ExitStack() as stack:
        from foredraft.train.draft_model import SmallPlan
        from foredraft.train.plan import Plan
        from foredraft.train.run import Training

        plan = Plan(
            method=method, out=out, prompts=prompts, own_prompts=own_prompts, epochs=epochs, batch_tokens=batch_tokens,
            forward_tokens=forward_tokens, learning_rate=learning_rate, draft_vocabulary=draft_vocabulary_size,
            num_heads=num_heads, num_steps=unrolled_steps, one_in=held_out, evaluate_tokens=evaluate_tokens,
            patience=patience, features=features, raw=raw, num_layers=num_layers, intermediate_size=intermediate_size,
            input_noise=input_noise,
            small=SmallPlan(
                from_layers=numbers("from-layers", from_layers, int), hidden_size=hidden_size,
                own_embeddings=own_embeddings, start=start, total_variation=total_variation,
            ),
            max_answer_tokens=max_new_tokens, seed=seed,
        )  # fmt: skip
        plan.check()
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(out / ".running"))
        llm = load_llm(choose_model(target), "none", **vars(loading), **vars(rows))
        console = Console(stderr=True)
        run = Training(llm, plan, lambda text: console.print(f"foredraft: {text}", highlight=False), is_trial=dry_run)
        if dry_run:
            _say_estimate(run, as_json)
            return
        _train(run, console, as_json)


def _say_estimate(run: Training, as_json: bool) -> None:
    found = run.estimate()
    if as_json:
        put_json(vars(found))
        return
    answers = f"{found.answer_seconds / 60:.1f} min for answers that are still to be made, "
    typer.echo(
        f"{found.num_examples:,} examples, {found.num_tokens:,} answer tokens; a drafter of "
        f"{found.num_parameters / 1e6:.1f} M parameters\n"
        f"memory beside the target: {found.memory_bytes / 1e6:,.0f} MB; kept features would take "
        f"{found.feature_bytes / 1e9:.2f} GB\n"
        f"time: about {answers if found.answer_seconds else ''}{found.seconds / 60:.1f} min of training, "
        "measurements not counted"
    )


def _train(run: Training, console: Console, as_json: bool) -> None:
    total = run.trainer.schedule.num_tokens
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tau: float | None = None
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=total)
        for record in run.train():
            shown = f"loss {record['loss']:.2f}, first token {record['accuracies'][0]:.0%}"
            progress.update(task, completed=record["num_tokens"], description=shown)
            if "tau" in record:
                tau = record["tau"]
                _say_measured(record, as_json, total)
    if tau is None:
        console.print("foredraft: this run has ended before; give another --out, or more --epochs", highlight=False)


def _say_measured(record: dict[str, Any], as_json: bool, total: int) -> None:
    if as_json:
        put_json(record)
        return
    positions = " ".join(f"{share:.0%}" for share in record["by_position"])
    typer.echo(
        f"{record['num_tokens']:>10,} of {total:,} tokens: {record['tau']:.2f} tokens per step, accepted by position "
        f"{positions}"
    )
