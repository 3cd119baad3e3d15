"""What the plugin takes from SGLang is there in every supported release: read from its sources, without importing it.

Says nothing about behaviour. It is what a new release breaks first, and it is told in seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookType

from sglang_oscar.attach import touchpoints
from sglang_oscar.attach.feature import features
from sglang_oscar.attach.releases import drafts_token_ids
from sglang_oscar.attach.touchpoint import Touchpoint
from sglang_oscar.features import register_all
from support.releases import SGLANG_VERSIONS, pins, tree
from support.syntax import SourceTree

PLUGIN = Path(touchpoints.__file__).parents[1]
SRT = "sglang.srt."
register_all()
RECORDING = [feature.any_server.in_schedulers for feature in features() if feature.any_server is not None]
ALL: list[Touchpoint] = [
    *touchpoints.of_arguments(),
    *(point for feature in features() for point in (*feature.in_schedulers, *feature.in_every_scheduler)),
    *(point for points in RECORDING for point in points),
]

ATTRIBUTES: dict[str, str] = {
    "managers.schedule_batch.Req": "extra_key origin_input_ids output_ids input_embeds positional_embed_overrides "
    "skip_radix_cache_insert rid lora_id _compute_max_prefix_len to_finish finished is_retracted "
    "inflight_middle_chunks",
    "managers.scheduler.Scheduler": "tree_cache",
    "lora.lora_manager.LoRAManager": "prepare_lora_batch",
    "managers.utils.GenerationBatchResult": "copy_done accept_lens",
    "managers.schedule_batch.ScheduleBatch": "reqs req_to_token_pool seq_lens_cpu",
    "mem_cache.memory_pool.ReqToTokenPool": "req_to_token",
    "mem_cache.memory_pool.MHATokenToKVPool": "size page_size device k_buffer v_buffer memory_saver_adapter "
    "enable_custom_mem_pool custom_mem_pool _create_buffers_normal set_kv_buffer",
    "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator": "device page_size need_sort free_pages "
    "merge_and_sort_free",
    "mem_cache.kv_cache_configurator.KVCacheConfigurator": "server_args model_config model layer_info device page_size "
    "pool_page_size sliding_window_size is_draft_worker",
    "mem_cache.swa_memory_pool.SWAKVPool": "full_kv_pool swa_kv_pool translate_loc_from_full_to_swa set_kv_buffer",
    "model_executor.pool_configurator.MemoryPoolConfigurator": "calculate_pool_sizes "
    "calculate_pool_sizes_from_max_tokens finalize_with_max_running_requests",
    "mem_cache.base_prefix_cache.BasePrefixCache": "req_to_token_pool",
    "managers.cache_controller.HiCacheController": "_page_get_zero_copy _page_set_zero_copy",
    "mem_cache.hicache_storage.HiCacheFile": "file_path metadata_cache _evictor _get_suffixed_key",
    "model_executor.model_runner.ModelRunner": "server_args model_config model token_to_kv_pool req_to_token_pool "
    "attn_backend dtype",
    "model_executor.forward_batch_info.ForwardBatch": "forward_mode batch_size input_ids req_pool_indices seq_lens "
    "seq_lens_cpu out_cache_loc positions spec_algorithm is_extend_in_batch extend_seq_lens extend_prefix_lens "
    "extend_seq_lens_cpu extend_prefix_lens_cpu global_num_tokens_cpu global_num_tokens_gpu rids "
    "global_num_tokens_for_logprob_cpu global_num_tokens_for_logprob_gpu num_token_non_padded mamba_track_mask "
    "mamba_track_indices mamba_track_seqlens",
    "model_executor.forward_batch_info.ForwardMode": "EXTEND is_extend is_decode is_idle",
    "model_executor.forward_batch_info.CaptureHiddenMode": "NULL",
    "configs.model_config.ModelConfig": "attention_arch dtype head_dim v_head_dim hf_config hf_text_config "
    "is_encoder_decoder is_generation is_hybrid_swa is_multimodal model_path num_attention_heads num_hidden_layers "
    "get_num_kv_heads get_total_num_kv_heads from_server_args full_attention_layer_ids swa_attention_layer_ids "
    "get_swa_num_kv_heads swa_head_dim swa_v_head_dim has_attention_sinks",
    "layers.radix_attention.RadixAttention": "layer_id scaling head_dim v_head_dim tp_q_head_num tp_k_head_num "
    "tp_v_head_num logit_cap sliding_window_size is_cross_attention attn_type xai_temperature_len use_irope",
    "layers.linear.QKVParallelLinear": "q_proj_shard_size kv_proj_shard_size quant_method",
    "layers.attention.base_attn_backend.AttentionBackend": "init_forward_metadata init_forward_metadata_out_graph "
    "init_cuda_graph_state get_cuda_graph_seq_len_fill_value forward_decode forward_extend",
    "plugins.hook_registry.HookRegistry": "register _patched",
    "arg_groups.arg_utils.Arg": "help choices",
}
"""Attributes of objects of SGLang that the plugin reads, calls or overrides, by class."""

ALTERNATIVES: dict[str, list[set[str]]] = {
    "seat": [{"managers.schedule_batch.Req.req_pool_idx"}, {"managers.schedule_batch.ReqKvInfo.req_pool_idx"}],
    "committed_tokens": [
        {"managers.schedule_batch.Req.kv_committed_len"},
        {"managers.schedule_batch.ReqKvInfo.kv_committed_len"},
    ],
    "state_source": [
        {f"managers.schedule_batch.Req.{name}" for name in ("mamba_cow_src_index", "mamba_pool_idx")},
        {f"managers.schedule_batch.ReqKvInfo.{name}" for name in ("mamba_cow_src_index", "mamba_pool_idx")},
    ],
    "prefix_tokens": [{"managers.schedule_batch.Req.prefix_indices"}, {"managers.schedule_batch.Req.prefix_len"}],
    "real_token_counts": [
        {"model_executor.forward_batch_info.ForwardBatch.num_token_non_padded_cpu"},
        {
            "model_executor.forward_batch_info.ForwardBatch.global_num_token_non_padded",
            "model_executor.forward_batch_info.ForwardBatch.global_num_token_non_padded_cpu",
        },
    ],
    "model_config": [
        {"server_args.ServerArgs.get_model_config"},
        {"arg_groups.model_override_base.model_config_of", "arg_groups.model_override_base.resolving_view"},
    ],
    "is_resolved": [
        {"server_args.ServerArgs.get_model_config"},
        {"server_args.ServerArgs._resolution_finished", "server_args.ServerArgs.resolve_once"},
    ],
}
"""What functions of ``attach/releases.py`` choose between: exactly one choice is there, all of it."""

PARAMETERS: dict[str, str] = {
    "mem_cache.memory_pool.MHATokenToKVPool": "size dtype head_num head_dim v_head_dim layer_num page_size device "
    "enable_memory_saver start_layer end_layer",
    "mem_cache.kv_cache_dtype.configure_kv_cache_dtype": "server_args_kv_cache_dtype model_dtype is_draft_worker",
    "mem_cache.swa_memory_pool.SWAKVPool": "size size_swa page_size dtype head_num head_dim swa_attention_layer_ids "
    "full_attention_layer_ids device token_to_kv_pool_class",
    "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend": "full_attn_backend linear_attn_backend "
    "full_attn_layers",
    "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify": "model "
    "last_correct_step_indices mamba_track_indices mamba_steps_to_track req_pool_indices",
    "mem_cache.common.free_swa_out_of_window_slots": "sliding_window_size page_size req_to_token_pool",
    "model_executor.pool_configurator.MemoryPoolConfig": "max_total_num_tokens full_max_total_num_tokens "
    "swa_max_total_num_tokens",
    "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool": "sizes req_to_token_pool",
    "managers.cache_controller.HiCacheController._page_get_zero_copy": "operation hash_values host_indices extra_info",
    "managers.cache_controller.HiCacheController._page_set_zero_copy": "hash_values host_indices extra_info",
    "mem_cache.storage.file.lru_file_evictor.LRUFileEvictor.reserve": "suffixed_key value_bytes key",
    "mem_cache.storage.file.lru_file_evictor.LRUFileEvictor.touch": "tensor_path",
    "plugins.hook_registry._propagate_patch": "original wrapped source_module",
    "models.utils.apply_qk_norm": "q k q_norm k_norm head_dim alt_stream allow_inplace",
}
"""Parameters of functions of SGLang that the plugin calls, or is called with, by name."""

VARIABLES = """
    SGLANG_USE_CPU_ENGINE SGLANG_PLUGINS SGLANG_TEST_RETRACT SGLANG_TEST_RETRACT_INTERVAL
    SGLANG_SWA_EVICTION_INTERVAL SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY
