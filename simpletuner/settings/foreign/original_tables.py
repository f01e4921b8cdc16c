"""Names that occur only in the original's files, by their outcome: data of `importing/original.py`.

Names stand in one text per answer; `name=value|value` adds values without an effect, besides those that mean
"off".
"""

from __future__ import annotations

FAMILY_NAMES = {"cosmos2image": "cosmos", "ideogram": "ideogram4", "pixart": "pixart_sigma"}
"""Families that have another name here."""

RENAMED: dict[str, str] = {
    "assistant_lora": "assistant_lora_path",
    "accelerate_config": "accelerate_config_path",
    "adam_beta1": "optimizer_beta1",
    "adam_beta2": "optimizer_beta2",
    "adam_weight_decay": "optimizer_weight_decay",
    "attention_backend": (
        "attention_mechanism=none|false|diffusers|xformers|sdpa|native|flash-attn-hub|flash-attn-varlen|"
        "flash-attn-varlen-hub|flash-attn-3-hub|flash-attn-3-varlen|flash-attn-3-varlen-hub|flex"
    ),
    "checkpoints_total_limit": "checkpointing_limit",
    "data_backend_config": "dataloader_config dataset_backend_config",
    "export_format": "lora_format=diffusers",
    "fsdp_offload_params": "fsdp_cpu_offload",
    "fuse_qkv_projections": "fused_qkv_projections",
    "dynamo_backend": "trainer_dynamo_backend",
    "gradient_checkpointing": "use_gradient_checkpointing fsdp_activation_checkpointing=false|no|off|0",
    "lora_init": "init_lora",
    "lora_target_modules": "peft_lora_target_modules",
    "lora_type": "use_dora=false",
    "lr_scheduler": "lr_schedule",
    "max_train_steps": "max_num_steps",
    "num_train_epochs": "num_epochs",
    "offload_activations": "gradient_checkpointing_backend=none|false|torch|torch-ffn",
    "resume_from_checkpoint": "resume_checkpoint",
    "snr_gamma": "min_snr_gamma",
}
"""Alternative names of settings, including those in the original's config.env."""

