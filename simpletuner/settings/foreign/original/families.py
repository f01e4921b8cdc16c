"""Names of families of the original: those that differ here, and how this version trains those without a class.

Families that are not listed have the same name here, and a class.
"""

from __future__ import annotations

FAMILY_NAMES = {"cosmos2image": "cosmos", "pixart": "pixart_sigma"}
"""Names that differ here."""

BY_AUTO = {
    "ernie": "ErnieImagePipeline",
    "hunyuanvideo": "HunyuanVideo15Pipeline",
    "kandinsky5_video": "Kandinsky5T2VPipeline",
    "kolors": "KolorsPipeline",
    "krea2": "Krea2Pipeline",
    "longcat_image": "LongCatImagePipeline",
    "sanavideo": "SanaVideoPipeline",
}
"""Pipelines of diffusers that model_family=auto runs in place of a class, if they pass its proof."""

WITHOUT_LORA = ("hunyuanvideo", "longcat_image")
"""Families of these whose pipelines cannot load a LoRA."""

AUDIO = "it generates audio"
NO_PIPELINE = "diffusers has no pipeline of it"
NO_TEXT = "its pipeline has no encode_prompt, whose embeddings could be cached"
UNTRAINED = {
    "ace_step": AUDIO,
    "anima": "diffusers has it as a modular pipeline alone, which has no call to run",
    "boogu_image": NO_PIPELINE,
    "cosmos": "its scheduler is for EDM, which is not trained here",
    "cosmos3": NO_TEXT,
    "deepfloyd": "it denoises pixels, in stages of their own",
    "heartmula": AUDIO,
    "hidream": "its pipeline generates images of one area alone, whatever size it is asked for",
    "ideogram": "its pipeline guides by a second denoiser",
    "ideogram4": "its pipeline guides by a second denoiser",
    "kandinsky5_image": "its pipeline generates images of sizes of its own, whatever size it is asked for",
    "longcat_video": NO_PIPELINE,
    "ltxvideo2": "it generates audio with a video, and its pipeline draws noise for both",
    "mage_flow": NO_PIPELINE,
    "mageflow": NO_PIPELINE,
    "minimax_h3": "diffusers has it as a modular pipeline alone, which has no call to run",
    "minimax_music": AUDIO,
    "minimax_music3": AUDIO,
    "omnigen": NO_TEXT,
    "stable_cascade": "it has two denoisers, one after the other",
    "wan_s2v": NO_PIPELINE,
    "z_image_omni": "its pipeline generates from images, too",
    "zlab_i1": NO_PIPELINE,
}
"""Reasons for which this version trains a family neither by a class nor by its pipeline."""


def alternative(family: str, model_type: str, hub: str) -> tuple[str, str]:
    """Return how a family that has no class can be trained, or why it cannot, and a hint; empty for another name.

    `hub` is the id of its published pipeline, where that is known.
    """
    if pipeline := BY_AUTO.get(family):
        lora = ", with model_type=full: it cannot load a LoRA" if family in WITHOUT_LORA else ""
        return (
            f"{family} has no class here; model_family=auto trains it by its pipeline in diffusers, {pipeline}, if "
            f"that passes the proof{lora if model_type == 'lora' else ''}",
            f"set model_family=auto, and pretrained_model_name_or_path to {hub or 'its folder or hub id'}; "
            "`simpletuner models --check` proves it without a run",
        )
    reason = UNTRAINED.get(family)
    return (f"{family} cannot be trained: {reason}" if reason else ""), "`simpletuner models` lists those that can"
