"""What keys of an axolotl configuration do to time and memory (axolotl 0.19, utils/schemas and integrations)."""

from __future__ import annotations

from typing import Final

from .asked_run import Tool
from .keys import Contradicts, KeyTable, LeftOut

LIGER: Final = (
    "liger_rope",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_layer_norm",
    "liger_swiglu",
    "liger_glu_activation",
)
LORA_KERNELS: Final = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
CUT_PLUGIN: Final = "CutCrossEntropyPlugin"
OF_PLUGINS: Final = {
    "cut_cross_entropy": CUT_PLUGIN,
    **dict.fromkeys((*LIGER, "liger_cross_entropy", "liger_fused_linear_cross_entropy"), "LigerPlugin"),
    **dict.fromkeys(("use_scattermoe", "use_sonicmoe", "use_dsv4_kernels", "use_glm_dsa_kernels"), "KernelsPlugin"),
}
"""Keys that nobody reads unless ``plugins`` lists the plugin that has them in its arguments."""
WITHOUT_EFFECT_PLUGINS: Final = frozenset(
    {CUT_PLUGIN, "LigerPlugin", "KernelsPlugin", "SwanLabPlugin", "LMEvalPlugin", "ExpertParallelPlugin"}
)
"""Plugins that do nothing but what keys of their own say."""
LEFT_OUT_PLUGINS: Final = {
    "GrokfastPlugin": "averages of gradients are kept and added to them: as much memory as gradients, and more time",
    "DenseMixerPlugin": "routers learn from all experts: steps take longer",
    "LLMCompressorPlugin": "weights are compressed in training",
}
"""Plugins that change time or memory, and how."""
OTHER_PLUGINS: Final = {
    "KDPlugin": "it trains by another Trainer, with a teacher beside",
    "DiffusionPlugin": "it trains by another Trainer, with masks and without causal attention",
    "SpectrumPlugin": "it chooses a part of the model, which alone is trained",
    "NemoGymPlugin": "it trains by another Trainer, which writes text",
    "HatcheryPlugin": "another machine trains",
}
"""Plugins with which it is another training."""
_READ: Final = [
    *LORA_KERNELS,
    *OF_PLUGINS,
    "plugins",
    "trust_remote_code",
    "tf32",
    "pad_to_sequence_len",
    "torch_compile",
    "base_model",
    "base_model_config",
    "sequence_len",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "batch_size",
    "max_grad_norm",
    "optimizer",
    "bf16",
    "bfloat16",
    "fp16",
    "float16",
    "float32",
    "adapter",
    "lora_r",
    "lora_target_modules",
    "lora_target_linear",
    "lora_dropout",
    "peft_use_dora",
    "load_in_8bit",
    "load_in_4bit",
    "gptq",
    "sample_packing",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "attn_implementation",
    "flash_attention",
    "activation_offloading",
    "chunked_cross_entropy",
    "chunked_cross_entropy_num_chunks",
    "flash_attn_cross_entropy",
    "tiled_mlp",
    "tiled_mlp_num_shards",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "fsdp_version",
    "dp_shard_size",
    "dp_replicate_size",
    "world_size",
    "peft_autocast_adapter_dtype",
]
FUSED: Final = "fused kernels take less time than the answer's, and hold less"
_COMPILED: Final = "compilation is told more than in the answer: other kernels, other time"
_FEWER: Final = "fewer weights are adapted than in the answer"
_LEFT_OUT: Final = {
    "deepcompile": LeftOut("compiled kernels and gathers take less time than the answer's"),
    "flash_attn_fuse_mlp": LeftOut(FUSED),
    "flash_attn_rms_norm": LeftOut(FUSED),
    "use_kernels": LeftOut(FUSED),
    "fused_attn_kernel": LeftOut(FUSED),
    "flex_attention": LeftOut("attention is FlexAttention's, which takes other time than the answer's"),
    "sage_attention": LeftOut("attention in 8 bits takes less time than the answer's"),
    "eager_attention": LeftOut("scores exist whole: attention takes more time and memory than in the answer"),
    "flash_attn_fuse_qkv": LeftOut(FUSED),
    "nvfp4_merge_aware": LeftOut("adapted weights are quantized in training as they will be merged: steps take longer"),
    "llmcompressor": LeftOut("weights are compressed in training"),
    "s2_attention": LeftOut("attention within groups takes less time than the answer's"),
    "neftune_noise_alpha": LeftOut("noise is added to embeddings, one tensor of hidden states"),
    "noisy_embedding_alpha": LeftOut("noise is added to embeddings, one tensor of hidden states"),
    "torch_empty_cache_steps": LeftOut("cached segments are given back now and then: steps take longer"),
    "gc_steps": LeftOut("Python collects garbage in some steps"),
    "gc_collect_steps": LeftOut("Python collects garbage in some steps"),
    "fp8": LeftOut("products in float8 take less time than the answer's"),
    "relora": LeftOut("adapters are merged now and then"),
    "relora_steps": LeftOut("adapters are merged now and then"),
    "lisa_n_layers": LeftOut("some layers alone are trained: less memory and time than in the answer"),
    "peft_layers_to_transform": LeftOut(_FEWER),
    "peft_layers_pattern": LeftOut(_FEWER),
    "peft_layer_replication": LeftOut("layers are repeated, which the answer's model does not do"),
    "lora_rank_pattern": LeftOut("ranks differ from map to map; the answer has one"),
    "lora_target_parameters": LeftOut("adapters beside expert weights are not in the answer"),
    "lora_modules_to_save": LeftOut("these modules are trained whole: more memory and time than in the answer"),
    "peft_trainable_token_indices": LeftOut("rows of the embedding are trained too"),
    "layer_offloading": LeftOut("layers that are not trained go to the host: less memory, longer steps"),
    "selective_checkpointing": LeftOut("what is recomputed is chosen by operation"),
    "qat": LeftOut("weights are quantized in training"),
    "experts_implementation": LeftOut("experts run by other kernels than the answer's"),
    "quantize_moe_experts": LeftOut("experts are packed; in the answer they are not"),
    "ple_cpu_offload": LeftOut("embeddings of layers lie on the host"),
    "freeze_mm_modules": LeftOut("parts that read images are not trained"),
    "resize_token_embeddings_to_32x": LeftOut("the table of tokens has a few more rows"),
    "multipack_real_batches": LeftOut("rows are padded, and not laid end to end"),
    "batch_flattening": LeftOut("samples of a batch lie end to end: attention takes less time"),
    "pretraining_sample_concatenation": LeftOut("samples lie end to end in a row"),
    "use_pose": LeftOut("positions skip: rows are shorter than the context"),
    "use_eaft": LeftOut("the loss reads logits once more"),
    "ddp_bucket_cap_mb": LeftOut("gradients are reduced in buckets of another size"),
    "ddp_find_unused_parameters": LeftOut("the graph is searched in every iteration"),
    "ddp_broadcast_buffers": LeftOut("module buffers are broadcast in every iteration"),
    "profiler_steps": LeftOut("the profiler records some steps"),
    "include_tkps": LeftOut("ranks gather their numbers of tokens in every step"),
    "gpu_memory_limit": LeftOut("weights that do not fit the limit go to the host"),
    "max_memory": LeftOut("weights that do not fit the limits go elsewhere"),
    **dict.fromkeys(
        ("overrides_of_model_config", "overrides_of_model_kwargs"),
        LeftOut("the model is changed; in the answer it is as published"),
    ),
    "torch_compile_mode": LeftOut(_COMPILED, ("default",)),
    "torch_compile_backend": LeftOut(_COMPILED, ("inductor",)),
    "torch_compile_options": LeftOut(_COMPILED),
    "bnb_config_kwargs": LeftOut("weights are packed otherwise than the answer's, which are as without it"),
    "model_quantization_config": LeftOut("weights are packed otherwise than in the answer"),
    "use_onebitllms": LeftOut("linear maps are ternary, which takes other time and memory"),
    "optim_target_modules": LeftOut("a part of the modules is stepped otherwise"),
    "llama4_linearized_experts": LeftOut("experts run by other kernels than the answer's"),
    **dict.fromkeys(
        ("xformers_attention", "flash_optimum", "sdpa_varlen", "gemma4_hybrid_attn_impl", "large_head_attention"),
        LeftOut("attention is computed by other kernels; in the answer by what PyTorch takes"),
    ),
    "fp32_norms": LeftOut("norms compute in float32: they take more time and memory than in the answer"),
    "trainer_cls": LeftOut("another Trainer: whatever else it does takes time and memory too"),
    "device_map": LeftOut("layers may lie on several devices, one after the other", ("auto", "sequential")),
}
_OTHER_TRAINER: Final = Contradicts("it trains by another Trainer, with other models beside. Leave it out.")
_CONTRADICTS: Final = {
    "rl": _OTHER_TRAINER,
    "diffusion": _OTHER_TRAINER,
    "reward_model": _OTHER_TRAINER,
    "process_reward_model": _OTHER_TRAINER,
    "ebft": _OTHER_TRAINER,
    "kd_trainer": _OTHER_TRAINER,
    "tensor_parallel_size": Contradicts("no plan splits layers over ranks (tensor parallelism). Set it to 1.", (1,)),
    "context_parallel_size": Contradicts("its ranks share sequences by ring attention. Set it to 1.", (1,)),
    "sequence_parallel_degree": Contradicts("its ranks share sequences by ring attention. Set it to 1.", (1,)),
    "expert_parallel_size": Contradicts("no plan spreads experts over ranks. Set it to 1.", (1,)),
    "auto_find_batch_size": Contradicts("the batch is then found by running out of memory. Name its size."),
    "unfrozen_parameters": Contradicts(
        "a part of the model alone is trained. Ask protwin search with --freeze for the rest."
    ),
}
_WITHOUT_EFFECT: Final = (
    "strict resume_from_checkpoint auto_resume_from_checkpoints mean_resizing_embeddings shrink_embeddings "
    "embeddings_skip_upcast reinit_weights trl vllm quantization dynamic_checkpoint center_rewards_coefficient "
    "num_labels dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free "
    "dpo_loss_type dpo_loss_weights dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss dpo_beta rpo_alpha "
    "datasets test_datasets shuffle_merged_datasets shuffle_before_merging_datasets dataset_prepared_path "
    "dataset_shard_num dataset_shard_idx skip_prepare_dataset num_dataset_shards_to_save pretraining_dataset "
    "dataset_processes dataset_num_proc dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory "
    "dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last accelerator_config remove_unused_columns "
    "push_dataset_to_hub hf_use_auth_token device local_rank ddp seed ddp_timeout do_causal_lm_eval "
    "eval_causal_lm_metrics do_bench_eval bench_dataset bench_split metric_for_best_model greater_is_better "
    "loss_watchdog_threshold loss_watchdog_patience fp8_config fp8_enable_fsdp_float8_all_gather "
    "excess_length_strategy eval_sequence_len min_sample_len max_prompt_len sample_packing_group_size "
    "sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method eval_sample_packing "
    "pad_to_multiple_of curriculum_sampling pose_split_on_token_ids pose_max_context_len "
    "pose_num_chunks pretrain_multipack_buffer_size pretrain_multipack_attn streaming streaming_multipack_buffer_size "
    "sdp_attention flex_attn_compile_kwargs flash_attn_d512 scaling_softmax scaling_softmax_factor "
    "scaling_softmax_bias eaft_alpha eaft_k tiled_mlp_use_original_mlp fp32_norm_classes fsdp_final_state_dict_type "
    "val_set_size heads_k_stride ring_attn_func special_tokens tokens added_tokens_overrides max_steps warmup_steps "
    "warmup_ratio eval_steps evals_per_epoch eval_strategy evaluation_strategy save_steps saves_per_epoch "
    "save_strategy save_total_limit save_first_step logging_steps early_stopping_patience load_best_model_at_end "
    "save_only_model use_tensorboard profiler_steps_start include_tokens_per_second orpo_alpha simpo_gamma cpo_alpha "
    "kto_desirable_weight kto_undesirable_weight rl_beta low_cpu_mem_usage chat_template chat_template_jinja "
    "chat_template_kwargs eot_tokens default_system_message fix_untrained_tokens is_preprocess preprocess_iterable "
    "total_num_tokens total_supervised_tokens sample_packing_eff_est axolotl_config_path is_falcon_derived_model "
    "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model generate_samples "
    "num_generation_samples generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
    "generation_prompt_ratio generation_do_sample capabilities env_capabilities cls_model_config tokenizer_config "
    "tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_type processor_type processor_kwargs "
    "tokenizer_save_jinja_files experimental_skip_move_to_device model_quantization_config_kwargs "
    "output_dir hub_model_id hub_strategy hub_revision save_safetensors lora_model_dir lora_alpha lora_fan_in_fan_out "
    "lora_alpha_pattern peft peft_use_rslora peft_init_lora_weights peft_ensure_weight_tying "
    "qlora_sharded_model_loading lora_on_cpu loraplus_lr_ratio loraplus_lr_embedding merge_lora merge_method "
    "relora_prune_ratio relora_prune_method relora_cpu_offload relora_warmup_steps eval_batch_size train_on_inputs "
    "group_by_length learning_rate embedding_lr embedding_lr_scale weight_decay optim_args torchdistx_path "
    "lr_scheduler lr_scheduler_kwargs lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor "
    "lr_groups adam_epsilon adam_epsilon2 adam_beta1 adam_beta2 adam_beta3 dion_lr dion_momentum dion_rank_fraction "
    "dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant "
    "qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size num_epochs "
    "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps use_mlflow mlflow_tracking_uri "
    "mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts lisa_step_interval lisa_layers_attribute "
    "use_wandb wandb_name wandb_run_id wandb_mode wandb_project wandb_entity wandb_watch wandb_log_model use_comet "
    "comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online "
    "comet_experiment_config gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
    "gradio_temperature use_ray ray_run_name ray_num_workers resources_per_worker use_otel_metrics otel_metrics_host "
    "otel_metrics_port use_trackio trackio_project_name trackio_run_name trackio_space_id image_size "
    "image_resize_algorithm role_boundaries max_packed_sequence_len rope_scaling eval_table_size eval_max_new_tokens "
    "type_of_model revision_of_model model_type tokenizer model_config liger_use_token_scaling liger_kernel_impl "
    "dataset_prepared_hash hub_private_repo debug wandb_tags use_swanlab swanlab_project swanlab_experiment_name "
    "swanlab_description swanlab_mode swanlab_log_completions eta_min adam_eps base_model_ignore_patterns "
    "eval_table_max_new_tokens sample_packing_seq_len_multiplier"
)

AXOLOTL_KEYS: Final = KeyTable(
    tool=Tool.AXOLOTL,
    read=frozenset(_READ),
    left_out=_LEFT_OUT,
    contradicts=_CONTRADICTS,
    without_effect=frozenset(_WITHOUT_EFFECT.split()),
)
