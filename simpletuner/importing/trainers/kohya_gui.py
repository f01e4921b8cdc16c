"""kohya_ss (45088f04), a GUI: its presets become the values that it writes for sd-scripts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.folders import as_number, files_in, prompts_of_lines
from simpletuner.importing.foreign_trainer import CACHES, FASTER, Translation
from simpletuner.importing.trainers.sd_scripts import SD_SCRIPTS, folders
from simpletuner.importing.trainers.sd_scripts_networks import UNETS
from simpletuner.settings.foreign.recognition import GUI
from simpletuner.settings.values.spelling import normalize_name

ONLY_HERE = (
    "file_path save_as save_as_bool headless print_only training_preset model_list num_cpu_threads_per_process "
    "multi_gpu main_process_port dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic extra_accelerate_launch_args "
    "lowvram lowvram_enabled create_caption create_buckets full_path caption_metadata_filename "
    "latent_metadata_filename batch_size show_timesteps show_timesteps_resolution sdxl_no_half_vae "
    "sd3_disable_mmap_load_safetensors sd3_fused_backward_pass sd3_text_encoder_batch_size flux_fused_backward_pass "
    "generate_caption_database generate_image_buckets stop_text_encoder_training_pct use_safetensors"
)
"""Names of the GUI that change time, memory or its own work alone."""
CACHED = (
    "use_latent_files sdxl_cache_text_encoder_outputs flux1_cache_text_encoder_outputs "
    "flux1_cache_text_encoder_outputs_to_disk sd3_cache_text_encoder_outputs sd3_cache_text_encoder_outputs_to_disk "
    "lumina_cache_text_encoder_outputs lumina_cache_text_encoder_outputs_to_disk "
    "hunyuan_image_cache_text_encoder_outputs hunyuan_image_cache_text_encoder_outputs_to_disk"
)
RENAMED = {"max_resolution": "resolution", "optimizer": "optimizer_type", "lora_network_weights": "network_weights"}
FAMILIES = {
    "flux1_checkbox": "flux",
    "sd3_checkbox": "sd3",
    "lumina_checkbox": "lumina2",
    "hunyuan_image_checkbox": "hunyuanimage",
    "anima_checkbox": "anima",
    "sdxl": "sdxl",
    "sdxl_checkbox": "sdxl",
}
PREFIXES = {"lumina_": "lumina2", "hunyuan_": "hunyuanimage", "anima_": "anima", "sd3_": "sd3", "flux1_": "flux"}
"""Beginnings of names that are read for one family, and stand for those of sd-scripts without them."""
OF_FAMILY = {
    "flux": (
        "ae model_type split_mode train_blocks t5xxl_max_token_length guidance_scale apply_t5_attn_mask "
        "discrete_flow_shift model_prediction_type timestep_sampling fp8_base_unet clip_l t5xxl mem_eff_save "
        "cpu_offload_checkpointing single_blocks_to_swap double_blocks_to_swap blockwise_fused_optimizers"
    ),
    "sd3": (
        "clip_g clip_g_dropout_rate clip_l t5xxl logit_mean logit_std mode_scale pos_emb_random_crop_rate save_clip "
        "save_t5xxl t5xxl_device t5xxl_dtype weighting_scheme"
    ),
}
"""Names of sd-scripts that the GUI passes for one family alone."""
NETWORKS = {
    "Standard": "networks.lora",
    "Kohya LoCon": "networks.lora",
    "Flux1": "networks.lora_flux",
    "Flux1 OFT": "networks.oft_flux",
    "Lumina": "networks.lora_lumina",
    "HunyuanImage-2.1": "networks.lora_hunyuan_image",
    "Anima": "networks.lora_anima",
    "Kohya LoHa": "networks.loha",
    "Kohya LoKr": "networks.lokr",
    "Kohya DyLoRA": "networks.dylora",
    "LoRA-FA": "networks.lora_fa",
}
ALGORITHMS = {
    "boft": "boft",
    "diag_oft": "diag-oft",
    "dylora": "dylora",
    "glora": "glora",
    "ia3": "ia3",
    "locon": "locon",
    "loha": "loha",
    "lokr": "lokr",
    "native_fine_tuning": "full",
}
"""Algorithms of LyCORIS by the second half of a LoRA type, `LyCORIS/LoKr`."""
BY_BLOCK = (
    *("down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold"),
    *("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"),
)
DROPOUTS = ("rank_dropout", "module_dropout")
OF_FLUX = (
    *("img_attn_dim", "img_mlp_dim", "img_mod_dim", "single_dim", "txt_attn_dim", "txt_mlp_dim", "txt_mod_dim"),
    *("single_mod_dim", "in_dims", "train_double_block_indices", "train_single_block_indices", "split_qkv"),
    *("train_t5xxl", "ggpo_sigma", "ggpo_beta"),
)
OF_LYCORIS = (
    *("conv_dim", "conv_alpha", "factor", "bypass_mode", "dora_wd", "use_cp", "use_tucker", "use_scalar"),
    *("rank_dropout_scale", "train_norm", "decompose_both"),
)
LORAPLUS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
OF_MODULE = {
    "networks.lora": (*BY_BLOCK, *DROPOUTS, *LORAPLUS),
    "networks.lora_sd3": (*BY_BLOCK, *DROPOUTS, *LORAPLUS),
    "networks.lora_flux": (*OF_FLUX, *DROPOUTS, *LORAPLUS),
    "networks.lora_lumina": (*DROPOUTS, *LORAPLUS),
    "networks.lora_hunyuan_image": (*DROPOUTS, *LORAPLUS),
    "lycoris.kohya": (*OF_LYCORIS, *DROPOUTS, *LORAPLUS),
}
"""Names that the GUI passes on as arguments of a network, by module."""
ARGUMENTS = (*BY_BLOCK, *OF_FLUX, *OF_LYCORIS, *DROPOUTS, *LORAPLUS, "LyCORIS_preset", "train_lora_ggpo")
OTHERS = (
    "conv_dims",
    "conv_alphas",
    "constrain",
    "rescaled",
    "train_on_input",
    "unit",
    "enable_all_linear",
    "LoRA_type",
    "split_mode",
    "train_blocks",
)
FOLDER = "images"
COUNTED = (".jpg", ".jpeg", ".png", ".webp")
"""Images that the GUI counts."""
LEFT_OUT = "the GUI writes no 0, false or empty value for sd-scripts, whose default counts"
# Names with which 0 is not what it seems: defaults of sd-scripts that count instead.
TOLD = {"max_grad_norm": 1.0, "network_alpha": 1.0, "guidance_scale": 3.5}


# Names that no tab passes on with 0, also as text.
OFF_AT_ZERO = (
    *("max_train_steps", "max_train_epochs", "seed", "vae_batch_size", "min_snr_gamma", "clip_skip", "noise_offset"),
    *("save_every_n_steps", "save_every_n_epochs", "sample_every_n_steps", "sample_every_n_epochs", "min_timestep"),
    *("max_timestep", "ip_noise_gamma", "multires_noise_iterations", "adaptive_noise_scale", "v_pred_like_loss"),
    *("save_last_n_steps", "save_last_n_steps_state", "save_last_n_epochs", "save_last_n_epochs_state"),
)


def as_sd_scripts(run: Translation) -> None:
    """Replace the values of the GUI by those that it writes for sd-scripts.

    lora_gui.py:1132, dreambooth_gui.py:502, finetune_gui.py:610.
    """
    if run.get("token_string") or run.get("num_vectors_per_token"):
        raise SettingsError(f"{run.file} trains an embedding (textual inversion)", "train a LoRA: model_type=lora")
    is_network = "LoRA_type" in run.written
    leave_out(run, ONLY_HERE.split(), FASTER)
    leave_out(run, CACHED.split(), CACHES)
    older_versions(run)
    base(run)
    (network if is_network else whole)(run)
    leave_out(run, ["image_folder", "train_dir", "t5xxl_lr"], "it is read of another tab")
    leave_out(run, [*ARGUMENTS, *OTHERS], "it is an argument of the network" if is_network else "there is no network")
    if not any(run.get(name) for name in ("train_data_dir", "dataset_config", "image_folder", "in_json")):
        run.defaults["instance_data_dir"] = FOLDER
        run.remark("train_data_dir", f"a preset without images: put yours into {FOLDER}, or set instance_data_dir", "")
    of_family(run, run.defaults["model_family"])
    noise(run)
    launch(run)
    steps(run)
    prompts_of_lines(run, "sample_prompts", str(run.get("sample_prompts", "")).splitlines())
    for name, new in RENAMED.items():
        rename(run, name, new)
    split_arguments(run)
    leave_zeros_out(run, (0,) if is_network else ())
    additional(run)


def leave_out(run: Translation, names: Iterable[str], reason: str) -> None:
    """Leave values out that the GUI does not pass on, as if they were not there."""
    run.drop(names, reason)
    for name in names:
        run.written.pop(name, None)


def rename(run: Translation, name: str, new: str) -> None:
    """Give a value the name of sd-scripts, in its place."""
    if name in run.written:
        run.lines = {**run.lines, new: run.lines.get(name, 0)}
        run.written[new] = run.written.pop(name)
        if name in run.values:
            run.values[new] = run.values.pop(name)


def set_value(run: Translation, name: str, value: Any) -> None:
    run.values[name] = run.written[name] = value


def older_versions(run: Translation) -> None:
    """Bring values of older versions up to date (common_gui.py:379)."""
    if "optimizer" not in run.written:
        set_value(run, "optimizer", "AdamW8bit" if run.is_on("use_8bit_adam") else "AdamW")
    if normalize_name(run.get("use_wandb")) == "true":
        set_value(run, "log_with", "wandb")
    leave_out(run, ["use_8bit_adam", "use_wandb", "xformers"], FASTER)
    if run.get("LoRA_type") == "LoCon":
        set_value(run, "LoRA_type", "LyCORIS/LoCon")


def base(run: Translation) -> None:
    """Family by the boxes that are ticked; without one, Stable Diffusion 1 or 2."""
    found = next((family for name, family in FAMILIES.items() if run.is_on(name)), "")
    run.defaults["model_family"] = found or ("sd2x" if run.is_on("v2") else "sd1x")
    leave_out(run, FAMILIES, "it is model_family here")
    if not run.get("pretrained_model_name_or_path"):
        leave_out(run, ["pretrained_model_name_or_path"], "no base")
        run.remark("pretrained_model_name_or_path", "a preset without a base: the published one of the family", "")


def of_family(run: Translation, family: str) -> None:
    """Leave out values of other families; drop the prefixes of those that the GUI passes."""
    run.refuse(["train_inpainting"], "models that fill in are not trained by this version")
    if family not in UNETS:
        leave_out(run, ["max_token_length"], "used only with another model")
    for other, names in OF_FAMILY.items():
        if other != family:
            shared = OF_FAMILY.get(family, "").split()
            leave_out(run, [name for name in names.split() if name not in shared], "used only with another model")
    for prefix, other in PREFIXES.items():
        for name in [name for name in run.values if name.startswith(prefix)]:
            if other == family:
                rename(run, name, name.removeprefix(prefix))
            else:
                leave_out(run, [name], "used only with another model")


def network(run: Translation) -> None:
    """Module and arguments of a network by its type, and whether its text encoders are trained."""
    written = str(run.get("LoRA_type"))
    module = "lycoris.kohya" if "/" in written else NETWORKS.get(written, written)
    if module == "networks.lora" and run.is_on("sd3_checkbox"):
        module = "networks.lora_sd3"
    given = {name: run.get(name) for name in OF_MODULE.get(module, ()) if run.get(name)}
    if module == "lycoris.kohya":
        kind = normalize_name(written.partition("/")[2])
        given |= {"algo": ALGORITHMS.get(kind, kind), "preset": run.get("LyCORIS_preset", "full")}
        given |= {name: run.get(name, 1) for name in CONVOLUTIONS}
        given.pop("use_tucker" if kind == "lokr" else "use_cp", None)
    if written == "Kohya LoCon":
        given |= {name: run.get(name, 1) for name in CONVOLUTIONS}
    if module == "networks.lora_flux" and run.is_on("split_mode"):
        given["train_blocks"] = "single"
    if not run.is_on("train_lora_ggpo"):
        given = {name: value for name, value in given.items() if not name.startswith("ggpo_")}
    set_value(run, "network_module", module)
    set_value(run, "network_args", [f"{name}={value}" for name, value in given.items()])
    encoders, unet = run.number("text_encoder_lr", 0), run.number("unet_lr", 0)
    if run.defaults["model_family"] == "hunyuanimage" or (not encoders and unet):
        set_value(run, "network_train_unet_only", True)
        leave_out(run, ["text_encoder_lr"], "text encoders are not trained")
    elif encoders and not unet:
        set_value(run, "network_train_text_encoder_only", True)
    leave_out(run, ["stop_text_encoder_training"], "it is not supported there")


CONVOLUTIONS = ("conv_dim", "conv_alpha")


def whole(run: Translation) -> None:
    """Text encoders and images of the tabs that train whole models."""
    if run.defaults["model_family"] == "sdxl":
        set_value(run, "train_text_encoder", any(run.number(f"learning_rate_te{end}", 0) > 0 for end in "12"))
        leave_out(run, ["learning_rate_te"], "used only with another model")
    else:
        leave_out(run, ["learning_rate_te1", "learning_rate_te2"], "used only with another model")
    if run.get("image_folder") and not run.get("dataset_config"):
        run.defaults["instance_data_dir"] = run.get("image_folder")
        set_value(run, "in_json", run.get("latent_metadata_filename", "meta_lat.json"))


# Values that are not passed on with a type of noise.
OF_NOISE = {
    "original": ("multires_noise_iterations", "multires_noise_discount"),
    "multires": ("noise_offset", "noise_offset_random_strength", "adaptive_noise_scale"),
}


def noise(run: Translation) -> None:
    kind = run.word("noise_offset_type", "original")
    leave_out(run, ["noise_offset_type", *OF_NOISE.get(kind, ())], f"noise_offset_type={kind} decides")


def launch(run: Translation) -> None:
    """Take what accelerate is given: processes and GPUs."""
    for name in ("num_processes", "num_machines"):
        if run.number(name, 1) > 1:
            run.rename(name, name)
    if run.get("gpu_ids"):
        run.rename("gpu_ids", "gpu_ids")
    leave_out(run, ["num_processes", "num_machines", "gpu_ids"], "one process")


def steps(run: Translation) -> None:
    """Count steps and those of the warm-up as the GUI does (lora_gui.py:1618, common_gui.py:1185)."""
    limit, share, own = (run.number(name, 0) for name in ("max_train_steps", "lr_warmup", "lr_warmup_steps"))
    has_file = bool(run.get("dataset_config"))
    if not limit and not has_file:
        counted = steps_of_epochs(run)
        set_value(run, *(("max_train_steps", counted) if counted else ("max_train_epochs", epochs(run))))
    if own > 0:
        warmup: float = int(own)
    elif has_file:
        warmup = round(share * limit / 100)
    else:
        warmup = share / 100
    if run.get("lr_scheduler_num_cycles") == "":
        set_value(run, "lr_scheduler_num_cycles", int(run.number("epoch", 1)))
    leave_out(run, ["lr_warmup", "epoch"], "counted as steps")
    set_value(run, "lr_warmup_steps", warmup)


def epochs(run: Translation) -> float:
    return run.number("max_train_epochs", 0) or run.number("epoch", 1)


def steps_of_epochs(run: Translation) -> int:
    """Return the steps of `epoch` epochs over the folders of train_data_dir, 0 if they are not here."""
    listed = folders(run)
    if listed is None:
        return 0
    images = 0
    for subset in listed["datasets"][0]["subsets"]:
        names = [file.suffix.lower() for file in files_in(subset["image_dir"])]
        images += subset["num_repeats"] * sum(name in COUNTED for name in names)
    batch = run.number("train_batch_size", 1) * run.number("gradient_accumulation_steps", 1)
    passes = run.number("epoch", 1) * (2 if run.get("reg_data_dir") else 1)
    return math.ceil(images / batch * passes) if batch > 0 else 0


def split_arguments(run: Translation) -> None:
    """Split arguments at spaces, without quotes: `betas=(0.9, 0.95)` becomes two, and sd-scripts fails."""
    for name in ("optimizer_args", "lr_scheduler_args"):
        if isinstance(run.get(name), str):
            set_value(run, name, run.written[name].replace('"', "").split())


def leave_zeros_out(run: Translation, zeros: tuple[int, ...]) -> None:
    """Leave out the values that the GUI does; for networks 0 and 0.0, too (lora_gui.py:2562)."""
    for name, value in list(run.values.items()):
        is_zero = name in OFF_AT_ZERO and run.number(name, 1) == 0
        if value in ("", None) or value is False or is_zero or (value in zeros and not isinstance(value, list)):
            default = TOLD.get(name)
            if value == 0 and value is not False and default is not None:
                run.look(name, f"{LEFT_OUT}: {default:g}")
            else:
                run.drop([name], LEFT_OUT)
            run.written.pop(name, None)


def additional(run: Translation) -> None:
    """Take what stands behind the file on the command line there, and goes before it."""
    written = str(run.get("additional_parameters", ""))
    leave_out(run, ["additional_parameters"], "its values are those of the keys that it names")
    try:
        words = shlex.split(written)
    except ValueError as error:
        raise SettingsError(f"{run.file}: additional_parameters: {error}", "close the quotes") from None
    given: dict[str, list[str]] = {}
    for word in words:
        name, has_value, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if name:
            given[name[2:]] = [value] if has_value else []
        elif given:
            list(given.values())[-1].append(value)
    for name, values in given.items():
        is_list = name.endswith("_args")
        set_value(run, name, values if is_list else as_number(" ".join(values)) if values else True)


KOHYA_GUI = replace(
    SD_SCRIPTS,
    name=GUI,
    meanings=(as_sd_scripts, *SD_SCRIPTS.meanings),
)
