"""What this machine has for the library, and what is missing: ``foretoken info`` without a model."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

EXTRAS = {
    "serve": ("fastapi", "foretoken serve"),
    "gguf": ("gguf", "GGUF files"),
    "structured": ("llguidance", "structured output"),
    "datastore": ("pydivsufsort", "large datastores of rest"),
    "tune": ("optuna", "foretoken tune layer-skip"),
    "plot": ("matplotlib", "pictures"),
    "ray": ("ray", "replicas"),
}
"""Of the package: a module that each brings, and what it is for."""

OR_WHEEL = "or install the wheel for this platform, which has them compiled"
UNTIL_MODEL = "what a model's text keeps is said with it: foretoken info MODEL"


def machine_report() -> dict[str, Any]:
    """Everything that is told, as plain data. Kernels are compiled where they are not yet, as a model would."""
    import torch

    from foretoken import zoo
    from foretoken.bench.provenance import provenance
    from foretoken.folders import CACHE_VARIABLE, cache_folder
    from foretoken.loading.packed_copy import kept_files
    from foretoken.machine import available_memory_bytes, cpu_name, cpu_quota, num_cpus
    from foretoken.model.promise import Promise
    from foretoken.native.build import cpp_compiler, instruction_set, why_not_precompiled
    from foretoken.native.library import library

    instructions, compiler, kernels = instruction_set(), cpp_compiler(), library()
    folder = cache_folder()
    missing = []
    if kernels is None:
        if instructions is None:
            why = "this processor has none of AVX2, AVX-512 and AMX, or the environment holds torch to less"
            remedy = "unset ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA, or use a CPU that has them"
        else:
            wheel = why_not_precompiled(instructions) or "those of the wheel cannot be loaded here"
            if compiler is None:
                why, remedy = "there is no C++ compiler", f"install g++ or clang++, or set CXX to one, {OR_WHEEL}"
            else:
                why = f"{' '.join(compiler)} does not build them"
                remedy = f"install a newer g++ or clang++, or set CXX, {OR_WHEEL}"
            why = f"{why}, and of precompiled ones: {wheel}"
        missing.append({"what": "kernels", "why": why, "remedy": remedy})
    elif compiler is None:
        why = "layers of large models are not compiled for long prompts, which are read more slowly"
        missing.append({"what": "compiler", "why": why, "remedy": "install g++ or clang++, or set CXX to one"})
    if not _is_writable(folder):
        remedy = f"set {CACHE_VARIABLE} to a folder that can be written"
        missing.append({"what": "cache", "why": f"{folder} cannot be written", "remedy": remedy})
    for name in zoo.names():
        if reason := zoo.why_missing(name):
            missing.append({"what": name, "why": "a model of the zoo that is not installed", "remedy": reason})
    for extra, (module, use) in EXTRAS.items():
        if find_spec(module) is None:
            missing.append({"what": extra, "why": use, "remedy": f"python -m pip install 'foretoken[{extra}]'"})
    reason = "" if kernels is not None else "the library's own kernels are missing"
    promise = Promise("native" if kernels is not None else "near-ties", reason)
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
        "promise": promise.as_dict(),
        "default_model": zoo.default(),
        "cache": {
            "folder": str(folder),
            "bytes": {one.name: _size(one) for one in sorted(folder.glob("*")) if one.is_dir()},
            "packed_copies": [asdict(one) for one in kept_files()],
            "free_bytes": shutil.disk_usage(_existing(folder)).free,
        },
        "missing": missing,
    }


def show_machine(report: dict[str, Any]) -> None:
    """The report for people."""
    from foretoken.model.promise import Promise

    console, machine, cache = Console(highlight=False), report["machine"], report["cache"]
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("machine", f"{machine['cpu']}, {machine['instruction_set'] or 'no instruction set of the kernels'}")
    quota = "" if machine["cpu_quota"] is None else f", {machine['cpu_quota']:g} of their time"
    memory = machine["available_memory_bytes"]
    room = "" if memory is None else f"; {memory / 1e9:.1f} GB of memory are free"
    facts.add_row("", f"{machine['num_cpus']} processors{quota}, {machine['num_threads']} threads{room}")
    for gpu in machine["gpus"]:
        facts.add_row("GPU", gpu)
    facts.add_row("versions", ", ".join(f"{name} {number}" for name, number in report["versions"].items()))
    facts.add_row("compiler", " ".join(report["compiler"] or ["none"]))
    facts.add_row("kernels", _kernels(report))
    promise = Promise(report["promise"]["kind"], report["promise"]["reason"])
    facts.add_row("promise", f"{promise.describe()}, at best; {UNTIL_MODEL}")
    facts.add_row("model", f"{report['default_model']}, where none is named")
    sizes = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in cache["bytes"].items()) or "empty"
    facts.add_row("cache", f"{cache['folder']}: {sizes}; {cache['free_bytes'] / 1e9:.1f} GB are free there")
    console.print(facts)
    for copy in cache["packed_copies"]:
        told = f"{copy['file']} ({copy['num_bytes'] / 1e6:.1f} MB, {copy['settings'] or 'settings unknown'})"
        unused = f"; delete it: {copy['why_unused']}" if copy["why_unused"] else ""
        console.print(escape(f"packed copy {told}{unused}"), soft_wrap=True)
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
    """Which are taken, where they come from, and where else they would have."""
    if report["kernels_from"] == "wheel":
        return f"{report['kernels']}, precompiled in the wheel, which come before any compiled here"
    if report["kernels_from"] == "compiler":
        return f"{report['kernels']}, compiled on this machine; of precompiled ones: {report['precompiled']}"
    return "none of the library's own"


def _is_writable(folder: Path) -> bool:
    return os.access(_existing(folder), os.W_OK)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _size(folder: Path) -> int:
    """Bytes of the files below; those that go away meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
