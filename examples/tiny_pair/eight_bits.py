"""Halve the size of heads: round weights that were trained in bfloat16 to eight bits (float8_e4m3fn)."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from foredraft.heads.checkpoint import read_checkpoint, write_checkpoint


def rounded(tensor: Tensor) -> Tensor:
    """Matrices in eight bits; vectors are few, and what is not a weight is no fraction."""
    return tensor.to(torch.float8_e4m3fn) if tensor.ndim == 2 and tensor.is_floating_point() else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=Path, required=True, help="folder that foredraft train wrote")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = read_checkpoint(options.heads)
    write_checkpoint(options.out, found.config, {name: rounded(tensor) for name, tensor in found.tensors.items()})


if __name__ == "__main__":
    main()
