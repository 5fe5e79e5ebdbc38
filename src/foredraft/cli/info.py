"""``foredraft info``: facts, cost and methods of a model. Without a model, facts of this machine and what is
missing."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from foredraft.cli.options import AsJson, DraftingOptions, Loading, LoadingOptions, ModelChoice, takes_groups
from foredraft.cli.running import exit_codes, load_llm, put_json, show_loading
from foredraft.config.speculative import method_named
from foredraft.extras import install_command
from foredraft.methods import key_entries, methods

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.model.lm import CausalLM


LENGTHS = {
    "governed": "the length of every draft is chosen from measured costs",
    "fixed": "drafts always have the full length",
}
TIMING = (
    "tokens of nearly equal probability may differ between runs, because measured times decide draft lengths; "
    "length_policy='fixed' avoids that"
)
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
CONTEXT, REPEATS = 256, 15
MACHINE = (ModelChoice(), DraftingOptions(), LoadingOptions(), CONTEXT, REPEATS)
"""Arguments that show the machine."""


@takes_groups
def info(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model, as in --model.", show_default=False)
    ] = None,
    *,
    model: ModelChoice,
    drafting: DraftingOptions,
    loading: Loading,
    context: Annotated[int, typer.Option(help="Tokens in the cache when a step is timed.", min=1)] = CONTEXT,
    repeats: Annotated[int, typer.Option(hidden=True, help="Timings per draft size.", min=1)] = REPEATS,
    keys: Annotated[
        bool, typer.Option("--keys", help="List the methods and their keys, or the keys of --method.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a model, the methods that work with it and their cost, or this machine.

    Without any option: processor, compiler, kernels, caches, and what is missing.

    Examples:
      foredraft info
      foredraft info zoo:smollm2
      foredraft info --keys --method suffix
    """
    with exit_codes():
        if keys and target is not None:
            raise typer.BadParameter(f"--keys needs no model; leave out {target!r}, or give a method with --method")
        model = model.named(target)
        if keys:
            show_keys(None if drafting.method is None else method_named(drafting.method).name, as_json)
            return
        if (model, drafting, loading, context, repeats) == MACHINE:
            found = machine_report()
            if as_json:
                put_json(found)
            else:
                show_machine(found)
            return
        name = model.chosen()
        show_loading(name)
        llm = load_llm(name, drafting.config(), gguf_file=model.gguf_file, **vars(loading))
        report = {**describe(llm, context, repeats), "notes": _notes(name)}
        if as_json:
            put_json(report)
        else:
            show(report)


def show_keys(method: str | None, as_json: bool) -> None:
    """Print the keys of a speculative config."""
    entries = key_entries(method)
    if as_json:
        for entry in entries:
            put_json(entry.as_dict())
        return
    console = Console(highlight=False)
    for name, definition in methods().items():
        if method in (None, name):
            console.print(f"{name} drafts {definition.summary}", soft_wrap=True)
    for entry in entries:
        owners = "" if method is not None else f" [dim]({', '.join(entry.defaults)})[/dim]"
        console.print(f"\n[bold]{entry.name}[/bold]{owners}")
        default = f"; default {entry.default}" if entry.default else ""
        console.print(Padding(f"{entry.values}{default}\n{escape(entry.help)}", (0, 0, 0, 4)))


def _notes(model: str) -> list[str]:
    """Notes on the figures of a zoo model."""
    from foredraft import zoo
    from foredraft.loading.models import is_zoo

    return list(zoo.manifest(model).notes) if is_zoo(model) else []


