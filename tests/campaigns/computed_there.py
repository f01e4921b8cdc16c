"""Compare what an imported file trains with what its program's own code computes from the same file.

`python tests/campaigns/computed_there.py PEERS [--python PYTHON] [--write FILE]`: PEERS has checkouts of sd-scripts
(48d368fa), OneTrainer (23df3832), mgds (3a6994ad) and ai-toolkit (27a03a91). Each file of
tests/support/imported_beside.py is given to the program's parser, scheduler, buckets, captions and noise levels, in a
process of its own, which PYTHON runs: it needs torch, diffusers, transformers, toml, voluptuous, imagesize and
opencv-python-headless. Packages that these functions import and do not use are empty there. --write keeps the
programs' numbers for the test.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from contextlib import chdir
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
DRAWS = 200_000
EMPTY = ("albumentations", "gguf", "info", "mgds", "nvidia", "torchaudio", "torchvision")
"""Packages, and info of ai-toolkit, that the functions import and do not use."""

NOT_TODAY = ("library.lpw_stable_diffusion", "library.sdxl_lpw_stable_diffusion")
"""Modules that need names of an older transformers, and sample images."""


# In a process of the program.


class Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *values, **named: None})


class EmptyModule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *values, **named: None})


class EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        is_empty = fullname.partition(".")[0] in EMPTY
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_empty else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare(*folders: Path) -> None:
    """Let the program's modules be imported."""
    import diffusers  # noqa: F401 - before torchvision seems to be there
    from transformers.utils import import_utils

    for name in ("torchvision", "torchvision_v2", "torchaudio", "torchao"):
        getattr(import_utils, f"is_{name}_available", lambda: False)()
    for name in NOT_TODAY:
        sys.modules[name] = EmptyModule(name)
    sys.meta_path.append(EmptyPackages())
    sys.path[:0] = [str(folder) for folder in folders]


def stepped(optimizer: Any, scheduler: Any, steps: int, rate: float) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"] / rate)
        optimizer.step()
        scheduler.step()
    return rates


def sgd(rate: float) -> Any:
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def quantiles(levels: Any, shares: list[float]) -> list[float]:
    import torch

    return torch.quantile(levels.double(), torch.tensor(shares, dtype=torch.float64)).tolist()


