"""Qwen-Image: a flow-matching transformer over 2x2 latent patches, with the text part of Qwen2.5-VL.

Its VAE is one for video, its texts are as long as the caption, and its guidance needs a negative prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from PIL.Image import Image
from torch import Tensor, nn

from simpletuner.data.prefetch import references_in, stack_conditioning
from simpletuner.models.families.flux import pack, unpack
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching, round_to_bf16
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.context.context_parallel import SequencePlan
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class QwenImage(ModelFamily):
    pipelines = ("QwenImagePipeline",)
    float32_inputs = ("timestep", "guidance")
    # QwenImageTransformer2DModel.forward casts the timestep to bf16; the embedding scales it by 1000 in fp32.
    round_sigmas_in_bf16 = staticmethod(round_to_bf16)
    objective = flow_matching
    packing = 4
    host_inputs = ("prompt_embeds_mask",)
    sequence_plan = SequencePlan(
        attention={
            "transformer_blocks.*.attn": (
                "transformer_blocks.0.encoder_hidden_states",
                "transformer_blocks.0.hidden_states",
            )
        },
        gathered={"proj_out": "transformer_blocks.0.hidden_states"},
    )

    @classmethod
    def variants(cls) -> tuple[type[ModelFamily], ...]:
        return (QwenImageEdit, QwenImageEditPlus)

    def default_max_length(self) -> int:
        return 512

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, L, D), zero after each caption's end, and their mask (B, L)."""
        embeds, mask = pipeline.encode_prompt(captions, max_sequence_length=self.max_length)
        return with_mask(embeds, mask)

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as QwenImagePipeline does: with a mask only for texts of different lengths."""
        batch, _, height, width = noised_BCHW.shape
        images = [noised_BCHW, *(each.to(noised_BCHW.dtype) for each in references_in(conditioning))]
        mask = conditioning["prompt_embeds_mask"]
        lengths: list[int] = mask.sum(1).tolist()  # they become shapes
        longest = max(lengths)
        tokens = model(
            hidden_states=torch.cat([pack(each) for each in images], dim=1),
            timestep=timesteps_B,
            encoder_hidden_states_mask=(
                mask[:, :longest].to(noised_BCHW.device, non_blocking=True) if min(lengths) < longest else None
            ),
            encoder_hidden_states=conditioning["prompt_embeds"][:, :longest].to(noised_BCHW.dtype),
            img_shapes=[[(1, each.shape[-2] // 2, each.shape[-1] // 2) for each in images]] * batch,
            return_dict=False,
        )[0]
        return unpack(tokens[:, : height // 2 * (width // 2)], Shape(1, height, width))

    def unused_parameters(self) -> tuple[str, ...]:
        # They compute the text that leaves the last block, and only its image tokens are read.
        last = f"transformer_blocks.{self.config['num_layers'] - 1}"
        return (f"{last}.attn.add_q_proj", f"{last}.attn.norm_added_q", f"{last}.attn.to_add_out", f"{last}.txt_mlp")

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        kwargs = super().pipeline_kwargs(positive, negative if sampling.guidance > 1 else {}, sampling)
        return kwargs | {
            # The pipeline's guidance_scale is for guidance-distilled models, of which none is published.
            "guidance_scale": None,
            "true_cfg_scale": sampling.guidance,
            # The most it takes. Its default of 512 would cut embeddings of a longer tokenizer_max_length.
            "max_sequence_length": 1024,
        }

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return unpack(latents, shape)


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit, whose text encoder reads the reference as well.

    Its pipeline brings references to the area of 1024 x 1024 px, so they are trained in that size.
    """

    pipelines = ("QwenImageEditPipeline",)
    least_references = most_references = 1
    tiny_pipeline = ""

    @property
    def reads_references(self) -> bool:
        return True

    def encode_edits(
        self, pipeline: DiffusionPipeline, captions: list[str], references: Sequence[Image]
    ) -> Conditioning:
        (reference,) = references
        return self._encode(pipeline, captions, [resized(pipeline, reference, AREA)] * len(captions))

    def _encode(self, pipeline: DiffusionPipeline, captions: list[str], images: list[Image]) -> Conditioning:
        embeds, mask = pipeline.encode_prompt(captions, image=images)
        return with_mask(embeds, mask)

    def reference_kwargs(self, references: Sequence[Image]) -> dict[str, object]:
        return {"image": references[0]}


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit 2509 and 2511, with several references, at 384 x 384 px for the text encoder."""

    pipelines = ("QwenImageEditPlusPipeline",)
    most_references = 3  # what its publisher has trained it with

    def encode_edits(
        self, pipeline: DiffusionPipeline, captions: list[str], references: Sequence[Image]
    ) -> Conditioning:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE

        images = [resized(pipeline, each, CONDITION_IMAGE_SIZE) for each in references]
        each = [self._encode(pipeline, [caption], images) for caption in captions]
        return stack_conditioning([{name: value[0] for name, value in own.items()} for own in each])

    def reference_kwargs(self, references: Sequence[Image]) -> dict[str, object]:
        return {"image": list(references)}


AREA = 1024 * 1024


def resized(pipeline: DiffusionPipeline, image: Image, area: int) -> Image:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    width, height = calculate_dimensions(area, image.width / image.height)
    return pipeline.image_processor.resize(image, height, width)


def with_mask(embeds: Tensor, mask: Tensor | None) -> Conditioning:
    if mask is None:  # all captions are equally long
        mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
