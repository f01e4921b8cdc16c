"""DeepSpeed ZeRO: requirements, memory estimates, the engine, row shards.

Internal DeepSpeed API in use, checked with 0.19.8; tests/zero/deepspeed/test_internal_api.py looks for each name in the
installed files:

runtime/zero/stage3.py                fp16_groups fp32_partitioned_groups_flat grad_position get_param_id
runtime/zero/stage3.py                persistent_parameters empty_partition_cache _swappable_optimizer_subgroup
runtime/zero/stage3.py                _optimizer_states_and_gradient_swap_in _optimizer_states_and_gradient_swap_out
runtime/zero/stage3.py                _release_swap_buffers _reassign_or_swap_out_partitioned_parameters clip_grad
runtime/zero/stage_1_and_2.py         update_lp_params clip_grad
runtime/bf16_optimizer.py             update_lp_params clip_grad
runtime/zero/partition_parameters.py  convert_to_zero_parameters partition_numel ds_numel all_gather
utils/mixed_precision_linkage.py      _hp_mapping
utils/tensor_fragment.py              lp_fragment_address hp_fragment_address param_group_index
ops/__init__.py                       __compatible_ops__
ops/op_builder/async_io.py            AsyncIOBuilder
ops/op_builder/pin_memory.py          PinMemoryBuilder
"""