# Names that change nothing here, whatever their value, by the reason.
ASKS_FOR_NOTHING: dict[str, str] = {
    "lora_type says the algorithm that lycoris_config has": "lycoris_config init_lokr_norm validation_lycoris_strength",
    "used only with another peft_lora_mode, which is refused": "singlora_ramp_up_steps",
    "validation samples with what is trained on, assistant_lora included": "assistant_lora_inference_strength",
    "no assistant is merged but by assistant_lora": "disable_assistant_lora",
    "lora_init names the file to go on from, of whichever step or average": "init_lora_step init_lora_ema",
    "used only with a family that this version does not train": "acestep_lora_target",
    "lora_rank is the rank": "network_rank",
    # Names and labels.
    "a tracker is given whole grids of images": "tracker_image_layout",
    "used only with push_to_hub": (
        "hub_model_name push_to_hub_background model_card_safe_for_work model_card_note modelspec_comment"
    ),
    "used only with webhook_config": "webhook_reporting_interval",
    "the file is named with --config": "configs_dir merge_environment_config",
    # What is done anyway, or has no counterpart.
    "no check is turned off by one switch": "i_know_what_i_am_doing",
    "noise depends on seed, sample and step, never on the rank": "seed_for_each_device",
    "the launcher gives each rank its number": "local_rank",
    "no code of a hub repository is run": "trust_remote_code",
    "vae_enable_tiling, vae_enable_slicing and vae_batch_size bound the VAE's memory": (
        "vae_enable_patch_conv vae_enable_temporal_roll"
    ),
    "a model is on the GPU only while it is used": (
        "keep_vae_loaded offload_during_startup fully_unload_text_encoder ramtorch_text_encoder ramtorch_vae "
        "ramtorch_text_encoder_percent group_offload_text_encoder group_offload_vae offload_during_save"
    ),
    "text encoders are not quantized, and freed when all captions are encoded": (
        "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision"
    ),
    "the result is the same: torch's attention and allocator are used as they are": (
        "unet_attention_slice accelerator_cache_clear_interval set_grads_to_none enable_chunked_feed_forward "
        "feed_forward_chunk_size disable_tf32 use_xformers"
    ),
    "every block is recomputed, which takes the least memory": (
        "gradient_checkpointing_interval gradient_checkpointing_segment_stride"
    ),
    "gradients and weights are float32": "gradient_precision base_model_default_dtype pure_bf16",
    "the command finds its own Python and libraries": "venv_path disable_ld_override",
    "AdamW is torch's fused one": "fuse_optimizer",
    "training draws from all timesteps, each sample by itself": (
        "disable_segmented_timestep_sampling training_scheduler_timestep_spacing"
    ),
    "num_train_epochs is exact": "strict_epoch_limit",
    "buckets are sizes in px, not rounded aspects": "aspect_bucket_rounding",
    "no bucket is left out in silence": "disable_bucket_pruning",
    "files that are new or changed are read at every start": (
        "ignore_missing_files override_dataset_config aspect_bucket_disable_rebuild skip_file_discovery "
        "metadata_update_interval vae_cache_scan_behaviour"
    ),
    "`simpletuner --debug` shows more": (
        "debug_aspect_buckets debug_dataset_loader print_filenames print_sampler_statistics"
    ),
    "caches and batches are prepared in the background, with nothing to tune": (
        "image_processing_batch_size write_batch_size read_batch_size enable_multiprocessing dataloader_prefetch "
        "torch_num_threads aspect_bucket_worker_count aws_max_pool_connections"
    ),
    "a checkpoint counts only when it is complete, and damaged ones are passed over": (
        "checkpointing_use_tempdir delete_invalid_checkpoints"
    ),
    "the exported pipeline is complete": "save_text_encoder",
    "ema_device says where the average is kept and updated": "ema_cpu_only ema_foreach_disable",
    "validation draws validation_prompt before the first step, at its interval and after the last step": (
        "disable_benchmark validation_on_startup validation_disable_unconditional"
    ),
    "the prompts are shared out over all ranks": "validation_multigpu",
    "starting noise is drawn on the CPU": "validation_seed_source",
    "images are drawn by the family's own pipeline and scheduler": (
        "inference_scheduler_timestep_spacing validation_no_cfg_until_timestep validation_torch_compile"
    ),
    "machines connect to main_process_ip": "same_network",
    "FSDP2 and DDP do what is needed by themselves": "fsdp_limit_all_gathers find_unused_parameters",
    # Options of what is off, or refused.
    "used only with base_model_precision": (
        "quantize_via quantization_config quantize_activations sdnq_weights_dtype sdnq_quantized_matmul_dtype "
        "sdnq_group_size sdnq_use_quantized_matmul sdnq_compile_mode sdnq_use_static_quantization "
        "sdnq_use_stochastic_rounding sdnq_dequantize_fp32 sdnq_use_svd sdnq_use_hadamard sdnq_svd_rank "
        "sdnq_svd_steps sdnq_hadamard_group_size sdnq_modules_to_not_convert sdnq_modules_to_not_use_matmul "
        "sdnq_modules_dtype_dict sdnq_modules_quant_config"
    ),
    "used only with ramtorch": (
        "ramtorch_target_modules ramtorch_transformer_percent ramtorch_disable_sync_hooks ramtorch_disable_extensions"
    ),
    "used only with enable_group_offload": (
        "group_offload_type group_offload_blocks_per_group group_offload_use_stream group_offload_to_disk_path"
    ),
    "used only with musubi_blocks_to_swap": "musubi_block_swap_device",
    "offload_activations copies through pinned memory, with nothing to tune": (
        "gradient_checkpointing_offload_attention gradient_checkpointing_offload_prefetch "
        "gradient_checkpointing_offload_pin_memory_max_buckets"
    ),
    "used only with another attention_mechanism": "sla_config sageattention_usage",
    "used only with controlnet": "controlnet_model_name_or_path controlnet_custom_config ramtorch_controlnet",
    "used only with max_grounding_entities": "pretrained_grounding_model_name_or_path",
    "used only with a timestep_bias_strategy": (
        "timestep_bias_begin timestep_bias_end timestep_bias_multiplier timestep_bias_portion"
    ),
    "used only with enable_nsfw_check": (
        "nsfw_check_models nsfw_check_min_votes nsfw_check_backend_types nsfw_check_sample_types "
        "nsfw_check_video_frame_count nsfw_check_video_frame_selection nsfw_check_video_min_flagged_frames"
    ),
    "used only with lr_scheduler=cosine_with_restarts, which is refused": "lr_num_cycles",
    "used only with an optimizer that is refused": "prodigy_steps",
    "used only with disk_low_threshold": "disk_low_action disk_low_script",
    "used only with checkpointing_rolling_steps": "checkpoints_rolling_total_limit",
    "used only with train_text_encoder": (
        "text_encoder_lr text_encoder_limit freeze_encoder_before freeze_encoder_after freeze_encoder_strategy"
    ),
    "used only with a loss_type other than l2": "huber_schedule huber_c",
    "used only with use_soft_min_snr": "soft_min_snr_sigma_data",
    "used only with flow_use_beta_schedule": "flow_beta_schedule_alpha flow_beta_schedule_beta",
    "used only with flow_custom_timesteps": "flow_timesteps_mode",
    "used only with mixflow_enabled": "mixflow_gamma",
    "used only with diff2flow_enabled": "diff2flow_loss",
    "used only with scheduled_sampling_max_step_offset": (
        "scheduled_sampling_strategy scheduled_sampling_probability scheduled_sampling_prob_start "
        "scheduled_sampling_prob_end scheduled_sampling_ramp_steps scheduled_sampling_start_step "
        "scheduled_sampling_ramp_shape scheduled_sampling_sampler scheduled_sampling_order "
        "scheduled_sampling_reflexflow_alpha scheduled_sampling_reflexflow_beta1 scheduled_sampling_reflexflow_beta2"
    ),
    "used only with xm_enabled": "xm_candidate_count xm_training_target xm_selection_scope xm_block_size",
    "used only with nextlat_enabled": "nextlat_block_index nextlat_weight nextlat_state_loss nextlat_kl_weight",
    "used only with irepa_enabled": "irepa_spatial_norm_alpha irepa_projector_kernel_size",
    "used only with crepa_enabled": (
        "crepa_block_index crepa_lambda crepa_adjacent_distance crepa_adjacent_tau crepa_encoder "
        "crepa_encoder_frames_batch_size crepa_use_backbone_features crepa_feature_source crepa_self_flow "
        "crepa_teacher_block_index crepa_self_flow_mask_ratio crepa_encoder_image_size crepa_drop_vae_encoder "
        "crepa_normalize_by_frames crepa_normalize_neighbour_sum crepa_spatial_align crepa_use_tae crepa_scheduler "
        "crepa_warmup_steps crepa_decay_steps crepa_lambda_end crepa_power crepa_cutoff_step "
        "crepa_similarity_threshold crepa_similarity_ema_decay crepa_threshold_mode"
    ),
    "used only with twinflow_enabled": (
        "twinflow_target_step_count twinflow_enhanced_ratio twinflow_estimate_order twinflow_target_clamp "
        "twinflow_delta_t"
    ),
    "used only with internal_guidance_enabled": (
        "internal_guidance_loss_weight internal_guidance_block_index validation_internal_guidance_scale"
    ),
    "used only with layersync_enabled": "layersync_student_block layersync_teacher_block layersync_lambda",
    "used only with urepa_enabled": (
        "urepa_lambda urepa_manifold_weight urepa_model urepa_encoder_image_size urepa_use_tae urepa_scheduler "
        "urepa_warmup_steps urepa_decay_steps urepa_lambda_end urepa_power urepa_cutoff_step "
        "urepa_similarity_threshold urepa_similarity_ema_decay urepa_threshold_mode"
    ),
    "used only with hidream_use_load_balancing_loss": "hidream_load_balancing_loss_weight",
    "used only with datasets that this version refuses": (
        "conditioning_multidataset_sampling parquet_caption_column parquet_filename_column "
        "audio_max_duration_seconds audio_min_duration_seconds audio_channels audio_duration_interval "
        "audio_truncation_mode"
    ),
    "the loss is measured on all held-out images, which are those of datasets of type eval, every eval_step_interval": (
        "num_eval_images eval_epoch_interval eval_dataset_pooling eval_loss_disable"
    ),
    "used only with evaluation_type": "pretrained_evaluation_model_name_or_path",
    "used only with validation_preview": "validation_preview_steps",
    "used only with another validation_image_format": "validation_image_quality",
    "used only with validation_method=external-script": "validation_external_script validation_external_background",
    "used only with validation_input": "validation_stitch_input_location",
    "used only with validation_guidance_skip_layers": (
        "validation_guidance_skip_layers_start validation_guidance_skip_layers_stop validation_guidance_skip_scale"
    ),
    "used only with a validation pipeline of several stages": (
        "deepfloyd_validation_stage1_model deepfloyd_validation_stage2_model deepfloyd_validation_stage3_model "
        "deepfloyd_validation_stage1_num_inference_steps deepfloyd_validation_stage2_num_inference_steps "
        "deepfloyd_validation_stage1_guidance deepfloyd_validation_stage2_guidance "
        "deepfloyd_validation_stage3_guidance deepfloyd_validation_stage3_noise_level "
        "ltx2_validation_spatial_upsampler_model ltx2_validation_spatial_upsampler_filename "
        "pixart_validation_stage1_model pixart_validation_stage2_model sdxl_validation_stage1_model "
        "sdxl_validation_stage2_model"
    ),
    "used only with validation_adapter_path": (
        "validation_adapter_name validation_adapter_strength validation_adapter_mode"
    ),
    "used only with offset_noise": "noise_offset noise_offset_probability",
    "used only with input_perturbation": "input_perturbation_steps",
    "used only with refiner_training": (
        "refiner_training_invert_schedule refiner_training_strength sdxl_refiner_uses_full_range data_aesthetic_score"
    ),
    "used only with flux_guidance_mode=random-range": "flux_guidance_min flux_guidance_max",
    "used only with distillation_method": "distillation_config",
    "used only with lyrics_embedder_train": (
        "lyrics_embedder_optimizer lyrics_embedder_lr lyrics_embedder_lr_scheduler"
    ),
    "used only with a family, or with audio or video, that this version does not train": (
        "audio_flow_schedule_shift validation_audio_duration validation_lyrics "
        "validation_audio_only ltx2_validation_audio_guidance validation_ltx2_video_conditioning "
        "cosmos3_reasoner_component cosmos3_generator_component krea2_reference_latents ideogram_auto_json "
        "ideogram_validation ideogram_prompt_upsample ideogram_fp8_base_upcast ideogram_prompt_enhancer_head_id "
        "ideogram_schedule_mu ideogram_schedule_std ideogram_load_unconditional_transformer ideogram_uncond_ramtorch "
        "ltx_train_mode ltx_i2v_prob ltx_partial_noise_fraction ltx_protect_first_frame ltx2_intrinsic_conditioning "
        "ltx2_first_frame_conditioning_probability ltx2_prefix_conditioning_probability "
        "ltx2_suffix_conditioning_probability ltx2_mask_conditioning_probability ltx2_prefix_conditioning_frames "
        "ltx2_suffix_conditioning_frames ltx2_reference_spatial_scale_factor ltx2_reference_temporal_scale_factor "
        "minimax_h3_reference_mode minimax_h3_target_mode minimax_h3_sparse_attention minimax_h3_sparse_block_shape "
        "minimax_h3_sparse_video_kv_fraction minimax_h3_sparse_share_heads minimax_h3_sparse_start_layer "
        "minimax_music_train_component minimax_music_lm_adapter minimax_music_lm_adapter_strength "
        "minimax_music_lm_precache_mode minimax_music_lm_max_frames stable_cascade_use_decoder_for_validation "
        "stable_cascade_validation_prior_guidance_scale stable_cascade_validation_decoder_guidance_scale "
        "stable_cascade_validation_prior_num_inference_steps stable_cascade_decoder_model_name_or_path "
        "stable_cascade_decoder_subfolder"
    ),
}
