"""Models of ai-toolkit (27a03a91) that are trained here: families, layers, sizes of buckets, shifts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from simpletuner.importing.foreign_trainer import Translation
from simpletuner.settings.values.spelling import normalize_name

MMDIT = "transformer_blocks.*,single_transformer_blocks.*"
# Linear layers and 1 x 1 convolutions of a U-Net (lora_special.py:585).
UNET = "to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2,time_emb_proj,conv_shortcut,linear_1,linear_2"
BY_SIZE = "by size"


@dataclass(frozen=True)
class Arch:
    """A model of ai-toolkit that is trained here."""

    family: str
    layers: str
    """Layers that its network adapts."""
    bucket_px: int = 16
    """Multiple of the sides of buckets; `bucket_tolerance` is overwritten by it (data_loader.py:395)."""
    shift: float | str | None = None
    """Shift of the timestep types that shift; None for one that is not computed here."""
    own_layout: bool = False
    """True if its layers have other names there, some of them fused."""
    flavours: tuple[str, ...] = ()
    """Names of its denoisers for high and for low noise."""

    @property
    def is_flow(self) -> bool:
        return self.family not in DIFFUSION


DIFFUSION = ("sd1x", "sd2x", "sdxl", "pixart_sigma")
WAN = {"family": "wan", "layers": "blocks.*", "shift": 3.0}
QWEN = Arch("qwen_image", "transformer_blocks.*", 32, BY_SIZE)
FLUX2 = Arch("flux2", MMDIT, own_layout=True)
ARCHS = {
    **dict.fromkeys(("sd1", "sd15"), Arch("sd1x", UNET)),
    "sd2": Arch("sd2x", UNET),
    "sdxl": Arch("sdxl", UNET),
    "pixart_sigma": Arch("pixart_sigma", "transformer_blocks.*"),
    "sd3": Arch("sd3", "transformer_blocks.*", 32, 3.0),
    **dict.fromkeys(("flux", "flex1"), Arch("flux", MMDIT, 32, BY_SIZE)),
    "flux_kontext": Arch("flux", MMDIT, 16, BY_SIZE),
    **dict.fromkeys(("flux2", "flux2_klein_4b", "flux2_klein_9b"), FLUX2),
    "chroma": Arch("chroma", MMDIT, 32, own_layout=True),
    "lumina2": Arch("lumina2", "layers.*,noise_refiner.*,context_refiner.*", 16, 6.0),
    **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"), QWEN),
    "zimage": Arch("z_image", "layers.*", 16, 3.0),
    "ernie_image": Arch("ernie", "layers.*", 32, 3.0),
    "krea2": Arch("krea2", "transformer_blocks.*", own_layout=True),
    "ltx2": Arch("ltxvideo2", "transformer_blocks.*", 32),
    **dict.fromkeys(("wan21", "wan21_i2v"), Arch(**WAN)),
    "wan22_14b": Arch(**WAN, flavours=("t2v-14b-2.2-high", "t2v-14b-2.2-low")),
    "wan22_14b_i2v": Arch(**WAN, flavours=("i2v-14b-2.2-high", "i2v-14b-2.2-low")),
    "wan22_5b": Arch("wan", "blocks.*", 32, 5.0),
}
# Models that take control images, by their kind here: stretched to the image's size, or of their own.
EDITORS = {"flux_kontext": "reference_strict", "qwen_image_edit": "reference_strict"} | dict.fromkeys(
    ("qwen_image_edit_plus", "flux2", "flux2_klein_4b", "flux2_klein_9b"), "reference_loose"
)


def name_of_arch(value: object) -> str:
    return normalize_name(value).partition(":")[0]


def arch_of(run: Translation) -> str:
    """Name of the model: `arch`, or as older files have it, one of several switches."""
    if run.get("model.arch"):
        return name_of_arch(run.get("model.arch"))
    switches = {"v2": "sd2", "v3": "sd3", "xl": "sdxl", "pixart_sigma": "pixart_sigma"} | {
        name: name for name in ("pixart", "auraflow", "flux", "lumina2", "vega", "ssd")
    }
    return next((arch for name, arch in switches.items() if run.is_on(f"model.is_{name}")), "sd1")


PLACES = re.compile(r"\[(?:trigger|name)\]")
"""Places of the trigger word in captions and prompts."""
