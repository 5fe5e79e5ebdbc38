"""``foredraft train``: training of a drafter for a target, with measurements of its tokens per step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from foredraft.cli.options import AsJson, EngineOptions, Loading, numbers, takes_groups
from foredraft.cli.running import choose_model, exit_codes, load_llm, put_json, show_loading, writing
from foredraft.folders import only_user

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
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the drafter and the state of training.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--model",
            "-m",
            metavar="MODEL",
            help="The target. Default: zoo:smollm2 if it is installed, else zoo:tiny.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE|DIR",
            help="JSONL with prompt, text or turns, and optional answer; .xz too; or .txt.",
        ),
    ] = None,
    own_prompts: Annotated[
        int, typer.Option("--own-prompts", metavar="N", help="Prompts to generate with the target (chat models).")
    ] = 0,
    epochs: Annotated[float, typer.Option(help="Passes over the answers.")] = 1.0,
    batch_tokens: Annotated[int, typer.Option(hidden=True, help="Answer tokens per optimiser step.")] = 1024,
    forward_tokens: Annotated[
        int | None,
        typer.Option(
            hidden=True,
            help="Tokens per forward pass, with padding. Default: one answer on a CPU, 32768 tokens on a GPU.",
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate, after warm-up; then cosine decay.")] = 8e-4,
    draft_vocabulary_size: Annotated[int, typer.Option(help="Number of tokens that can be drafted.")] = 8192,
    num_heads: Annotated[int, typer.Option(hidden=True, help="medusa, hydra: number of heads.")] = 4,
    num_layers: Annotated[
        int | None,
        typer.Option(
            hidden=True,
            help="Layers of the MLP of each head (medusa, hydra: 1; hydra++: 4), or of a new draft_model (4).",
        ),
    ] = None,
    intermediate_size: Annotated[
        int | None,
        typer.Option(hidden=True, help="hydra++, eagle, eagle3: width of the MLP. Default: the target's."),
    ] = None,
    unrolled_steps: Annotated[int, typer.Option(hidden=True, help="eagle3: draft steps that are trained.")] = 4,
    input_noise: Annotated[
        float, typer.Option(hidden=True, help="hydra, hydra++: noise on the inputs (alpha of NEFTune).")
    ] = 0.0,
    from_layers: Annotated[
        str, typer.Option(metavar="N,N,...", hidden=True, help="draft_model: layers of the target to start from.")
    ] = "",
    hidden_size: Annotated[int, typer.Option(hidden=True, help="draft_model: width; 0 is the target's.")] = 0,
    own_embeddings: Annotated[
        bool, typer.Option("--own-embeddings", hidden=True, help="draft_model: train embeddings too.")
    ] = False,
    start: Annotated[
        Path | None, typer.Option(metavar="DIR", hidden=True, help="draft_model: start from this drafter.")
    ] = None,
    total_variation: Annotated[
        float, typer.Option(metavar="SHARE", hidden=True, help="draft_model: share in the loss; the rest is KL.")
    ] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Limit on tokens per generated answer.")] = 256,
    held_out: Annotated[int, typer.Option(metavar="N", help="Use one prompt in N for measurements only.")] = 64,
    evaluate_tokens: Annotated[int, typer.Option(hidden=True, help="Answer tokens between measurements.")] = 100_000,
    patience: Annotated[int, typer.Option(help="Stop after this many measurements without progress; 0: never.")] = 5,
    features: Annotated[
        Path | None,
        typer.Option(metavar="DIR", hidden=True, help="Keep features of the target here, for several trainings."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the chat template.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of initial weights, order and answers.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Estimate memory and time, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for a model.

    Prompts without an answer are answered by the model first. After an interrupt, the same command continues. Use the
    folder as --draft-model afterwards.

    Examples:
      foredraft train eagle3 --target path/to/model --prompts file.jsonl --out head
      foredraft train eagle3 --own-prompts 1000 --out head --dry-run
    """
    with exit_codes(), ExitStack() as stack:
        from foredraft.train.plan import Plan, SmallPlan

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
            stack.enter_context(only_user(out, ".running"))
        name = choose_model(target)
        show_loading(name)
        from foredraft.train.run import Training

        llm = load_llm(name, "none", **vars(loading), **vars(rows))
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
    answers = f"{found.answer_seconds / 60:.1f} min for missing answers, "
    typer.echo(
        f"{found.num_examples:,} examples, {found.num_tokens:,} answer tokens; a drafter of "
        f"{found.num_parameters / 1e6:.1f} M parameters\n"
        f"memory in addition to the target: {found.memory_bytes / 1e6:,.0f} MB; kept features: "
        f"{found.feature_bytes / 1e9:.2f} GB\n"
        f"time: about {answers if found.answer_seconds else ''}{found.seconds / 60:.1f} min of training, "
        "without measurements"
    )


def _train(run: Training, console: Console, as_json: bool) -> None:
    total = run.trainer.schedule.num_tokens
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tau: float | None = None
    is_off = not console.is_terminal
    with Progress(*columns, console=console, disable=is_off, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("training", total=total)
        for record in run.train():
            shown = f"loss {record['loss']:.2f}, first token {record['accuracies'][0]:.0%}"
            done = record["num_tokens"]
            total = max(total, done)  # the last batch is trained whole
            progress.update(task, completed=done, total=total, description=shown)
            if "tau" in record:
                tau = record["tau"]
                progress.stop()  # removes the bar, which is on the line where the result begins
                _say_measured(record, as_json, total)
                progress.start()
    if tau is None:
        console.print("foredraft: this training is complete; give another --out, or more --epochs", highlight=False)


def _say_measured(record: dict[str, Any], as_json: bool, total: int) -> None:
    if as_json:
        put_json(record)
        return
    positions = " ".join(f"{share:.0%}" for share in record["by_position"])
    typer.echo(
        f"{record['num_tokens']:>10,} of {max(total, record['num_tokens']):,} tokens: {record['tau']:.2f} tokens per "
        f"step, accepted by position {positions}"
    )
