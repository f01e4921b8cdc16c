"""Networks of sd-scripts (48d368fa) and LyCORIS (3.2.0): modules become kind, layers and scale."""

from __future__ import annotations

from collections.abc import Iterable

from simpletuner.importing.folders import as_number
from simpletuner.importing.foreign_trainer import INNER_DROPOUT, Translation
from simpletuner.settings.foreign.original_names import is_off
from simpletuner.settings.values.spelling import normalize_name

LYCORIS = "lycoris.kohya"
NETWORKS = {
    "networks.lora": "",
    "networks.lora_flux": "flux",
    "networks.lora_sd3": "sd3",
    "networks.lora_lumina": "lumina2",
    "networks.lora_hunyuan_image": "hunyuanimage",
}
"""Modules that are a LoRA, with the family that they are of."""
UNETS = ("sd1x", "sd2x", "sdxl")
# Layers of a U-Net in Transformer2DModel, and in ResnetBlock2D, Downsample2D and Upsample2D.
ATTENTIONS, CONVOLUTIONS = ("*.attentions.*",), ("*.resnets.*", "*.downsamplers.*", "*.upsamplers.*")
# Layers of CONVOLUTIONS that are linear, or convolutions of 1 x 1.
WITHOUT_3X3 = ("*.time_emb_proj", "*.conv_shortcut")
# Layers that the networks of transformers adapt: all of their blocks, and Lumina's last one.
BLOCKS = {
    "flux": ("transformer_blocks.*", "single_transformer_blocks.*"),
    "chroma": ("transformer_blocks.*", "single_transformer_blocks.*"),
    "hunyuanimage": ("transformer_blocks.*", "single_transformer_blocks.*"),
    "sd3": ("transformer_blocks.*",),
    "lumina2": ("layers.*", "noise_refiner.*", "context_refiner.*", "norm_out.*"),
}
TRAIN_BLOCKS = {
    "flux": {"double": BLOCKS["flux"][:1], "single": BLOCKS["flux"][1:]},
    "lumina2": {
        "transformer": ("layers.*",),
        "noise_refiner": ("noise_refiner.*",),
        "context_refiner": ("context_refiner.*",),
        "refiners": ("noise_refiner.*", "context_refiner.*"),
    },
}
FUSED = "q, k and v are one matrix there; here each has a LoRA of its own, of the same rank"
OF_ALGORITHMS = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr"}
# Ranks from this on are written to train whole matrices, as LoKr does from half of a side on, with scale 1.
WHOLE = 10_000
ALONE = ("attn-mlp", "attn-only", "unet-transformer-only")
"""Presets of LyCORIS without ResNets."""
OF_UNETS = ("unet-only", "unet-transformer-only", "unet-convblock-only")
"""Presets of LyCORIS without text encoders."""
# Arguments without an effect of their own here: these two are read, and the others belong to what is refused.
NOTHING = ("verbose", "preset", "algo", "rank_dropout_scale", "constraint", "rescaled", "block_size", "bypass_mode")


def network(run: Translation) -> None:
    """Take kind, layers, rank and scale: rank 4 and alpha 1 where silent; an alpha of 0 is the rank."""
    module = str(run.get("network_module", ""))
    arguments = dict(arguments_of(run.values.pop("network_args", None)))
    if not module:
        whole(run)
        return
    run.defaults |= {"lora_rank": 4, "lora_alpha": None if run.get("network_alpha") == 0 else 1.0}
    if run.number("network_dropout", 0):
        run.remark("network_dropout", INNER_DROPOUT)
    if module == LYCORIS:
        lycoris(run, arguments)
    elif module in NETWORKS:
        own_layers(run, arguments)
    else:
        run.lose("network_module", "only networks.lora, its likes of FLUX, SD3 and Lumina, and LyCORIS are known here")
    for name, value in arguments.items():
        if not is_off(value) and name not in NOTHING:
            run.remark("network_args", "it has no place here", f"{name}={value}", "lost")
    text_encoders(run, is_adapted=normalize_name(arguments.get("preset", "")) not in map(normalize_name, OF_UNETS))


def arguments_of(written: object) -> Iterable[tuple[str, str]]:
    for argument in written if isinstance(written, list) else str(written or "").split():
        name, _, value = str(argument).partition("=")
        yield name.strip(), value.strip().strip("\"'")


def text_encoders(run: Translation, is_adapted: bool) -> None:
    """Lose text encoders, unless the run, or the preset of its network, leaves them alone."""
    rates = run.get("text_encoder_lr")
    has_no_rate = all(rate == 0 for rate in rates) if isinstance(rates, list) else rates == 0
    is_alone = run.is_on("network_train_unet_only") or not is_adapted or (has_no_rate and run.number("unet_lr", 0) > 0)
    if is_alone:
        run.drop(["text_encoder_lr"], "text encoders are not trained")
    else:
        run.lose("network_train_unet_only", "text encoders are not trained by this version", False)
        run.drop(["text_encoder_lr"], "text encoders are not trained")


def whole(run: Translation) -> None:
    """Say whether a whole model's script also trains text encoders: by default, Stable Diffusion 1 and 2 do.

    train_db.py:172: unless stop_text_encoder_training is below 0. All others, also fine_tune.py: with
    train_text_encoder.
    """
    run.values.pop("network_module", None)
    is_dreambooth = run.defaults["model_family"] in ("sd1x", "sd2x") and "in_json" not in run.written
    if is_dreambooth and run.number("stop_text_encoder_training", 0) >= 0:
        reason = "train_db.py trains the text encoder, too, unless it is -1, which this version does not do"
        run.lose("stop_text_encoder_training", reason, run.get("stop_text_encoder_training", 0))
    elif not run.is_on("train_text_encoder"):
        names = ("stop_text_encoder_training", *(f"learning_rate_te{end}" for end in ("", "1", "2", "3")))
        run.drop([*names, "text_encoder_lr"], "text encoders are not trained")


