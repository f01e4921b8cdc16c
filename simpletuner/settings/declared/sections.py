"""Every setting, declared once. Names are the ones that users already have in their files."""

# No annotations as texts, which pydantic would compile and evaluate, one by one, at each start: 4 ms.
import codecs
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, SecretStr, model_validator
from pydantic.fields import FieldInfo

from simpletuner.settings.declared.knob import Section, knob, with_own_defaults
from simpletuner.settings.files.raw_values import SecretUrl
from simpletuner.settings.values.parsed import (
    check_bucket,
    check_host,
    check_kernel,
    check_repository,
    checkpoint_name,
    no_address,
    no_url,
    normalize_formats,
    normalize_step_range,
    normalize_trackers,
)
from simpletuner.settings.values.shape import Shape, normalize_shapes
from simpletuner.settings.values.spelling import OF_A_RUN, normalize_name, only_placeholders
from simpletuner.system.files.paths import ENVIRONMENT, expand_path

# Upper bound of samples per rank and forward pass; `plan --auto` tries each divisor.
LARGEST_BATCH = 1_000_000


def paths_by_name(families: dict[str, str] | None) -> dict[str, str] | None:
    """Return the import paths of families, by folded name. Raises ValueError for what is no import path."""
    for path in (families or {}).values():
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", path):
            raise ValueError(f"{path!r} is not an import path: write package.module:ClassName")
    return families and {normalize_name(name): path for name, path in families.items()}


def in_home(name: str) -> str:
    """Expand a text that may be a path or another name, which has neither `~` nor `{env:NAME}`.

    Raises ValueError for what neither can be, as `expand_path` does.
    """
    path = expand_path(name) if name else name
    return str(path) if name.startswith("~") or ENVIRONMENT.search(name) else name


def encoding_name(name: str) -> str:
    """Return Python's name of a text encoding. Raises ValueError for what is none."""
    try:
        "a".encode(name or "utf-8")
    except (LookupError, ValueError):
        raise ValueError("is no encoding that Python knows; use one such as windows-1252, shift_jis or utf-16-le") from None
    return codecs.lookup(name).name if name else ""


def zero_as_none(value: object) -> object:
    """Map 0 to None: other trainers write 0 for no limit."""
    return None if str(value).strip() == "0" else value


def steps_or_fraction(value: float) -> float:
    """Return a count of steps, or a fraction of a run. Raises ValueError for a count that is not whole."""
    if value >= 1 and value != int(value):
        raise ValueError("use a whole number of steps, or a fraction of the run below 1, such as 0.05")
    return value


CacheFolder = Annotated[Path | None, AfterValidator(only_placeholders(*OF_A_RUN))]


class Model(Section):
    """Model"""

    model_family: Annotated[str, AfterValidator(normalize_name)] = knob("", "Architecture to train, such as sdxl or flux.")
    model_flavour: str = knob("", "Published checkpoint of the family; `tiny` is built locally with random weights.")
    model_families: Annotated[dict[str, str] | None, AfterValidator(paths_by_name)] = knob(None, "Families of your own: name=package.module:ClassName, or a table of them.")
    model_type: Literal["full", "lora"] = knob("full", "Train all weights, or a LoRA adapter over frozen ones.")
    pretrained_model_name_or_path: Annotated[str, AfterValidator(in_home)] = knob("", "Base model: diffusers folder, hub id or single .safetensors file. Default: the flavour's checkpoint.", aliases=("model_name",))
    single_file_config: Path | None = knob(None, "Diffusers folder of the same architecture, for configs, tokenizers and weights missing in a single-file model.", when="pretrained_model_name_or_path=*.safetensors")
    revision: str | None = knob(None, "Hub revision: a branch, tag or commit.")
    variant: str | None = knob(None, "Weights variant in the folder, such as fp16.")
    prediction_type: Literal["epsilon", "v_prediction"] | None = knob(None, "Prediction of a DDPM model. Default: its scheduler's.")  # fmt: skip
    vae_dtype: Literal["fp32", "bf16"] = knob("fp32", "Precision of the VAE while it encodes and decodes.")
    vae_enable_tiling: bool = knob(False, "Encode and decode large images in overlapping, blended tiles: less memory, slightly different latents.")
    vae_enable_slicing: bool = knob(False, "Encode the images of a VAE batch one by one.")


