"""The probe tells faults from rounding: in every dtype, for weights of every kind, however the model runs."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from test_mutations import MUTATIONS
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from architectures import ALWAYS, ARCHITECTURES, Architecture, but_variants, in_turns
from foredraft import zoo
from foredraft.errors import ProbeError
from foredraft.model import lm as model_module
from foredraft.model.execution import execution as execution_of
from foredraft.model.execution.execution import Execution
from foredraft.model.execution.native_program import NativeProgram
from foredraft.model.lm import CausalLM
from foredraft.model.masks import Masks
from foredraft.model.nodes import Nodes
from foredraft.model.prober import Check, Prober
from foredraft.model.reduced import representative, representatives
from foredraft.model.reference import relative_error
from foredraft.model.support import cache_argument
from foredraft.native.packed_matmul import NativeMatrix
from foredraft.testing import strengthen, toy_model
from mutants import Call, with_arguments, with_result
from mutations import Patch, shifts_positions, shows_siblings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = ("eager", "packed")
MAX_FORWARDS, MAX_TOKENS = 12, 400
NUM_SEEDS = 20
TRAINED = [("zoo:tiny", "float32", 1), ("zoo:tiny:draft", "float16", 1), ("zoo:smollm2", "bfloat16", 1)]

EVERYWHERE = but_variants(in_turns(DTYPES))
"""What the probe compares runs in float32, whatever the dtype; a third of the architectures show all that is done in
the others."""


def build(name: str, dtype: torch.dtype, seed: int = 0, *, is_strong: bool = True) -> PreTrainedModel:
    """A model with strong weights, or as its class initialises it: then a wrong mask or position hardly shows."""
    architecture = ARCHITECTURES[name]
    if is_strong:
        return architecture.build(architecture.attention[0], dtype, seed)
    config = architecture.config()
    config._attn_implementation = architecture.attention[0]
    torch.manual_seed(seed)
    model_class = getattr(transformers, architecture.model_class or f"{architecture.family}ForCausalLM")
    return model_class(config).to(dtype).eval()


def turn_of(name: str, dtype: str) -> int:
    return list(ARCHITECTURES).index(name) + list(DTYPES).index(dtype)


def load(model: PreTrainedModel, kind: str = "eager") -> CausalLM:
    """Packed to the smallest layer, where it is packed."""
    return CausalLM(model, execution=kind)


def assert_right(lm: CausalLM) -> None:
    assert lm.supports_trees
    assert {check.verdict for check in lm.probe.checks} == {"right"}, lm.probe
    assert lm.probe.num_forwards <= MAX_FORWARDS
    assert lm.probe.num_tokens <= MAX_TOKENS
    assert lm.num_forwards == 0
    assert not lm.probe.invisible


def draw_tokens(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let the probe take other tokens."""
    monkeypatch.setattr(model_module, "Prober", partial(Prober, seed=seed))


