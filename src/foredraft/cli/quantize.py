"""``foredraft quantize``: a model with weights of 8 or 4 bits, written once."""

from __future__ import annotations

from typing import Annotated

import typer

from foredraft.cli.options import TargetOptions, takes_groups
from foredraft.cli.running import exit_codes, load_llm, say
from foredraft.folders import check_new_folder


@takes_groups
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a hub id or zoo:NAME.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new one, for what is written.")],
    quantization: Annotated[str, typer.Option(metavar="int8|int4", help="Bits of linear layers.")] = "int8",
    *,
    loading: Annotated[TargetOptions, "dtype"],
) -> None:
    """Write a model with its linear layers rounded to 8 or 4 bits, in the layout of compressed-tensors."""
    with exit_codes():
        check_new_folder(folder)
        llm = load_llm(model, "none", dtype=loading.dtype, quantization=quantization, device="cpu")
        llm.save_quantized(folder)
        say(f"{folder} holds {model} in {quantization}; load it by this name")