class Lora(Section):
    """LoRA"""

    lora_type: Literal["lora", "dora", "loha", "lokr", "oft"] = knob("lora", "Adapter of model_type=lora: LoRA, DoRA (also trains row lengths), LoHa, LoKr or OFT (as in peft and LyCORIS).", when="model_type=lora")  # fmt: skip
    lora_rank: int = knob(16, "LoRA rank; for OFT, the block size.", when="model_type=lora", ge=1)
    lora_alpha: float | None = knob(None, "LoRA alpha; the update is scaled by alpha / rank. Default: the rank.", when="model_type=lora", gt=0)
    lokr_factor: int = knob(-1, "Size of the smaller factor of lora_type=lokr; -1: both near the square root of the layer's width.", when="model_type=lora and lora_type=lokr", ge=-1)
    lora_dropout: float = knob(0.0, "Dropout probability of the adapter's input.", when="model_type=lora", ge=0, lt=1)
    lora_target_modules: str = knob("", "Comma-separated layer names, their ends, or patterns (`blocks.*`). Default: attention projections (`detect-blocks`).", when="model_type=lora")
    lora_init: Path | None = knob(None, "LoRA to continue from: a .safetensors file of diffusers, ComfyUI or kohya, or a diffusers or peft folder.", when="model_type=lora")
    assistant_lora: list[Path] = knob([], "LoRA merged into the frozen base and not exported, e.g. for distilled models; may be repeated.", when="model_type=lora")
    assistant_lora_strength: float = knob(1.0, "Scale of assistant_lora.", when="model_type=lora and assistant_lora")
    export_format: Annotated[str, AfterValidator(normalize_formats)] = knob("diffusers", "Comma-separated LoRA formats to export: diffusers (always), comfyui, kohya (sd-scripts, musubi-tuner).", when="model_type=lora")
    base_model_precision: Literal["no_change", "int8", "float8", "nf4"] = knob("no_change", "Storage of a LoRA's frozen base: as mixed_precision, or quantized to 8 or 4 bits (torchao).", when="model_type=lora")
    base_model_compute: Literal["no_change", "int8"] = knob("no_change", "Products of a LoRA's frozen base: as mixed_precision, or int8 (int8 base; inputs quantized per token).", when="model_type=lora")  # fmt: skip


class DatasetSettings(Section):
    """Settings that each dataset of a file can have for itself; the flags are their defaults."""

    caption_strategy: Literal["textfile", "filename", "instanceprompt"] = knob("textfile", "Caption source: a `.txt` file beside the image, its file name, or one phrase.")  # fmt: skip
    caption_encoding: Annotated[str, AfterValidator(encoding_name)] = knob("", "Fallback encoding of caption files, such as windows-1252. Default: UTF-8, or a byte order mark, is required.", when="caption_strategy=textfile")
    caption_lines: Literal["auto", "one", "alternatives", "first"] = knob("auto", "Caption file lines: one caption, alternatives or only the first; auto: alternatives, or one if they form a text.", when="caption_strategy!=instanceprompt|filename")  # fmt: skip
    skip_uncaptioned: bool = knob(False, "Leave out images without a caption, instead of ending the run with their names.", when="caption_strategy!=instanceprompt")
    instance_prompt: str | None = knob(None, "Phrase for caption_strategy=instanceprompt.", when="caption_strategy=instanceprompt or prepend_instance_prompt")
    prepend_instance_prompt: bool = knob(False, "Put the instance prompt before every caption.", when="instance_prompt and caption_strategy!=instanceprompt")
    repeats: int = knob(0, "Extra passes over the images in every epoch.", ge=0, le=1_000_000)
    resolution: float = knob(1024, "Target size, in the unit of resolution_type.", gt=0)
    resolution_type: Literal["pixel", "area", "pixel_area"] = knob("pixel_area", "Unit of resolution: short edge, megapixels, or the edge of a square of the same area.")  # fmt: skip
    aspect_bucket_sizes: Literal["least_crop", "nearest"] = knob("least_crop", "Bucket size near the target area: least cropping, or each side rounded (4:3 at 1024: 1152x896).")  # fmt: skip
    crop: bool = knob(False, "Crop images; without it, only the part beyond the aspect bucket is cut off.")
    crop_style: Literal["center", "corner", "random"] = knob("center", "Crop position; corner: upper left; random: depends on seed and image only.", when="crop")
    crop_aspect: Literal["square", "preserve", "closest", "random"] = knob("square", "Crop shape: square, the image's aspect bucket, or the closest or a random one from a list of aspects.", when="crop")  # fmt: skip
    minimum_image_size: float | None = knob(None, "Leave out smaller images, in the unit of resolution.", gt=0, aliases=("minimum_resolution",))
    # The share with which Stable Diffusion was trained for classifier-free guidance (Ho and Salimans 2022).
    caption_dropout_probability: float = knob(0.1, "Fraction of samples trained without their caption.", ge=0, le=1)
    vae_batch_size: int = knob(4, "Images per VAE batch, on each rank.", when="not vae_cache_disable and not vae_cache_ondemand", ge=1)
    preserve_data_backend_cache: bool = knob(False, "Reuse the image list of an earlier start, without looking for new or changed files.")

    vae_cache_disable: bool = knob(False, "Encode images during training, one by one and ahead of the step, without storing latents.")
    text_cache_disable: bool = knob(False, "Encode captions during training, one by one and ahead of the step, without storing embeddings.")
    vae_cache_ondemand: bool = knob(False, "Encode images at their first use, one by one and ahead of the step, and store the latents.", when="not vae_cache_disable")
    text_cache_ondemand: bool = knob(False, "Encode captions at their first use, one by one and ahead of the step, and store the embeddings.", when="not text_cache_disable")
    max_workers: int | None = knob(None, "Image decoding threads per rank. Default: the rank's share of the cores, more for S3.", ge=1, le=1024)


