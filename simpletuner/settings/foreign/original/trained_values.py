"""Values that the original trains with, whatever its file says or leaves out: of its optimizers and its families.

Facts, read off its optimizer_param.py and each family's model.py. Only `config import` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerThere:
    """An optimizer of the original: its replacement here, and the values that it has there."""

    ours: str
    betas: tuple[float, float] | None = None
    epsilon: float | None = None
    weight_decay: float = 0.0
    note: str = ""

    @property
    def settings(self) -> dict[str, float]:
        beta1, beta2 = self.betas or (None, None)
        values = {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": self.epsilon}
        return {name: value for name, value in values.items() if value is not None} | {
            "adam_weight_decay": self.weight_decay
        }


EIGHT_BITS = "its moments are of 8 bits there; state_layout=split has such, for model_type=full"
PAGED = "its moments are paged out to the machine's memory there; fsdp_offload_params keeps them there"
BETAS = (0.9, 0.999)
FASTER = (0.9, 0.99)
OPTIMIZERS_THERE: dict[str, OptimizerThere] = {
    "adamw_bf16": OptimizerThere("adamw", BETAS, 1e-6, 0.01),
    "torch_adam": OptimizerThere("adam", BETAS, 1e-8),
    "torch_adamw": OptimizerThere("adamw", BETAS, 1e-8, 0.01),
    "torch_adagrad": OptimizerThere("adagrad", epsilon=1e-10),
    "torch_adafactor": OptimizerThere("adafactor"),
    "adamw_schedulefree": OptimizerThere("adamw_schedulefree", BETAS, 1e-8, 0.01),
    "adamw_schedulefree+aggressive": OptimizerThere("adamw_schedulefree", BETAS, 1e-6, 1e-3),
    "adamw_schedulefree+no_kahan": OptimizerThere("adamw_schedulefree", BETAS, 1e-6, 1e-3),
    "optimi_adam": OptimizerThere("adam", FASTER, 1e-6),
    "optimi_adamw": OptimizerThere("adamw", FASTER, 1e-6),
    "optimi_lion": OptimizerThere("lion", FASTER),
    "ao_adamw8bit": OptimizerThere("adamw", BETAS, 1e-6, 0.01, EIGHT_BITS),
    "bnb_adagrad": OptimizerThere("adagrad", epsilon=1e-10),
    "bnb_adagrad8bit": OptimizerThere("adagrad", None, 1e-10, note="its sums are of 8 bits there"),
    "bnb_adam": OptimizerThere("adam", BETAS, 1e-8),
    "bnb_adam8bit": OptimizerThere("adam", BETAS, 1e-8, note="its moments are of 8 bits there"),
    "bnb_adamw": OptimizerThere("adamw", BETAS, 1e-6, 0.01),
    "bnb_adamw_paged": OptimizerThere("adamw", BETAS, 1e-6, 0.01, PAGED),
    "bnb_adamw8bit": OptimizerThere("adamw", BETAS, 1e-6, 0.01, EIGHT_BITS),
    "bnb_adamw8bit_paged": OptimizerThere("adamw", BETAS, 1e-6, 0.01, EIGHT_BITS),
    "bnb_lion": OptimizerThere("lion", FASTER),
    "bnb_lion_paged": OptimizerThere("lion", FASTER, note=PAGED),
    "bnb_lion8bit": OptimizerThere("lion", FASTER, note="its momentum is of 8 bits there"),
    "bnb_lion8bit_paged": OptimizerThere("lion", FASTER, note="its momentum is of 8 bits there"),
}
DEFAULT_OPTIMIZER = "adamw_bf16"
NOT_WITH_FSDP2 = ("optimi_", "bnb_", "soap")
"""Optimizers that the original silently replaces by adamw_schedulefree with FSDP2."""


@dataclass(frozen=True)
class FamilyThere:
    """Behaviour of the original in every run of a family."""

    forces: Mapping[str, Any] = field(default_factory=dict)
    """Settings that have these values whatever the file says."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Settings that are at most this, unless the file says i_know_what_i_am_doing, and this where it says nothing."""
    lost: str = ""
    """A method of its own that this version does not have."""


