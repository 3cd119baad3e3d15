"""What is known of every server argument of every supported release with int2: tried, refused, or not tried.

An argument is in one group. Of those that are in none, and of those in :data:`NOT_TRIED`, one log line at start names
the ones that are not at their default. A release that brings an argument without a row fails a contract test.
"""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.names import GROUP_SIZE


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRIED = _names(
    """
    model_path dtype quantization load_format context_length json_model_override_args trust_remote_code kv_cache_dtype
    host port device base_gpu_id random_seed sleep_on_idle nccl_port dp_size attn_dp_size enable_dp_attention
    enable_dp_lm_head tp_size pp_size ep_size ep_num_redundant_experts ep_dispatch_algorithm init_expert_location
    enable_eplb eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
    expert_distribution_recorder_mode expert_distribution_recorder_buffer_size moe_dense_tp_size moe_runner_backend
    disable_custom_all_reduce enforce_disable_flashinfer_allreduce_fusion mem_fraction_static max_running_requests
    max_total_tokens chunked_prefill_size page_size enable_mixed_chunk disable_overlap_schedule disable_radix_cache
    max_mamba_cache_size mamba_track_interval mamba_max_states_per_path attention_backend prefill_attention_backend
    decode_attention_backend grammar_backend cuda_graph_bs_decode enable_fp32_lm_head torch_compile_max_bs
    skip_tokenizer_init skip_server_warmup incremental_streaming_output enable_cache_report decode_log_interval
    enable_metrics extra_metric_labels enable_session_radix_cache enable_hierarchical_cache hicache_ratio hicache_size
    hicache_io_backend hicache_mem_layout hicache_storage_backend hicache_storage_backend_extra_config
    hicache_storage_prefetch_policy hicache_write_policy disaggregation_mode disaggregation_bootstrap_port
    disaggregation_transfer_backend disaggregation_decode_retraction_backup speculative_algorithm
    speculative_draft_model_path speculative_eagle_topk speculative_num_draft_tokens speculative_num_steps
    speculative_ngram_capacity speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth schedule_policy
    schedule_conservativeness retraction_policy enable_priority_scheduling radix_eviction_policy prefill_max_requests
    num_continuous_decode_steps stream_interval scheduler_recv_interval max_queued_requests max_prefill_tokens
    optimistic_prefill_attempts lora_backend max_loras_per_batch
    """
) | {GROUP_SIZE}
"""Served with int2, by a test or a benchmark, with a value off its default."""

REFUSED = _names(
    """
    attn_cp_size dcp_size enable_kv_cache_sharding enable_prefill_cp enable_prefill_context_parallel
    enable_dsa_prefill_context_parallel use_ray model_impl remote_instance_weight_loader_start_seed_via_transfer_engine
    enable_memory_saver enable_lora lora_paths cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_config
    disable_cuda_graph disable_decode_cuda_graph enable_torch_compile enable_two_batch_overlap enable_pdmux
    enable_nvidia_megakernel dllm_algorithm elastic_ep_backend enable_elastic_expert_backup
    enable_deterministic_inference rl_on_policy_target enable_mis prefill_only_disable_kv_cache enable_streaming_session
    kv_canary encoder_only language_only enable_adaptive_dispatch_to_encoder enable_flexkv flexkv_config_file
    enable_lmcache enable_hisparse enable_page_major_kv_layout enable_unified_memory
    enable_unified_cache_external_linker radix_cache_backend hicache_host_memory_mode
    disaggregation_decode_allocation_policy disaggregation_decode_enable_offload_kvcache
    disaggregation_decode_enable_radix_cache disaggregation_decode_extra_slots
    disaggregation_decode_host_receive_threshold disaggregation_enable_kv_checksum enable_pd_role_switch
    enable_int8_mamba_checkpoint enable_linear_replayssm enable_linear_replayssm_spec linear_attn_backend
    linear_attn_prefill_backend mamba_radix_cache_strategy enable_multi_layer_eagle speculative_adaptive
    speculative_draft_attention_backend speculative_draft_kv_cache_dtype
    """
)
"""Refused with int2, or some of their values are, or together with others (docs/reference.md)."""