class Data(DatasetSettings):
    """Data"""

    instance_data_dir: Annotated[Path | None, AfterValidator(no_address)] = knob(None, "Folder of images, including subfolders.", aliases=("instance_dir",))
    data_backend_config: Path | None = knob(None, "JSON file with several datasets (multidatabackend.json).")
    aspect_bucket_alignment: int = knob(64, "Multiple for both sides of a bucket.", unit="px", ge=8, le=256)
    reference_dropout_probability: float = knob(0.0, "Fraction of steps trained without reference images.", when="references", ge=0, le=1)
    masked_loss_probability: float = knob(1.0, "Fraction of steps with masked loss; the others train on whole images.", when="masks", ge=0, le=1)
    allow_dataset_oversubscription: bool = knob(False, "Repeat small buckets until they fill the effective batch.")
    cache_dir_vae: CacheFolder = knob(None, "Folder for cached latents, such as cache/{model_family}. Default: output_dir/cache/latents.", when="not vae_cache_disable")
    cache_dir_text: CacheFolder = knob(None, "Folder for cached text embeddings. Default: output_dir/cache/text.", when="not text_cache_disable")
    vae_cache_dtype: Literal["fp32", "bf16"] = knob("fp32", "Precision of cached latents; bf16 halves the size, without further error if vae_dtype=bf16.")
    compress_disk_cache: bool = knob(False, "Compress cached latents and embeddings (zstd); a dataset's own compress_cache takes precedence.", when="not vae_cache_disable or not text_cache_disable")
    text_encoder_batch_size: int = knob(8, "Captions per text encoder batch, on each rank.", when="not text_cache_disable and not text_cache_ondemand", ge=1)
    tokenizer_max_length: int | None = knob(None, "Maximum T5 prompt length in tokens. Default: the family's.", ge=1)
    rescan: bool = knob(False, "Read all image headers and captions again, ignoring earlier scans.")
    dataloader_prefetch_qlen: int = knob(4, "Optimizer steps of batches prepared ahead.", ge=1)

    @property
    def square(self) -> Shape:
        """The square of the training resolution, both sides a multiple of the alignment."""
        edge_px = self.resolution if self.resolution_type != "area" else 1000 * self.resolution**0.5
        side_px = max(1, round(edge_px / self.aspect_bucket_alignment)) * self.aspect_bucket_alignment
        return Shape(1, side_px, side_px)


