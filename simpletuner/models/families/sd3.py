"""Stable Diffusion 3 and 3.5: a flow-matching transformer with two CLIP text encoders and T5-XXL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from simpletuner.models.family.base import CLIP_TOKENS, ModelFamily
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.context.context_parallel import TOKENS, SequencePlan

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class SD3(ModelFamily):
    """Stable Diffusion 3 and 3.5."""

    pipelines = ("StableDiffusion3Pipeline",)
    objective = flow_matching
    sequence_plan = SequencePlan(
        attention={
            "transformer_blocks.*.attn": (
                "transformer_blocks.0.hidden_states",
                "transformer_blocks.0.encoder_hidden_states",
            ),
            "transformer_blocks.*.attn2": ("transformer_blocks.0.hidden_states",),  # 3.5 medium: of the image alone
        },
        gathered={"proj_out": "transformer_blocks.0.hidden_states"},
        splits={"transformer_blocks.0": {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS}},
    )

    def optional_encoders(self) -> tuple[str, ...]:
        return ("text_encoder_3",)

    def default_max_length(self) -> int:
        return 256  # as the pipeline's; 3.5 was trained on 77 and on 256 tokens

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.exported_config()
        tokens = CLIP_TOKENS + (self.max_length or 0)  # CLIP's, then T5's
        return {
            "prompt_embeds": (tokens, config[self.text_width]),
            "pooled_prompt_embeds": (config["pooled_projection_dim"],),
        }

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, 77 + max_length, D) and pooled_prompt_embeds (B, P).

        The first 77 tokens are both CLIPs', side by side and padded with zeros to T5's width; T5's tokens
        follow.
        """
        # Without T5 the pipeline takes zeros of the width in its transformer's config, not loaded here.
        pipeline.transformer = self.meta_denoiser
        embeds, _, pooled, _ = pipeline.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def zero_gradients(self) -> tuple[str, ...]:
        # The last block returns no text (context_pre_only): what the text's queries attend to is dropped.
        last = f"transformer_blocks.{self.config['num_layers'] - 1}.attn"
        return (f"{last}.add_q_proj", f"{last}.norm_added_q")

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as StableDiffusion3Pipeline does: it patchifies itself; time is in 0..1000."""
        dtype = noised_BCHW.dtype
        return model(
            hidden_states=noised_BCHW,
            timestep=timesteps_B * 1000,
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            pooled_projections=conditioning["pooled_prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]
