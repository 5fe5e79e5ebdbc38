"""The checks that every drafter has to pass, and small models to run them on.

`check_drafter` corresponds to scikit-learn's ``check_estimator``: a drafter that passes it can be used with every
sampling setting, batch and draft length.
"""

from __future__ import annotations

from foredraft.testing.conformance import (
    GREEDY,
    PENALISED,
    PROMPTS,
    SAMPLED,
    MakeDrafter,
    Shown,
    Trace,
    check_abort,
    check_cache_lengths,
    check_drafter,
    check_endings,
    check_governed,
    check_identity,
    check_no_state,
    check_rows_come_and_go,
    check_samples,
    check_single_rows,
    compare,
    cut_after,
    decode,
    governed,
    require,
    ungoverned,
)
from foredraft.testing.divergence import Divergence, divergences, token_gap
from foredraft.testing.hostile import hostile_kernels
from foredraft.testing.inflation import inflate
from foredraft.testing.toys import PerfectDrafter, WrongDrafter, perturbed, reference_node_logits, strengthen, toy_model

__all__ = [
    "GREEDY",
    "PENALISED",
    "PROMPTS",
    "SAMPLED",
    "Divergence",
    "MakeDrafter",
    "PerfectDrafter",
    "Shown",
    "Trace",
    "WrongDrafter",
    "check_abort",
    "check_cache_lengths",
    "check_drafter",
    "check_endings",
    "check_governed",
    "check_identity",
    "check_no_state",
    "check_rows_come_and_go",
    "check_samples",
    "check_single_rows",
    "compare",
    "cut_after",
    "decode",
    "divergences",
    "governed",
    "hostile_kernels",
    "inflate",
    "perturbed",
    "reference_node_logits",
    "require",
    "strengthen",
    "token_gap",
    "toy_model",
    "ungoverned",
]