class Training(Section):
    """Training"""

    output_dir: Annotated[Path, AfterValidator(no_url)] = knob(Path("output"), "Folder of this run: checkpoints, caches, validation images, metrics, final pipeline.")
    continue_with_other_data: bool = knob(False, "Continue the run in output_dir with entirely different images; refused otherwise.")
    seed: int = knob(42, "Determines data order, noise, timesteps and crops.", ge=0, aliases=("training_seed",))
    train_batch_size: int = knob(4, "Samples per rank in one forward pass.", ge=1, le=LARGEST_BATCH)
    gradient_accumulation_steps: int = knob(1, "Forward passes per optimizer step.", ge=1, le=1_000_000)
    global_batch_size: int | None = knob(None, "Samples per optimizer step over all ranks; sets gradient_accumulation_steps.", ge=1, le=1_000_000_000)
    max_train_steps: Annotated[int | None, BeforeValidator(zero_as_none)] = knob(None, "Stop after this many optimizer steps. Default, and 0: num_train_epochs decides.", ge=1)
    num_train_epochs: int = knob(1, "Stop after this many epochs, unless max_train_steps is set; 0: max_train_steps is required.", when="not max_train_steps", ge=0)
    mixed_precision: Literal["no", "bf16"] = knob("bf16", "Compute in bf16 with float32 master weights, or in float32.")
    float8: bool = knob(False, "Compute blocks' linear layers in float8 (torchao; NVIDIA Ada, Hopper and later); weights keep their precision.")
    allow_tf32: bool = knob(False, "Compute float32 products and convolutions in TF32 on NVIDIA GPUs: faster, with a 10-bit mantissa.", when="not use_cpu")
    gradient_checkpointing: bool | None = knob(None, "Recompute blocks in the backward pass to save memory; auto: as little of them as fits.", when="not activation_memory_budget>=0")  # fmt: skip
    activation_memory_budget: float | None = knob(None, "Recompute the cheapest parts of blocks, keeping this share of the others: 0 (least) to 1. Default: gradient_checkpointing decides.", ge=0, le=1)
    offload_activations: bool = knob(False, "Keep activations for the backward pass in host memory.", when="not use_cpu")
    fuse_qkv_projections: bool = knob(False, "Compute the query, key and value projections as one product; checkpoints keep the published layout.")
    attention_backend: Literal["auto", "cudnn", "flash", "flash3", "efficient", "math"] = knob("auto", "Attention kernel where applicable; auto: by torch; flash3 needs flash_attn_interface or attention_kernel.")  # fmt: skip
    attention_kernel: Annotated[str, AfterValidator(check_kernel)] = knob("", "Hub kernel for attention_backend=flash3, OWNER/NAME@COMMIT, downloaded and run. Default: flash_attn_interface.", when="attention_backend=flash3")


class Optimizer(Section):
    """Optimizer"""

    optimizer: Literal["adamw", "adam", "adagrad", "lion", "adafactor", "muon", "adamw_schedulefree", "prodigy"] = knob("adamw", "Optimizer. muon: AdamW outside blocks; adafactor: relative learning rate; prodigy: set learning_rate=1.")  # fmt: skip
    state_layout: Literal["fp32", "split", "bf16"] = knob("fp32", "Weights and moments: fp32 (12 bytes/weight), split (6; AdamW) or bf16 (4; stochastic rounding), 8-bit moments.")  # fmt: skip
    optimizer_release_gradients: bool = knob(False, "Update each weight in the backward pass as soon as its gradient exists, then free the gradient.")
    learning_rate: float = knob(1e-5, "Peak learning rate.", gt=0)
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine", "polynomial"] = knob("constant", "Learning rate schedule after the warm-up.")  # fmt: skip
    lr_warmup_steps: Annotated[float, AfterValidator(steps_or_fraction)] = knob(0, "Warm-up in optimizer steps; below 1: fraction of all steps.", ge=0)
    lr_end: float = knob(0.0, "Final learning rate of linear, cosine and polynomial schedules.", when="lr_scheduler=linear|cosine|polynomial", ge=0, aliases=("learning_rate_end",))
    lr_power: float = knob(1.0, "Exponent of the polynomial schedule.", when="lr_scheduler=polynomial", gt=0)
    # Kingma and Ba 2015 (arXiv:1412.6980, algorithm 1) give these two and epsilon as good defaults.
    adam_beta1: float = knob(0.9, "Decay of the first moment.", when="optimizer!=adafactor|adagrad", ge=0, lt=1)
    adam_beta2: float = knob(0.999, "Decay of the second moment; 0.99 for Lion unless set.", when="optimizer!=adafactor|adagrad", ge=0, lt=1)
    adam_epsilon: float = knob(1e-8, "Added to the denominator.", when="optimizer!=adafactor|lion", gt=0)
    adam_weight_decay: float = knob(0.01, "Decoupled weight decay; 0 for Adam, Adagrad and Adafactor unless set.", ge=0)
    max_grad_norm: float = knob(2.0, "Clip gradients to this global norm; 0: off.", ge=0)
    grad_clip_method: Literal["norm", "value"] = knob("norm", "Clip by the norm of all gradients, or each value separately.", when="max_grad_norm>0")  # fmt: skip

    add_own_defaults = model_validator(mode="before")(with_own_defaults)

    @property
    def betas(self) -> tuple[float, float]:
        return self.adam_beta1, self.adam_beta2

    def warmup_steps(self, max_steps: int) -> int:
        """Return the steps of the warm-up in a run of so many."""
        return round(self.lr_warmup_steps * (max_steps if self.lr_warmup_steps < 1 else 1))


