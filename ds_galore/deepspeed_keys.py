"""What DeepSpeed 0.19 makes of a configuration's keys, written down for machines on which it is not installed.

Tests compare these tables with the DeepSpeed that is. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "AUTO",
    "CLOSED_SECTIONS",
    "DEEPSPEED_OPTIMIZERS",
    "OPEN_SECTIONS",
    "REMOVED",
    "SCHEDULERS",
    "TOP_LEVEL_KEYS",
    "UNUSED_BY_STAGES_1_AND_2",
    "UNUSED_BY_STAGE_3",
]

_MONITOR_FILE = ("enabled", "output_path", "job_name")

#: Sections in which DeepSpeed refuses a key that it does not know; a dot leads to a section within a section.
CLOSED_SECTIONS: Mapping[str, frozenset[str]] = {
    "bf16": frozenset(
        (
            *("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads"),
            "bf16_optimizer_states",
        )
    ),
    "fp16": frozenset(
        (
            *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
            *("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
        )
    ),
    "zero_optimization": frozenset(
        (
            *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
            *("use_multi_rank_bucket_allreduce", "allgather_bucket_size", "overlap_comm", "compute_grad_norm"),
            *("load_from_fp32_weights", "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow"),
            *("sub_group_size", "cpu_offload_param", "cpu_offload_use_pin_memory", "cpu_offload"),
            *("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
            *("param_persistence_threshold", "stage3_param_persistence_threshold"),
            *("model_persistence_threshold", "stage3_model_persistence_threshold"),
            *("max_live_parameters", "stage3_max_live_parameters"),
            *("max_reuse_distance", "stage3_max_reuse_distance"),
            *("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
            *("module_granularity_threshold", "stage3_module_granularity_threshold"),
            *("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
            *("allgather_sequential", "stage3_allgather_sequential"),
            *("stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1"),
            *("round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights"),
            *("zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear"),
            *("pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings"),
            *("enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module"),
        )
    ),
    "zero_optimization.offload_param": frozenset(
        ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")
    ),
    "zero_optimization.offload_optimizer": frozenset(
        (
            *("device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init"),
            *("ratio", "super_offload", "cpuadam_cores_perc"),
        )
    ),
    "tensorboard": frozenset(_MONITOR_FILE),
    "csv_monitor": frozenset(_MONITOR_FILE),
    "wandb": frozenset(("enabled", "group", "team", "project")),
    "comet": frozenset(
        (
            *("enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name"),
            *("experiment_key", "online", "mode"),
        )
    ),
}

#: Sections in which DeepSpeed passes over a key that it does not know.
OPEN_SECTIONS: Mapping[str, frozenset[str]] = {
    "activation_checkpointing": frozenset(
        (
            *("partition_activations", "number_checkpoints", "contiguous_memory_optimization"),
            *("synchronize_checkpoint_boundary", "profile", "cpu_checkpointing"),
        )
    ),
    "checkpoint": frozenset(
        (
            *("tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"),
            "checkpoint_serialization",
        )
    ),
    "data_types": frozenset(("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")),
    "torch_autocast": frozenset(("enabled", "dtype", "lower_precision_safe_modules")),
}

#: Keys that DeepSpeed 0.19.8 refuses, because what they were for is gone.
REMOVED: frozenset[str] = frozenset(
    (
        *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting"),
        *("nebula", "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"),
        *("zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather"),
        "zero_optimization.zeropp_loco_param",
    )
)

#: DeepSpeed's schedulers and their parameters; the names of torch's are looked up in torch.
SCHEDULERS: Mapping[str, frozenset[str]] = {
    "LRRangeTest": frozenset(
        (
            *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate"),
            *("lr_range_test_staircase", "last_batch_iteration"),
        )
    ),
    "OneCycle": frozenset(
        (
            *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
            *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum"),
            *("cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration"),
        )
    ),
    "WarmupLR": frozenset(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
    ),
    "WarmupDecayLR": frozenset(
        (
            *("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
            "last_batch_iteration",
        )
    ),
    "WarmupCosineLR": frozenset(
        (
            *("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
            "last_batch_iteration",
        )
    ),
}

#: Keys of ``zero_optimization`` that a stage does not read (engine.py, ``_configure_zero_optimizer``), beside those of
#: stage 3 by their names. ``allgather_partitions`` is read by none.
UNUSED_BY_STAGES_1_AND_2: frozenset[str] = frozenset(
    (
        *("sub_group_size", "offload_param", "zero_hpz_partition_size", "zero_quantized_weights"),
        *("zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear"),
        *("log_trace_cache_warnings", "enable_sanity_checks", "leaf_module", "cpu_offload_param"),
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
        *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
        *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
        "allgather_partitions",
    )
)
UNUSED_BY_STAGE_3: frozenset[str] = frozenset(
    (
        *("allgather_bucket_size", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters"),
        *("round_robin_gradients", "parameter_alignment", "allgather_partitions"),
    )
)

#: Who puts a value in the place of ``"auto"``, by key. launch/train.py has a list of its own, which tests compare.
AUTO: Mapping[str, frozenset[str]] = {
    "launch/train.py": frozenset(
        (
            *("bf16.enabled", "fp16.enabled", "gradient_accumulation_steps", "gradient_clipping"),
            *("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps", "train_batch_size"),
            "train_micro_batch_size_per_gpu",
        )
    ),
    "accelerate": frozenset(
        (
            *("bf16.enabled", "fp16.enabled", "gradient_accumulation_steps", "gradient_clipping"),
            *("optimizer.params.lr", "optimizer.params.weight_decay", "scheduler.params.total_num_steps"),
            *("scheduler.params.warmup_num_steps", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"),
            *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization.reduce_bucket_size"),
            *("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold"),
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        )
    ),
    "the Trainer": frozenset(
        (
            *("bf16.enabled", "fp16.enabled", "gradient_accumulation_steps", "gradient_clipping"),
            *("optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps"),
            *("optimizer.params.weight_decay", "scheduler.params.total_num_steps"),
            *("scheduler.params.warmup_num_steps", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"),
            *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization.reduce_bucket_size"),
            *("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold"),
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        )
    ),
}

#: Optimizer types that DeepSpeed 0.19 and torch.optim know, for checks where neither is installed.
DEEPSPEED_OPTIMIZERS: tuple[str, ...] = (
    *("adam", "adamw", "adagrad", "lamb", "lion", "muadam", "muadamw", "musgd", "muon", "Adam", "AdamW", "Lamb"),
    *("Lion", "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)

#: Top-level keys that DeepSpeed 0.19 reads. Others are left alone, unless they differ from one of these by little.
TOP_LEVEL_KEYS: frozenset[str] = frozenset(
    (
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "expert_parallel",
        "gradient_allreduce_op",
        "log_level",
        "managed_gradient_accumulation",
        "ds_galore",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "gradient_predivide_factor",
        "graph_harvesting",
        "hybrid_engine",
        "keep_in_fp32_modules",
        "load_universal_checkpoint",
        "memory_breakdown",
        "monitor_config",
        "nebula",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "use_data_before_expert_parallel_",
        "use_node_local_storage",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "zenflow",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    )
)