def describe(llm: LLM, context: int, repeats: int) -> dict[str, Any]:
    """Facts of a model as plain data."""
    from foredraft.engine.costs import forward_curve

    target = llm.target
    curve = forward_curve(target, WIDTHS, context, repeats)
    seconds = curve.seconds
    report: dict[str, Any] = {
        "model": asdict(llm.model_info),
        "probe": "trees and chains" if target.supports_trees else "chains only",
        "probe_report": None if target.probe is None else target.probe.as_dict(),
        "guarantee": llm.guarantee.as_dict(),
        "method": llm.speculative_config.title,
        "length_policy": llm.speculative_config.length_policy,
        "varies_with_time": varies_with_time(llm),
        "num_speculative_tokens": llm.speculative_config.num_speculative_tokens,
        "context_tokens": curve.context,
        "step_seconds": {str(width): seconds[width] for width in seconds},
        "step_cost": {str(width): seconds[width] / seconds[1] for width in seconds},
        "peak_memory_bytes": peak_memory(target),
        "methods": [
            {"method": name, "applies": reason is None, "reason": reason} for name, reason in llm.applicable_methods()
        ],
        "drafter": None,
        "heads": list(llm.drafting.heads),
    }
    drafting = llm.drafting
    if drafting.model is not None and drafting.info is not None:
        step = forward_curve(drafting.model, (1,), curve.context, repeats).seconds[1]
        report["drafter"] = {
            **asdict(drafting.info),
            "tokenizer": "same as the target's" if llm.tokenizer is not None else "same vocabulary size",
            "step_seconds": step,
            "cost": step / seconds[1],
        }
    return report


def varies_with_time(llm: LLM) -> bool:
    """Whether measured times may change tokens of nearly equal probability, since they decide draft sizes."""
    return llm.speculative_config.is_governed and not llm.guarantee.keeps_bits