class ObjectiveSettings(Section):
    """Objective"""

    snr_gamma: float | None = knob(None, "Min-SNR loss weighting for epsilon and v-prediction; 5 is usual.", gt=0)
    flow_schedule_shift: float | None = knob(None, "Noise level shift of flow matching; 1: none. Default: published sampling shift at 1024 px (LTX: by tokens).", gt=0)
    flow_schedule_auto_shift: bool = knob(False, "Shift noise levels by image size, as the base model's scheduler does for sampling.")
    flow_sigmoid_scale: float = knob(1.0, "Width of the logit-normal distribution of noise levels.", when="not flow_use_uniform_schedule", gt=0)
    flow_use_uniform_schedule: bool = knob(False, "Sample noise levels uniformly instead of from a logit-normal distribution.")
    sound_loss_weight: float = knob(0.0, "Train the sound of clips, too (LTX-2): weight of its loss beside the video's. 0: the video alone.", ge=0)
    flux_guidance_value: float = knob(1.0, "Guidance input of guidance-distilled Flux during training.", ge=0)


class Ema(Section):
    """EMA"""

    use_ema: bool = knob(False, "Keep an exponential moving average of the weights, in float32.")
    ema_decay: float = knob(0.995, "Share of the old average kept by each update.", when="use_ema", ge=0, lt=1)
    ema_device: Literal["cpu", "accelerator"] = knob("cpu", "Location of the average: host memory, or beside the weights.", when="use_ema")
    ema_update_interval: int = knob(1, "Optimizer steps between updates.", when="use_ema", ge=1)


