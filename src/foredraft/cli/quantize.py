"""``foredraft quantize``: a copy of a model with weights of 8 or 4 bits."""

from __future__ import annotations

from typing import Annotated

import typer

from foredraft.cli.options import TargetOptions, takes_groups
from foredraft.cli.running import exit_codes, load_llm, say, show_loading
from foredraft.folders import check_new_folder


@takes_groups
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub id or zoo:NAME.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="New folder for the result.")],
    quantization: Annotated[
        str, typer.Option(metavar="int8|int4", help="Bits of the weights of linear layers.")
    ] = "int8",
    *,
    loading: Annotated[TargetOptions, "dtype"],
) -> None:
    """Write a model with its linear layers rounded to 8 or 4 bits.

    The result has the format of compressed-tensors. foredraft, vLLM and transformers load it.

    Examples:
      foredraft quantize path/to/model path/to/model-int8
      foredraft quantize zoo:smollm2 smollm2-int4 --quantization int4
    """
    with exit_codes():
        check_new_folder(folder)
        show_loading(model)
        llm = load_llm(model, "none", dtype=loading.dtype, quantization=quantization, device="cpu")
        llm.save_quantized(folder)
        say(f"wrote {model} in {quantization} to {folder}; use it with --model {folder}")