# -- no false verdict ------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "dtype"), EVERYWHERE)
def test_a_sound_model_is_found_sound(name: str, dtype: str) -> None:
    """Strong weights and those of the class, one of them eager and the other packed, by turns."""
    for number, is_strong in enumerate((True, False), start=turn_of(name, dtype)):
        assert_right(load(build(name, DTYPES[dtype], is_strong=is_strong), KINDS[number % 2]))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sound_model_is_found_sound_with_any_weights(name: str, dtype: str) -> None:
    for seed in range(1, NUM_SEEDS):
        for is_strong in (True, False):
            model = build(name, DTYPES[dtype], seed, is_strong=is_strong)
            for kind in KINDS:
                assert_right(load(model, kind))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "dtype", "seeds"),
    [
        pytest.param(name, dtype, seeds, marks=() if (name, dtype, len(seeds)) in TRAINED else pytest.mark.full)
        for name in ("zoo:tiny", "zoo:tiny:draft", "zoo:smollm2")
        for dtype in DTYPES
        for seeds in (range(1), range(1, NUM_SEEDS))
    ],
)
def test_a_trained_model_is_found_sound(name: str, dtype: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any tokens. In bfloat16, thirty layers of rounding move the logits of smollm2 by a twentieth.

    Behind some tokens they move by so much more that the last check may say that a fault could hide in it.
    """
    model = trained(name, DTYPES[dtype])
    for seed in seeds:
        draw_tokens(monkeypatch, seed)
        for kind in KINDS:
            lm = CausalLM(model, execution=kind)
            assert lm.supports_trees
            *others, execution = lm.probe.checks
            assert {check.verdict for check in others} == {"right"}, lm.probe
            assert execution.verdict == "right" or (dtype == "bfloat16" and seed > 0), lm.probe


def trained(name: str, dtype: torch.dtype) -> PreTrainedModel:
    _, name, *part = name.split(":")
    if not zoo.is_available(name):
        pytest.skip(str(zoo.why_missing(name)))
    return AutoModelForCausalLM.from_pretrained(zoo.path(name, *part), dtype=dtype).eval()


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [pytest.param(24, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "bfloat16"), ("qwen3-moe", "float16"), ("gpt2", "bfloat16"), ("llama", "float32")]
)
def test_deep_models_are_not_mistaken_for_wrong_ones(name: str, dtype: str, depth: int) -> None:
    """Rounding grows from layer to layer, up to where a fault cannot be told from it; the verdict then says so."""
    architecture = deep(ARCHITECTURES[name], depth)
    lm = load(architecture.build(architecture.attention[0], DTYPES[dtype]), "packed")
    *others, execution = lm.probe.checks
    assert {check.verdict for check in others} == {"right"}
    assert execution.verdict == "right" or (dtype != "float32" and execution.verdict == "unclear")
    assert (execution.verdict == "unclear") == (execution.control <= execution.bound)
    assert len(lm.probe.layers) == 2
    assert lm.probe.num_forwards <= MAX_FORWARDS


def deep(architecture: Architecture, depth: int) -> Architecture:
    key = "n_layer" if "n_layer" in architecture.options else "num_hidden_layers"
    return dataclasses.replace(architecture, options={**architecture.options, key: depth})


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen2-sliding"])
def test_a_compiled_model_is_found_sound(name: str) -> None:
    lm = load(build(name, torch.bfloat16), "compiled")
    assert_right(lm)
    assert lm.execution.num_compiled == lm.num_layers


@pytest.mark.full
def test_a_trained_model_is_found_sound_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(CausalLM(trained("zoo:smollm2", torch.bfloat16), execution="compiled"))


# -- every fault of masks, positions, windows and columns ------------------------------------------------------------


def shifts_positions_behind_the_prefix(patch: pytest.MonkeyPatch) -> None:
    """From the first token on, rotary positions that are all off by one are not wrong: only distances count."""
    right = CausalLM.forward
    shifts_positions(patch)
    wrong = CausalLM.forward

    def forward(self: CausalLM, nodes: Nodes, cache: Any, **options: Any) -> torch.Tensor:
        is_prefix = cache.lengths[options.get("first_row", 0)] == 0
        return (right if is_prefix else wrong)(self, nodes, cache, **options)

    patch.setattr(CausalLM, "forward", forward)


FAULTS: tuple[Patch, ...] = (
    *(mutation.apply for mutation in MUTATIONS if mutation.apply is not shifts_positions),
    shifts_positions_behind_the_prefix,
)
NEED_WINDOWS = {mutation.apply for mutation in MUTATIONS if mutation.needs_layer == "sliding_attention"}
NEED_FULL_ATTENTION = {mutation.apply for mutation in MUTATIONS if mutation.needs_layer == "full_attention"}
BY_TURNS = sorted(ALWAYS)
IN_TREES_ONLY = {mutation.apply for mutation in MUTATIONS if not mutation.in_chains}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*cell.values, marks=() if cell.values[0] in ALWAYS else pytest.mark.full) for cell in EVERYWHERE],
)
def test_every_fault_is_found_in_every_dtype(name: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """Faults that chains do not have cost the trees, the others are refused. A window of 128 is no shelter.

    By turns: all of them in the dtypes of an architecture that differs in kind, and a fourth elsewhere.
    """
    place = BY_TURNS.index(name) if name in BY_TURNS else list(ARCHITECTURES).index(name)
    shares = len(DTYPES) if name in BY_TURNS else 4
    first = (place + list(DTYPES).index(dtype)) % shares
    windows = [fault for fault in FAULTS if fault in NEED_WINDOWS and name in ALWAYS]
    check_faults(name, DTYPES[dtype], caplog, [*{*FAULTS[first::shares], *windows}])


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_fault_is_found_at_the_weights_of_the_class(
    name: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And in packed execution."""
    check_faults(name, DTYPES[dtype], caplog, FAULTS)
    check_faults(name, DTYPES[dtype], caplog, FAULTS, is_strong=False, kind="packed")


def check_faults(
    name: str,
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
    faults: Sequence[Patch],
    *,
    is_strong: bool = True,
    kind: str = "eager",
) -> None:
    model = build(name, dtype, is_strong=is_strong)
    kinds = set(CausalLM(model, execution="eager", probe=False).layer_types)
    for fault in faults:
        if (fault in NEED_WINDOWS and "sliding_attention" not in kinds) or (
            fault in NEED_FULL_ATTENTION and "full_attention" not in kinds
        ):
            continue
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "foredraft"):
            fault(patch)
            if fault in IN_TREES_ONLY:
                lm = load(model, kind)
                assert not lm.supports_trees, (fault, lm.probe)
                assert "verifies chains but not trees (relative error" in caplog.text
            else:
                with pytest.raises(ProbeError, match=r"relative error .*; rounding alone gives .*; the limit is"):
                    load(model, kind)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [shows_siblings, shifts_positions_behind_the_prefix])