class Parallel(Section):
    """Parallelism"""

    fsdp_enable: bool = knob(False, "Shard weights, gradients and optimizer state over the ranks (FSDP2).")
    fsdp_version: Literal[1, 2] = knob(2, "FSDP version; 1 is deprecated and runs as 2.", when="fsdp_enable")
    fsdp_reshard_after_forward: bool = knob(True, "Free a block's gathered weights between forward and backward.", when="fsdp_enable")
    dp_replicate_size: int = knob(1, "Model copies, each sharded over neighbouring ranks (hybrid sharding), such as one per machine.", when="fsdp_enable", ge=1)  # fmt: skip
    fsdp_sync_each_batch: bool | None = knob(None, "Reduce gradients after each micro-batch and keep only shards; auto: for models above 2 billion parameters.", when="fsdp_enable")  # fmt: skip
    fsdp_offload_params: bool = knob(False, "Keep shards of weights, gradients and optimizer state in host memory, and update them there.", when="fsdp_enable")
    fsdp_state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = knob("SHARDED_STATE_DICT", "Checkpoint format: one file per rank, or one ordinary set of safetensors.")  # fmt: skip
    fsdp_cpu_ram_efficient_loading: bool = knob(True, "Build on the meta device; each rank reads only its own shards.", when="fsdp_enable")
    fsdp_auto_wrap_policy: str = knob("TRANSFORMER_BASED_WRAP", "FSDP units: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, or `package.module.callable`.", when="fsdp_enable")  # fmt: skip
    # torch's own default (size_based_auto_wrap_policy).
    fsdp_min_num_params: int = knob(100_000_000, "Smallest unit of SIZE_BASED_WRAP.", when="fsdp_enable and fsdp_auto_wrap_policy=SIZE_BASED_WRAP", unit="parameters", ge=1)
    fsdp_transformer_layer_cls_to_wrap: str = knob("", "Comma-separated block classes to wrap. Default: as recommended by `simpletuner detect-blocks`.", when="fsdp_enable and fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP")


    context_parallel_size: int = knob(1, "Ranks per sample, each with a part of its tokens (context parallel, with FSDP2).", ge=1)
    context_parallel_comm_strategy: Literal["allgather", "alltoall"] = knob("allgather", "Exchange for attention: allgather of keys and values, or alltoall over heads (Ulysses).", when="context_parallel_size>1")  # fmt: skip
    zero_stage: Literal[1, 2, 3] | None = knob(None, "DeepSpeed ZeRO stage: shard optimizer state (1), also gradients (2), also weights (3). Default: no DeepSpeed.")  # fmt: skip
    offload_optimizer: Literal["none", "cpu", "nvme"] = knob("none", "Location of DeepSpeed's optimizer state: GPU, host memory, or files (stage 3).", when="zero_stage")  # fmt: skip
    offload_param: Literal["none", "cpu", "nvme"] = knob("none", "Location of DeepSpeed's weights between uses (stage 3).", when="zero_stage")
    offload_param_path: Path | None = knob(None, "Folder for DeepSpeed's NVMe offload.", when="offload_param=nvme or offload_optimizer=nvme")
    deepspeed_config: dict[str, JsonValue] | None = knob(None, "DeepSpeed JSON, inline or as a path; values with an equivalent setting become that setting.", when="zero_stage")  # fmt: skip

    @property
    def engine(self) -> Literal["ddp", "fsdp2", "zero"]:
        """The engine that holds the weights; on one rank alone `ddp` averages nothing."""
        if self.zero_stage is not None:
            return "zero"
        return "fsdp2" if self.fsdp_enable else "ddp"



class Launch(Section):
    """Launch"""

    num_processes: int = knob(1, "Ranks in total, over all machines.", ge=1, le=1_000_000, aliases=("training_num_processes",))
    num_machines: int = knob(1, "Number of machines, with the same number of ranks each.", ge=1, le=1_000_000, aliases=("training_num_machines",))
    machine_rank: int = knob(0, "Index of this machine, from 0.", when="num_machines>1", ge=0)
    main_process_ip: Annotated[str, AfterValidator(check_host)] = knob("", "Address of machine 0, as reachable from the others.", when="num_machines>1")
    # torchrun's default port.
    main_process_port: int = knob(29500, "TCP port on machine 0 for the connections of all ranks.", when="num_processes>1", ge=1, le=65535)
    node_join_timeout: float = knob(600, "Time to wait for the other machines at the start.", when="num_machines>1", unit="s", gt=0)
    node_timeout: float = knob(60, "Heartbeat timeout: the run ends if a machine is silent for longer.", when="num_machines>1", unit="s", gt=0)
    stall_timeout: float = knob(50, "Timeout of a rank in a suspension, or in a hang with others waiting; the run then ends and names it.", when="num_processes>1", unit="s", gt=0)
    preemption_check: str = knob("", "Command or URL polled every 5 s on each machine; exit code 0 or status 200 stops the run as SIGTERM does.")
    preemption_grace_seconds: float = knob(30, "Seconds between SIGTERM and power-off; warn if a save takes longer. 0: never warn.", unit="s", ge=0)
    run_secret_file: Path | None = knob(None, "Secret file for signed messages between machines, readable by its owner only; SIMPLETUNER_RUN_SECRET wins.", when="num_machines>1")
    gpu_ids: str = knob("all", "GPUs to use on each machine, such as 0,1,3.", when="not use_cpu")
    use_cpu: bool = knob(False, "Train on the CPU even if there are GPUs.")


