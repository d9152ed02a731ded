"""What keys of a DeepSpeed configuration do to time and memory (its documentation, "DeepSpeed Configuration JSON")."""

from __future__ import annotations

from typing import Final

from .asked_run import Tool
from .keys import Contradicts, KeyTable, LeftOut

_ZERO: Final = "zero_optimization"
_FEWER_BYTES: Final = "fewer bytes pass between ranks than in the answer"
_ALL_READ: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "communication_data_type",
    "optimizer.type",
    "bf16.enabled",
    "bfloat16.enabled",
    "fp16.enabled",
    "fp16.auto_cast",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    f"{_ZERO}.stage",
    f"{_ZERO}.offload_param.device",
    f"{_ZERO}.offload_optimizer.device",
    f"{_ZERO}.cpu_offload",
    f"{_ZERO}.cpu_offload_params",
    f"{_ZERO}.cpu_offload_param",
    f"{_ZERO}.stage3_max_live_parameters",
    f"{_ZERO}.stage3_prefetch_bucket_size",
    f"{_ZERO}.mics_shard_size",
    f"{_ZERO}.reduce_bucket_size",
    f"{_ZERO}.contiguous_gradients",
    f"{_ZERO}.overlap_comm",
    f"{_ZERO}.stage3_param_persistence_threshold",
    f"{_ZERO}.offload_param.pin_memory",
    f"{_ZERO}.offload_optimizer.pin_memory",
    "aio",
)
_LEFT_OUT: Final = {
    "sparse_gradients": LeftOut("gradients of embeddings are reduced by rows: " + _FEWER_BYTES),
    "wall_clock_breakdown": LeftOut("the host waits for the device after every phase: steps take longer"),
    "disable_allgather": LeftOut("weights are broadcast in the place of gathers: steps take longer"),
    "torch_autocast.enabled": LeftOut("copies of weights that autocast makes take memory beside those of the answer"),
    "amp.enabled": LeftOut("apex casts operation by operation; the answer has mixed precision throughout"),
    "fp16.fp16_master_weights_and_grads": LeftOut("masters of 16 bits take less memory than in the answer"),
    "data_types.grad_accum_dtype": LeftOut("gradients are added up in another element type than in the answer"),
    "zero_force_ds_cpu_optimizer": LeftOut("the host's steps are of another kernel than the answer's", (True,)),
    "compile.enabled": LeftOut("compiled kernels take less time than the answer's"),
    "compile.deepcompile": LeftOut("compiled kernels and gathers take less time than the answer's"),
    "progressive_layer_drop.enabled": LeftOut("blocks are skipped: steps take less time than the answer's"),
    "curriculum_learning.enabled": LeftOut("sequences are shorter at first"),
    "data_efficiency.enabled": LeftOut("sequences or tokens are left out at first"),
    "compression_training": LeftOut("weights or activations are compressed in training"),
    "quantize_training.enabled": LeftOut("weights are quantized in training"),
    "sparse_attention": LeftOut("attention leaves blocks out: it takes less time than the answer's"),
    "eigenvalue.enabled": LeftOut("eigenvalues are computed beside steps"),
    "flops_profiler.enabled": LeftOut("the profiler hooks every module in the steps that it looks at"),
    "hybrid_engine.enabled": LeftOut("generation between steps is left out"),
    f"{_ZERO}.zero_quantized_weights": LeftOut(_FEWER_BYTES),
    f"{_ZERO}.zero_quantized_nontrainable_weights": LeftOut(_FEWER_BYTES),
    f"{_ZERO}.zero_quantized_gradients": LeftOut(_FEWER_BYTES),
    f"{_ZERO}.zeropp_loco_param": LeftOut(_FEWER_BYTES),
    f"{_ZERO}.zero_hpz_partition_size": LeftOut(
        "a second copy of parameters within a node takes memory and spares gathers across nodes", (1,)
    ),
    f"{_ZERO}.mics_hierarchical_params_gather": LeftOut("gathers go within nodes first"),
    f"{_ZERO}.reduce_scatter": LeftOut("gradients are reduced whole: more bytes pass between ranks", (True,)),
    f"{_ZERO}.stage3_use_all_reduce_for_fetch_params": LeftOut("gathers are all-reduces: more bytes pass"),
    f"{_ZERO}.stage3_allgather_sequential": LeftOut("gathers take longer than in the answer"),
    f"{_ZERO}.round_robin_gradients": LeftOut("ranks copy gradients to their hosts in turn"),
    f"{_ZERO}.memory_efficient_linear": LeftOut("linear maps save their weights for backward", (True,)),
    f"{_ZERO}.sdma_allgather": LeftOut("gathers run on copy engines, and leave the device's units to computation"),
    f"{_ZERO}.zenflow": LeftOut("steps of the host are put off beside the next iterations"),
    f"{_ZERO}.offload_optimizer.ratio": LeftOut("a part of the state is stepped on the device", (1.0,)),
    f"{_ZERO}.offload_optimizer.super_offload": LeftOut("steps of the host are spread over the backward"),
    f"{_ZERO}.offload_param.max_in_cpu": LeftOut("a part of the parameters stays in host memory", (1_000_000_000,)),
    "activation_checkpointing.partition_activations": LeftOut(
        "saved inputs are split over tensor-parallel ranks, where the model calls DeepSpeed's own checkpointing"
    ),
    "activation_checkpointing.contiguous_memory_optimization": LeftOut(
        "saved inputs are copied into one buffer, where the model calls DeepSpeed's own checkpointing"
    ),
    "activation_checkpointing.synchronize_checkpoint_boundary": LeftOut(
        "the host waits for the device at every block, where the model calls DeepSpeed's own checkpointing"
    ),
    "optimizer.params.torch_adam": LeftOut("the step is torch's in the place of one fused kernel: it takes longer"),
    "activation_checkpointing.cpu_checkpointing": LeftOut(
        "saved inputs go to the host, where the model calls DeepSpeed's own checkpointing"
    ),
}
_CONTRADICTS: Final = {
    "tensor_parallel.autotp_size": Contradicts(
        "no plan splits layers over ranks (tensor parallelism). Set it to 1, or ask without it.", (1,)
    ),
    "sequence_parallel_size": Contradicts(
        "its ranks share sequences by all-to-all exchanges, which no plan does. Set it to 1.", (1,)
    ),
    "expert_parallel.enabled": Contradicts("no plan spreads experts over ranks. Leave it out."),
    "expert_parallel.autoep_size": Contradicts("no plan spreads experts over ranks. Set it to 1.", (1,)),
    "pipeline.stages": Contradicts("no plan splits a whole model into stages. Leave it out.", (1, "auto")),
    "elasticity.enabled": Contradicts(
        "the batch then depends on the number of ranks. Write train_micro_batch_size_per_gpu in its place."
    ),
    "autotuning.enabled": Contradicts("what is trained is then searched by DeepSpeed. Ask about what it finds."),
}
_WITHOUT_EFFECT: Final = (
    "steps_per_print",
    "scheduler",
    "optimizer.params",
    "optimizer.legacy_fusion",
    "zero_allow_untested_optimizer",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "dump_state",
    "memory_breakdown",
    "seq_parallel_communication_data_type",
    "disable_python_gc",
    "log_level",
    "dataloader_drop_last",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "monitor_config",
    "checkpoint",
    "nebula",
    "autotuning",
    "elasticity",
    "eigenvalue",
    "flops_profiler",
    "hybrid_engine",
    "progressive_layer_drop",
    "curriculum_learning",
    "data_efficiency",
    "quantize_training",
    "data_types",
    "compile",
    "amp",
    "torch_autocast",
    "pipeline",
    "expert_parallel",
    "tensor_parallel",
    "activation_checkpointing",
    "bf16",
    "bfloat16",
    "fp16",
    f"{_ZERO}.allgather_bucket_size",
    f"{_ZERO}.allgather_partitions",
    f"{_ZERO}.use_multi_rank_bucket_allreduce",
    f"{_ZERO}.load_from_fp32_weights",
    f"{_ZERO}.elastic_checkpoint",
    f"{_ZERO}.sub_group_size",
    f"{_ZERO}.stage3_model_persistence_threshold",
    f"{_ZERO}.stage3_max_reuse_distance",
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save",
    f"{_ZERO}.stage3_module_granularity_threshold",
    f"{_ZERO}.stage3_partition_stream_chunk_size",
    f"{_ZERO}.sdma_allgather_max_numel",
    f"{_ZERO}.ignore_unused_parameters",
    f"{_ZERO}.legacy_stage1",
    f"{_ZERO}.parameter_alignment",
    f"{_ZERO}.compute_grad_norm",
    f"{_ZERO}.pipeline_loading_checkpoint",
    f"{_ZERO}.override_module_apply",
    f"{_ZERO}.log_trace_cache_warnings",
    f"{_ZERO}.enable_sanity_checks",
    f"{_ZERO}.save_muon_momentum_buffer_in_memory",
    f"{_ZERO}.leaf_module",
    f"{_ZERO}.cpu_offload_use_pin_memory",
    f"{_ZERO}.offload_param.nvme_path",
    f"{_ZERO}.offload_param.buffer_count",
    f"{_ZERO}.offload_param.buffer_size",
    f"{_ZERO}.offload_optimizer.nvme_path",
    f"{_ZERO}.offload_optimizer.buffer_count",
    f"{_ZERO}.offload_optimizer.pipeline_read",
    f"{_ZERO}.offload_optimizer.pipeline_write",
    f"{_ZERO}.offload_optimizer.fast_init",
    f"{_ZERO}.offload_optimizer.fast",
    f"{_ZERO}.offload_optimizer.cpuadam_cores_perc",
)

DEEPSPEED_KEYS: Final = KeyTable(
    tool=Tool.DEEPSPEED,
    read=frozenset(_ALL_READ),
    left_out=_LEFT_OUT,
    contradicts=_CONTRADICTS,
    without_effect=frozenset(_WITHOUT_EFFECT),
)
