"""The original's names that are refused where they ask for something, by the reason: data of `original.py`.

Names stand in one text per reason. `name=value|value` adds values that ask for nothing, besides those that mean "off".
"""

from __future__ import annotations

DECIDES: dict[str, str] = {
    # Parts of a model.
    "the parts of a model come from one pipeline folder: put this one there, and name the folder with "
    "pretrained_model_name_or_path": (
        "pretrained_vae_model_name_or_path=madebyollin/sdxl-vae-fp16-fix pretrained_transformer_model_name_or_path "
        "pretrained_transformer_subfolder=transformer pretrained_unet_model_name_or_path "
        "pretrained_unet_subfolder=unet pretrained_t5_model_name_or_path pretrained_gemma_model_name_or_path "
        "qwen_text_encoder_model_name_or_path"
    ),
    "ControlNets and control channels are not trained by this version": "controlnet control",
    "grounding is not trained by this version": "max_grounding_entities",
    "text encoders are not trained by this version; leave it out": "train_text_encoder lyrics_embedder_train",
    "SDXL's refiner is not trained by this version": "refiner_training",
    "all weights are trained; leave it out": "layer_freeze_strategy use_bitfit",
    "the text encoder's usual layers are used; leave it out": "custom_text_encoder_intermediary_layers",
    # LoRA.
    "adapters are those of peft; leave it out": "peft_lora_mode=standard",
    "the first matrix is drawn from a uniform distribution, the second is 0; leave it out": "lora_init_type=default",
    "set lora_target_modules; without it the attention projections are adapted": "flux_lora_target=all",
    # The objective.
    "the objective is the mean squared error; leave it out": "loss_type=l2 use_soft_min_snr snr_weight=1",
    "the base model's scheduler decides: set rescale_betas_zero_snr in its scheduler_config.json": (
        "rescale_betas_zero_snr"
    ),
    "noise levels are logit-normal, or uniform with flow_use_uniform_schedule; leave it out": (
        "flow_use_beta_schedule flow_cubic_schedule_weights flow_custom_timesteps timestep_bias_strategy"
    ),
    "noise is plain Gaussian noise; leave it out": "offset_noise input_perturbation",
    "guidance is the constant flux_guidance_value; leave it out": "flux_guidance_mode=constant",
    "the family's own inputs are used, as its pipeline makes them; leave it out": (
        "flux_attention_masked_training flux_fast_schedule sana_complex_human_instruction "
        "wan_force_2_1_time_embedding t5_padding=unmodified sd3_clip_uncond_behaviour=empty_string "
        "sd3_t5_uncond_behaviour=empty_string hidream_use_load_balancing_loss"
    ),
    "this method of training is not known to this version; leave it out": (
        "tread_config diffusion_blocks_config distillation_method diff2flow_enabled scheduled_sampling_max_step_offset "
        "scheduled_sampling_reflexflow mixflow_enabled xm_enabled nextlat_enabled irepa_enabled crepa_enabled "
        "twinflow_enabled internal_guidance_enabled layersync_enabled urepa_enabled slider_lora_target"
    ),
    # Optimizer and schedule.
    "write the product into learning_rate yourself": "lr_scale lr_scale_sqrt",
    "write adam_beta1, adam_beta2, adam_epsilon and adam_weight_decay as settings": "optimizer_config",
    "the average begins at the first step; leave it out": "ema_warmup_steps",
    # Data.
    "what images show is not checked; leave it out": "enable_nsfw_check",
    "it is a key of a dataset: write it into the file of data_backend_config": (
        "type maximum_image_size target_downsample_size max_upscale_threshold crop_aspect_buckets "
        "disable_multiline_split"
    ),
    "datasets are weighted by repeats and probability alone": "data_backend_sampling=auto-weighting",
    "set caption_strategy=instanceprompt": "only_instance_prompt",
}
"""Names that decide what is trained: without them a file would train something else."""

REFUSED: dict[str, str] = {
    **DECIDES,
    # Adapters.
    "adapters are not loaded by this version": "validation_adapter_path validation_adapter_config",
    # Memory.
    "set fsdp_enable and fsdp_offload_params, which keep weights in the machine's memory, with one GPU, too": (
        "ramtorch musubi_blocks_to_swap enable_group_offload"
    ),
    "leave it out; zero_stage=2 with offload_optimizer=cpu keeps optimizer state in memory": (
        "optimizer_cpu_offload_method optimizer_offload_gradients"
    ),
    # Data and caches.
    "your images are never deleted; leave it out": (
        "delete_unwanted_images delete_problematic_images delete_nsfw_images delete_small_images delete_errored_images"
    ),
    "downloads are never deleted; leave it out": "delete_model_after_load",
    "captions are encoded before training, or with text_cache_ondemand while training; leave it out": (
        "text_embed_full_cache"
    ),
    "set cache_dir_vae and cache_dir_text; HF_HOME says where downloads go": "cache_dir",
    # Checkpoints.
    "checkpoints are counted in steps: set checkpoint_step_interval": (
        "checkpoint_epoch_interval checkpointing_rolling_steps"
    ),
    "a full disk ends the run, which goes on from its last checkpoint; leave it out": "disk_low_threshold",
    # Validation.
    "validation is counted in steps: set validation_step_interval": (
        "validation_epoch_interval validate_after_step validate_after_epoch"
    ),
    "leave validation_prompt out: without prompts nothing is drawn": "validation_disable",
    "write the prompts as the list validation_prompt, or as lines of validation_prompt_file": (
        "validation_prompt_library user_prompt_library"
    ),
    "one PNG image is drawn per prompt; leave it out": "num_validation_images=1 validation_image_format=png",
    "images are written when they are finished; leave it out": "validation_preview",
    "validation draws from text alone; leave it out": "validation_input validation_using_datasets",
    "set validation_seed": "validation_randomize",
    "images are drawn by the family's own pipeline with validation_guidance; leave it out": (
        "validation_guidance_rescale validation_guidance_real=1 validation_guidance_skip_layers "
        "validation_noise_scheduler validation_method=simpletuner-local enable_watermark "
        "deepfloyd_validation_pipeline_mode=auto|trained-stage deepfloyd_validation_stage3_mode "
        "ltx2_validation_pipeline_mode=trained-stage pixart_validation_pipeline_mode=trained-stage "
        "sdxl_validation_pipeline_mode=trained-stage wan_validation_load_other_stage"
    ),
    "images are not scored; leave it out, and look at validation_prompt's": "evaluation_type eval_dataset_id",
    # Publishing.
    "checkpoints are not uploaded: set push_to_hub, which uploads the pipeline when the run has ended": (
        "push_checkpoints_to_hub push_checkpoints publishing_config"
    ),
    "set notify_url to one address, which gets JSON": "webhook_config",
    "no program is run by a run: leave it out": "post_checkpoint_script post_upload_script",
    "trackers of your own are not loaded; metrics.jsonl in output_dir has all metrics": "custom_tracker",
    "set gpu_ids, use_cpu or an accelerate file": "accelerate_extra_args",
    "write each argument as a setting": "trainer_extra_args",
}
"""Names that are refused unless their value asks for nothing, by the reason and what to do instead."""