NO_BEARING = _names(
    """
    tokenizer_path revision reasoning_parser admin_api_key api_key allow_auto_truncate asr_max_buffer_seconds
    asr_max_concurrent_sessions chat_template completion_template constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt constrained_json_whitespace_pattern default_chat_template_kwargs
    disable_outlines_disk_cache disable_tokenizer_batch_decode dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_dynamic_batch_tokenizer enable_http2 enable_http_worker_reuseport
    enable_response_store enable_ssl_refresh enable_strict_thinking enable_tokenizer_batch_encode fastapi_root_path
    file_storage_path grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads hf_chat_template_name
    http2_initial_connection_window_size http2_max_concurrent_streams preferred_sampling_params return_input_ids
    return_output_ids sampling_defaults served_model_name sidecar sidecar_args smg_grpc_mode smg_http_sidecar_port
    ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password stream_response_default_include_usage tokenizer_backend
    tokenizer_mode tool_call_parser tool_server trust_request_chat_template weight_version gated_launch_port
    bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token crash_dump_folder
    enable_expert_distribution_metrics enable_forward_pass_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
    enable_request_time_stats_logging enable_trace export_metrics_to_file export_metrics_to_file_dir
    forward_pass_metrics_ipc_name forward_pass_metrics_worker_id gc_threshold gc_warning_threshold_secs
    generation_tokens_buckets kv_events_config load_publish_endpoint load_snapshot_publish_interval log_level
    log_level_http log_requests log_requests_format log_requests_level log_requests_target otlp_service_name
    otlp_traces_endpoint prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
    prompt_tokens_buckets show_time_cost spec_trace_dir stat_loggers tokenizer_metrics_allowed_custom_labels
    tokenizer_metrics_custom_labels_header trace_modules uvicorn_access_log_exclude_prefixes soft_watchdog_timeout
    watchdog_timeout custom_sigquit_handler dist_timeout download_dir decrypted_config_file decrypted_draft_config_file
    delete_ckpt_after_loading model_checksum model_config_parser weight_loader_disable_mmap
    weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    allowed_media_domains media_url_max_file_size_mb speculative_draft_model_revision
    """
)
"""Outside of what a cache of keys and values can notice: protocols, texts, logs, metrics, how files are read."""

NOT_SERVED = _names(
    """
    is_embedding qsa_indexer_dtype c128_page_size swa_prefix_tails enable_decoder_swa_bounded_replay
    enable_encoder_swa_bounded_replay enable_deepseek_v4_fp4_indexer enable_dsa_cache_layer_split
    enable_dsa_fused_indexer enable_return_indexer_topk enable_scattered_sconv dsa_decode_backend
    dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_prefill_cp_mode dsa_topk_backend dsa_triton_union
    dsv4_attn_backend dsv4_prefill_backend flashinfer_mla_disable_ragged speculative_dsa_topk_backend
    disable_chunked_prefix_cache enable_linker_mla_dedup prefill_kv_cache_dequant_dtype ple_offload_backend
    ple_offload_dir ple_offload_embedding enable_paged_experts paged_experts_num_resident mlx_enable_sampling
    uno_lora_path hisparse_config lmcache_config_file unified_cache_external_linker_backend
    unified_cache_external_linker_config kv_canary_real_data kv_canary_sweep_interval dllm_algorithm_config dllm_fdfo
    tbo_token_distribution_threshold pdmux_config_path sm_group_num cp_strategy prefill_cp_mode dcp_comm_backend
    dcp_replicate_q_proj enable_cp_decode_attn_tp enable_cp_tp_group_sharing speculative_skip_dp_mlp_sync
    elastic_ep_initial_size elastic_ep_rejoin elastic_ep_scale_timeout ep_join_mode ep_join_rank_offset max_ep_size
    mooncake_ib_device encoder_bootstrap_port encoder_register_urls encoder_transfer_backend encoder_urls
    engine_info_bootstrap_port modelexpress_config int8_mamba_ckpt_size linear_replayssm_cache_len
    speculative_adaptive_config decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
    decoupled_spec_role speculative_dflash_block_size speculative_domino_candidate_pool_size
    speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size
    speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path enable_amd_monokernel
    enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill
    """
)
"""They act on models, cache dtypes, kernels of attention, devices and features that int2 mode refuses or replaces."""