def test_faults_are_found_in_packed_execution(fault: Patch, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention over grouped heads takes the masks."""
    model = build("llama", DTYPES[dtype])
    fault(monkeypatch)
    if fault is shows_siblings:
        assert not load(model, "packed").supports_trees
    else:
        with pytest.raises(ProbeError):
            load(model, "packed")


def test_a_fault_of_one_layer_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model of six layers, five of them sliding: the window is forgotten in the first layer of that type only."""
    config = ARCHITECTURES["gemma3"].config().to_dict()
    config |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**config))
    model = strengthen(model).to(torch.bfloat16).eval()
    assert_right(load(model))
    monkeypatch.setattr(Masks, "in_window", lambda *_: torch.tensor(True))
    with pytest.raises(ProbeError):
        load(model)


# -- execution -------------------------------------------------------------------------------------------------------

RUN = Execution.run


def without_masks(self: Execution, **options: Any) -> Any:
    mask = options.get("attention_mask")
    if self.kind == "packed" and mask is not None:
        options["attention_mask"] = torch.zeros_like(mask) if mask.is_floating_point() else torch.ones_like(mask)
    return RUN(self, **options)


def with_counted_positions(self: Execution, **options: Any) -> Any:
    positions = options["position_ids"]
    if self.kind == "packed" and positions.shape[1] > 1:
        flat = options.get("flat_nodes")
        rows = positions if flat is None else flat.spread(positions[0])
        rows = rows[:, :1] + torch.arange(rows.shape[1])
        options["position_ids"] = rows if flat is None else flat.listed(rows)[None]
    return RUN(self, **options)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_strong", [True, False])
