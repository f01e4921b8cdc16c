"""What a start imports, counted: these numbers only fall. A raise needs a reason beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import start_budget

from simpletuner.training.hooks import HOOKS

UNUSED = {"torchao", "deepspeed", "peft", "boto3", "botocore", "matplotlib", "pandas", "scipy", "datasets"}
UNUSED |= {"sympy", "transformers"}
"""Packages that a run does without which quantizes, compiles and shards nothing, trains all weights, reads files, and
whose captions have been encoded."""

LATER = {
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.pipelines.pipeline_utils",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo.eval_frame",
}
"""Modules that nothing needs before the first step where everything has been encoded."""

SWITCHED_OFF = {f"simpletuner.training.{place.rpartition('.')[0]}" for place in HOOKS} - {"simpletuner.training.hooks"}
SWITCHED_OFF |= {"simpletuner.training.profiling", "simpletuner.training.metrics.sample_losses"}
SWITCHED_OFF |= {"simpletuner.settings.foreign.key_table", "simpletuner.counting.step_memory"}
SWITCHED_OFF |= {"simpletuner.launch.supervisor", "simpletuner.caches.store.mirror"}
SWITCHED_OFF |= {f"simpletuner.training.validation.{name}" for name in ("held_out", "image_grid", "validator")}
"""Modules of what a plain run has not switched on."""

MOST_OF_OURS, MOST_MODULES = 248, 2197  # 2,186 seen
MOST_OF_OURS_FOR_HELP, MOST_MODULES_FOR_HELP = 18, 177


@pytest.mark.long
def test_a_start_imports_what_it_uses(tmp_path):
    start_budget.make_inputs(tmp_path)
    start_budget.new_run(tmp_path, sys.executable)  # encodes
    modules = start_budget.new_run(tmp_path, sys.executable).modules
    packages = start_budget.count_by_package(modules)
    assert not UNUSED & packages.keys()
    assert not (LATER | SWITCHED_OFF) & modules
    assert packages["simpletuner"] <= MOST_OF_OURS
    assert packages.total() <= MOST_MODULES


def test_help_imports_the_command_line_alone(tmp_path):
    packages = start_budget.count_by_package(start_budget.modules_of_answer(str(tmp_path), "--help"))
    assert "pydantic" not in packages
    assert packages["simpletuner"] <= MOST_OF_OURS_FOR_HELP
    assert packages.total() <= MOST_MODULES_FOR_HELP


def test_a_list_of_models_imports_no_settings(tmp_path):
    modules = start_budget.modules_of_answer(str(tmp_path), "models")
    assert not any(name.startswith(("simpletuner.settings", "pydantic", "rich.console")) for name in modules)


def test_a_list_of_caches_imports_no_datasets_where_none_is_named(tmp_path):
    modules = start_budget.modules_of_answer(str(tmp_path), "cache list")
    assert "simpletuner.tools.cache.contents" in modules
    assert not {"simpletuner.data.config.datasets", "rich.console"} & modules
