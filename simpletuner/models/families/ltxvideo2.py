"""LTX-2: a flow-matching transformer that denoises a video and its audio together, with Gemma 3 text.

Clips without sound, images, and all data unless `sound_loss_weight` is set are trained on their video alone: the
blocks' attention between video and audio is off then, as in the pipeline's calls for `modality_scale`. So the
prediction of the video depends on no audio, and the weights of the audio get no gradient. Clips with sound are
given to the denoiser as the pipeline's other calls do. Sampling is the pipeline's, which generates both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn

from simpletuner.data.images.sounds import Sound
from simpletuner.data.prefetch import FIRST_FRAME, LATENTS, SOUND
from simpletuner.errors import SettingsError
from simpletuner.models.families.ltxvideo import as_video
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.sound import load_frozen
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.two_denoisers import condition_on_first_frame
from simpletuner.models.folder.diffusers_io import component_class, diffusers_class
from simpletuner.models.folder.malformed import read_json
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# Frames per second of a clip: the pipeline's default.
FRAME_RATE = 24

OF_AUDIO = ("audio_", "av_cross_attn_", "video_to_audio_", "video_a2v_")
"""Prefixes of weights, also in blocks, that only audio or its attention with the video uses."""
# A weight of 2.5 that LTX2DFRPipeline alone uses.
OF_KEYFRAMES = "keyframes_abs_pos_embedding"


class LTXVideo2(ModelFamily):
    """LTX-2, 2.3 and 2.5."""

    pipelines = ("LTX2Pipeline",)
    objective = flow_matching
    float32_inputs = ("timestep", "audio_timestep", "sigma", "video_coords", "audio_coords")
    unused_inputs = ("audio_hidden_states", "audio_encoder_hidden_states")
    outputs_vae_latents = True
    frame_rate = FRAME_RATE

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        self._coords: dict[tuple[int, Shape, torch.device], tuple[Tensor, Tensor]] = {}
        self._audio_vae: nn.Module | None = None
        self._vocoder: nn.Module | None = None
        self.check_length()

    def check_length(self) -> None:
        """Raise SettingsError for a caption length that the connectors' registers cannot fill up."""
        if not (config := self.folder / "connectors" / "config.json").is_file():
            return  # known by the preset alone
        step, length = read_json(config).get("video_connector_num_learnable_registers"), self.max_length
        if step and length and length % step:
            raise SettingsError(
                f"tokenizer_max_length = {length}: the connectors of {self.folder} take multiples of {step} tokens",
                f"set tokenizer_max_length={max(1, round(length / step)) * step}",
            )

    def default_max_length(self) -> int:
        return 1024

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to what the connectors make, which are frozen: a text for the video and one for the
        audio, both (B, max_length, D), and their mask (B, max_length)."""
        embeds, mask, _, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        with torch.no_grad():
            video, audio, mask = pipeline.connectors(embeds, mask, padding_side=pipeline.tokenizer.padding_side)
        return {"prompt_embeds": video, "audio_prompt_embeds": audio, "prompt_attention_mask": mask}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        config, tokens = self.exported_config(), self.max_length or self.default_max_length()
        video, audio = config["cross_attention_dim"], config["audio_cross_attention_dim"]
        if config["use_prompt_embeddings"]:  # then it projects both texts itself
            video = audio = config["caption_channels"]
        return {
            "prompt_embeds": (tokens, video),
            "audio_prompt_embeds": (tokens, audio),
            "prompt_attention_mask": (tokens,),
        }

    @property
    def stream_weights(self) -> Mapping[str, float]:
        weight = self.settings.objective.sound_loss_weight
        return {SOUND: weight} if weight else {}

    def sound_shape(self, frames: int) -> tuple[int, ...]:
        """Tokens of the audio latents of a clip of so many frames, and their width."""
        config = self.exported_config()
        rate = config["audio_sampling_rate"] / config["audio_hop_length"] / config["audio_scale_factor"]
        return round(frames / FRAME_RATE * rate), config["audio_in_channels"]

    def unused_parameters(self) -> tuple[str, ...]:
        if self.stream_weights:
            return (OF_KEYFRAMES,)
        blocks = (f"transformer_blocks.{number}." for number in range(self.config["num_layers"]))
        return (OF_KEYFRAMES, *(f"{place}{start}" for place in ("", *blocks) for start in OF_AUDIO))

    def predict(self, model: nn.Module, noised: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        return self.predict_streams(model, {LATENTS: noised}, timesteps_B, conditioning)[LATENTS]

    def predict_streams(
        self, model: nn.Module, streams: Mapping[str, Tensor], timesteps_B: Tensor, conditioning: Conditioning
    ) -> Mapping[str, Tensor]:
        """Call the transformer as LTX2(ImageToVideo)Pipeline does, without sound with the video isolated."""
        noised, sound = streams[LATENTS], streams.get(SOUND)
        shape, dtype = Shape.of_axes(noised.shape[2:]), noised.dtype
        timesteps, mask = timesteps_B * 1000, conditioning["prompt_attention_mask"]
        times: dict[str, Tensor] = {"timestep": timesteps}
        if FIRST_FRAME in conditioning:
            noised, per_token = condition_on_first_frame(conditioning[FIRST_FRAME], noised, timesteps, shape)
            times = {"timestep": per_token, "audio_timestep": timesteps}
        video_coords, audio_coords = self.coords(len(noised), shape, noised.device)
        audio_frames = audio_coords.shape[2]
        silent = (len(noised), audio_frames, self.config["audio_in_channels"])
        tokens, audio_tokens = model(
            hidden_states=noised.flatten(2).transpose(1, 2),
            audio_hidden_states=noised.new_zeros(silent) if sound is None else sound,
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            audio_encoder_hidden_states=conditioning["audio_prompt_embeds"].to(dtype),
            **times,
            sigma=timesteps,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=shape.frames,
            height=shape.height,
            width=shape.width,
            fps=FRAME_RATE,
            audio_num_frames=audio_frames,
            video_coords=video_coords,
            audio_coords=audio_coords,
            isolate_modalities=sound is None,
            use_cross_timestep=True,
            return_dict=False,
        )
        of_sound = {} if sound is None else {SOUND: audio_tokens}
        return {LATENTS: self.unpack_latents(tokens, shape), **of_sound}

    @property
    def image_to_video(self) -> Literal["never", "optional", "always"]:
        return "optional"

    @property
    def image_to_video_class(self) -> Any:
        return diffusers_class("LTX2ImageToVideoPipeline")

    def reference_kwargs(self, references: Sequence[Image]) -> dict[str, object]:
        return {"image": references[0]}

    def coords(self, batch: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first and last second, row and column of each token of the video, and the seconds of the
        audio's.

        Kept, since diffusers makes them of Python numbers, which a GPU waits for.
        """
        if (key := (batch, shape, device)) not in self._coords:
            model, frames = self.meta_denoiser, (shape.frames - 1) * self.cell.frames + 1
            self._coords[key] = (
                model.rope.prepare_video_coords(batch, *shape, device, fps=FRAME_RATE),
                model.audio_rope.prepare_audio_coords(batch, self.sound_shape(frames)[0], device),
            )
        return self._coords[key]

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        """Guidance by the negative prompt, as strong for audio; not the pipeline's two other kinds."""
        return {
            **joined(positive, ""),
            **joined(negative, "negative_"),
            **sampling.kwargs(),
            "num_frames": sampling.shape.frames,
            "frame_rate": float(FRAME_RATE),
            "audio_guidance_scale": sampling.guidance,
            **{f"{of}stg_scale": 0.0 for of in ("", "audio_")},
            **{f"{of}modality_scale": 1.0 for of in ("", "audio_")},
            **{f"{of}guidance_rescale": 0.0 for of in ("", "audio_")},
        }

    def sampling_components(self, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        """Audio VAE, in host memory: of a run that trains no sound, for its statistics only."""
        if self._audio_vae is None:
            names = ("audio_vae", "vocoder") if self.stream_weights else ("audio_vae",)
            loaded = {
                name: load_frozen(component_class(self.index, name, self.folder), self.folder / name, torch.float32)
                for name in names
            }
            self._audio_vae, self._vocoder = loaded["audio_vae"], loaded.get("vocoder")
        return {"audio_vae": self._audio_vae}

    @torch.no_grad()
    def decode_sound(self, latents: Tensor, device: torch.device, sampling: SamplingParams) -> Sound | None:
        if sampling.shape.frames == 1:
            return None
        parts = [each for each in (self._audio_vae, self._vocoder) if each is not None]
        try:
            vae, vocoder = (each.to(device) for each in parts)
            waveform = vocoder(vae.decode(latents.to(device, torch.float32)).sample)[0].clamp(-1, 1)
        finally:
            for each in parts:
                each.to("cpu")
        return Sound(waveform.float().cpu().numpy(), vocoder.config.output_sampling_rate)

    def enter_pipeline(self, pipeline: DiffusionPipeline, positive: Conditioning) -> None:
        pipeline.register_modules(connectors=PassedConnectors(self.conditioning_shapes()["prompt_embeds"][1]))

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return as_video(latents, shape)


class PassedConnectors:
    """Stand-in for the pipeline's connectors: splits texts that they have made before, put side by side."""

    def __init__(self, video_width: int) -> None:
        self.video_width = video_width

    def __call__(self, embeds: Tensor, mask: Tensor, padding_side: str = "left") -> tuple[Tensor, Tensor, Tensor]:
        return embeds[..., : self.video_width], embeds[..., self.video_width :], mask


def joined(text: Conditioning, start: str) -> dict[str, object]:
    """Return the pipeline's arguments of one prompt, as PassedConnectors takes them; nothing for none."""
    if not text:
        return {}
    embeds = torch.cat([text["prompt_embeds"], text["audio_prompt_embeds"]], dim=-1)
    return {f"{start}prompt_embeds": embeds, f"{start}prompt_attention_mask": text["prompt_attention_mask"]}
