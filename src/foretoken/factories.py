"""From a `SpeculativeConfig` to a drafter: one function per method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from foretoken import zoo
from foretoken.drafters.adjacency import AdjacencyMatrix
from foretoken.drafters.base import Drafter
from foretoken.drafters.composition import FirstDrafter, UnionDrafter
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.drafters.jacobi import JacobiDrafter
from foretoken.drafters.layer_skip import LayerSet, LayerSkipDrafter
from foretoken.drafters.lengths import LengthPolicy, make_policy
from foretoken.drafters.lookahead import LookaheadDrafter
from foretoken.drafters.nasd import NasdDrafter
from foretoken.drafters.ngram import NGramDrafter
from foretoken.drafters.none import EmptyDrafter
from foretoken.drafters.quantized_self import QuantizedSelfDrafter
from foretoken.drafters.rest import RestDrafter
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.drafters.swift import SwiftDrafter, SwiftSearch
from foretoken.drafters.token_recycling import TokenRecyclingDrafter
from foretoken.engine.errors import ConfigError
from foretoken.engine.model import CausalLM
from foretoken.engine.quantize import quantizable
from foretoken.engine.sublayers import Sublayers
from foretoken.methods import LENGTH_POLICIES
from foretoken.retrieval.datastore import MAX_DEPTH, Datastore, Lookup
from foretoken.retrieval.history import OutputHistory
from foretoken.retrieval.manifest import fingerprint_of
from foretoken.speculative import SpeculativeConfig

DrafterFactory = Callable[[], Drafter]

RECYCLED_NODES, RECYCLED_NODES_ON_CPU = 80, 16
"""Nodes of the tree of ``token_recycling`` where the config names none: as published, and where every node costs."""


@dataclass(frozen=True)
class Materials:
    """What drafters are made of.

    Args:
      target: of the engine that they will run in.
      draft_model: of the method ``draft_model``.
      tokenizer: of the target, where one is known.
      zoo_name: of a target of the zoo ("zoo:tiny"), which brings along what drafters need.
      kept: what several drafters share and a new one goes on with: opened datastores, histories. Filled on first use.
    """

    target: CausalLM
    draft_model: CausalLM | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    zoo_name: str | None = None
    kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def brings(self, what: str) -> bool:
        """Whether the target is one of the zoo that brings this along."""
        return self.zoo_name is not None and zoo.brings(self.zoo_name, what)

    @property
    def brings_none(self) -> str:
        """For messages about something that is missing."""
        return "" if self.zoo_name is None else f", and {self.zoo_name} brings none along"


def drafter_factory(config: SpeculativeConfig, materials: Materials) -> DrafterFactory:
    """What makes a fresh drafter, as often as one is needed.

    Raises: ConfigError for what the config asks and the materials do not have.
    """
    make = FACTORIES[str(config.method)]
    make(config, materials)  # every refusal now, none later
    return lambda: make(config, materials)


def length_policy(config: SpeculativeConfig, longest: int) -> LengthPolicy:
    """The policy that a config asks for, with the settings it gives, around a longest draft."""
    name = str(config.length_policy)
    given = {argument: getattr(config, key) for key, argument in LENGTH_POLICIES[name].keys.items()}
    return make_policy(name, longest, **{argument: value for argument, value in given.items() if value is not None})


def _none(config: SpeculativeConfig, materials: Materials) -> Drafter:
    return EmptyDrafter()


def _ngram(config: SpeculativeConfig, materials: Materials) -> Drafter:
    return NGramDrafter(
        prompt_lookup_min=_set(config.prompt_lookup_min),
        prompt_lookup_max=_set(config.prompt_lookup_max),
        num_candidates=_set(config.num_prompt_lookup_candidates),
        max_nodes=config.max_draft_nodes,
        length_policy=length_policy(config, _set(config.num_speculative_tokens)),
    )


def _nasd(config: SpeculativeConfig, materials: Materials) -> Drafter:
    return NasdDrafter(
        ngram_size=_set(config.ngram_size),
        filler_top_k=_set(config.filler_top_k),
        num_branches=_set(config.num_draft_branches),
        length_policy=length_policy(config, _depth(config)),
    )


def _jacobi(config: SpeculativeConfig, materials: Materials) -> Drafter:
    return JacobiDrafter(
        initial_guess=str(config.initial_guess),
        length_policy=length_policy(config, _set(config.num_speculative_tokens)),
    )


def _lookahead(config: SpeculativeConfig, materials: Materials) -> Drafter:
    _check_trees(config, materials)
    return LookaheadDrafter(
        _set(config.num_speculative_tokens),
        window_size=_set(config.window_size),
        guess_set_size=_set(config.guess_set_size),
        pool_from_prompt=bool(config.pool_from_prompt),
        max_nodes=config.max_draft_nodes,
    )


def _suffix(config: SpeculativeConfig, materials: Materials) -> Drafter:
    if config.state_file is not None and not config.shared:
        raise ConfigError("state_file is of a history that requests share; add shared=true, or leave it out")
    return SuffixDrafter(
        max_tree_depth=_set(config.suffix_decoding_max_tree_depth),
        max_spec_factor=float(config.suffix_decoding_max_spec_factor or 0.0),
        min_token_prob=float(config.suffix_decoding_min_token_prob or 0.0),
        max_nodes=_set(config.max_draft_nodes),
        num_branches=_set(config.num_draft_branches),
        history=_history(config, materials) if config.shared else None,
        history_file=config.state_file,
        length_policy=length_policy(config, _set(config.num_speculative_tokens)),
    )


def _history(config: SpeculativeConfig, materials: Materials) -> OutputHistory:
    """Past outputs, from the state file where there is one; the same for all drafters of one model."""
    depth, limit = _set(config.suffix_decoding_max_tree_depth), _set(config.suffix_decoding_max_cached_requests)
    name = ("history", config.state_file, depth, limit)
    if name not in materials.kept:
        fingerprint = "" if materials.tokenizer is None else fingerprint_of(materials.tokenizer)
        history = OutputHistory(depth, max_outputs=limit, fingerprint=fingerprint)
        if config.state_file is not None and Path(config.state_file).expanduser().exists():
            history.load(config.state_file, materials.target.vocab_size)
        materials.kept[name] = history
    return cast(OutputHistory, materials.kept[name])


def _rest(config: SpeculativeConfig, materials: Materials) -> Drafter:
    depth = _set(config.num_speculative_tokens)
    if depth > MAX_DEPTH:
        raise ConfigError(f"num_speculative_tokens is {depth}; method 'rest' drafts at most {MAX_DEPTH} tokens deep")
    lookup = Lookup(
        match_min=_set(config.retrieval_match_min),
        match_max=_set(config.retrieval_match_max),
        max_hits=_set(config.retrieval_max_hits),
        depth=max(1, depth),
    )
    return RestDrafter(
        _datastore(config, materials),
        lookup=lookup,
        max_nodes=_set(config.max_draft_nodes),
        num_branches=_set(config.num_draft_branches),
        dynamic_index=bool(config.retrieval_dynamic_index),
        length_policy=length_policy(config, depth),
    )


def _datastore(config: SpeculativeConfig, materials: Materials) -> Datastore:
    """The datastore that the config names, or the one that a target of the zoo brings along; opened once."""
    folder = config.datastore
    if folder is None:
        if materials.zoo_name is None or not materials.brings("datastore"):
            raise ConfigError(
                f"method 'rest' needs a datastore{materials.brings_none}; build one with foretoken datastore build "
                "CORPUS... --tokenizer MODEL --out DIR and add datastore=DIR"
            )
        folder = str(zoo.asset(materials.zoo_name, "datastore"))
    name = ("datastore", folder)
    if name not in materials.kept:
        materials.kept[name] = Datastore.open(
            folder, tokenizer=materials.tokenizer, vocab_size=materials.target.vocab_size
        )
    return cast(Datastore, materials.kept[name])


def _token_recycling(config: SpeculativeConfig, materials: Materials) -> Drafter:
    _check_trees(config, materials)
    matrix, initial_state, vocab_size = None, str(config.initial_state), materials.target.vocab_size
    if initial_state == "auto":
        initial_state = "prompt"
        if materials.brings("candidates") and config.state_file is None and _set(config.num_candidates) <= 8:
            matrix = _zoo_matrix(str(materials.zoo_name), vocab_size, _set(config.num_candidates))
    default_nodes = RECYCLED_NODES_ON_CPU if materials.target.device.type == "cpu" else RECYCLED_NODES
    return TokenRecyclingDrafter(
        vocab_size,
        _set(config.num_speculative_tokens),
        num_candidates=_set(config.num_candidates),
        max_nodes=config.max_draft_nodes or default_nodes,
        shared=bool(config.shared),
        initial_state=initial_state,
        matrix=matrix,
        state_file=config.state_file,
    )


def _layer_skip(config: SpeculativeConfig, materials: Materials) -> Drafter:
    for layer in materials.target.layers:
        Sublayers.of(layer)  # refuses layers of another build now
    if config.layer_search is not None:
        start = _given_layer_set(config, materials)
        if start is not None:
            start.check(materials.target.num_layers, materials.target.name)
        SwiftSearch(materials.target.num_layers, start)  # refuses now what it cannot begin with
        return SwiftDrafter(start, **_growth(config, materials))
    layer_set = _layer_set(config, materials)
    if layer_set is None:
        raise ConfigError(
            f"method 'layer_skip' needs to know what to leave out{materials.brings_none}; give layer_set=FILE (from "
            "foretoken tune layer-skip), skipped_attention and skipped_mlp, exit_layer, or layer_search='swift'"
        )
    layer_set.check(materials.target.num_layers, materials.target.name)
    return LayerSkipDrafter(layer_set, **_growth(config, materials))


def _quantized_self(config: SpeculativeConfig, materials: Materials) -> Drafter:
    model = materials.target.execution.model
    quantizable(model, _set(config.quantization_group_size), with_head=bool(config.quantize_head))  # refuses now
    return QuantizedSelfDrafter(
        group_size=_set(config.quantization_group_size),
        with_head=bool(config.quantize_head),
        layer_set=_given_layer_set(config, materials),
        **_growth(config, materials),
    )


def _layer_set(config: SpeculativeConfig, materials: Materials) -> LayerSet | None:
    """What the config names, or else what a target of the zoo brings along."""
    given = _given_layer_set(config, materials)
    if given is None and materials.brings("layer_set"):
        return LayerSet.load(zoo.asset(str(materials.zoo_name), "layer_set"))
    return given


def _given_layer_set(config: SpeculativeConfig, materials: Materials) -> LayerSet | None:
    """The layer set of a config, which may spell it in one of three ways.

    Raises: ConfigError for more than one of them.
    """
    by_index = config.skipped_attention is not None or config.skipped_mlp is not None
    if (config.layer_set is not None) + (config.exit_layer is not None) + by_index > 1:
        raise ConfigError("layer_set, exit_layer and skipped_attention / skipped_mlp exclude each other; give one")
    if config.layer_set is not None:
        return LayerSet.load(config.layer_set)
    if config.exit_layer is not None:
        return LayerSet.exit_at(config.exit_layer, materials.target.num_layers)
    return LayerSet(config.skipped_attention or (), config.skipped_mlp or ()) if by_index else None


def _growth(config: SpeculativeConfig, materials: Materials) -> dict[str, Any]:
    """Options of drafters that grow a tree with a language model."""
    return {
        "target_vocab_size": materials.target.vocab_size,
        "num_branches": _set(config.num_draft_branches),
        "sample_method": str(config.draft_sample_method),
        "acceptance": str(config.rejection_sample_method),
        "policy": length_policy(config, _depth(config)),
    }


def _zoo_matrix(zoo_name: str, vocab_size: int, num_candidates: int) -> AdjacencyMatrix:
    """What a target of the zoo says after every token alone."""
    return AdjacencyMatrix.load(zoo.asset(zoo_name, "candidates"), vocab_size, num_candidates)


def _union(config: SpeculativeConfig, materials: Materials) -> Drafter:
    _check_trees(config, materials)
    return UnionDrafter(_parts(config, materials), _set(config.max_draft_nodes))


def _first(config: SpeculativeConfig, materials: Materials) -> Drafter:
    return FirstDrafter(_parts(config, materials), float(config.min_expected_tokens or 0.0))


def _parts(config: SpeculativeConfig, materials: Materials) -> list[Drafter]:
    return [FACTORIES[str(part.method)](part, materials) for part in config.drafters]


def _check_trees(config: SpeculativeConfig, materials: Materials) -> None:
    """Refuse a method whose drafts are trees where only chains can be verified."""
    if not materials.target.supports_trees:
        raise ConfigError(
            f"method {config.method!r} drafts trees, and {materials.target.name} verifies chains only; use one that "
            "drafts chains: ngram, nasd, jacobi or draft_model"
        )


def _draft_model(config: SpeculativeConfig, materials: Materials) -> Drafter:
    if materials.draft_model is None:
        raise ConfigError(
            f"method 'draft_model' needs a drafter{materials.brings_none}; add model (a directory, a hub id, zoo:NAME "
            "or a loaded model), or use zoo:tiny, which brings its own"
        )
    return DraftModelDrafter(materials.draft_model, **_growth(config, materials))


def _depth(config: SpeculativeConfig) -> int:
    """Draft length within the node limit: a level of a tree has as many nodes as there are branches.

    10 nodes, root included, hold 4 levels of 2 branches.
    """
    length, branches = _set(config.num_speculative_tokens), _set(config.num_draft_branches)
    if config.max_draft_nodes is None:
        return length
    depth = (config.max_draft_nodes - 1) // branches
    if depth == 0:
        raise ConfigError(
            f"max_draft_nodes={config.max_draft_nodes} leaves no room for one level of num_draft_branches={branches}; "
            f"raise the first to {branches + 1} or more"
        )
    return min(length, depth)


def _set(value: int | None) -> int:
    """A key that the table of methods has filled in."""
    if value is None:
        raise ConfigError("a key of the speculative config has no value; build it with SpeculativeConfig(...)")
    return value


FACTORIES: dict[str, Callable[[SpeculativeConfig, Materials], Drafter]] = {
    "none": _none,
    "draft_model": _draft_model,
    "ngram": _ngram,
    "nasd": _nasd,
    "jacobi": _jacobi,
    "lookahead": _lookahead,
    "suffix": _suffix,
    "rest": _rest,
    "token_recycling": _token_recycling,
    "layer_skip": _layer_skip,
    "quantized_self": _quantized_self,
    "union": _union,
    "first": _first,
}
"""How a drafter of every method is made; the keys are those of `foretoken.methods.METHODS`."""
