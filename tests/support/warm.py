"""What the fork server imports once, and all that a run would otherwise import, compile or build after its fork.

Measured on a one-step run of the tiny SDXL: 2.1 CPU seconds without the second half of this file, 1.1 with it. Most of
that is `gc.freeze`: torch, diffusers and transformers leave half a million objects, and without it every full
collection in every rank walks over them, which also copies the pages that they share with the fork server.
"""

from __future__ import annotations

import gc
import os
import warnings
from contextlib import suppress

gc.disable()  # until all is imported: 1.1 of 5.9 CPU seconds
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCH_WARM_POOL"] = "0"  # inductor would start a process at its import
os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.filterwarnings("ignore")

import diffusers
import diffusers.guiders
import huggingface_hub.repocard
import jinja2
import matplotlib.ft2font
import numpy.ctypeslib
import PIL.Image
import pydantic.dataclasses
import rich.console
import rich.progress
import rich.table
import torch.distributed.checkpoint
import transformers
import typer._adapters
import typer._click.decorators
import xxhash
from diffusers import schedulers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import simpletuner.app
import simpletuner.launch.heartbeat
import simpletuner.launch.supervisor
import simpletuner.models.families.flux
import simpletuner.models.families.sdxl
import simpletuner.runs.report
import simpletuner.system.processes.run_status
import simpletuner.tools.run_check
import simpletuner.training.publishing.model_card
import simpletuner.training.validation.image_grid
import simpletuner.worker
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.config.embeds import TextEmbeds
from simpletuner.launch.node_info import versions
from simpletuner.models.catalog import registry
from simpletuner.settings import Settings

with suppress(ImportError):
    import cpuinfo
    import deepspeed.comm.mori
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.superoffload.superoffload_stage3
    import deepspeed.runtime.zero.muon.muon_optimizer  # 1 CPU second, since it compiles a function
    import torch.utils.cpp_extension

    import simpletuner.deepspeed.engine
    import simpletuner.deepspeed.startup

    # 1 CPU second of each rank that offloads to a disk, which loads operators by these
    simpletuner.deepspeed.startup.keep_cpu_info()
    cpuinfo.get_cpu_info()

for lazy in ("StableDiffusionXLPipeline", "FluxPipeline", "UNet2DConditionModel", "FluxTransformer2DModel"):
    getattr(diffusers, lazy)
for lazy in ("CLIPTextModel", "CLIPTextModelWithProjection", "CLIPTokenizer", "T5EncoderModel", "T5TokenizerFast"):
    getattr(transformers, lazy)
get_checkpoint_conversion_mapping("clip")  # builds, and keeps, those of all models
for scheduler in [name for name in dir(schedulers) if name.endswith("Scheduler")]:
    getattr(schedulers, scheduler)  # a run looks at those that are compatible with its own
PIL.Image.init()
simpletuner.runs.report.template("page.html.jinja").environment.get_template("parts.html.jinja")
# `train` with its 170 options, whose types Typer keeps: 8 ms to build and 50 to read a first command line by
simpletuner.app.command_of("simpletuner", "train").commands["train"].make_context("train", [])
simpletuner.training.publishing.model_card.template()  # 25 ms of each run that ends
simpletuner.system.processes.run_status.adapter()
registry.presets()
versions()
for section in (LocalImages, TextEmbeds, Settings, *(each.annotation for each in Settings.model_fields.values())):
    section.model_rebuild()  # 0.1 of 0.4 CPU seconds: pydantic builds what reads them at its first use
simpletuner.training.validation.image_grid.fonts_for(frozenset("plain"))

gc.freeze()
gc.enable()