def sd_scripts(peers: Path, case: dict[str, Any]) -> dict[str, Any]:
    prepare(peers / "sd-scripts")
    import torch
    from library import config_util, flux_train_utils, sd3_train_utils, train_util

    parser = argparse.ArgumentParser()
    train_util.add_sd_models_arguments(parser)
    train_util.add_dataset_arguments(parser, True, True, True)
    train_util.add_training_arguments(parser, False)
    train_util.add_optimizer_arguments(parser)
    train_util.add_dit_training_arguments(parser)
    flux_train_utils.add_flux_train_arguments(parser)
    args, _ = parser.parse_known_args(["--config_file", "train.toml"])
    sys.argv = ["flux_train_network.py", "--config_file", "train.toml"]
    args = train_util.read_config_from_file(args, parser)
    optimizer = sgd(args.learning_rate)
    rates = stepped(optimizer, train_util.get_scheduler_fix(args, optimizer, 1), case["steps"], args.learning_rate)

    sanitizer = config_util.ConfigSanitizer(True, False, False, True)
    blueprint = config_util.BlueprintGenerator(sanitizer).generate(config_util.load_user_config("data.toml"), args)
    made = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
    [dataset] = (made[0] if isinstance(made, tuple) else made).datasets
    infos = sorted(dataset.image_data.values(), key=lambda info: info.absolute_path)
    subset = dataset.subsets[0]
    captions = [dataset.process_caption(subset, infos[number % len(infos)].caption) for number in range(DRAWS // 10)]

    scheduler = sd3_train_utils.FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=args.discrete_flow_shift
    )
    latents = torch.zeros(DRAWS, 1, 2, 2)
    _, timesteps, _ = flux_train_utils.get_noisy_model_input_and_timesteps(
        args, scheduler, latents, torch.zeros_like(latents), torch.device("cpu"), torch.float32
    )
    levels = quantiles(timesteps / 1000, case["shares"])
    return {
        "rates": rates,
        "buckets": [list(info.bucket_reso) for info in infos],
        "captions": captions,
        "levels": levels,
    }


def one_trainer(peers: Path, case: dict[str, Any]) -> dict[str, Any]:
    prepare(peers / "OneTrainer", peers / "mgds" / "src")
    import torch
    from modules.modelSetup.mixin.ModelSetupNoiseMixin import ModelSetupNoiseMixin
    from modules.util import create
    from modules.util.config.TrainConfig import TrainConfig

    config = TrainConfig.default_values().from_dict(json.loads(Path("config.json").read_text()))
    optimizer = sgd(config.learning_rate)
    scheduler = create.create_lr_scheduler(
        config=config,
        optimizer=optimizer,
        learning_rate_scheduler=config.learning_rate_scheduler,
        warmup_steps=config.learning_rate_warmup_steps,
        num_cycles=config.learning_rate_cycles,
        min_factor=config.learning_rate_min_factor,
        num_epochs=config.epochs,
        batch_size=config.batch_size,
        approximate_epoch_length=len(case["sizes"]),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )
    rates = stepped(optimizer, scheduler, case["steps"], config.learning_rate)
    levels = ModelSetupNoiseMixin()._get_timestep_discrete(
        100_000, False, torch.Generator().manual_seed(0), DRAWS, config, config.timestep_shift
    )
    return {
        "rates": rates,
        "buckets": buckets_of_mgds(case["sizes"], config.resolution),
        "captions": captions_of_mgds(config.concepts[0].text, case["texts"]),
        "levels": quantiles(levels / 100_000, case["shares"]),
    }


def fed(module: type, items: dict[str, Any]) -> type:
    """Class of a module of mgds that stands alone: what it reads of others is `items`, lists by index or values."""
    import random

    class Fed(module):
        def _get_previous_item(self, variation: int, name: str, index: int) -> Any:
            return items[name][index] if isinstance(items[name], list) else items[name]

        def _get_previous_length(self, name: str) -> int:
            return max(len(each) if isinstance(each, list) else 1 for each in items.values())

        def _get_rand(self, variation: int, index: int = -1) -> random.Random:
            return random.Random(f"{variation} {index}")

    return Fed


def buckets_of_mgds(sizes: list[list[int]], resolution: str) -> list[list[int]]:
    from mgds.pipelineModules.AspectBucketing import AspectBucketing

    items = {"size": [(height, width) for width, height in sizes], "target": resolution, "frames": 1}
    made = fed(AspectBucketing, items)(64, "size", "target", None, None, "frames", False, "scale", "crop", "possible")
    made.start(0)
    crops = [made.get_item(0, number)["crop"] for number in range(len(sizes))]
    return [[width, height] for height, width in crops]


def captions_of_mgds(text: Any, texts: list[str]) -> list[str]:
    from mgds.pipelineModules.ShuffleTags import ShuffleTags

    items = {
        "text": texts,
        "enabled": text.enable_tag_shuffling,
        "delimiter": text.tag_delimiter,
        "keep": text.keep_tags_count,
    }
    made = fed(ShuffleTags, items)("text", "enabled", "delimiter", "keep", "out")
    times = DRAWS // 10 // len(texts)
    return [made.get_item(variation, number)["out"] for variation in range(times) for number in range(len(texts))]


def ai_toolkit(peers: Path, case: dict[str, Any]) -> dict[str, Any]:
    prepare(peers / "ai-toolkit")
    import torch
    import yaml
    from toolkit.buckets import get_bucket_for_image_size
    from toolkit.config_modules import DatasetConfig, TrainConfig
    from toolkit.dataloader_mixins import CaptionProcessingDTOMixin
    from toolkit.samplers.custom_flowmatch_sampler import CustomFlowMatchEulerDiscreteScheduler
    from toolkit.scheduler import get_lr_scheduler

    process = yaml.safe_load(Path("job.yaml").read_text())["config"]["process"][0]
    train, dataset = TrainConfig(**process["train"]), DatasetConfig(**process["datasets"][0])
    optimizer = sgd(train.lr)
    params = {**train.lr_scheduler_params, "total_iters": train.steps}  # BaseSDTrainProcess.py:2234
    rates = stepped(optimizer, get_lr_scheduler(train.lr_scheduler, optimizer, **params), case["steps"], train.lr)
    sizes = [get_bucket_for_image_size(*size, resolution=dataset.resolution, divisibility=32) for size in case["sizes"]]

    file = CaptionProcessingDTOMixin.__new__(CaptionProcessingDTOMixin)
    file.trigger_word, file.is_reg, file.dataset_config, captions = None, False, dataset, []
    for number in range(DRAWS // 10):
        file.raw_caption = case["texts"][number % len(case["texts"])]
        captions.append(file.get_caption())
    sampler = CustomFlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    latents = torch.zeros(1, 16, 96, 96)
    # An index is drawn evenly of these (BaseSDTrainProcess.py:1301).
    levels = sampler.set_train_timesteps(DRAWS, "cpu", train.timestep_type, latents, 2) / 1000
    return {
        "rates": rates,
        "buckets": [[each["width"], each["height"]] for each in sizes],
        "captions": captions,
        "levels": quantiles(levels, case["shares"]),
    }


PROBES = {"sd-scripts": sd_scripts, "OneTrainer": one_trainer, "ai-toolkit": ai_toolkit}


# Here.


def main(peers: Path, python: str, write: Path | None) -> None:
    sys.path.append(str(HERE.parents[1] / "support"))
    from imported_beside import CASES, SHARES, SIZES, STEPS, TAGS, imported_there, places_of, write_case

    texts = [", ".join((*TAGS, str(number))) for number in range(len(SIZES))]
    facts: dict[str, Any] = {}
    for program, cases in CASES.items():
        for name, files in cases.items():
            with tempfile.TemporaryDirectory() as made, chdir(made):
                file = write_case(files, Path(made))
                given = json.dumps({"sizes": SIZES, "steps": STEPS, "shares": SHARES, "texts": texts})
                command = [python, str(HERE), str(peers), "--probe", program]
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
                ran = subprocess.run(command, input=given, capture_output=True, text=True, env=environment)
                if ran.returncode:
                    sys.exit(f"{program}: {ran.stderr[-3000:]}")
                there = json.loads(ran.stdout.splitlines()[-1])
                there["captions"] = places_of(there["captions"])
                here = imported_there(file)
            facts.setdefault(program, {})[name] = there
            print(f"{program}, {name}: {'; '.join(differences(here, there))}", flush=True)
    if write:
        text = json.dumps(rounded(facts), indent=1)
        write.write_text(INNER_LIST.sub(lambda found: " ".join(found[0].split()), text) + "\n")


INNER_LIST = re.compile(r"\[[^][]*\]")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


def differences(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    rates = [abs(one - other) for one, other in zip(here["rates"], there["rates"], strict=True)]
    last = max((step for step, each in enumerate(rates) if each > 1e-9), default=-1)
    same = sum(list(one) == list(other) for one, other in zip(here["buckets"], there["buckets"], strict=True))
    places = max(
        abs(one - other)
        for tag, shares in here["captions"]["places"].items()
        for one, other in zip(shares, there["captions"]["places"][tag], strict=True)
    )
    levels = max(abs(one - other) for one, other in zip(here["levels"], there["levels"], strict=True))
    return [
        f"rates equal from step {last + 1} of {len(rates)} on, largest difference {max(rates):.4f} of the rate",
        f"{same} of {len(here['buckets'])} buckets equal",
        f"tags in places differ by {places:.3f}, dropped captions {here['captions']['dropped']:.3f} and "
        f"{there['captions']['dropped']:.3f}",
        f"noise levels differ by {levels:.4f}",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--probe", choices=PROBES)
    given = parser.parse_args()
    if given.probe:
        print(json.dumps(PROBES[given.probe](given.peers, json.load(sys.stdin))))
    else:
        main(given.peers.resolve(), given.python, given.write and given.write.resolve())
