"""Environments for the other engines of benchmarks/race.py, from wheels alone.

    python benchmarks/build_peers.py [openvino] [llamacpp] [--envs runs/envs]

Every engine gets a virtual environment of its own, ENVS/openvino (1.7 GB) and ENVS/llamacpp (0.2 GB), beside this
library's. One that is there already stays as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "openvino": ["torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"],
    "llamacpp": ["xllamacpp==2026.10.11549", "gguf==0.19.0", "safetensors", "numpy"],
}
UNWANTED = {"openvino": ["torchvision"], "llamacpp": []}
"""optimum brings torchvision, whose build for another torch breaks its export."""
DONE = "built"


def build(name: str, folder: Path) -> None:
    """Make one environment. An unfinished one is completed."""
    if (folder / DONE).exists():
        print(f"{folder} is there")
        return
    print(f"building {folder}", flush=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    torch = [package for package in PACKAGES[name] if package.startswith("torch==")]
    constraints = folder / "constraints.txt"  # else a dependency takes a newer torch and gigabytes beside it
    constraints.write_text("\n".join(torch) + "\n")
    subprocess.run([*pip, "install", "--only-binary", ":all:", "-c", str(constraints), *PACKAGES[name]], check=True)
    for package in UNWANTED[name]:
        subprocess.run([*pip, "uninstall", "--yes", package], check=True)
    (folder / DONE).write_text("\n".join(PACKAGES[name]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", choices=[*PACKAGES, []], help="all by default")
    parser.add_argument("--envs", type=Path, default=ROOT / "runs" / "envs")
    options = parser.parse_args()
    for name in options.engines or list(PACKAGES):
        build(name, options.envs / name)
    print(
        f"run: {sys.executable} benchmarks/race.py zoo:smollm2 --dtype bfloat16 --envs {options.envs} --out race.json"
    )


if __name__ == "__main__":
    main()
