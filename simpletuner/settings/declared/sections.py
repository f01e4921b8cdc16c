"""Every setting, declared once. Names are the ones that users already have in their files."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, JsonValue, SecretStr, model_validator
from pydantic.fields import FieldInfo

from simpletuner.settings.declared.knob import Section, knob, with_own_defaults
from simpletuner.settings.files.raw_values import SecretUrl
from simpletuner.settings.values.parsed import (
    check_bucket,
    check_host,
    check_kernel,
    check_repository,
    no_url,
    normalize_formats,
    normalize_step_range,
    normalize_trackers,
)
from simpletuner.settings.values.shape import Shape, normalize_shapes
from simpletuner.settings.values.spelling import OF_A_RUN, normalize_name, only_placeholders
from simpletuner.system.files.paths import ENVIRONMENT, expand_path

LARGEST_BATCH = 1_000_000
"""Samples per rank in one forward pass, of which `plan --auto` tries each divisor."""


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
    """Return no value for 0, by which other trainers mean that a limit is not set."""
    return None if str(value).strip() == "0" else value


def steps_or_fraction(value: float) -> float:
    """Return a count of steps, or a fraction of a run. Raises ValueError for a count that is not whole."""
    if value >= 1 and value != int(value):
        raise ValueError("use a whole number of steps, or a fraction of the run below 1, such as 0.05")
    return value


CacheFolder = Annotated[Path | None, AfterValidator(only_placeholders(*OF_A_RUN))]


class Model(Section):
    """Model"""

    model_family: Annotated[str, AfterValidator(normalize_name)] = knob("", "Which architecture to train, such as sdxl or flux.")
    model_flavour: str = knob("", "Which published checkpoint of the family; `tiny` is built locally with random weights.")
    model_families: Annotated[dict[str, str] | None, AfterValidator(paths_by_name)] = knob(None, "Families of your own: name=package.module:ClassName, or a table of such.")
    model_type: Literal["full", "lora"] = knob("full", "Train all weights, or a LoRA adapter over frozen ones.")
    pretrained_model_name_or_path: Annotated[str, AfterValidator(in_home)] = knob("", "A diffusers folder, hub id or single .safetensors file to start from; empty: the flavour's own.", aliases=("model_name",))
    single_file_config: Path | None = knob(None, "With a model in one .safetensors file: a diffusers folder of the same architecture, for configs, tokenizers and what the file lacks.", when="pretrained_model_name_or_path=*.safetensors")
    revision: str | None = knob(None, "Hub revision: a branch, tag or commit.")
    variant: str | None = knob(None, "Weights variant in the folder, such as fp16.")
    prediction_type: Literal["epsilon", "v_prediction"] | None = knob(None, "What a DDPM model predicts; empty: as its scheduler says.")  # fmt: skip
    vae_dtype: Literal["fp32", "bf16"] = knob("fp32", "Precision of the VAE while it encodes and decodes.")
    vae_enable_tiling: bool = knob(False, "Encode and decode images larger than the VAE's tile size in overlapping tiles, blended at their edges: less memory, slightly other latents.")
    vae_enable_slicing: bool = knob(False, "Encode the images of a VAE batch one after another.")


class Lora(Section):
    """LoRA"""

    lora_type: Literal["lora", "dora", "loha", "lokr", "oft"] = knob("lora", "Kind of adapter that model_type=lora trains: LoRA; DoRA, which trains the length of each row, too; LoHa, LoKr and OFT, which peft and LyCORIS have.", when="model_type=lora")  # fmt: skip
    lora_rank: int = knob(16, "Rank of each pair of matrices that model_type=lora trains; of lora_type=oft the inputs that one block rotates.", when="model_type=lora", ge=1)
    lora_alpha: float | None = knob(None, "Adapters are scaled by lora_alpha / lora_rank; empty: lora_rank, so by 1.", when="model_type=lora", gt=0)
    lokr_factor: int = knob(-1, "Factors of lora_type=lokr: the size of the smaller one; -1: both near the root of a layer's width.", when="model_type=lora and lora_type=lokr", ge=-1)
    lora_dropout: float = knob(0.0, "Fraction of an adapter's input values that are zeroed in training.", when="model_type=lora", ge=0, lt=1)
    lora_target_modules: str = knob("", "Comma-separated names, or ends of names, of the layers to adapt; empty: the attention projections that `simpletuner detect-blocks --lora` shows.", when="model_type=lora")
    lora_init: Path | None = knob(None, "A LoRA to train on: a .safetensors file of diffusers, ComfyUI or kohya's programs, or a folder of diffusers or peft.", when="model_type=lora")
    assistant_lora: list[Path] = knob([], "A LoRA that is merged into the frozen base and not exported, such as one for training a distilled model; give it several times for several.", when="model_type=lora")
    assistant_lora_strength: float = knob(1.0, "Scale of assistant_lora.", when="model_type=lora and assistant_lora")
    export_format: Annotated[str, AfterValidator(normalize_formats)] = knob("diffusers", "Programs to write a LoRA for, separated by commas: diffusers always, comfyui, kohya (sd-scripts, musubi-tuner).", when="model_type=lora")
    base_model_precision: Literal["no_change", "int8", "float8", "nf4"] = knob("no_change", "How a LoRA's frozen base is held: in the precision of mixed_precision, or in 8 or 4 bits (torchao).", when="model_type=lora")
    base_model_compute: Literal["no_change", "int8"] = knob("no_change", "Products of a LoRA's frozen base: in the precision of mixed_precision, or with base_model_precision=int8 in int8, for which inputs are quantized token by token.", when="model_type=lora")  # fmt: skip


class DatasetSettings(Section):
    """Settings that each dataset of a file can have for itself; the flags are their defaults."""

    caption_strategy: Literal["textfile", "filename", "instanceprompt"] = knob("textfile", "Where captions come from: a `.txt` file beside the image, its file name, or one phrase.")  # fmt: skip
    caption_encoding: Annotated[str, AfterValidator(encoding_name)] = knob("", "Encoding of caption files that are neither UTF-8 nor begin with a byte order mark, such as windows-1252; empty: these are refused.", when="caption_strategy=textfile")
    caption_lines: Literal["auto", "one", "alternatives", "first"] = knob("auto", "What the lines of a caption file are: one caption, alternatives of which one is chosen each time, or only the first is read; auto: alternatives, unless most files of the dataset have paragraphs, Markdown, JSON, YAML or wrapped lines.", when="caption_strategy!=instanceprompt|filename")  # fmt: skip
    skip_uncaptioned: bool = knob(False, "Leave out images without a caption; otherwise the run ends with their names.", when="caption_strategy!=instanceprompt")
    instance_prompt: str | None = knob(None, "The phrase for caption_strategy=instanceprompt.", when="caption_strategy=instanceprompt or prepend_instance_prompt")
    prepend_instance_prompt: bool = knob(False, "Put the instance prompt before every caption.", when="instance_prompt and caption_strategy!=instanceprompt")
    repeats: int = knob(0, "Extra passes over the images in every epoch.", ge=0, le=1_000_000)
    resolution: float = knob(1024, "Target size, in the unit of resolution_type.", gt=0)
    resolution_type: Literal["pixel", "area", "pixel_area"] = knob("pixel_area", "Unit of resolution: short edge, megapixels, or the edge of a square of the same area.")  # fmt: skip
    aspect_bucket_sizes: Literal["least_crop", "nearest"] = knob("least_crop", "Which size near the target area an image's bucket has: the one that crops least, or each side rounded by itself, as in other trainers (4:3 at 1024: 1152x896).")  # fmt: skip
    crop: bool = knob(False, "Crop images; without it, only what extends beyond the aspect bucket is cut off.")
    crop_style: Literal["center", "corner", "random"] = knob("center", "Where to crop: corner is the upper left one; random depends on the seed and the image alone.", when="crop")
    crop_aspect: Literal["square", "preserve", "closest", "random"] = knob("square", "Shape of the crop: square, the image's aspect bucket, or of a list of aspects the closest or a random one.", when="crop")  # fmt: skip
    minimum_image_size: float | None = knob(None, "Leave out smaller images; same unit as resolution.", gt=0, aliases=("minimum_resolution",))
    # The share with which Stable Diffusion was trained for classifier-free guidance (Ho and Salimans 2022).
    caption_dropout_probability: float = knob(0.1, "Fraction of samples trained without their caption.", ge=0, le=1)
    vae_batch_size: int = knob(4, "Images that the VAE encodes at once, per rank.", when="not vae_cache_disable and not vae_cache_ondemand", ge=1)
    preserve_data_backend_cache: bool = knob(False, "Use the image list of an earlier start without looking for new or changed files.")

    vae_cache_disable: bool = knob(False, "Encode images while training, ahead of the step and one by one, and store no latents.")
    text_cache_disable: bool = knob(False, "Encode captions while training, ahead of the step and one by one, and store no embeddings.")
    vae_cache_ondemand: bool = knob(False, "Encode images when training first needs them, ahead of the step and one by one, and store the latents.", when="not vae_cache_disable")
    text_cache_ondemand: bool = knob(False, "Encode captions when training first needs them, ahead of the step and one by one, and store the embeddings.", when="not text_cache_disable")
    max_workers: int | None = knob(None, "Threads per rank that decode images ahead of the VAE; empty: its share of the cores, and more for images in S3.", ge=1, le=1024)


class Data(DatasetSettings):
    """Data"""

    instance_data_dir: Path | None = knob(None, "Folder of images, searched with its subfolders.", aliases=("instance_dir",))
    data_backend_config: Path | None = knob(None, "JSON file that lists several datasets (multidatabackend.json).")
    aspect_bucket_alignment: int = knob(64, "Both sides of a bucket are multiples of this.", unit="px", ge=8, le=256)
    reference_dropout_probability: float = knob(0.0, "Fraction of steps trained without reference images.", when="references", ge=0, le=1)
    masked_loss_probability: float = knob(1.0, "Fraction of steps in which masks of the loss count; in the others the loss is that of whole images.", when="masks", ge=0, le=1)
    allow_dataset_oversubscription: bool = knob(False, "Repeat small buckets as often as the effective batch needs.")
    cache_dir_vae: CacheFolder = knob(None, "Folder for cached latents, such as cache/{model_family}; empty: output_dir/cache/latents.", when="not vae_cache_disable")
    cache_dir_text: CacheFolder = knob(None, "Folder for cached text embeddings; empty: output_dir/cache/text.", when="not text_cache_disable")
    vae_cache_dtype: Literal["fp32", "bf16"] = knob("fp32", "Precision of cached latents; bf16 takes half the space, and what vae_dtype=bf16 adds no error to.")
    compress_disk_cache: bool = knob(False, "Compress cached latents and embeddings (zstd); a dataset's own compress_cache wins.", when="not vae_cache_disable or not text_cache_disable")
    text_encoder_batch_size: int = knob(8, "Captions that the text encoders encode at once, per rank.", when="not text_cache_disable and not text_cache_ondemand", ge=1)
    tokenizer_max_length: int | None = knob(None, "Longest T5 prompt in tokens; empty: the family's own.", ge=1)
    rescan: bool = knob(False, "Read all image headers and captions again, whatever earlier starts have kept.")
    dataloader_prefetch_qlen: int = knob(4, "Optimizer steps of batches prepared ahead.", ge=1)

    @property
    def square(self) -> Shape:
        """The square of the training resolution, both sides a multiple of the alignment."""
        edge_px = self.resolution if self.resolution_type != "area" else 1000 * self.resolution**0.5
        side_px = max(1, round(edge_px / self.aspect_bucket_alignment)) * self.aspect_bucket_alignment
        return Shape(1, side_px, side_px)


class Training(Section):
    """Training"""

    output_dir: Annotated[Path, AfterValidator(no_url)] = knob(Path("output"), "Folder of this run: checkpoints, caches, validation images, metrics, the final pipeline.")
    continue_with_other_data: bool = knob(False, "Let the run in output_dir go on with images none of which it was trained on, which is refused otherwise: a run's folder is one project's.")
    seed: int = knob(42, "Determines data order, noise, timesteps and crops.", ge=0, aliases=("training_seed",))
    train_batch_size: int = knob(4, "Samples per rank in one forward pass.", ge=1, le=LARGEST_BATCH)
    gradient_accumulation_steps: int = knob(1, "Forward passes per optimizer step.", ge=1, le=1_000_000)
    global_batch_size: int | None = knob(None, "Samples per optimizer step over all ranks, whatever their number: gradient_accumulation_steps follows from it.", ge=1, le=1_000_000_000)
    max_train_steps: Annotated[int | None, BeforeValidator(zero_as_none)] = knob(None, "Stop after this many optimizer steps; empty or 0: num_train_epochs counts.", ge=1)
    num_train_epochs: int = knob(1, "Stop after this many epochs, unless max_train_steps is given; 0: only that counts.", when="not max_train_steps", ge=0)
    mixed_precision: Literal["no", "bf16"] = knob("bf16", "Compute in bf16 over float32 master weights, or in float32.")
    float8: bool = knob(False, "Compute the blocks' linear layers in float8 (torchao) on NVIDIA GPUs from Ada and Hopper on; weights keep their precision.")
    allow_tf32: bool = knob(False, "Compute float32 products and convolutions in TF32 on NVIDIA GPUs: faster, with 10 bits of mantissa.", when="not use_cpu")
    gradient_checkpointing: bool | None = knob(None, "Keep only the inputs of blocks for the backward pass, and recompute the rest there, to save memory; auto: only where all does not fit, counted before training.", when="not activation_memory_budget>=0 or dynamo_backend=no|auto")  # fmt: skip
    activation_memory_budget: float | None = knob(None, "What compiled blocks keep for the backward pass, from 0 (as little as they can) to 1 (all that they need), in place of gradient_checkpointing; empty: that decides.", ge=0, le=1)
    offload_activations: bool = knob(False, "Keep what the backward pass needs of the forward pass in the machine's memory.", when="not use_cpu")
    fuse_qkv_projections: bool = knob(False, "Compute the query, key and value projections of an attention as one product; weights and checkpoints stay as published.")
    attention_backend: Literal["auto", "cudnn", "flash", "flash3", "efficient", "math"] = knob("auto", "Which kernel computes attention: torch's choice, or this one wherever it can; flash3 needs flash_attn_interface, or attention_kernel.")  # fmt: skip
    attention_kernel: Annotated[str, AfterValidator(check_kernel)] = knob("", "FlashAttention 3 of the kernels hub for attention_backend=flash3, as OWNER/NAME@COMMIT, which is downloaded and run; empty: flash_attn_interface.", when="attention_backend=flash3")


class Optimizer(Section):
    """Optimizer"""

    optimizer: Literal["adamw", "adam", "adagrad", "lion", "adafactor", "muon", "adamw_schedulefree", "prodigy"] = knob("adamw", "Which optimizer: AdamW, Adam (weight decay in the gradient), Adagrad, Lion, Adafactor (learning_rate relative to each weight's size), Muon (AdamW outside the blocks' linear layers), schedule-free AdamW, or Prodigy (finds its rate, which learning_rate=1 multiplies).")  # fmt: skip
    state_layout: Literal["fp32", "split", "bf16"] = knob("fp32", "How weights and moments are held: in float32 (12 bytes per parameter), split (6 bytes, AdamW): in bf16 with the 16 bits that make it float32, and 8-bit moments, or bf16 (4 bytes): rounded stochastically, with such moments.")  # fmt: skip
    optimizer_release_gradients: bool = knob(False, "Update each weight in the backward pass as soon as its gradient is there, and free the gradient.")
    learning_rate: float = knob(1e-5, "Peak learning rate.", gt=0)
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine", "polynomial"] = knob("constant", "How the learning rate changes after the warm-up.")  # fmt: skip
    lr_warmup_steps: Annotated[float, AfterValidator(steps_or_fraction)] = knob(0, "Optimizer steps over which the learning rate rises from 0; below 1: that fraction of all steps.", ge=0)
    lr_end: float = knob(0.0, "Learning rate that linear, cosine and polynomial reach when the run ends.", when="lr_scheduler=linear|cosine|polynomial", ge=0, aliases=("learning_rate_end",))
    lr_power: float = knob(1.0, "Exponent of the polynomial schedule.", when="lr_scheduler=polynomial", gt=0)
    # Kingma and Ba 2015 (arXiv:1412.6980, algorithm 1) give these two and epsilon as good defaults.
    adam_beta1: float = knob(0.9, "Decay of the first moment.", when="optimizer!=adafactor|adagrad", ge=0, lt=1)
    adam_beta2: float = knob(0.999, "Decay of the second moment; 0.99 for Lion unless set.", when="optimizer!=adafactor|adagrad", ge=0, lt=1)
    adam_epsilon: float = knob(1e-8, "Added to the denominator.", when="optimizer!=adafactor|lion", gt=0)
    adam_weight_decay: float = knob(0.01, "Decoupled weight decay; 0 for Adam, Adagrad and Adafactor unless set.", ge=0)
    max_grad_norm: float = knob(2.0, "Scale gradients down to this global norm; 0 turns it off.", ge=0)
    grad_clip_method: Literal["norm", "value"] = knob("norm", "What max_grad_norm limits: the norm of all gradients, or the size of each value.", when="max_grad_norm>0")  # fmt: skip

    add_own_defaults = model_validator(mode="before")(with_own_defaults)

    def warmup_steps(self, max_steps: int) -> int:
        """Return the steps of the warm-up in a run of so many."""
        return round(self.lr_warmup_steps * (max_steps if self.lr_warmup_steps < 1 else 1))


class ObjectiveSettings(Section):
    """Objective"""

    snr_gamma: float | None = knob(None, "Min-SNR loss weighting (5 is usual) for epsilon and v-prediction.", gt=0)
    flow_schedule_shift: float | None = knob(None, "Shift noise levels of flow matching towards noise; 1 leaves them; empty: the shift with which the published model samples 1024 px, or clips of LTX by their tokens.", gt=0)
    flow_schedule_auto_shift: bool = knob(False, "Shift noise levels by image size, as the base model's scheduler does when it samples.")
    flow_sigmoid_scale: float = knob(1.0, "Width of the logit-normal noise levels.", when="not flow_use_uniform_schedule", gt=0)
    flow_use_uniform_schedule: bool = knob(False, "Sample noise levels uniformly instead of logit-normally.")
    flux_guidance_value: float = knob(1.0, "Guidance input of guidance-distilled Flux while training.", ge=0)


class Ema(Section):
    """EMA"""

    use_ema: bool = knob(False, "Keep an exponential moving average of the weights, in float32.")
    ema_decay: float = knob(0.995, "How much of the old average stays at each update.", when="use_ema", ge=0, lt=1)
    ema_device: Literal["cpu", "accelerator"] = knob("cpu", "Where the average is kept: in the host's memory, or with the weights.", when="use_ema")
    ema_update_interval: int = knob(1, "Optimizer steps between updates.", when="use_ema", ge=1)


class Parallel(Section):
    """Parallelism"""

    fsdp_enable: bool = knob(False, "Shard weights, gradients and optimizer state over the ranks (FSDP2).")
    fsdp_version: Literal[1, 2] = knob(2, "FSDP version; 1 is deprecated and runs as 2.", when="fsdp_enable")
    fsdp_reshard_after_forward: bool = knob(True, "Free a block's gathered weights between forward and backward.", when="fsdp_enable")
    dp_replicate_size: int = knob(1, "Copies of the model, each sharded over neighbouring ranks (hybrid sharding): with one per machine, weights are only gathered within machines.", when="fsdp_enable", ge=1)  # fmt: skip
    fsdp_sync_each_batch: bool | None = knob(None, "Reduce gradients after each accumulated micro-batch, which keeps shards of them instead of whole ones; auto: for models above 2 billion parameters.", when="fsdp_enable")  # fmt: skip
    fsdp_offload_params: bool = knob(False, "Keep shards of weights, gradients and optimizer state in the machine's memory, and update them there.", when="fsdp_enable")
    fsdp_state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = knob("SHARDED_STATE_DICT", "Checkpoint as one file per rank, or as one ordinary set of safetensors.")  # fmt: skip
    fsdp_cpu_ram_efficient_loading: bool = knob(True, "Build on the meta device and let each rank read only its own slices.", when="fsdp_enable")
    fsdp_auto_wrap_policy: str = knob("TRANSFORMER_BASED_WRAP", "What becomes an FSDP unit: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, or `package.module.callable`.", when="fsdp_enable")  # fmt: skip
    # torch's own default (size_based_auto_wrap_policy).
    fsdp_min_num_params: int = knob(100_000_000, "Smallest unit of SIZE_BASED_WRAP.", when="fsdp_enable and fsdp_auto_wrap_policy=SIZE_BASED_WRAP", unit="parameters", ge=1)
    fsdp_transformer_layer_cls_to_wrap: str = knob("", "Comma-separated block classes to wrap; empty: those that `simpletuner detect-blocks` recommends.", when="fsdp_enable and fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP")


    context_parallel_size: int = knob(1, "Ranks that share the tokens of each sample (context parallel, with FSDP2).", ge=1)
    context_parallel_comm_strategy: Literal["allgather", "alltoall"] = knob("allgather", "How these ranks attend to one another: allgather of keys and values, or alltoall over heads (Ulysses).", when="context_parallel_size>1")  # fmt: skip
    zero_stage: Literal[1, 2, 3] | None = knob(None, "Shard optimizer state (1), also gradients (2), also weights (3) over the ranks with DeepSpeed ZeRO; empty: DeepSpeed is off.")  # fmt: skip
    offload_optimizer: Literal["none", "cpu", "nvme"] = knob("none", "Where DeepSpeed keeps optimizer state: on the GPU, in the machine's memory, or in files (stage 3).", when="zero_stage")  # fmt: skip
    offload_param: Literal["none", "cpu", "nvme"] = knob("none", "Where DeepSpeed keeps weights between uses (stage 3).", when="zero_stage")
    offload_param_path: Path | None = knob(None, "Folder for what DeepSpeed offloads to NVMe.", when="offload_param=nvme or offload_optimizer=nvme")
    deepspeed_config: dict[str, JsonValue] | None = knob(None, "DeepSpeed's JSON, inline or as the path of a file; its values become settings where there are such.", when="zero_stage")  # fmt: skip


class Launch(Section):
    """Launch"""

    num_processes: int = knob(1, "Ranks in total, over all machines.", ge=1, le=1_000_000, aliases=("training_num_processes",))
    num_machines: int = knob(1, "Machines that train together, each with the same number of ranks.", ge=1, le=1_000_000, aliases=("training_num_machines",))
    machine_rank: int = knob(0, "Which of the machines this is, counted from 0.", when="num_machines>1", ge=0)
    main_process_ip: Annotated[str, AfterValidator(check_host)] = knob("", "Address of machine 0, as the others reach it.", when="num_machines>1")
    # torchrun's default port.
    main_process_port: int = knob(29500, "TCP port on machine 0 that all ranks connect to.", when="num_processes>1", ge=1, le=65535)
    node_join_timeout: float = knob(600, "How long a machine waits at the start for the others.", when="num_machines>1", unit="s", gt=0)
    node_timeout: float = knob(60, "How long a machine may be silent before the others end the run.", when="num_machines>1", unit="s", gt=0)
    stall_timeout: float = knob(50, "How long a rank may be suspended, or hang while others wait for it, before the run ends and names it.", when="num_processes>1", unit="s", gt=0)
    preemption_check: str = knob("", "Command, or address, that each machine asks every 5 s whether it will be taken away: exit code 0, or an answer with status 200, stops the run as SIGTERM does.")
    preemption_grace_seconds: float = knob(30, "How long a machine lives on after SIGTERM: the run warns where saving takes longer; 0: it never does.", unit="s", ge=0)
    run_secret_file: Path | None = knob(None, "File with a secret, readable by its owner alone, that the machines of a run sign their messages with; SIMPLETUNER_RUN_SECRET takes precedence.", when="num_machines>1")
    gpu_ids: str = knob("all", "GPUs of each machine that the ranks use, such as 0,1,3.", when="not use_cpu")
    use_cpu: bool = knob(False, "Train on the CPU even where there are GPUs.")


class Compile(Section):
    """torch.compile"""

    dynamo_backend: Literal["auto", "no", "inductor", "eager", "aot_eager", "cudagraphs"] = knob("auto", "Compile the denoiser with this backend of torch.compile; auto: with inductor on NVIDIA GPUs, where a run has enough steps for its shapes.", aliases=("training_dynamo_backend",))  # fmt: skip
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = knob("default", "How much time the compiler takes for faster code.", when="dynamo_backend!=no")  # fmt: skip
    dynamo_fullgraph: bool = knob(False, "Fail where the compiler would have to break the graph.", when="dynamo_backend!=no", aliases=("dynamo_use_fullgraph",))
    dynamo_dynamic: bool = knob(False, "Compile once for all image sizes instead of once per size.", when="dynamo_backend!=no", aliases=("dynamo_use_dynamic",))
    dynamo_use_regional_compilation: bool = knob(True, "Compile block by block, equal blocks once; otherwise the denoiser as one.", when="dynamo_backend!=no")

    @property
    def is_on(self) -> bool:
        """False for `auto`, too, until a run has chosen (training/auto.py)."""
        return self.dynamo_backend not in ("auto", "no")


class Checkpoints(Section):
    """Checkpoints"""

    checkpoint_step_interval: int = knob(500, "Optimizer steps between checkpoints.", ge=1, aliases=("checkpointing_steps",))
    async_checkpointing: bool | None = knob(None, "Write checkpoints while training goes on, from a copy in the machine's memory; auto: where the copies take at most half of what is available.")  # fmt: skip
    checkpoints_total_limit: int = knob(5, "Keep this many of the newest checkpoints.", ge=1)
    export_single_file: bool = knob(False, "Also export what is trained as one .safetensors file in the original layout, for other tools (Stable Diffusion 1.x, 2.x and XL).")
    resume_from_checkpoint: Annotated[str, AfterValidator(in_home)] = knob("latest", "`latest`, a checkpoint folder, or `none`.")
    mirror_output: Annotated[str, AfterValidator(check_bucket)] = knob("", "Folder in a bucket that gets all of output_dir but the caches, in the background, and from which a machine without it resumes: s3://BUCKET/FOLDER, gs:// or az://.")


class Validation(Section):
    """Validation"""

    validation_prompt: list[str] = knob([], "Prompt of a validation image; give it several times for several images.")
    validation_prompt_file: Path | None = knob(None, "JSON lines of further prompts, each with a seed, resolution, guidance and negative prompt of its own where it gives them (docs/validation.md).")
    validation_images: list[Path] = knob([], "Reference image of validation prompts, for models that edit images; give it several times for several of them. Empty: those of a pair that is held out, or else trained on.", when="validation_prompt or validation_prompt_file")
    validation_pairs: int = knob(0, "Pairs of the datasets that validation edits by their own captions: held-out ones, or else some that are trained on.", when="references", ge=0)
    validation_negative_prompt: str = knob("", "What guidance moves away from; empty: the family's unconditional input.", when="validation_prompt or validation_prompt_file or validation_pairs")
    validation_step_interval: int = knob(100, "Optimizer steps between validations; 0: only before the first step and after the last.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=0, aliases=("validation_steps",))  # fmt: skip
    validation_num_inference_steps: int = knob(30, "Denoising steps per image.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=1)
    validation_guidance: float = knob(7.5, "Guidance scale.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=0)
    validation_resolution: Annotated[str, AfterValidator(normalize_shapes)] = knob("", "Image size as EDGE or WIDTHxHEIGHT in px, with @FRAMES for a clip, or several such as 1024x1024,1280x768; empty: the training resolution.", when="validation_prompt or validation_prompt_file or validation_pairs")  # fmt: skip
    validation_num_video_frames: int | None = knob(None, "Frames of validation clips, where their size gives none as WIDTHxHEIGHT@FRAMES; empty: those of the longest clip that is trained on.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=1)
    framerate: float | None = knob(None, "Frames per second at which validation clips play; empty: the model's own.", when="validation_prompt or validation_prompt_file or validation_pairs", gt=0, le=1000)
    validation_seed: int | None = knob(None, "Seed of the starting noise; empty: the run's seed.", when="validation_prompt or validation_prompt_file or validation_pairs", ge=0)
    eval_split: float = knob(0.0, "Fraction of the images that is held out of training, to measure the loss on.", ge=0, lt=1)
    eval_step_interval: int = knob(100, "Optimizer steps between measurements of the held-out loss; 0: only before the first step and after the last.", when="eval_split>0 or eval_dataset", ge=0, aliases=("eval_steps_interval",))  # fmt: skip
    eval_timesteps: int = knob(4, "Noise levels at which each held-out image is measured, one from each equal part of their range.", when="eval_split>0 or eval_dataset", ge=1, le=1000)  # fmt: skip
    ema_validation: Literal["none", "ema_only", "comparison"] = knob("comparison", "Which weights validation images and the held-out loss use when EMA is on: the trained, the averaged, or both.", when="use_ema")  # fmt: skip

    @property
    def samples_images(self) -> bool:
        return bool(self.validation_prompt or self.validation_pairs) or self.validation_prompt_file is not None


class Logging(Section):
    """Logging"""

    report_to: Annotated[str, AfterValidator(normalize_trackers)] = knob("none", "Trackers that metrics, validation images and settings go to as well: none, tensorboard, wandb, trackio, swanlab, or several with commas between them.")
    tracker_project_name: str = knob("", "Project at online trackers; empty: WANDB_PROJECT (TRACKIO_PROJECT, SWANLAB_PROJECT), or simpletuner.", when="report_to=*wandb*|*trackio*|*swanlab*")
    tracker_run_name: str = knob("", "Name of the run there, and of its folder in logging_dir; empty: that of output_dir, and no folder.", when="report_to!=none")
    logging_dir: Path | None = knob(None, "Folder for what trackers write on this machine; empty: output_dir/logs.", when="report_to!=none")
    device_peak_tflops: float | None = knob(None, "What each device computes at most, for MFU; empty: dense bf16 of the GPUs that docs/performance.md lists.", unit="TFLOP/s", gt=0)
    profile_steps: Annotated[str, AfterValidator(normalize_step_range)] = knob("", "Optimizer steps FIRST:LAST that rank 0 traces with torch's profiler into output_dir/profile.")
    log_sample_losses: bool = knob(False, "Write the loss and the timestep of each sample at each step to output_dir/sample_losses.jsonl: `simpletuner runs losses` shows which images are learned last, and which look mislabelled.")
    notify_format: Literal["auto", "json", "discord", "ntfy"] = knob("auto", "Format of these messages: JSON, or as Discord or ntfy take them, with an image of the round; auto: as the address says.", when="notify_url")
    notify_url: SecretUrl = knob(SecretStr(""), "Address that gets a message after each round of validation and when the run ends or fails. `{env:NAME}` stands for a variable; it is a secret and never written down.")


class Hub(Section):
    """Hugging Face Hub"""

    push_to_hub: bool = knob(False, "Upload what the run exports, with its model card, when it has ended.")
    hub_model_id: Annotated[str, AfterValidator(check_repository)] = knob("", "Repository to upload to, as OWNER/NAME or NAME; empty: the name of output_dir.", when="push_to_hub")
    model_card_private: bool = knob(True, "Create the repository as a private one; false publishes to everybody. A repository that there is stays as it is.", when="push_to_hub")


class Settings(Section):
    """All sections of a run; each part of the program is given only the ones it needs."""

    model: Model = Model()
    lora: Lora = Lora()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    objective: ObjectiveSettings = ObjectiveSettings()
    ema: Ema = Ema()
    parallel: Parallel = Parallel()
    launch: Launch = Launch()
    compile: Compile = Compile()
    checkpoints: Checkpoints = Checkpoints()
    validation: Validation = Validation()
    logging: Logging = Logging()
    hub: Hub = Hub()

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
