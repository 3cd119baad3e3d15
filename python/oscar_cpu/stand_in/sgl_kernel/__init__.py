"""Stand-in for SGLang's kernel package on machines without libcuda, where the real one cannot be imported.

Put on PYTHONPATH for a CPU server and never elsewhere (:func:`oscar_cpu.server.environment`): importing
SGLang needs these names. What speculative decoding and
hybrid models call is there, in torch; serving others calls none of them.
"""

from __future__ import annotations

from types import SimpleNamespace

from sgl_kernel import device, operators, products
from sgl_kernel.drafting import (
    assign_draft_cache_locs_contiguous_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_bonus_tokens_cpu,
)
from sgl_kernel.verification import (
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    fill_accept_out_cache_loc_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "device",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "operators",
    "products",
    "verify_tree_greedy_cpu",
]

__version__ = "0.4.5"


products.install()
scalar_type = SimpleNamespace(ScalarType=object, scalar_types=SimpleNamespace())
