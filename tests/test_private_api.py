"""Private API of torch, diffusers and typer stands in simpletuner/private_api alone: one place to look at."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from diffusers.models.attention_processor import Attention

from simpletuner.private_api import of_diffusers

PACKAGE = Path(__file__).parent.parent / "simpletuner"
LIBRARIES = ("torch", "dist", "diffusers", "typer")
OF_MODELS = {"_cp_plan", "_no_split_modules", "_repeated_blocks", "_keep_in_fp32_modules"}


def is_private(dotted: str) -> bool:
    library, *parts = dotted.split(".")
    return library in LIBRARIES and any(part.startswith("_") and not part.startswith("__") for part in parts)


def private_uses(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from (name for each in names if is_private(name := f"{module}.{each.name}"))
            case ast.Import(names=names):
                yield from (each.name for each in names if is_private(each.name))
            case ast.Attribute(attr=attr) if attr in OF_MODELS or is_private(ast.unparse(node)):
                yield ast.unparse(node)
            case ast.Constant(value=str(text)) if text in OF_MODELS:
                yield text


def test_the_package_has_one_place_for_it():
    files = [file for file in PACKAGE.rglob("*.py") if file.parent.name != "private_api"]
    found = {file.name: uses for file in files if (uses := list(private_uses(file.read_text("utf-8"))))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "from torch._dynamo import config",
        "from torch.utils import _pytree",
        "import diffusers.models._modeling_parallel",
        "torch._foreach_norm(gradients)",
        "dist.distributed_c10d._abort_process_group()",
        "model._cp_plan",
        "getattr(model, '_repeated_blocks')",
        "from typer._adapters import x",
    ],
)
def test_another_place_would_be_found(source):
    assert len(list(private_uses(source))) == 1


LEFT_OUT = """
import sys
from simpletuner.private_api import of_diffusers, of_torch

of_torch.leave_out_compiler()
of_diffusers.leave_out(["peft", "torchao", "deepspeed"])
of_diffusers.import_without_transformers()
import torch
import importlib.metadata
from diffusers.utils import import_utils

distributions = import_utils._package_map
assert "found" not in vars(distributions), "nobody has asked"
assert importlib.metadata.packages_distributions() == dict(distributions) and "found" in vars(distributions)
assert import_utils._is_distribution_installed("PIL") == (True, importlib.metadata.version("pillow"))
from diffusers import UNet2DConditionModel
from diffusers.loaders import lora_base, single_file_utils

layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
for is_early in (True, False):
    with torch.utils.checkpoint.set_checkpoint_early_stop(is_early):
        torch.utils.checkpoint.checkpoint(layer, torch.ones(1, 2), use_reentrant=False).sum().backward()
optimizer.step()
assert not {"transformers", "sympy", "torch.distributed.tensor", "torch._dynamo.eval_frame"} & sys.modules.keys()
assert type(torch._dynamo).__name__ == "ModuleStub"
assert not issubclass(UNet2DConditionModel, lora_base.PreTrainedModel), "and asks nobody"
assert "transformers" not in sys.modules

with of_diffusers.imported_later("jinja2"):
    from jinja2.environment import Template
    try:
        from jinja2.environment import absent
        assert False, "libraries ask so for versions"
    except ImportError:
        assert not isinstance(3, Template)
assert not any(name.startswith("jinja2") for name in sys.modules)
import jinja2
assert Template.__name__ == "Template" and isinstance(jinja2.Template("x"), Template)

import transformers
from transformers import CLIPTextModel

assert issubclass(CLIPTextModel, (torch.Tensor, lora_base.PreTrainedModel))
assert single_file_utils.AutoImageProcessor.from_pretrained == transformers.AutoImageProcessor.from_pretrained
assert transformers.PreTrainedModel.__module__ == "transformers.modeling_utils"
from diffusers import StableDiffusionXLPipeline
assert StableDiffusionXLPipeline.load_lora_weights
assert type(sys.modules["torch._dynamo"]).__name__ == "ModuleStub", "transformers and pipelines need no compiler either"

compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.zeros(1)).item() == 1
assert torch._inductor.config is sys.modules["torch._inductor.config"]
assert sys.modules["torch._dynamo"] is torch._dynamo and "torch._dynamo.eval_frame" in sys.modules
assert torch._dynamo._trace_wrapped_higher_order_op
"""


def test_what_is_left_out_at_a_start_is_there_when_it_is_asked_for():
    done = subprocess.run([sys.executable, "-c", LEFT_OUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LEFT_OUT_OF_LORA = """
from simpletuner.private_api import of_diffusers, of_torch

of_torch.leave_out_compiler()
of_diffusers.leave_out(["torchao", "deepspeed"])
of_diffusers.import_without_transformers()
is_left_out = True
"""
LORA = """
import sys
import peft, torch
from diffusers import UNet2DConditionModel

HEAVY = {"transformers", "sympy", "torch.distributed.tensor", "torch.distributed.checkpoint"}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv2d(3, 3, 1), torch.nn.Linear(4, 4))
for number, kind in enumerate((peft.LoraConfig, peft.LoHaConfig, peft.LoKrConfig)):
    config = kind(r=2, target_modules=[str(number)])
    peft.inject_adapter_in_model(config, model, f"default{number}", low_cpu_mem_usage=True)
assert HEAVY & sys.modules.keys() == (set() if is_left_out else HEAVY), HEAVY & sys.modules.keys()
names = sorted(name for name, _ in model.named_parameters())
known = {name: value for name, value in vars(peft.import_utils).items() if isinstance(value, bool | int)}

import transformers
from diffusers import StableDiffusionXLPipeline
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

assert torch.distributed.tensor.DTensor is DTensor
assert isinstance(Conv1D(2, 2), peft.tuners.tuners_utils.Conv1D)
assert not isinstance(model, peft.tuners.tuners_utils.PreTrainedModel)
assert StableDiffusionXLPipeline.load_lora_weights
encoder = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1))
peft.get_peft_model(encoder, peft.LoraConfig(r=2, target_modules=["q_proj"]))
print(names, known)
"""


def test_an_adapter_is_the_same_whether_peft_has_imported_transformers_and_works_with_it_afterwards(starter):
    command = [sys.executable, "-W", "ignore", "-c", LEFT_OUT_OF_LORA + LORA]
    without = subprocess.run(command, capture_output=True, text=True)
    assert without.returncode == 0, without.stderr
    imported = starter.start(exec, 1, LORA, {"is_left_out": False})  # forked from what has imported transformers
    assert imported.wait() == [0], imported.said
    # What a library warns of comes first.
    assert without.stdout.splitlines() == imported.said.splitlines()[-1:] != []
    assert version("peft").startswith(of_diffusers.SEEN_PEFT)


def test_attention_finds_the_kept_signature_of_its_processor():
    layer = Attention(query_dim=8, heads=1, dim_head=8)
    before = inspect.signature(layer.processor.__call__)
    of_diffusers.keep_signatures(torch.nn.Sequential(layer, torch.nn.Linear(1, 1)))
    assert inspect.signature(layer.processor.__call__) == before
    assert inspect.signature(type(layer.processor).__call__) is inspect.signature(type(layer.processor).__call__)
