"""The keys of a ds_config outside zero_optimization: those that deepspeed 0.19.8 reads, and those that it refuses.

Tests compare the lists with the installed library's own.
"""

from collections.abc import Mapping

TOP_KEYS = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler",
        "fp16", "bf16", "bfloat16", "zero_optimization", "gradient_clipping", "prescale_gradients",
        "gradient_predivide_factor", "gradient_allreduce_op", "managed_gradient_accumulation", "steps_per_print",
        "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc", "communication_data_type",
        "seq_parallel_communication_data_type", "data_types", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer", "activation_checkpointing", "comms_logger", "comms_config", "flops_profiler",
        "monitor_config", "tensorboard", "wandb", "csv_monitor", "comet", "checkpoint", "autotuning", "aio",
        "data_efficiency", "disable_allgather", "torch_autocast", "use_data_before_expert_parallelism",
        "weight_quantization", "pipeline", "hybrid_engine", "compile", "timers", "tensor_parallel",
        "sequence_parallel_size", "expert_parallel", "vocabulary_size", "dataloader_drop_last", "log_level",
        "datastates_ckpt",
    }
)  # fmt: skip
# Refused wherever they stand (runtime/config.py, _reject_removed_config_keys).
REMOVED = frozenset(
    {
        "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
        "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
    }
)  # fmt: skip
REMOVED_FROM_ZERO = frozenset({"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"})

# Sections in which a key of another name is refused.
SECTION_KEYS: Mapping[str, frozenset[str]] = {
    "bf16": frozenset(
        {
            "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
        }
    ),
    "fp16": frozenset(
        {
            "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
            "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads",
        }
    ),
    "compile": frozenset(
        {
            "deepcompile", "autoep_non_moe", "debug_log", "double_buffer", "free_activation",
            "free_activation_threshold", "keep_all_input_tensors", "keep_int_input_tensors", "offload_activation",
            "offload_activation_pin_memory", "offload_opt_states", "offload_parameters", "passes", "symmetric_memory",
            "sync_after_allgather", "sync_after_reduce", "sync_before_allgather", "sync_before_reduce",
        }
    ),
}  # fmt: skip
