"""Interface of the compiled library: structures and functions, in the order of ``abi.h``."""

from __future__ import annotations

import ctypes
from typing import Any

Integer, Address = ctypes.c_int64, ctypes.c_void_p
Float, Double, Threads = ctypes.c_float, ctypes.c_double, ctypes.c_int

MOST_NODES = 64
"""Limit on nodes of a row, root included, for which a node has the same bits in any tree."""

PAIRS, FLOAT32, BFLOAT16, FLOAT16, NIBBLES, BYTES, MULTIPLES, SCALED, FIVES, SIXES = range(10)
"""Formats of the numbers in a matrix or a cache; they are the values of ``Kind`` in ``abi.h``."""
OF_BITS = {4: NIBBLES, 5: FIVES, 6: SIXES, 8: BYTES}
"""Formats of integer codes by their bits."""
SCALE_BYTES = 4
"""Bytes of the scale that follows the int8 numbers of each head in a cache."""
SCRATCH, MEMORY, INPUT, GIVEN, OUTPUT = range(5)
"""Memory areas of a program's operands."""
OPERATIONS, PRODUCT, ATTENTION, GROUPED_PRODUCT = range(4)
"""Kinds of a program's steps."""
CODES = {
    name: number
    for number, name in enumerate(
        [
            *("copy", "neg", "abs", "relu", "exp", "sqrt", "rsqrt", "reciprocal", "sigmoid", "silu", "tanh"),
            *("gelu", "gelu_tanh", "add", "sub", "mul", "div", "maximum", "minimum", "sum"),
            *("peak", "order", "gather"),
        ]
    )
}
"""Operations of a program, with their numbers."""

MOST_HALF = 256
"""Limit on numbers in half a head, for attention within a program."""


