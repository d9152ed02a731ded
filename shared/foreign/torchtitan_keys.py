"""What keys of torchtitan's TOML files do to time and memory, in all layouts that its train_configs have had.

Older files have degrees of parallelism in ``training`` and ``experimental``, newer ones in ``parallelism``; compilation
moved from ``training.compile`` to ``compile``, and ``batch_size`` became ``local_batch_size`` (torchtitan,
config_manager.py and config/job_config.py).
"""

from __future__ import annotations

from typing import Final

from .asked_run import Tool
from .keys import Contradicts, KeyTable, LeftOut

DEGREES: Final = ("parallelism", "training", "experimental")
"""Sections that have had degrees of parallelism."""
_READ: Final = [
    "model.name",
    "model.flavor",
    "model.converters",
    "optimizer.name",
    "training.batch_size",
    "training.local_batch_size",
    "training.global_batch_size",
    "training.seq_len",
    "training.max_norm",
    "training.enable_cpu_offload",
    "training.dtype",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.data_parallel_degree",
    *(f"{section}.data_parallel_replicate_degree" for section in DEGREES),
    *(f"{section}.data_parallel_shard_degree" for section in DEGREES),
    "parallelism.fsdp_reshard_after_forward",
    "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
    "liger_kernel.enable_fused_linear_cross_entropy",
    "training.compile",
    "compile.enable",
    "compile.components",
    "float8.enable_float8_linear",
    "float8.recipe_name",
    "quantize.linear.float8.recipe_name",
    *(
        f"{section}.{name}"
        for section in ("float8", "quantize.linear.float8")
        for name in (
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
            "filter_fqns",
            "emulate",
            "force_recompute_fp8_weight_in_bwd",
        )
    ),
]
_FLOAT8: Final = "products in float8 take less time than the answer's"
_LEFT_OUT: Final = {
    "training.fp8_linear": LeftOut(_FLOAT8),
    "training.enable_fp8_linear": LeftOut(_FLOAT8),
    "model.norm_type": LeftOut("norms are of another kind than the model's", ("rmsnorm", "fused_rmsnorm")),
    "model.use_flex_attn": LeftOut("attention is FlexAttention's, by a mask"),
    "model.attn_mask_type": LeftOut("attention leaves out what lies in other documents", ("causal",)),
    "optimizer.implementation": LeftOut("the step is not fused: it takes longer", ("fused",)),
    "optimizer.early_step_in_backward": LeftOut("gradients are stepped and freed within backward: less memory"),
    "compile.backend": LeftOut("compiled kernels are of another backend than the answer's", ("inductor",)),
    "experimental.custom_import": LeftOut("code of one's own may change the training"),
    "experimental.custom_model_path": LeftOut("code of one's own may change the model"),
    "training.deterministic": LeftOut("deterministic kernels take longer"),
    "training.gc_debug": LeftOut("Python collects garbage in every step"),
    "debug.deterministic": LeftOut("deterministic kernels take longer"),
    "debug.detect_anomaly": LeftOut("the graph keeps where operations were called"),
    "debug.moe_force_load_balance": LeftOut("tokens are spread evenly over experts; in the answer too"),
    "profiling.enable_profiling": LeftOut("the profiler records some steps"),
    "profiling.run_profiler": LeftOut("the profiler records some steps"),
    "profiling.enable_memory_snapshot": LeftOut("allocations are recorded with their stacks"),
    **{
        f"{section}.enable_compiled_autograd": LeftOut("the backward is compiled: it takes less time")
        for section in DEGREES
    },
    "parallelism.enable_fsdp_symm_mem": LeftOut("collectives use symmetric memory: they take less time"),
    "activation_checkpoint.early_stop": LeftOut("recomputation ends with the last saved tensor", (True,)),
    "activation_checkpoint.memory_budget": LeftOut("compilation chooses what is kept within a budget", (0.5,)),
    "checkpoint.async_mode": LeftOut("checkpoints are written beside training"),
    "memory_estimation.enabled": LeftOut("nothing is trained: memory is estimated"),
    "memory_estimation.enable": LeftOut("nothing is trained: memory is estimated"),
}
_TENSOR: Final = Contradicts("no plan splits layers over ranks (tensor parallelism). Set it to 1.", (1,))
_PIPELINE: Final = Contradicts("no plan splits a whole model into stages (pipeline parallelism). Set it to 1.", (1,))
_CONTEXT: Final = Contradicts(
    "its ranks share sequences by rotating keys and values, which no plan does. Set it to 1.", (1,)
)
_EXPERT: Final = Contradicts("no plan spreads experts over ranks (expert parallelism). Set it to 1.", (1,))
_CONTRADICTS: Final = {
    **{
        f"{section}.{name}": why
        for section in DEGREES
        for name, why in (
            ("tensor_parallel_degree", _TENSOR),
            ("pipeline_parallel_degree", _PIPELINE),
            ("context_parallel_degree", _CONTEXT),
            ("expert_parallel_degree", _EXPERT),
        )
    },
    "training.sequence_parallel_degree": _TENSOR,
    "parallelism.expert_tensor_parallel_degree": _TENSOR,
    "fault_tolerance.enable": Contradicts("its replicas come and go, each with a group of its own. Leave it out."),
}
_WITHOUT_EFFECT: Final = [
    "job",
    "metrics",
    "lr_scheduler",
    "checkpoint",
    "comm",
    "validation",
    "fault_tolerance",
    "memory_estimation",
    "float8",
    "mx",
    "quantize",
    "compile",
    "liger_kernel",
    "debug",
    "profiling.save_traces_folder",
    "profiling.profile_freq",
    "profiling.profile_every_x_iter",
    "profiling.save_memory_snapshot_folder",
    "profiling.profiler_active",
    "profiling.profiler_warmup",
    "profiling.experiment_name",
    "model.tokenizer_path",
    "model.tokenizer_name",
    "model.hf_assets_path",
    "model.print_after_conversion",
    "model.tokenizer_type",
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.fused",
    "training.dataset",
    "training.dataset_path",
    "training.steps",
    "training.warmup_steps",
    "training.gc_freq",
    "training.seed",
    "training.checkpoint_interval",
    "training.checkpoint_interval_type",
    "training.checkpoint_folder",
    "training.enable_loss_parallel",
    "training.disable_loss_parallel",
    "parallelism.disable_loss_parallel",
    "parallelism.enable_sequence_parallel",
    "parallelism.spmd_backend",
    "parallelism.module_fqns_per_model_part",
    *(
        f"{section}.{name}"
        for section in DEGREES
        for name in (
            "enable_async_tensor_parallel",
            "pipeline_parallel_split_points",
            "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers",
            "pipeline_parallel_schedule",
            "pipeline_parallel_schedule_csv",
            "pipeline_parallel_microbatches",
            "pipeline_parallel_microbatch_size",
            "context_parallel_rotate_method",
            "context_parallel_load_balancer",
        )
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "activation_checkpoint.visualize_memory_budget_pareto",
    "activation_checkpoint.preserve_rng_state",
    "activation_checkpoint.determinism_check",
    "activation_checkpoint.debug",
    "experimental.custom_args_module",
]

TORCHTITAN_KEYS: Final = KeyTable(
    tool=Tool.TORCHTITAN,
    read=frozenset(_READ),
    left_out=_LEFT_OUT,
    contradicts=_CONTRADICTS,
    without_effect=frozenset(_WITHOUT_EFFECT),
)