def own_layers(run: Translation, arguments: dict[str, str]) -> None:
    """Layers of sd-scripts' networks; with conv_dim, `networks.lora` also adapts convolutions of 3 x 3."""
    family = run.defaults["model_family"]
    layers = BLOCKS.get(family, ATTENTIONS)
    if family in UNETS:
        rank, alpha = arguments.pop("conv_dim", ""), arguments.pop("conv_alpha", "1")
        if rank and has_rank_of_convolutions(run, rank, alpha):
            layers = (*ATTENTIONS, *CONVOLUTIONS)
    elif normalize_name(arguments.pop("split_qkv", "")) != "true":
        run.remark("network_module", FUSED)
    some = TRAIN_BLOCKS.get(family, {}).get(arguments.get("train_blocks", ""))
    if some or arguments.get("train_blocks") == "all":
        layers = some or layers
        del arguments["train_blocks"]
    run.defaults["lora_target_modules"] = ",".join(layers)


def has_rank_of_convolutions(run: Translation, rank: str, alpha: str) -> bool:
    """Return whether convolutions have the rank and the alpha of the other layers; otherwise lose them."""
    others = (run.number("network_dim", 4), run.number("network_alpha", 1) or run.number("network_dim", 4))
    try:
        own = (float(rank), float(alpha) or float(rank))
    except ValueError:
        own = (-1, -1)
    if own[0] and own != others:
        shown = f"conv_dim={rank} conv_alpha={alpha}"
        run.remark("network_args", "convolutions have the rank and alpha of the other layers here", shown, "lost")
    return bool(own[0])


def lycoris(run: Translation, arguments: dict[str, str]) -> None:
    """Kind and layers of a network of LyCORIS, by its algorithm and preset."""
    algorithm = normalize_name(arguments.get("algo", "lora"))
    if (kind := OF_ALGORITHMS.get(algorithm)) is None:
        run.remark("network_args", "it has no place here", f"algo={algorithm}", "lost")
        arguments.clear()
        return
    run.values.pop("network_module", None)
    is_dora = not is_off(arguments.pop("dora_wd", "")) and kind == "lora"
    run.defaults["lora_type"] = "dora" if is_dora else kind
    if is_dora and is_off(arguments.pop("wd_on_output", "true")):
        run.remark("network_args", "DoRA trains the lengths of rows here", "wd_on_output=False", "lost")
    arguments.pop("wd_on_output", None)
    if kind == "lokr":
        run.defaults["lokr_factor"] = as_number(arguments.pop("factor", "-1"))
        if run.number("network_dim", 4) >= WHOLE:
            run.values.pop("network_alpha", None)
            run.defaults["lora_alpha"] = None
    else:
        [arguments.pop(name, None) for name in ("factor", "decompose_both")]
    layers = layers_of_preset(run, arguments)
    if layers and is_dora and (run.defaults["model_family"] == "sd1x" or set(layers) & {*CONVOLUTIONS, *WITHOUT_3X3}):
        run.remark("network_args", "DoRA is for linear layers here, and convolutions are adapted", "dora_wd", "lost")
    run.defaults["lora_target_modules"] = ",".join(layers)


def layers_of_preset(run: Translation, arguments: dict[str, str]) -> tuple[str, ...]:
    """Return the layers of a preset of LyCORIS; none, which is lost, for a file of somebody's own."""
    family, preset = run.defaults["model_family"], normalize_name(arguments.get("preset") or "full").replace("_", "-")
    rank = arguments.pop("conv_dim", "") or str(run.get("network_dim", 4))
    alpha = arguments.pop("conv_alpha", "") or str(run.get("network_alpha", 1))
    tucker = [not is_off(arguments.pop(name, "")) for name in ("use_tucker", "use_cp", "use_conv_cp")]
    if family not in UNETS:
        run.remark("network_module", FUSED)
        of_attention = {"flux": ("transformer_blocks.*.attn.*",)} if preset == "attn-only" else BLOCKS
        if family in of_attention and preset in (*ALONE, "full", "full-lin", "unet-only"):
            return of_attention[family]
    elif preset in ALONE:
        return ("*.attn1.*", "*.attn2.*") if preset == "attn-only" else ATTENTIONS
    elif preset in ("full", "full-lin", "unet-only", "unet-convblock-only"):
        has_3x3 = preset != "full-lin" and has_rank_of_convolutions(run, rank, alpha)
        if has_3x3 and any(tucker):
            run.remark("network_args", "convolutions are not factorized so here", "use_tucker=True", "lost")
        # SDXL's U-Net of sd-scripts calls these layers otherwise, and they are not found there.
        first = ("conv_in", "conv_out") if family != "sdxl" and has_3x3 else ()
        times = ("time_embedding.linear_1", "time_embedding.linear_2") if family != "sdxl" else ()
        rest = CONVOLUTIONS if has_3x3 else WITHOUT_3X3
        if preset == "unet-convblock-only":
            return (*rest, *first)
        return (*ATTENTIONS, *rest, *first, *times)
    run.remark("network_args", "its layers are not known here: set lora_target_modules", f"preset={preset}", "lost")
    return ()