class Compile(Section):
    """torch.compile"""

    dynamo_backend: Literal["auto", "no", "inductor", "eager", "aot_eager", "cudagraphs"] = knob("auto", "Backend of torch.compile for the denoiser; auto: inductor on NVIDIA GPUs, if there are enough steps per shape.", aliases=("training_dynamo_backend",))  # fmt: skip
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = knob("default", "Mode of torch.compile: default, or longer compilation for faster code.", when="dynamo_backend!=no")  # fmt: skip
    dynamo_fullgraph: bool = knob(False, "Fail on graph breaks.", when="dynamo_backend!=no", aliases=("dynamo_use_fullgraph",))
    dynamo_dynamic: bool = knob(False, "Compile once for all image sizes instead of once per size.", when="dynamo_backend!=no", aliases=("dynamo_use_dynamic",))
    dynamo_use_regional_compilation: bool = knob(True, "Compile block by block, equal blocks once; otherwise the whole denoiser at once.", when="dynamo_backend!=no")

    @property
    def is_on(self) -> bool:
        """False for `auto`, too, until a run has chosen (training/auto.py)."""
        return self.dynamo_backend not in ("auto", "no")


ExportPrecision = Literal["fp32", "bf16", "fp16", "float8"]


class Checkpoints(Section):
    """Checkpoints"""

    checkpoint_step_interval: int = knob(500, "Optimizer steps between checkpoints.", ge=1, aliases=("checkpointing_steps",))
    async_checkpointing: bool | None = knob(None, "Write checkpoints in the background from a copy in host memory; auto: if it takes half of the free memory at most.")  # fmt: skip
    checkpoints_total_limit: int = knob(5, "Number of newest checkpoints to keep; with a held-out loss, the best one, too.", ge=1)
    export_single_file: bool = knob(False, "Also export the weights as one .safetensors file in the original layout (Stable Diffusion 1.x, 2.x, XL).")
    export_precision: ExportPrecision | None = knob(None, "Precision of the exported weights; float8: linear layers of the blocks, the rest in bf16. Default: fp32, as they are trained.")
    export_best: bool = knob(False, "Also save a checkpoint at each best held-out loss, and export the best at the end (pipeline-best).", when="eval_split>0 or eval_dataset")
    resume_from_checkpoint: Annotated[str, AfterValidator(in_home), AfterValidator(checkpoint_name)] = knob("latest", "`latest`, a step, a checkpoint folder, or `none`.")
    mirror_output: Annotated[str, AfterValidator(check_bucket)] = knob("", "Bucket folder to mirror output_dir to, without caches, and to resume from: s3://BUCKET/FOLDER, gs:// or az://.")