def aligned(pixels: int, **forces: Any) -> dict[str, Any]:
    return {"aspect_bucket_alignment": pixels, **forces}


BY_PIPELINE = FamilyThere(
    lost="there code of its own trains it, which was not compared with diffusers' pipeline, by which it trains here"
)

FAMILIES_THERE: dict[str, FamilyThere] = {
    "auraflow": FamilyThere(aligned(64), {"tokenizer_max_length": 120}),
    "chroma": FamilyThere(
        aligned(64),
        lost="there noise levels are pushed towards 0 and 1 after they are drawn, which this version does not do",
    ),
    "cosmos": FamilyThere(aligned(16)),
    "ernie": BY_PIPELINE,
    "flux": FamilyThere(aligned(64)),
    "flux2": FamilyThere(aligned(16, tokenizer_max_length=512, flux_guidance_value=1.0)),
    "hunyuanvideo": BY_PIPELINE,
    "kandinsky5_video": BY_PIPELINE,
    "kolors": BY_PIPELINE,
    "krea2": BY_PIPELINE,
    "longcat_image": BY_PIPELINE,
    "ltxvideo": FamilyThere(aligned(64, tokenizer_max_length=226)),
    "ltxvideo2": FamilyThere(
        lost="there the video attends to its audio, or to noised zeros where there is none, and here to no audio",
    ),
    "lumina2": FamilyThere(aligned(64)),
    "pixart_sigma": FamilyThere(aligned(64, tokenizer_max_length=300), {"max_grad_norm": 0.01}),
    "qwen_image": FamilyThere(limits={"aspect_bucket_alignment": 32}),
    "sana": FamilyThere(
        aligned(64, vae_dtype="fp32"),
        lost="there latents are halved, and noise levels are drawn evenly from the scheduler's own",
    ),
    "sanavideo": BY_PIPELINE,
    "sd3": FamilyThere(aligned(64), {"tokenizer_max_length": 154}),
    "wan": FamilyThere(aligned(32, tokenizer_max_length=512)),
}

ASSISTED = {"z_image": ("", "turbo", "turbo_ostris_v2"), "flux": ("schnell",)}
"""Flavours (`""`: the default one) whose LoRA the original trains on top of an assistant LoRA."""

IMAGE_STREAM = "to_k,to_q,to_v,to_out.0"
LORA_TARGETS = {
    "flux": f"{IMAGE_STREAM},add_k_proj,add_q_proj,add_v_proj,to_add_out",
    "kandinsky5_video": "to_key,to_query,to_value",
    "flux2": "attn.to_q,attn.to_k,attn.to_v,attn.to_out.0,attn.to_qkv_mlp_proj",
}
"""Layers that a LoRA adapts where the file names none; those of IMAGE_STREAM in all other families."""
CONTEXT = "add_k_proj,add_q_proj,add_v_proj,to_add_out"
FEED_FORWARD = "ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2,proj_mlp,proj_out"
FLUX_LORA_TARGETS = {
    "all": LORA_TARGETS["flux"],
    "context": CONTEXT,
    "context+ffs": f"{CONTEXT},ff_context.net.0.proj,ff_context.net.2",
    "all+ffs": f"{LORA_TARGETS['flux']},{FEED_FORWARD}",
    "all+ffs+embedder": f"x_embedder,{LORA_TARGETS['flux']},{FEED_FORWARD}",
    "ai_toolkit": f"{LORA_TARGETS['flux']},{FEED_FORWARD},norm.linear,norm1.linear,norm1_context.linear",
    "tiny": "single_transformer_blocks.7.proj_out,single_transformer_blocks.20.proj_out",
    "nano": "single_transformer_blocks.7.proj_out",
}
"""Layers by the original's flux_lora_target, those that diffusers' FLUX.1 has."""