def test_a_graph_that_ignores_its_masks_is_found(is_strong: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", DTYPES[dtype], is_strong=is_strong)
    monkeypatch.setattr(Execution, "run", without_masks)
    assert_right(load(model))
    with pytest.raises(ProbeError, match=rf"wrong masks in {dtype} and packed execution.*Use execution=\"eager\""):
        load(model, "packed")


@pytest.mark.sample(3)
@pytest.mark.parametrize(("dtype", "is_strong"), [*((dtype, True) for dtype in DTYPES), ("float32", False)])
def test_a_graph_that_ignores_its_positions_loses_trees(
    is_strong: bool, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts them, which is right for chains.

    At the weights of the class, in half precision, positions move logits by less than rounding does.
    """
    model = build("llama", DTYPES[dtype], is_strong=is_strong)
    monkeypatch.setattr(NativeProgram, "is_possible", False)
    monkeypatch.setattr(Execution, "run", with_counted_positions)
    assert_right(load(model))
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert not load(model, "packed").supports_trees
    assert f'The cause is running in {dtype} and packed execution: try execution="eager"' in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_with_the_weights_of_another_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, however many layers surround it."""

    def exchanged(execution: Execution, _: Call) -> Execution:
        if execution.kind == "packed":
            first, second = (layer.self_attn for layer in execution.model.model.layers[4:6])
            first.q_proj.forward, second.q_proj.forward = second.q_proj.forward, first.q_proj.forward
        return execution

    architecture = deep(ARCHITECTURES["llama"], 8)
    model = architecture.build("sdpa", DTYPES[dtype])
    with_result(execution_of, "apply_execution", exchanged)(monkeypatch)
    monkeypatch.setattr(Execution, "record", lambda *_, **__: None)  # whose programs are another check's
    with pytest.raises(ProbeError, match=r"layer model.layers.[45].self_attn.q_proj of .* execution=\"eager\""):
        load(model, "packed")


def test_a_bias_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_arguments(NativeMatrix, "__init__", lambda call: {"bias": None})(monkeypatch)
    with pytest.raises(ProbeError, match="does not compute in packed execution what it computes eagerly"):
        load(build("starcoder2", torch.bfloat16), "packed")


def test_a_fault_of_half_precision_alone_names_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure is right in float32; what is wrong is how the mask is written in the dtype of the model."""
    as_mask = Masks.formatted

    def wrong(self: Masks, visible: torch.Tensor) -> torch.Tensor:
        is_wrong = self.dtype == torch.bfloat16
        visible = visible & (torch.arange(visible.shape[-1]) > 3) if is_wrong else visible
        return as_mask(self, visible)

    monkeypatch.setattr(Masks, "formatted", wrong)
    with pytest.raises(ProbeError, match=r"in bfloat16 .*although its code handles .* in float32.*dtype=\"float32\""):
        load(build("llama", torch.bfloat16))
    assert_right(load(build("llama", torch.float32)))


# -- what is refused for another reason ------------------------------------------------------------------------------


class Quantized(torch.nn.Module):
    """Activations in 8 bits, with one scale for all of these dimensions: dynamic quantisation."""

    def __init__(self, layer: torch.nn.Linear, dim: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.bias, self._dim = layer.weight, layer.bias, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(self._dim, keepdim=True).clamp_min(1e-9) / 127
        return torch.nn.functional.linear((x / scale).round() * scale, self.weight, self.bias)


def quantized(dtype: torch.dtype, dim: tuple[int, ...]) -> PreTrainedModel:
    model = build("llama", dtype)
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, Quantized(child, dim))
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arithmetic_that_depends_on_the_batch_is_refused_for_that(dtype: str) -> None:
    with pytest.raises(
        ProbeError, match=r"gives a sequence different logits alone than in a batch .* Quantise weights only"
    ):
        load(quantized(DTYPES[dtype], (0, 1, 2)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_that_are_quantized_row_by_row_pass(dtype: str) -> None:
    """They round coarsely, but alike in every batch; the verdict may say that a fault could hide in it."""
    lm = load(quantized(DTYPES[dtype], (-1,)))
    assert lm.supports_trees
    assert all(check.verdict == "right" for check in lm.probe.checks[:3])


@pytest.mark.parametrize(
    ("value", "message"),
    [(6e4, r"in float16; dtype=\"float32\" has a wider range"), (float("nan"), "in float32; its weights are damaged")],
)
def test_nan_in_plain_text_is_named(value: float, message: str) -> None:
    model = build("llama", torch.float16)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(value)
    with pytest.raises(ProbeError, match=f"gives NaN for plain text {message}"):
        load(model)


def test_nan_that_attention_hides_is_named() -> None:
    """Torch's attention made numbers of NaN queries, and the layer was said to compute otherwise when packed."""
    model = build("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    with pytest.raises(ProbeError, match=r"gives NaN for plain text.*; its weights are damaged"):
        load(model, "packed")


def test_a_model_that_no_fault_moves_is_said_to_prove_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with caplog.at_level(logging.WARNING, "foredraft"):
        lm = load(model)
    assert {check.verdict for check in lm.probe.checks} == {"unclear"}
    assert lm.probe.invisible == ("positions", "masks")
    assert "the llama model hardly reacts to a wrong mask" in caplog.text


def test_a_model_without_positions_needs_none() -> None:
    model = ARCHITECTURES["smollm3"]
    model = dataclasses.replace(model, options={**model.options, "no_rope_layers": [0, 0]})
    lm = load(model.build("sdpa", torch.bfloat16), "packed")
    assert lm.probe.invisible == ("positions",)
    assert {check.verdict for check in lm.probe.checks} == {"right"}


@pytest.mark.parametrize("vocab_size", [2, 3, 5, 13])
def test_the_smallest_vocabularies_pass(vocab_size: int) -> None:
    """With 3 tokens the probe's texts are beginnings of each other, and some logits were never taken."""
    assert CausalLM(toy_model(vocab_size)).supports_trees


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_one_layer_at_a_time_is_held_in_single_precision() -> None:
    model = build("gemma3", torch.bfloat16)
    lm = CausalLM(model, execution="eager", probe=False)
    small = representative(lm, (0, 1), torch.float32, 4)
    seen: list[tuple[torch.dtype, ...]] = []

    def look(*_: Any) -> None:
        seen.append(tuple(layer.self_attn.q_proj.weight.dtype for layer in small.layers))

    for layer in small.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(look)
    states = small.shadow(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits
    assert seen == [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
    assert states.shape == (1, 3, 64)
    assert states.dtype == torch.float32
    addresses = {weight.data_ptr() for weight in model.parameters()}
    own = [w for w in small.shadow.parameters() if w.data_ptr() not in addresses and w.numel() > 0]
    assert not own
    assert (small.window, lm.window) == (4, 8)
    assert model.config.sliding_window == lm.config.sliding_window == 8
    probed = load(model).probe
    assert probed.extra_bytes == 2 * max(
        sum(weight.nbytes for weight in layer.parameters()) for layer in model.model.layers
    )


def test_a_model_that_does_not_run_reduced_is_probed_as_it_is() -> None:
    """Its output layer is read past its module, so that nothing can stand in its place."""

    class Direct(LlamaForCausalLM):
        def forward(self, input_ids: Any, position_ids: Any = None, past_key_values: Any = None, **options: Any) -> Any:
            keep = options.pop("logits_to_keep", 0)
            options[cache_argument(self.model)] = past_key_values
            states = self.model(input_ids=input_ids, position_ids=position_ids, **options)[0]
            kept = slice(-keep, None) if isinstance(keep, int) else keep
            logits = torch.nn.functional.linear(states[:, kept], self.lm_head.weight)
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    config = LlamaConfig(**ARCHITECTURES["llama"].config().to_dict())
    model = strengthen(Direct(config)).to(torch.bfloat16).eval()
    lm = load(model)
    assert lm.supports_trees
    assert (lm.probe.dtype, lm.probe.layers, lm.probe.extra_bytes) == ("bfloat16", (0, 1), 0)
    with pytest.MonkeyPatch.context() as patch:
        shifts_positions_behind_the_prefix(patch)
        with pytest.raises(ProbeError):
            load(model)


# -- parts -----------------------------------------------------------------------------------------------------------


def test_layers_of_every_build_are_taken() -> None:
    """At least two, no more than six, and one whose attention somebody has replaced."""
    sliding, full = ["sliding_attention"] * 3, ["full_attention"]
    llama = deep(ARCHITECTURES["llama"], 8).build().model.layers
    assert representatives(llama, full * 8) == (0, 1)
    assert representatives(llama[:1], full) == (0,)
    assert representatives(llama, (sliding + full) * 2) == (0, 3)
    llama[6].self_attn.forward = lambda *_: None
    llama[7].mlp.register_forward_pre_hook(lambda *_: None)
    assert representatives(llama, full * 8) == (0, 6, 7)
    assert representatives(llama, [str(index) for index in range(8)]) == tuple(range(6))
    mixed = deep(ARCHITECTURES["deepseek-v3"], 4).build().model.layers
    assert representatives(mixed, full * 4) == (0, 1)  # dense, experts


def test_a_check_is_held_between_rounding_and_a_fault() -> None:
    assert Check.of("x", 1e-3, 1e-6, 1e-2) == Check("x", 1e-3, 1e-6, 1e-2, 1e-4, "wrong")
    assert Check.of("x", 1e-5, 1e-6, 1e-2).verdict == "right"
    assert Check.of("x", 0.3, 0.1, 0.41) == Check("x", 0.3, 0.1, 0.41, 0.4, "right")
    assert Check.of("x", 0.3, 0.1, 0.39).verdict == "unclear"
    assert Check.of("x", float("nan"), 0.1, 1.0).verdict == "wrong"
    assert "relative error 0.001; rounding alone gives 1e-06" in Check.of("x", 1e-3, 1e-6, 1e-2).describe()


def test_errors_are_relative_to_the_spread() -> None:
    """Some models rule tokens out; a NaN is an error of any size."""
    want = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert relative_error(want + 0.5, want) == 0.5
    ruled_out = torch.tensor([1.0, 3.0, -math.inf], dtype=torch.float64)
    assert relative_error(ruled_out, ruled_out) == 0.0
    assert relative_error(torch.tensor([1.0, 3.0, 0.0]).double(), ruled_out) == math.inf
    assert relative_error(torch.full((2,), math.nan).double(), want) == math.inf


def test_the_verdict_is_data() -> None:
    lm = load(build("llama", torch.bfloat16), "packed")
    data = json.loads(json.dumps(lm.probe.as_dict(), allow_nan=False))
    assert [check["name"] for check in data["checks"]] == ["chains", "trees", "branches", "linears", "execution"]
    assert data["dtype"] == "float32"
    assert data["layers"] == [0, 1]
    broken = dataclasses.replace(lm.probe, checks=(Check.of("trees", float("inf"), 1e-6, 1e-2),))
    assert json.loads(json.dumps(broken.as_dict(), allow_nan=False))["checks"][0]["error"] is None
    assert not broken.supports_trees
    with pytest.raises(dataclasses.FrozenInstanceError):
        lm.probe.dtype = "float64"
