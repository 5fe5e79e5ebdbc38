"""Heads of EAGLE that their authors have published, by the sizes of the targets that they are for.

Provenance: the README of SafeAILab/EAGLE (2026-02-19). Other targets have the same sizes: a head fits its own only.
"""

from __future__ import annotations

PUBLISHED_EAGLE: dict[tuple[int, int, int], dict[int, tuple[str, ...]]] = {
    (4096, 32, 32000): {1: ("yuhuili/EAGLE-Vicuna-7B-v1.3", "yuhuili/EAGLE-llama2-chat-7B")},
    (5120, 40, 32000): {
        1: ("yuhuili/EAGLE-Vicuna-13B-v1.3", "yuhuili/EAGLE-llama2-chat-13B"),
        3: ("yuhuili/EAGLE3-Vicuna1.3-13B",),
    },
    (8192, 80, 32000): {1: ("yuhuili/EAGLE-llama2-chat-70B",)},
    (4096, 32, 128256): {
        1: ("yuhuili/EAGLE-LLaMA3-Instruct-8B",),
        3: ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
    },
    (8192, 80, 128256): {
        1: ("yuhuili/EAGLE-LLaMA3-Instruct-70B",),
        3: ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",),
    },
}
"""(hidden size, layers, vocabulary) -> generation -> hub ids."""


def published_eagle(hidden_size: int, num_layers: int, vocab_size: int, generation: int) -> tuple[str, ...]:
    """Hub ids of published heads for targets of this size."""
    return PUBLISHED_EAGLE.get((hidden_size, num_layers, vocab_size), {}).get(generation, ())
