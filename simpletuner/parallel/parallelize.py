"""Prepare a denoiser on the meta device for training: split the sequence, recompute, compile, shard, in this order."""

from __future__ import annotations

import torch
from torch import nn

from simpletuner.parallel.compilation import compile_in_place
from simpletuner.parallel.context.attention_exchange import SequenceGroup
from simpletuner.parallel.context.context_parallel import SequencePlan, split_sequence
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.fsdp2 import shard
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.model.activations import offload_activations, set_recomputation
from simpletuner.parallel.model.fused_qkv import fuse_qkv
from simpletuner.settings.declared.sections import Settings


def parallelize(
    model: nn.Module, blocks: tuple[str, ...], settings: Settings, mesh: Mesh, plan: SequencePlan | None = None
) -> None:
    """Apply what the settings ask for, in place; parameters stay on the meta device. Collective: creates groups.

    Compiling comes before sharding, so that FSDP2's hooks, which gather weights, run between the compiled blocks
    rather than break their graphs. DeepSpeed shards later, when it takes the model over.
    """
    model.train()
    if mesh.cp > 1 and plan is not None:
        group = SequenceGroup.of(mesh.cp_group())
        split_sequence(model, plan, group, settings.parallel.context_parallel_comm_strategy)
    if settings.training.fuse_qkv_projections:
        fuse_qkv(model)
    set_recomputation(model, settings)
    if settings.training.offload_activations:
        offload_activations(model)
    if settings.compile.is_on:
        compile_in_place(model, blocks, settings.compile)
    if settings.parallel.fsdp_enable:
        # The norms of a LoRA's base in bf16 are float32, and so are its matrices: gathered as they are, under autocast.
        is_lora = settings.model.model_type == "lora"
        shard(model, blocks, settings.parallel, torch.float32 if is_lora else compute_dtype(settings), mesh)