"""


@cache
def sources(version: str) -> SourceTree:
    return SourceTree(tree(version))


releases = pytest.mark.parametrize("version", SGLANG_VERSIONS)


def test_every_supported_release_is_pinned() -> None:
    assert tuple(pins()) == SGLANG_VERSIONS


def target_in(version: str, point: Touchpoint) -> str | None:
    return next((target for target in point.targets if sources(version).has(target)), None)


def strange(version: str, point: touchpoints.Touchpoint) -> str | None:
    """What a release lacks of a touch point; None where it is there and takes what its hook names."""
    target = target_in(version, point)
    if target is None:
        return point.name
    stock = sources(version).parameters(target)
    parameters = list(inspect.signature(point.hook).parameters.values())
    if point.kind is not HookType.BEFORE:  # the original function, or its result, comes first
        parameters = parameters[1:]
    named = [mine.name for mine in parameters if mine.kind is mine.POSITIONAL_OR_KEYWORD]
    lacks = [name for name in named if name not in stock]
    return f"{target} (no parameter {', '.join(lacks)})" if lacks else None


@releases
def test_touchpoints(version: str) -> None:
    """Each is there under one of its names, and takes what its hook names."""
    missing = [found for point in ALL if (found := strange(version, point))]
    assert not missing, f"touch points that do not read back: {', '.join(missing)}"


def test_no_name_of_a_touchpoint_is_dead() -> None:
    """Every name is the one that is hooked in some release."""
    for point in ALL:
        hooked = {target_in(version, point) for version in SGLANG_VERSIONS}
        assert hooked == set(point.targets), point.name


def plugin_imports() -> set[str]:
    """Dotted names that the plugin imports from SGLang."""
    found: set[str] = set()
    for path in sorted(PLUGIN.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@releases
def test_imports(version: str) -> None:
    imports = plugin_imports()
    assert len(imports) > 20
    missing = {name for name in imports if not sources(version).has(name)}
    assert not missing, f"names that are gone: {', '.join(sorted(missing))}"


@releases
def test_attributes(version: str) -> None:
    missing = [
        f"{owner} has no {', '.join(lacks)}"
        for owner, names in ATTRIBUTES.items()
        if (lacks := sorted(set(names.split()) - class_attributes(version, SRT + owner)))
    ]
    assert not missing, f"classes that changed: {'; '.join(missing)}"


def is_there(version: str, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    if sources(version).has(SRT + name):
        return True
    return sources(version).has(SRT + owner) and attribute in class_attributes(version, SRT + owner)


def class_attributes(version: str, place: str) -> set[str]:
    try:
        return sources(version).attributes(place)
    except KeyError:  # a module
        return set()


@releases
@pytest.mark.parametrize("function", ALTERNATIVES)
def test_alternatives(version: str, function: str) -> None:
    """A request that is asked for what it does not have must raise, not answer: so exactly one place has it."""
    there = [choice for choice in ALTERNATIVES[function] if all(is_there(version, name) for name in choice)]
    some = [choice for choice in ALTERNATIVES[function] if any(is_there(version, name) for name in choice)]
    assert len(there) == 1, f"sglang {version}: {function} finds {there}"
    assert there == some, f"sglang {version}: {function} finds part of {some}"


@releases
def test_cache_salt(version: str) -> None:
    """From its first release on, the salt is part of what keeps prefixes apart."""
    salted = "cache_salt" in sources(version).attributes(SRT + "managers.schedule_batch.Req")
    assert salted == (version != "0.5.17")


@releases
def test_slots_of_kept_states(version: str) -> None:
    """Where a batch does not say which slot it kept a state in, hybrid models are refused with overlap scheduling."""
    attributes = sources(version).attributes(SRT + "managers.schedule_batch.ScheduleBatch")
    assert ("mamba_track_buffer_indices" in attributes) == (version != "0.5.17")


@releases
def test_drafts_of_prompts_with_images(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NGRAM they are tokens of the model from 0.5.23 on; the name is in no older release."""
    source = tree(version) / "sglang" / "srt" / "speculative" / "ngram_worker.py"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=source))
    assert drafts_token_ids.__wrapped__() == (version not in [f"0.5.{patch}" for patch in range(17, 23)])