def peak_memory(lm: CausalLM) -> int:
    """Peak memory of the process, or of the allocator on a GPU, in bytes."""
    if lm.device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(lm.device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    console = Console(highlight=False)
    model, drafter = report["model"], report["drafter"]
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("model", f"{model['name']} ({model['architecture']})")
    facts.add_row("parameters", f"{model['num_parameters'] / 1e6:.2f} M, {model['weight_bytes'] / 1e6:.1f} MB")
    facts.add_row("runs", f"{model['dtype']} on {model['device']}, {model['execution']}")
    if model["kv_cache_dtype"] != model["dtype"]:
        facts.add_row("", f"keys and values in {model['kv_cache_dtype']}")
    if model["quantization"] is not None:
        bits, size = model["bits_per_weight"], model["step_bytes"] / 1e6
        name = f"{model['quantization']} ({model['weight_types']})" if model["weight_types"] else model["quantization"]
        facts.add_row("weights", f"{name}, {bits:.2f} bits per weight; a step reads {size:.1f} MB")
    if model["activations"] is not None:
        facts.add_row("", f"{model['activations']} activations")
    facts.add_row("vocabulary", f"{model['vocab_size']:,} ids, context {_count(model['context_length'])}")
    facts.add_row("tested", f"drafts as {report['probe']} are verified exactly")
    facts.add_row("memory", f"{report['peak_memory_bytes'] / 1e6:.0f} MB peak")
    facts.add_row("method", f"{report['method']}, drafts of up to {report['num_speculative_tokens']} tokens")
    if report["length_policy"] is not None:
        facts.add_row("", LENGTHS.get(report["length_policy"], report["length_policy"]))
    if report["varies_with_time"]:
        facts.add_row("", TIMING)
    if drafter is not None:
        facts.add_row("drafter", f"{drafter['name']}, {drafter['num_parameters'] / 1e6:.2f} M parameters")
        facts.add_row("", f"tokenizer: {drafter['tokenizer']}; a step costs {drafter['cost']:.3f} steps of the target")
    for head in report["heads"]:
        facts.add_row("head", head)
    for note in report["notes"]:
        facts.add_row("note", note)
    console.print(facts)
    show_guarantee(console, report["guarantee"])
    if report["probe_report"] is not None:
        show_probe(console, report["probe_report"])
    console.print(f"\ncost of a forward pass over k tokens, with {report['context_tokens']} tokens in the cache")
    curve = Table()
    curve.add_column("k", justify="right")
    curve.add_column("ms", justify="right")
    curve.add_column("T(k)/T(1)", justify="right")
    for width, cost in report["step_cost"].items():
        curve.add_row(width, f"{report['step_seconds'][width] * 1e3:.2f}", f"{cost:.2f}")
    console.print(curve)
    show_methods(console, report["methods"])


def _count(number: int | None) -> str:
    return "not stated" if number is None else f"{number:,}"


def show_guarantee(console: Console, guarantee: dict[str, Any]) -> None:
    """Print the guarantee for the output."""
    from foredraft.config.engine import Guarantee

    console.print(f"guarantee: {Guarantee(guarantee['kind'], guarantee['reason']).describe()}")


def show_probe(console: Console, probe: dict[str, Any]) -> None:
    """Print the test made when the model was loaded: errors relative to plain forward passes, and their limits."""
    cost = f"{probe['num_forwards']} forward passes in {probe['seconds']:.1f} s"
    table = Table(title=f"test on loading: errors relative to plain forward passes, {cost}")
    table.add_column("check")
    for column in ("error", "rounding", "a fault", "allowed"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for check in probe["checks"]:
        error = "infinite" if check["error"] is None else f"{check['error']:.1e}"
        numbers = (f"{check[name]:.1e}" for name in ("noise", "control", "bound"))
        table.add_row(check["name"], error, *numbers, check["verdict"])
    console.print(table)
    if probe["invisible"]:
        console.print(f"this model cannot show wrong {' and '.join(probe['invisible'])}")


def show_methods(console: Console, methods: list[dict[str, Any]]) -> None:
    """Print the methods that work with the model, and why others do not."""
    applying = [entry["method"] for entry in methods if entry["applies"]]
    console.print(f"methods that work with this model: {', '.join(applying)}")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for entry in methods:
        if not entry["applies"]:
            table.add_row(f"not {entry['method']}", Text(entry["reason"]))
    if table.row_count:
        console.print(table)


EXTRAS = {
    "serve": ("fastapi", "foredraft serve"),
    "gguf": ("gguf", "GGUF files"),
    "structured": ("llguidance", "structured output"),
    "datastore": ("pydivsufsort", "large datastores of rest"),
    "tune": ("optuna", "foredraft tune layer-skip"),
    "plot": ("matplotlib", "pictures"),
    "ray": ("ray", "replicas"),
}
"""Extras of the package: a module and the purpose of each."""

OR_WHEEL = "or install the wheel for this platform, which includes compiled kernels"
UNTIL_MODEL = "foredraft info MODEL shows the guarantee for a model"


def machine_report() -> dict[str, Any]:
    """Facts of the machine as plain data. Kernels that are not compiled yet are compiled."""
    import torch

    from foredraft import zoo
    from foredraft.bench.provenance import provenance
    from foredraft.config.engine import Guarantee
    from foredraft.folders import CACHE_VARIABLE, cache_folder
    from foredraft.machine import available_memory_bytes, cpu_name, cpu_quota, num_cpus
    from foredraft.native.build import cpp_compiler, instruction_set, why_not_precompiled
    from foredraft.native.library import library

    instructions, compiler, kernels = instruction_set(), cpp_compiler(), library()
    folder = cache_folder()
    missing = []
    if kernels is None:
        if instructions is None:
            why = "this processor has none of AVX2, AVX-512 and AMX, or the environment turns them off for torch"
            remedy = "unset ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA, or use a CPU that has them"
        else:
            wheel = why_not_precompiled(instructions) or "those of the wheel cannot be loaded"
            if compiler is None:
                why, remedy = "there is no C++ compiler", f"install g++ or clang++, or set CXX to one, {OR_WHEEL}"
            else:
                why = f"{' '.join(compiler)} cannot compile them"
                remedy = f"install a newer g++ or clang++, or set CXX, {OR_WHEEL}"
            why = f"{why}; precompiled kernels: {wheel}"
        missing.append({"what": "kernels", "why": why, "remedy": remedy})
    elif compiler is None:
        why = "without one, large models read long prompts more slowly"
        missing.append({"what": "compiler", "why": why, "remedy": "install g++ or clang++, or set CXX to one"})
    if not _is_writable(folder):
        remedy = f"set {CACHE_VARIABLE} to a writable folder"
        missing.append({"what": "cache", "why": f"{folder} cannot be written", "remedy": remedy})
    for name in zoo.names():
        if reason := zoo.why_missing(name):
            missing.append({"what": name, "why": "a model of the zoo that is not installed", "remedy": reason})
    for extra, (module, use) in EXTRAS.items():
        if find_spec(module) is None:
            missing.append({"what": extra, "why": use, "remedy": install_command(extra)})
    reason = "" if kernels is not None else "foredraft's own kernels are missing"
    guarantee = Guarantee("bit-identical" if kernels is not None else "up to rounding", reason)
    return {
        "machine": {
            "cpu": cpu_name(),
            "instruction_set": instructions,
            "num_cpus": num_cpus(),
            "cpu_quota": cpu_quota(),
            "num_threads": torch.get_num_threads(),
            "available_memory_bytes": available_memory_bytes(),
            "gpus": [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())],
        },
        "versions": provenance()["versions"],
        "compiler": compiler,
        "kernels": None if kernels is None else kernels.instruction_set,
        "kernels_from": None if kernels is None else kernels.origin,
        "precompiled": None if instructions is None else why_not_precompiled(instructions) or "whole",
        "guarantee": guarantee.as_dict(),
        "default_model": zoo.default(),
        "cache": {
            "folder": str(folder),
            "bytes": {one.name: _size(one) for one in sorted(folder.glob("*")) if one.is_dir()},
            "free_bytes": shutil.disk_usage(_existing(folder)).free,
        },
        "missing": missing,
    }


def show_machine(report: dict[str, Any]) -> None:
    """Print the report."""
    from foredraft.config.engine import Guarantee

    console, machine, cache = Console(highlight=False), report["machine"], report["cache"]
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row(
        "machine",
        f"{machine['cpu']}, {machine['instruction_set'] or 'without an instruction set that the kernels need'}",
    )
    quota = "" if machine["cpu_quota"] is None else f", quota of {machine['cpu_quota']:g}"
    memory = machine["available_memory_bytes"]
    room = "" if memory is None else f"; {memory / 1e9:.1f} GB of memory available"
    facts.add_row("", f"{machine['num_cpus']} processors{quota}, {machine['num_threads']} threads{room}")
    for gpu in machine["gpus"]:
        facts.add_row("GPU", gpu)
    facts.add_row("versions", ", ".join(f"{name} {number}" for name, number in report["versions"].items()))
    facts.add_row("compiler", " ".join(report["compiler"] or ["none"]))
    facts.add_row("kernels", _kernels(report))
    guarantee = Guarantee(report["guarantee"]["kind"], report["guarantee"]["reason"])
    facts.add_row("guarantee", f"{guarantee.describe()}, at best; {UNTIL_MODEL}")
    facts.add_row("model", f"{report['default_model']} by default")
    sizes = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in cache["bytes"].items()) or "empty"
    facts.add_row("cache", f"{cache['folder']}: {sizes}; {cache['free_bytes'] / 1e9:.1f} GB free")
    console.print(facts)
    if not report["missing"]:
        console.print("nothing is missing")
        return
    table = Table(title="missing", title_justify="left")
    for column in ("what", "why", "remedy"):
        table.add_column(column, overflow="fold")
    for one in report["missing"]:
        table.add_row(*(escape(one[column]) for column in ("what", "why", "remedy")))
    console.print(table)


def _kernels(report: dict[str, Any]) -> str:
    """Kernels in use and their origin."""
    if report["kernels_from"] == "wheel":
        return f"{report['kernels']}, precompiled in the wheel"
    if report["kernels_from"] == "compiler":
        return f"{report['kernels']}, compiled on this machine; precompiled kernels: {report['precompiled']}"
    return "none of foredraft's own"


def _is_writable(folder: Path) -> bool:
    return os.access(_existing(folder), os.W_OK)


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _size(folder: Path) -> int:
    """Bytes of the files below a folder. Files that are removed meanwhile are not counted."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
