"""Z-Image: a flow-matching transformer over image and text in one sequence; Qwen3's last layer but one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.context.context_parallel import TOKENS, SequencePlan
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class ZImage(ModelFamily):
    pipelines = ("ZImagePipeline",)
    float32_inputs = ("t",)
    objective = flow_matching
    text_width = "cap_feat_dim"
    host_inputs = ("prompt_embeds_mask",)
    # The two blocks that read the text alone stay whole. What joins text and image needs the whole image.
    sequence_plan = SequencePlan(
        attention={"noise_refiner.*.attention": ("noise_refiner.0.x",), "layers.*.attention": ("layers.0.x",)},
        gathered={"noise_refiner.-1": "noise_refiner.0.x", "all_final_layer.*": "layers.0.x"},
        splits={
            "noise_refiner.0": {"x": TOKENS},
            "noise_refiner.*": {"freqs_cis": TOKENS},
            "layers.0": {"x": TOKENS},
            "layers.*": {"freqs_cis": TOKENS},
        },
    )

    def default_max_length(self) -> int:
        return 512

    def image_tokens(self, shape: Shape) -> int:
        return (shape.height // 2) * (shape.width // 2)  # its config has `all_patch_size` in place of `patch_size`

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, L, D), zero after each caption's end, and their mask (B, L)."""
        embeds, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        masks = [torch.ones(len(each), dtype=torch.long, device=each.device) for each in embeds]
        return {
            "prompt_embeds": pad_sequence(embeds, batch_first=True),
            "prompt_embeds_mask": pad_sequence(masks, batch_first=True),
        }

    def zero_gradients(self) -> tuple[str, ...]:
        return ("x_pad_token", "cap_pad_token")  # of sequences that are no multiple of 32 tokens

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as ZImagePipeline does, with a list of samples, each a video of one frame.

        Its time is 0 at noise and 1 at the image, and it predicts latents - noise.
        """
        predictions = model(
            list(noised_BCHW.unsqueeze(2)),
            1 - timesteps_B,
            [embeds.to(noised_BCHW.dtype) for embeds in unpad(conditioning)],
            return_dict=False,
        )[0]
        return -torch.stack(predictions).squeeze(2)

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        # In this pipeline a guidance scale of 0 means none, in the others 1 does.
        kwargs = sampling.kwargs() | {"guidance_scale": sampling.guidance - 1}
        for prefix, conditioning in (("", positive), ("negative_", negative)):
            if conditioning:
                kwargs[f"{prefix}prompt_embeds"] = unpad(conditioning)
        return kwargs


def unpad(conditioning: Conditioning) -> list[Tensor]:
    """Embedding of each caption (L, D), without padding."""
    lengths = conditioning["prompt_embeds_mask"].sum(1).tolist()  # they become shapes
    return [embeds[:length] for embeds, length in zip(conditioning["prompt_embeds"], lengths, strict=True)]
