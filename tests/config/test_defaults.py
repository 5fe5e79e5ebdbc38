"""A drafter that is made by hand has the defaults of its method's options."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from foredraft.drafters.parts.growth import Growth
from foredraft.engine.drafter import Drafter
from foredraft.methods import Method, methods
from foredraft.methods.growth import GrowthOptions
from foredraft.retrieval.datastore import Lookup
from foredraft.retrieval.history import OutputHistory

OPTION_OF = {
    "max_nodes": ("max_draft_nodes",),
    "num_branches": ("num_draft_branches",),
    "group_size": ("quantization_group_size",),
    "with_head": ("quantize_head",),
    "min_expected": ("min_expected_tokens",),
    "beam_width": ("draft_beam_width",),
    "reranks": ("draft_rerank",),
    "sharpness": ("draft_sharpness",),
    "sample_method": ("draft_sample_method",),
    "acceptance": ("rejection_sample_method",),
    "match_min": ("retrieval_match_min",),
    "match_max": ("retrieval_match_max",),
    "max_hits": ("retrieval_max_hits",),
    "depth": ("num_speculative_tokens",),
    "max_depth": ("suffix_decoding_max_tree_depth",),
    "max_outputs": ("suffix_decoding_max_cached_requests",),
    "name": ("method",),
}
"""Arguments of classes -> keys of the same meaning, where they are not called the same."""

OF_THEIR_OWN = {
    "options": "the keys themselves",
    "length_policy": "an object, which the options name",
    "policy": "an object, which the options name",
    "layer_set": "an object, which the options name",
    "view": "an object, which the options name",
    "matrix": "what the zoo brings",
    "vocabulary": "of the head",
    "history": "made of the options",
    "start": "made of the options",
    "learned": "made of the options",
    "vocab_size": "of the target",
    "UnionDrafter.ways": "of auto",
    "UnionDrafter.arm": "of auto",
    "UnionDrafter.enough": "of auto",
    "Growth.least_mass": "no key",
    "Growth.tree": "of heads, which always give one",
    "Growth.max_depth": "of heads, which always give one",
    "SwiftDrafter.num_scored": "no key",
    "SwiftDrafter.seed": "no key",
    "Lookup.few_hits": "no key",
    "OutputHistory.fingerprint": "of the tokenizer",
}
"""Arguments that no key has the default of, and why."""


OF_A_SHARED_CLASS = ("quantized_self", "sparse_kv")
"""Methods that are one use of a class of `parts`, which has no defaults of theirs."""


def made_by(method: Method) -> list[Any]:
    """The drafters in the file that builds those of a method, and the functions that make one.

    Where the file builds several methods, those that are called as its builder.
    """
    module_name, _, builder = method.build.partition(":")
    module = importlib.import_module(module_name)
    found = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
        and (name.endswith("_drafter") or (inspect.isclass(value) and issubclass(value, Drafter)))
    }
    own = f"{builder.title()}Drafter", f"{builder}_drafter"
    return [value for name, value in found.items() if name in own] or list(found.values())


def disagreements(made: Any, options: type[Any]) -> Iterator[str]:
    """Arguments of a class or a function whose default is not that of the key of the same meaning."""
    keys = {field.name: field.default for field in dataclasses.fields(options)}
    keys["method"] = getattr(options, "method", None)
    for name, argument in inspect.signature(made).parameters.items():
        place = f"{made.__name__}.{name}"
        if argument.default is inspect.Parameter.empty or name in OF_THEIR_OWN or place in OF_THEIR_OWN:
            continue
        key = next((key for key in (name, *OPTION_OF.get(name, ())) if key in keys), None)
        if key is None:
            yield f"{place} has no key in {options.__name__}"
        elif argument.default != keys[key]:
            yield f"{place} is {argument.default!r}, and {key} {keys[key]!r}"


@pytest.mark.parametrize("name", sorted(methods()))
def test_drafters_have_the_defaults_of_their_options(name: str) -> None:
    found = made_by(methods()[name])
    assert bool(found) == (name not in OF_A_SHARED_CLASS)
    assert [place for made in found for place in disagreements(made, methods()[name].options)] == []


def test_components_have_the_defaults_of_the_options_that_make_them() -> None:
    assert list(disagreements(Growth, GrowthOptions)) == []
    assert list(disagreements(Lookup, methods()["rest"].options)) == []
    assert list(disagreements(OutputHistory, methods()["suffix"].options)) == []


def test_a_default_of_its_own_is_noticed() -> None:
    class Other:
        def __init__(self, num_speculative_tokens: int = 3, unheard_of: int = 1) -> None:
            """Of other defaults."""

    assert list(disagreements(Other, methods()["ngram"].options)) == [
        "Other.num_speculative_tokens is 3, and num_speculative_tokens 10",
        "Other.unheard_of has no key in NGramOptions",
    ]