class Validation(Section):
    """Validation"""

    validation_prompt: list[str] = knob([], "Prompt of a validation image; may be repeated.")
    validation_prompt_file: Path | None = knob(None, "JSON lines of further prompts, with seed, resolution, guidance, negative prompt (docs/validation.md).")
    validation_images: list[Path] = knob([], "Reference image for prompts of editing models; may be repeated. Default: from a held-out or training pair.", when="validation_prompt or validation_prompt_file")
    validation_pairs: int = knob(0, "Dataset pairs to edit in validation, by their own captions: held-out pairs, or else training pairs.", when="references or first_frames", ge=0)
    validation_negative_prompt: str = knob("", "Negative prompt. Default: the family's unconditional input.", when="validation_prompt or validation_prompt_file or validation_pairs")
    validation_step_interval: int = knob(100, "Optimizer steps between validations; 0: only before the first step and after the last.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=0, aliases=("validation_steps",))  # fmt: skip
    validation_num_inference_steps: int = knob(30, "Denoising steps per image.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=1)
    validation_guidance: float = knob(7.5, "Guidance scale.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=0)
    validation_resolution: Annotated[str, AfterValidator(normalize_shapes)] = knob("", "Image sizes, comma-separated: EDGE or WIDTHxHEIGHT in px, @FRAMES for clips. Default: the training resolution.", when="validation_prompt or validation_prompt_file or validation_pairs")  # fmt: skip
    validation_num_video_frames: int | None = knob(None, "Frames of validation clips without @FRAMES. Default: the longest training clip.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=1)
    framerate: float | None = knob(None, "Frames per second of validation clips. Default: the model's.", when="validation_prompt or validation_prompt_file or validation_pairs", gt=0, le=1000)
    validation_seed: int | None = knob(None, "Seed of the starting noise. Default: the run's seed.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=0)
    eval_split: float = knob(0.0, "Fraction of images held out of training, to measure the loss on.", ge=0, lt=1)
    eval_step_interval: int = knob(100, "Optimizer steps between measurements of the held-out loss; 0: only before the first step and after the last.", when="eval_split>0 or eval_dataset", ge=0, aliases=("eval_steps_interval",))  # fmt: skip
    eval_timesteps: int = knob(4, "Noise levels per held-out image, one from each equal part of their range.", when="eval_split>0 or eval_dataset", ge=1, le=1000)  # fmt: skip
    early_stopping_patience: int = knob(0, "End training after so many evaluations in a row whose held-out loss is above the best one; 0: never.", when="eval_split>0 or eval_dataset", ge=0)
    ema_validation: Literal["none", "ema_only", "comparison"] = knob("comparison", "Weights for validation images and held-out loss with EMA: trained, averaged, or both.", when="use_ema")  # fmt: skip

    @property
    def samples_images(self) -> bool:
        return bool(self.validation_prompt or self.validation_pairs) or self.validation_prompt_file is not None


class Logging(Section):
    """Logging"""

    report_to: Annotated[str, AfterValidator(normalize_trackers)] = knob("none", "Comma-separated trackers for metrics, images and settings: none, tensorboard, wandb, trackio, swanlab.")
    tracker_project_name: str = knob("", "Project at online trackers. Default: WANDB_PROJECT (TRACKIO_PROJECT, SWANLAB_PROJECT), or simpletuner.", when="report_to=*wandb*|*trackio*|*swanlab*")
    tracker_run_name: str = knob("", "Run name at trackers, and its folder in logging_dir. Default: the name of output_dir, and no folder.", when="report_to!=none")
    logging_dir: Path | None = knob(None, "Folder for local files of trackers. Default: output_dir/logs.", when="report_to!=none")
    device_peak_tflops: float | None = knob(None, "Peak of each device, for MFU. Default: dense bf16 peak of the GPUs in docs/performance.md.", unit="TFLOP/s", gt=0)
    profile_steps: Annotated[str, AfterValidator(normalize_step_range)] = knob("", "Optimizer steps FIRST:LAST to trace on rank 0 with torch.profiler, into output_dir/profile.")
    log_sample_losses: bool = knob(False, "Write each sample's loss and timestep to output_dir/sample_losses.jsonl, for `simpletuner runs losses`.")
    notify_format: Literal["auto", "json", "discord", "ntfy"] = knob("auto", "Message format: JSON, Discord or ntfy (both with a validation image); auto: from the address.", when="notify_url")
    notify_url: SecretUrl = knob(SecretStr(""), "Secret URL for a message after each validation, for each alarm and at the run's end or failure; `{env:NAME}` is expanded.")


class Hub(Section):
    """Hugging Face Hub"""

    push_to_hub: bool = knob(False, "Upload the export and its model card at the end of the run.")
    hub_model_id: Annotated[str, AfterValidator(check_repository)] = knob("", "Repository to upload to, as OWNER/NAME or NAME. Default: the name of output_dir.", when="push_to_hub")
    model_card_private: bool = knob(True, "Create a private repository; false: public. An existing repository's visibility is not changed.", when="push_to_hub")


class Settings(Section):
    """All sections of a run; each part of the program is given only the ones it needs."""

    model: Model = Field(default_factory=Model)
    lora: Lora = Field(default_factory=Lora)
    data: Data = Field(default_factory=Data)
    training: Training = Field(default_factory=Training)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    objective: ObjectiveSettings = Field(default_factory=ObjectiveSettings)
    ema: Ema = Field(default_factory=Ema)
    parallel: Parallel = Field(default_factory=Parallel)
    launch: Launch = Field(default_factory=Launch)
    compile: Compile = Field(default_factory=Compile)
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)
    validation: Validation = Field(default_factory=Validation)
    logging: Logging = Field(default_factory=Logging)
    hub: Hub = Field(default_factory=Hub)

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks; those that share a sample's tokens count as one."""
        training, data_ranks = self.training, self.launch.num_processes // self.parallel.context_parallel_size
        return training.train_batch_size * data_ranks * training.gradient_accumulation_steps


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Settings.model_fields.items() if isinstance(field.annotation, type)
}
SECTION_OF: dict[str, str] = {
    setting: name for name, section in SECTIONS.items() for setting in section.model_fields
}


@cache
def setting_fields() -> Mapping[str, FieldInfo]:
    """Every setting by name, in the order of the sections."""
    return {name: field for section in SECTIONS.values() for name, field in section.model_fields.items()}