def _of(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


def array_of(values: Any) -> ctypes.Array[ctypes.c_int64]:
    """Return integers as a C array."""
    return (Integer * len(values))(*values)


# ---- products and attention -----------------------------------------------------------------------------------------


class Matrix(ctypes.Structure):
    """A packed matrix."""

    _fields_ = (
        *_of(Integer, "inputs outputs kind"),
        *_of(Address, "weight bias"),
        *_of(Integer, "group scale_kind zero_kind"),
        *_of(Address, "scales zeros"),
        *_of(Integer, "activation_bytes value_kind half_shift"),
        *_of(Address, "scale_halves zero_halves"),
        ("ignores_infinite", Integer),
    )


class Attention(ctypes.Structure):
    """Attention of lists of nodes over the rows of a cache."""

    _fields_ = (
        *_of(Integer, "rows heads group size value_size kind cache_kind"),
        *_of(Integer, "query_node query_head key_row key_head value_row value_head mask_row mask_node"),
        *_of(Address, "counts firsts columns"),
        ("scale", Float),
        ("window", Integer),
        ("before", Address),
    )


# ---- nodes ----------------------------------------------------------------------------------------------------------


class Nodes(ctypes.Structure):
    """Rows of nodes, padded to one width, that follow the cached tokens of these rows."""

    _fields_ = (
        *_of(Integer, "rows width count earlier"),
        *_of(Address, "tokens depths counts lengths offsets ancestors"),
        ("first_row", Integer),
    )


# ---- programs -------------------------------------------------------------------------------------------------------


class Operand(ctypes.Structure):
    """Location of a node's numbers: base, offset and strides."""

    _fields_ = (*_of(Integer, "base offset"), ("strides", Integer * 3))


class Operation(ctypes.Structure):
    """An elementwise operation or a sum over the numbers of a node."""

    _fields_ = (("code", Integer), ("sizes", Integer * 3), *_of(Operand, "out first second"))


class Base(ctypes.Structure):
    """A memory area that operands refer to."""

    _fields_ = _of(Integer, "role place kind bytes")


class Step(ctypes.Structure):
    """A step of a program: operations, a product, attention, or a product with the experts that nodes choose."""

    _fields_ = _of(
        Integer,
        "kind first count matrix input output query key value attended chosen num_chosen num_experts has_own_inputs",
    )


class Program(ctypes.Structure):
    """The computation of layers with the same structure."""

    _fields_ = (*_of(Address, "bases operations steps"), *_of(Integer, "num_bases num_steps scratch memory"))


class Layer(ctypes.Structure):
    """A layer with its weights."""

    _fields_ = (*_of(Address, "program given inputs"), *_of(Integer, "num_inputs form cache"))


class AttentionShape(ctypes.Structure):
    """Attention parameters that several layers share."""

    _fields_ = (*_of(Integer, "heads group size value_size kind window"), ("scale", Float))


class Table(ctypes.Structure):
    """An input that is looked up by token or by position."""

    _fields_ = (("rows", Address), *_of(Integer, "bytes count by_position"), ("matrix", Address), ("kind", Integer))


class Model(ctypes.Structure):
    """All layers of a model, with its embeddings, output layer and shapes."""

    _fields_ = (
        *_of(Integer, "num_layers num_forms num_tables num_computed first state_bytes read_bytes logit_bytes kind"),
        ("least_shared", Integer),
        *_of(Address, "layers forms before behind head"),
    )


class Store(ctypes.Structure):
    """Memory of a cache's keys and values."""

    _fields_ = (*_of(Address, "keys values"), *_of(Integer, "columns kind"))


class Results(ctypes.Structure):
    """Memory for the results of a forward pass."""

    _fields_ = (*_of(Address, "states read kept"), ("num_kept", Integer), ("logits", Address))


class Drafts(ctypes.Structure):
    """Lengths of chains that are to be drafted, and memory for their tokens."""

    _fields_ = (("depths", Address), *_of(Integer, "most columns known"), *_of(Address, "names tokens"))


# ---- heads in eight bits --------------------------------------------------------------------------------------------


class Head(ctypes.Structure):
    """A draft head: sizes, addresses of tables and norms, and matrices."""

    _fields_ = (
        *_of(Integer, "generation size width heads kv_heads head_dim inner is_residual_normed norms_output is_float"),
        *_of(Address, "table frequencies"),
        *_of(Address, "embed_norm streams_norm input_norm hidden_norm post_norm norm"),
        *_of(Matrix, "fuse heads_in heads_out gate_up down output"),
        *_of(Float, "eps rope_factor"),
    )


class Level(ctypes.Structure):
    """Nodes for one pass through a head, and memory for the results."""

    _fields_ = (
        *_of(Address, "nodes keys values"),
        *_of(Integer, "row head"),
        *_of(Address, "features streams outputs"),
    )


class Drawing(ctypes.Structure):
    """Noise and distribution for ranking drafted tokens, if the target samples with the same noise."""

    _fields_ = (("keys", Address), ("top_k", Integer), *_of(Float, "temperature top_p min_p"))


class Growing(ctypes.Structure):
    """Limits of a draft tree that a head grows, and memory for the result."""

    _fields_ = (
        *_of(Integer, "pending trunk depth branches beam most"),
        *_of(Address, "keys values"),
        *_of(Integer, "row head owed"),
        *_of(Address, "tokens_of streams last names drawing tokens parents scores"),
        *_of(Double, "least_mass least"),
        ("power", Float),
    )


# ---- functions ------------------------------------------------------------------------------------------------------

_SCORES = (Address, Integer, Integer, Integer, Integer)
"""Arguments for scores: address, kind, number of rows or one row, stride between rows, and length of a row."""

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "pack": (None, Address, *(Integer,) * 4, Address, Threads),
    "round": (None, Address, Address, *(Integer,) * 3, Threads),
    "pack_codes": (None, Address, Address, Integer, Integer, Threads),
    "pack_blocks": (None, Address, Integer, Address, Address, Integer, Integer, Threads),
    "read_blocks": (None, Integer, Integer, Address, Address, Integer, Integer, Address, Threads),
    "rows": (None, Address, Address, Integer, Integer, Address),
    "product": (None, Address, Address, Integer, Address, Threads),
    "grouped_product": (Integer, Address, Integer, Address, Integer, Address, Integer, Address, Threads),
    "decode_attention": (None, *(Address,) * 7, Threads),
    "decode_attention_scratch": (Integer, Address, Threads),
    "prefill_attention": (None, *(Address,) * 6, Threads),
    "prefill_attention_scratch": (Integer, Address, Threads),
    "forward": (Integer, *(Address,) * 5, Threads),
    "chains": (Integer, *(Address,) * 5, Threads),
    "head_level": (None, Address, Address, Threads),
    "head_logits": (None, Address, Address, Integer, Address, Threads),
    "head_grow": (Integer, Address, Address, Threads),
    "argmax": (None, *_SCORES, Address, Threads),
    "argmax_at": (Integer, *_SCORES),
    "best": (None, *_SCORES, Address, Integer, Address, Threads),
    "gumbel_best": (None, *_SCORES, Float, Address, Address, Integer, Address, Address, Threads),
    "gumbel_best_at": (None, *_SCORES, Float, ctypes.c_uint64, Address, Integer, Address, Address),
    "limit_threads": (None, Threads),
    "is_allowed": (ctypes.c_int,),
    "num_outputs": (ctypes.c_int,),
}
"""Return type and argument types of every function."""
