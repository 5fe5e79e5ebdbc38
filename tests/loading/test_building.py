"""Models are built without torch's compiler, and are those that transformers builds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from architectures import ARCHITECTURES
from foredraft.loading.models import load_model
from foredraft.model.building import WithoutCompiler, without_weights
from programs import printed

NAMES = ("llama", "gemma3", "gpt2", "phi", "qwen2-sliding", "mixtral")


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_model_has_the_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    """Buffers as well: angles of positions are not in the file."""
    ARCHITECTURES[name].build("sdpa", torch.float32).save_pretrained(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(tmp_path)
    got = load_model(tmp_path, dtype="float32", with_tokenizer=False).model
    tensors = [dict((*model.named_parameters(), *model.named_buffers())) for model in (want, got)]
    assert tensors[0].keys() == tensors[1].keys()
    for key, tensor in tensors[0].items():
        assert tensor.device.type == tensors[1][key].device.type == "cpu", key
        assert torch.equal(tensor, tensors[1][key]), key


@pytest.mark.parametrize("name", NAMES)
def test_modules_without_weights_have_their_shapes(name: str) -> None:
    config = ARCHITECTURES[name].config()
    want, got = AutoModelForCausalLM.from_config(config), without_weights(config)
    shapes = [{key: (each.shape, each.dtype) for key, each in model.named_parameters()} for model in (want, got)]
    assert shapes[0] == shapes[1]
    assert all(weight.is_meta for weight in got.parameters())
    assert {key: each.shape for key, each in want.named_buffers()} == {
        key: each.shape for key, each in got.named_buffers()
    }


def test_tensors_of_both_devices_are_combined_on_the_meta_device() -> None:
    with WithoutCompiler(), torch.device("meta"):
        frequencies = torch.arange(0, 8, 2) / 8
        weight = torch.empty(4)
        assert torch.equal(frequencies, torch.tensor([0.0, 0.25, 0.5, 0.75], device="cpu"))
        assert (weight * frequencies).is_meta
        assert torch.nn.init.normal_(weight) is weight


PROGRAM = """
import sys
from foredraft.cli.quick_imports import quick_imports
with quick_imports():
    import foredraft.llm
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from foredraft.model.building import without_weights
without_weights(LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
names = "torch._dynamo", "sympy", "scipy.optimize", "torch.distributed.tensor"
print([name for name in names if name in sys.modules])
import torch
import torch._dynamo.config
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
print(torch._dynamo.__file__ is not None, sys.modules["torch._dynamo.config"] is torch._dynamo.config)
print(type(transformers.masking_utils.TransformGetItemToIndex()) is TransformGetItemToIndex)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""


def told(program: str, folder: Path) -> str:
    """What a program prints in a process of its own."""
    return printed([sys.executable, "-c", program], folder, os.environ)


def test_the_command_line_imports_transformers_without_the_compiler_and_distributed_tensors(tmp_path: Path) -> None:
    """And both can be imported afterwards."""
    assert told(PROGRAM, tmp_path).splitlines() == ["[]", "True True", "True", "2.0"]


EARLIER = """
import sys
from foredraft.cli.quick_imports import quick_imports
with quick_imports():
    import transformers
    import torch._dynamo
    first = torch._dynamo.allow_in_graph
    import torch._dynamo.utils
    second = sys.modules["torch._dynamo"]
    print(first(print) is print, second.__file__ is not None, torch._dynamo.utils is sys.modules["torch._dynamo.utils"])
    from transformers import PreTrainedModel
print(PreTrainedModel.__name__, sys.modules["torch._dynamo"] is second is torch._dynamo)
"""


def test_what_the_stand_ins_do_not_have_is_imported(tmp_path: Path) -> None:
    assert told(EARLIER, tmp_path).splitlines() == ["True True True", "PreTrainedModel True"]