@releases
def test_allocator_on_cpu(version: str) -> None:
    """Where the allocator says whether it uses Triton it has a way without."""
    attributes = sources(version).attributes(SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator")
    naive = sources(version).has(SRT + "mem_cache.allocator.paged.alloc_decode_naive")
    assert ("use_triton_kernels" in attributes) == naive


@releases
def test_parameters(version: str) -> None:
    missing = []
    for function, names in PARAMETERS.items():
        if not sources(version).has(SRT + function):
            missing.append(f"{function} is gone")
            continue
        if lacks := set(names.split()) - set(sources(version).parameters(SRT + function)):
            missing.append(f"{function} takes no {', '.join(sorted(lacks))}")
    assert not missing, f"functions that changed: {'; '.join(missing)}"


@releases
def test_batch_of_a_refill(version: str) -> None:
    """Fields that a refill pass makes a ForwardBatch of."""
    code = ast.parse((PLUGIN / "attention" / "refill_pass.py").read_text())
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)]
    (made,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ForwardBatch"]
    used = {keyword.arg for keyword in made.keywords}
    used |= {
        target.attr
        for node in ast.walk(code)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "batch"
    }
    missing = used - sources(version).attributes(SRT + "model_executor.forward_batch_info.ForwardBatch")
    assert len(used) > 20
    assert not missing, f"sglang {version}: ForwardBatch has no {sorted(map(str, missing))}"


@releases
def test_graphs_of_prefills_ask_for_what_a_refill_tells(version: str) -> None:
    """On a GPU alone, so nothing else here would notice: what they ask is what SGLang's own plan brings."""
    runner = tree(version) / "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py"
    asks = runner.exists() and "kv_loc_plan.bind_replay" in runner.read_text()
    assert sources(version).has(SRT + "mem_cache.kv_index_translator.KVIndexTranslator.bind_own_plan") == asks
    runner_has = sources(version).attributes(SRT + "model_executor.model_runner.ModelRunner")
    assert not asks or "kv_index_translator" in runner_has


@releases
def test_a_prefix_hit_and_its_seat_are_of_one_round(version: str) -> None:
    """Kept windows are pinned from the one to the other, and not from round to round."""
    (scheduler,) = [
        node
        for node in ast.parse((tree(version) / "sglang/srt/managers/scheduler.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Scheduler"
    ]
    texts = [ast.unparse(node) for node in scheduler.body if isinstance(node, ast.FunctionDef)]
    seats = [text for text in texts if "prepare_for_extend()" in text]
    assert seats
    assert all("init_next_round_input(self.tree_cache)" in text for text in seats)


@releases
def test_variables(version: str) -> None:
    """Environment variables that the plugin or its tests set."""
    code = (tree(version) / "sglang/srt/environ.py").read_text() + (
        tree(version) / "sglang/srt/plugins/__init__.py"
    ).read_text()
    code += (tree(version) / "sglang/srt/utils/common.py").read_text()
    missing: list[Any] = [name for name in VARIABLES.split() if name not in code]
    assert not missing, f"sglang {version} does not know {missing}"