NOT_TRIED = _names(
    """
    swa_full_tokens_ratio mamba_full_memory_ratio quantization_param_path custom_weight_loader
    checkpoint_engine_wait_weights_before_ready startup_weight_load_mode weight_cache_mode weight_cache_socket
    weight_cache_timeout remote_instance_weight_loader_backend remote_instance_weight_loader_seed_instance_ip
    remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports
    enable_lora_overlap_loading experts_shared_outer_loras lora_drain_wait_threshold lora_eviction_policy
    lora_strict_loading lora_target_modules lora_use_virtual_experts max_loaded_loras max_lora_chunk_size max_lora_rank
    model_loader_extra_config modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
    modelopt_quant quantize_and_serve rl_quant_profile torchao_config gpu_id_step numa_node nnodes node_rank
    dist_init_addr disable_attn_tp_gather enable_dense_mlp_attn_tp enable_dp_attention_local_control_broadcast
    enable_shared_experts_attn_tp dwdp_size moe_dp_size pp_async_batch_depth pp_max_micro_batch_size
    enable_dynamic_chunking shared_experts_tp_size load_balance_method enable_attn_tp_input_scattered
    enable_layernorm_sp enable_megamoe_for_layernorm_sp enable_p2p_check enable_tp_lm_head_all_to_all
    abort_on_priority_when_disabled default_priority_value disable_priority_preemption
    priority_scheduling_preemption_threshold schedule_low_priority_values_first disable_hybrid_swa_memory
    enable_prefill_delayer prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
    prefill_delayer_token_usage_low_watermark prefill_decode_interval prefill_decode_interval_min_bs
    min_free_slots_delay batch_notify_size detokenizer_worker_num strip_thinking_cache warmups
    radix_eviction_policy_config hicache_host_memory_fraction hicache_storage_prefetch_retry_max_attempts
    hicache_storage_prefetch_retry_poll_interval disaggregation_decode_polling_interval disaggregation_ib_device
    num_reserved_decode_tokens language_model_only disable_fast_image_processor enable_broadcast_mm_inputs_process
    enable_mm_global_cache enable_multimodal enable_prefix_mm_cache image_processor_backend keep_mm_feature_on_device
    limit_mm_data_per_request mm_attention_backend mm_enable_dp_encoder mm_feature_transport mm_global_cache_backend
    mm_io_worker_num mm_preprocess_cache_size_mb mm_process_config mm_processor_worker_num trust_mm_content_hashes
    enable_precise_embedding_interpolation debug_tensor_dump_input_file debug_tensor_dump_layers
    debug_tensor_dump_output_folder forward_hooks msprobe_dump_config aux_hidden_state_capture
    enable_return_aux_hidden_states enable_return_hidden_states enable_return_routed_experts
    return_aux_hidden_state_layer_ids return_hidden_states_mode enable_custom_logit_processor sampling_backend
    sampling_mask_max_tokens enable_watermark watermark_config watermark_context_window watermark_default_enabled
    watermark_enforce_all watermark_key watermark_key_b watermark_max_probability watermark_mixing_probability
    enable_lean_attention triton_attention_num_kv_splits triton_attention_reduce_in_fp32
    triton_attention_split_tile_size bf16_gemm_backend fp4_gemm_runner_backend fp8_gemm_runner_backend
    boundary_reduction cpu_offload_gb cuda_graph_bs_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context cuda_graph_tc_compiler debug_cuda_graph
    disable_cuda_graph_padding disable_prefill_cuda_graph enable_cudagraph_gc enable_profile_cuda_graph
    enable_layerwise_nvtx_marker enable_torch_compile_debug_mode deepep_config deepep_dispatcher_output_dtype
    deepep_mode deepep_v2_mode disable_flashinfer_autotune disable_flashinfer_cutlass_moe_fp4_allgather
    disable_shared_experts_fusion enable_draft_weights_cpu_backup enable_flashinfer_allreduce_fusion
    enable_fused_moe_sum_all_reduce enable_fused_qk_norm_rope enable_mscclpp enable_nccl_nvls
    enable_quant_communications enable_single_batch_overlap enable_symm_mem enable_tf32_matmul enable_torch_symm_mem
    enable_w4a4_mxfp4_megamoe enable_waterfill enable_weights_cpu_backup enforce_shared_experts_fusion
    eplb_min_rebalancing_utilization_threshold expert_balancedness_report_mode flashinfer_a2a_dispatch_type
    flashinfer_allreduce_fusion_backend flashinfer_autotune_skip_ops flashinfer_mxfp4_moe_precision fuseep_mode
    moe_a2a_backend pre_warm_nccl kt_cpuinfer kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts
    kt_threadpool_count kt_weight_path offload_group_size offload_mode offload_num_in_group offload_prefetch_step
    enable_mamba_cache_stochastic_rounding linear_attn_decode_backend linear_attn_verify_backend mamba_backend
    mamba_cache_philox_rounds mamba_ssm_dtype uses_mamba_radix_cache speculative_accept_threshold_acc
    speculative_accept_threshold_single speculative_attention_mode speculative_boundary_reduction
    speculative_draft_load_format speculative_draft_model_quantization speculative_draft_sink_size
    speculative_draft_window_size speculative_enable_w4a4_mxfp4_megamoe speculative_moe_a2a_backend
    speculative_moe_runner_backend speculative_ngram_external_corpus_max_tokens speculative_ngram_external_corpus_path
    speculative_ngram_external_sam_budget speculative_ngram_match_type speculative_ngram_min_bfs_breadth
    speculative_token_map speculative_use_block_verification speculative_use_rejection_sampling tokenizer_worker_num
    """
)
"""Nobody has served int2 with a value off their default: nothing speaks against it, and nothing for it."""

GROUPS = {
    "tried": TRIED,
    "refused": REFUSED,
    "no bearing": NO_BEARING,
    "not served": NOT_SERVED,
    "not tried": NOT_TRIED,
}
"""Group -> fields of ServerArgs."""


def untried(server_args: Any) -> list[str]:
    """Flags of server arguments off their default that nobody has tried with int2, in SGLang's order.

    Args:
        server_args: SGLang's ServerArgs, as the operator gave them.
    """
    known = TRIED | REFUSED | NO_BEARING | NOT_SERVED
    defaults = releases.field_defaults(type(server_args))
    return [
        f"--{name.replace('_', '-')}"
        for name, default in defaults.items()
        # Names that begin so are SGLang's notes on others.
        if name not in known and not name.startswith("_") and getattr(server_args, name) != default
    ]
