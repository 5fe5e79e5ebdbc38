"""Published layouts of EAGLE heads: those of the authors and of the package speculators, and variants of both.

The structure is read from the tensors. The config has the properties that tensors do not show, such as head counts,
rotary parameters and flags of norms. If the config contradicts the tensors, the tensors are used and a note is
returned, or the checkpoint is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.folders import not_ours
from foredraft.heads.checkpoint import ACCEPTANCE, Checkpoint, fill, integer
from foredraft.heads.eagle import EagleHead, EagleShape, default_streams
from foredraft.heads.layers import LayerShape
from foredraft.heads.recognition import FIRST, SHARED_OUTPUT, eagle_generation, eagle_name
from foredraft.heads.vocabulary import DraftVocabulary

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class TargetFacts:
    """Properties of a target that a head must fit.

    Args:
      name: name of the target, for messages.
      hidden_size: H.
      vocab_size: number of rows of the output layer.
      num_layers: L.
      eos_token_ids: EOS tokens of the target.
      embedding: input embedding (V or more, H); None to check shapes only.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...] = ()
    embedding: Tensor | None = None


class StructureReader:
    """Reader of a head's structure from its tensors, which removes tensors that are not weights of the head."""

    def __init__(self, name: str, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetFacts) -> None:
        self.name, self.config, self.tensors, self.target = name, config, tensors, target
        self.notes: list[str] = []

    def vocabulary(self, generation: int) -> DraftVocabulary | None:
        """Return the vocabulary of the head's own output layer; the copy of the target's in EAGLE-1 checkpoints is
        dropped.
        """
        d2t, t2d = self.tensors.pop("d2t", None), self.tensors.pop("t2d", None)
        layer = self.tensors.get("lm_head.weight")
        if generation == 1:
            if layer is not None:
                self.tensors.pop("lm_head.weight")
            return None
        size = self.target.vocab_size
        if layer is None:
            if d2t is None:
                return None
            if not self._flag(SHARED_OUTPUT):
                raise CheckpointError(
                    f"{self.name} has a reduced vocabulary and no output layer: lm_head.weight is missing. "
                    f"{not_ours('It', 'head', 'foredraft train')}"
                )
            return self._published(d2t, t2d, len(d2t))
        num_rows = layer.shape[0]
        if d2t is None:
            if num_rows != size:
                raise CheckpointError(
                    f"the output layer of {self.name} has {num_rows} rows, {self.target.name} has {size} tokens, and "
                    "no d2t maps rows to tokens; the head is for another target, or the checkpoint is incomplete"
                )
            return DraftVocabulary.full(size)
        width = integer(self.config, "hidden_size", self.name, layer.shape[1])
        if num_rows == width != layer.shape[1] == len(d2t):  # transposed; `fill` reports it
            num_rows = layer.shape[1]
        return self._published(d2t, t2d, num_rows)

    def _published(self, d2t: Tensor, t2d: Tensor | None, num_rows: int) -> DraftVocabulary:
        size = self.target.vocab_size
        try:
            vocabulary = DraftVocabulary.published(d2t, t2d, num_rows, size)
        except CheckpointError as error:
            raise CheckpointError(
                f"the draft vocabulary of {self.name} does not fit {self.target.name}: {error}"
            ) from None
        vocabulary.check_eos(self.target.eos_token_ids, self.name)
        self._said("draft_vocab_size", len(vocabulary))
        return vocabulary

    def shape(self, generation: int, rope_theta: float | None) -> EagleShape:
        size = self._size()
        is_fused = generation == 3
        layer = self._layer(size, 2 * size if is_fused else size, rope_theta)
        indices = {int(match[1]) for match in map(_LAYER.match, self.tensors) if match}
        num_layers = max(indices) + 1
        self._said("num_hidden_layers", num_layers)
        streams = self._streams() if is_fused else (self.target.num_layers,)
        target_size = self.target.hidden_size
        told = self.config.get("target_hidden_size")
        if told is not None and told != target_size:
            raise CheckpointError(
                f"{self.name} reads features of size {told}, and {self.target.name} has hidden size {target_size}: the "
                "head is for another target"
            )
        if not is_fused and size != target_size:
            raise CheckpointError(
                f"{self.name} extrapolates features of size {size}, and {self.target.name} has hidden size "
                f"{target_size}: the head is for another target"
            )
        fc = self.tensors.get("fc.weight")
        width = len(streams) * target_size
        if is_fused and fc is not None and width not in fc.shape:
            raise CheckpointError(
                f"{self.name} fuses features of total size {max(fc.shape)}, and {len(streams)} layers of "
                f"{self.target.name} have {width}: the head is for another target"
            )
        has = self.tensors.keys().__contains__
        flags = {key: self._flag(key) for key in ("norm_before_residual", "norm_output")} if is_fused else {}
        return EagleShape(
            generation=generation,
            layer=layer,
            target_size=target_size,
            streams=streams,
            num_layers_of_target=self.target.num_layers,
            num_layers=num_layers,
            has_fc_bias=has("fc.bias"),
            embed_norm=has("embed_norm.weight"),
            input_norm=not is_fused and has(f"{FIRST}input_layernorm.weight"),
            output_norm=not is_fused and has("norm.weight"),
            norm_before_fc=self._marked("norm_before_fc", has("input_norm.weight")),
            fc_norm=self._marked("fc_norm", any(name.startswith("fc_norm.") for name in self.tensors)),
            own_embedding=self._own_embedding(size),
            shares_output=is_fused and self._flag(SHARED_OUTPUT) and not has("lm_head.weight"),
            **flags,
        )

    def _size(self) -> int:
        """Return H of the head, from a norm, which cannot be transposed."""
        norm = self.tensors.get(f"{FIRST}post_attention_layernorm.weight")
        told = self.config.get("hidden_size")
        if norm is None or norm.ndim != 1:
            return integer(self.config, "hidden_size", self.name)
        size = norm.shape[0]
        if told is not None and told != size:
            self.notes.append(f"the config says hidden_size={told}, but the tensors have {size}, which is used")
        return size

    def _layer(self, size: int, in_size: int, rope_theta: float | None) -> LayerShape:
        queries = self._rows("self_attn.q_proj.weight", in_size)
        keys = self._rows("self_attn.k_proj.weight", in_size)
        num_heads = integer(self.config, "num_attention_heads", self.name)
        head_dim = self._head_dim(queries, num_heads)
        num_heads = queries // head_dim
        self._said("num_attention_heads", num_heads)
        if keys % head_dim or num_heads % (keys // head_dim):
            raise CheckpointError(
                f"the keys of {self.name} have size {keys}, which does not fit {num_heads} heads of size {head_dim}"
            )
        self._said("num_key_value_heads", keys // head_dim)
        intermediate = self._rows("mlp.gate_proj.weight", size)
        self._said("intermediate_size", intermediate)
        return LayerShape(
            hidden_size=size,
            intermediate_size=intermediate,
            num_heads=num_heads,
            num_kv_heads=keys // head_dim,
            head_dim=head_dim,
            eps=float(self.config.get("rms_norm_eps", 1e-6)),
            activation=str(self.config.get("hidden_act", "silu")),
            rope=self._rope(rope_theta),
            has_bias=f"{FIRST}self_attn.q_proj.bias" in self.tensors,
            has_head_norms=f"{FIRST}self_attn.q_norm.weight" in self.tensors,
        )

    def _rows(self, key: str, in_size: int) -> int:
        """Return the number of rows of a matrix with ``in_size`` inputs; a transposed matrix is accepted, and `fill`
        reports it.
        """
        matrix = self.tensors.get(FIRST + key)
        if matrix is None or matrix.ndim != 2 or in_size not in matrix.shape:
            shape = "missing" if matrix is None else "x".join(map(str, matrix.shape))
            raise CheckpointError(f"{FIRST}{key} of {self.name} is {shape}; it must have {in_size} inputs")
        return int(matrix.shape[0] if matrix.shape[1] == in_size else matrix.shape[1])

    def _head_dim(self, queries: int, num_heads: int) -> int:
        norm = self.tensors.get(f"{FIRST}self_attn.q_norm.weight")
        told = self.config.get("head_dim")
        head_dim = int(norm.shape[0]) if norm is not None else told
        if head_dim is None:
            head_dim = queries // num_heads
        if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2 or queries % head_dim:
            raise CheckpointError(
                f"the queries of {self.name} have size {queries}, which is not a whole number of heads: its config "
                f"says num_attention_heads={num_heads} and head_dim={told}"
            )
        return head_dim

    def _rope(self, theta: float | None) -> dict[str, Any]:
        """Return the rotary parameters, from the keys of transformers 5 or earlier; the default base is 10,000."""
        told = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        rope = {**told, "rope_type": told.get("rope_type", told.get("type", "default"))}
        rope.pop("type", None)
        rope.setdefault("rope_theta", self.config.get("rope_theta", 10000.0))
        if theta is not None:
            rope["rope_theta"] = theta
        return rope

    def _streams(self) -> tuple[int, ...]:
        """Return the features that the head reads, as indices of layers whose inputs are read.

        Two conventions exist. A list that begins with 1 names layers by their outputs, so one is added to each index.
        """
        num_layers = self.target.num_layers
        if self.config.get("use_aux_hidden_state") is False:
            return (num_layers,)
        nested = self.config.get("eagle_config")
        told = self.config.get("eagle_aux_hidden_state_layer_ids")
        if told is None and isinstance(nested, Mapping):
            told = nested.get("eagle_aux_hidden_state_layer_ids")
            if nested.get("use_aux_hidden_state") is False:
                return (num_layers,)
        if told is None:
            return default_streams(num_layers)
        if not isinstance(told, list) or not told or any(isinstance(i, bool) or not isinstance(i, int) for i in told):
            raise CheckpointError(
                f"eagle_aux_hidden_state_layer_ids of {self.name} is {told!r}; it must be a list of whole numbers"
            )
        streams = tuple(index + 1 for index in told) if told[0] == 1 else tuple(told)
        if min(streams) < 0 or max(streams) > num_layers:
            raise CheckpointError(
                f"{self.name} reads the layers {told}, and {self.target.name} has {num_layers} layers: the head is for "
                "another target"
            )
        return streams

    def _own_embedding(self, size: int) -> int:
        """Return the number of rows of an embedding that is not the target's; a copy of the target's is dropped."""
        own, theirs = self.tensors.get("embed_tokens.weight"), self.target.embedding
        if own is None:
            if size != self.target.hidden_size:
                raise CheckpointError(
                    f"{self.name} has hidden_size={size} and no embedding of its own: embed_tokens.weight is missing"
                )
            return 0
        if own.ndim != 2 or own.shape[1] != size or own.shape[0] < self.target.vocab_size:
            raise CheckpointError(
                f"embed_tokens.weight of {self.name} is {'x'.join(map(str, own.shape))}, expected "
                f"{self.target.vocab_size}x{size}: the head is for another target"
            )
        if theirs is None or _is_copy(own, theirs):
            self.tensors.pop("embed_tokens.weight")
            return 0
        self.notes.append("the head's embedding differs from the target's and is kept")
        return int(own.shape[0])

    def _flag(self, key: str) -> bool:
        value = self.config.get(key, False)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise CheckpointError(f"{key} is {value!r} in the config of {self.name}; it must be true or false")
        return value

    def _marked(self, key: str, is_there: bool) -> bool:
        """Return whether the tensors of a flag are present; the config's value only affects notes and errors."""
        if self._flag(key) and not is_there:
            raise CheckpointError(f"the config of {self.name} sets {key}, and the tensors of that norm are missing")
        if is_there and not self._flag(key):
            self.notes.append(f"the config does not set {key}, but the tensors of that norm are present and used")
        return is_there

    def _said(self, key: str, value: int) -> None:
        """Add a note if the config has another value."""
        told = self.config.get(key)
        if told is not None and told != value:
            self.notes.append(f"the config says {key}={told}, but the tensors have {value}, which is used")


def _is_copy(own: Tensor, theirs: Tensor) -> bool:
    """Return whether two embeddings are equal, up to padding and the rounding of half precision."""
    if own.shape[1] != theirs.shape[1]:
        return False
    num_rows = min(len(own), len(theirs))
    own, theirs = own[:num_rows], theirs[:num_rows]
    narrow = own.dtype if own.dtype in (torch.float16, torch.bfloat16) else theirs.dtype
    if narrow not in (torch.float16, torch.bfloat16):
        return torch.equal(own.to(theirs.dtype), theirs.to("cpu"))
    return torch.allclose(own.float(), theirs.to("cpu").float(), rtol=2**-7, atol=1e-6)


_WITHOUT_USE = re.compile(r"^(verifier_norm|verifier_lm_head|verifier_lm_head_embed)\.|rotary_emb\.")
"""Names of unused tensors: copies of the target's tensors, and tables of positions."""


def read_eagle(
    checkpoint: Checkpoint, target: TargetFacts, *, generation: int | None = None, rope_theta: float | None = None
) -> tuple[EagleHead, tuple[str, ...]]:
    """Return the head in a checkpoint.

    Args:
      checkpoint: see `read_checkpoint`.
      target: properties of the target.
      generation: expected generation, 1 or 3; None for either.
      rope_theta: rotary base that replaces the one in the config, which is wrong for some published heads.

    Returns: the head, and sentences about values in the config that contradict the tensors.
    Raises: CheckpointError, naming tensors that are missing, extra, transposed or wrongly shaped, and sizes that do
    not fit the target.
    """
    name = checkpoint.name
    found = eagle_generation(checkpoint.config, frozenset(checkpoint.tensors))
    if found is None:
        raise CheckpointError(f"{name} contains no EAGLE head: it lacks fc.weight or a decoder layer beside it")
    if generation is not None and found != generation:
        use = "'eagle3'" if found == 3 else "'eagle' or 'eagle2'"
        raise CheckpointError(f"{name} contains an EAGLE{'-3' if found == 3 else ' (1 or 2)'} head; use method {use}")
    tensors = _renamed(checkpoint)
    reader = StructureReader(name, _merged(checkpoint.config), tensors, target)
    vocabulary = reader.vocabulary(found)
    shape = reader.shape(found, rope_theta)
    head = EagleHead(shape, vocabulary)
    fill(head, tensors, name)
    head.first_token_acceptance = _acceptance_in(checkpoint.config, name)
    return head.eval(), tuple(reader.notes)


def _acceptance_in(config: Mapping[str, Any], name: str) -> float | None:
    """Return the share of first tokens that the target accepted in validation, or None if it is not stored.

    Raises: CheckpointError for a value outside 0..1.
    """
    stored = config.get(ACCEPTANCE)
    if stored is None:
        return None
    if isinstance(stored, bool) or not isinstance(stored, (int, float)) or not 0.0 <= stored <= 1.0:
        raise CheckpointError(f"{ACCEPTANCE} is {stored!r} in the config of {name}; it must be a number from 0 to 1")
    return float(stored)


def write_eagle(head: EagleHead, target_name: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a head in the layout of the package speculators (0.9, which reads it).

    The input embedding is omitted if it is the target's.
    """
    shape, layer = head.shape, head.shape.layer
    is_fused = shape.generation == 3
    size = head.vocabulary.target_size if head.vocabulary is not None else 0
    llama: dict[str, Any] = {
        "model_type": "qwen3" if layer.has_head_norms else "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.activation,
        "rms_norm_eps": layer.eps,
        "rope_parameters": dict(layer.rope),
        "attention_bias": layer.has_bias,
    }
    if size:
        llama["vocab_size"] = size
    algorithm = "eagle3" if is_fused else "eagle"
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"] if is_fused else ["EagleSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target_name or None, "architectures": []},
        },
        "transformer_layer_config": llama,
    }
    if head.first_token_acceptance is not None:
        config[ACCEPTANCE] = head.first_token_acceptance
    tensors = {name: tensor.detach() for name, tensor in head.named_parameters()}
    if not is_fused:
        config |= {
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "layernorms": shape.embed_norm or shape.input_norm or shape.output_norm,
            "fusion_bias": shape.has_fc_bias,
        }
        return config, {_speculators_name(name): tensor for name, tensor in tensors.items()}
    config |= {
        "draft_vocab_size": len(head.vocabulary) if head.vocabulary is not None else None,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "target_hidden_size": shape.target_size if shape.target_size != layer.hidden_size else None,
        "eagle_aux_hidden_state_layer_ids": list(shape.streams),
        "embed_requires_grad": False,
    }
    if shape.shares_output:
        config[SHARED_OUTPUT] = True
    if head.vocabulary is not None and not head.vocabulary.is_full:
        tensors |= {"d2t": head.vocabulary.d2t, "t2d": head.vocabulary.t2d}
    return config, tensors


def _speculators_name(name: str) -> str:
    """Return the name of an EAGLE-1 tensor in the layout of speculators."""
    for ours, theirs in (
        ("layers.0.", "transformer."),
        ("fc.", "fusion_fc."),
        ("embed_norm.", "embedding_layernorm."),
        ("norm.", "pre_lm_head_layernorm."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


# -- names -----------------------------------------------------------------------------------------------------------


def _renamed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return tensors under foredraft's names, without unused ones."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        short = eagle_name(name)
        if _WITHOUT_USE.search(short):
            continue
        if short in tensors:
            raise CheckpointError(f"{checkpoint.name} has two tensors for {short}; one of them is {name}")
        tensors[short] = tensor
    return tensors


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config merged with the nested config of the decoder layer, as stored by speculators."""
    nested = config.get("transformer_layer_config")
    return {**(nested if isinstance(nested, Mapping) else {}), **config}


def check_fits(head: EagleHead, target: TargetFacts, generation: int) -> None:
    """Check that a head in memory is for this target and generation.

    Raises: CheckpointError for another target or generation.
    """
    shape = head.shape
    if shape.generation != generation:
        raise CheckpointError(
            f"the head is of EAGLE generation {shape.generation}, and this method needs generation {generation}"
        )
    wanted = (target.hidden_size, target.num_layers)
    if (shape.target_size, shape.num_layers_of_target) != wanted:
        raise CheckpointError(
            f"the head is for a target of {shape.num_layers_of_target} layers and hidden size {shape.target_size}, and "
            f"{target.name} has {wanted[1]} layers and hidden size {wanted[0]}"
        )
    if head.vocabulary is not None and head.vocabulary.target_size != target.vocab_size:
        raise CheckpointError(
            f"the head is for a target of {head.vocabulary.target_size} tokens, and {target.name} has "
            f"{target.vocab_size}"
        )
