"""Where a decode step goes: sums over a trace of overlapping kernels."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

from step_profile import NeverAtOnceError, kind, summarize, wait_for_batch

from oscar_tools.local_server import LocalServer


def kernel(name: str, begin: float, end: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


def test_kinds() -> None:
    assert kind("nvjet_sm90_tst_192x8_64x8_2x1_v_bz_TNT") == "matrix products"
    assert kind("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>") == "attention"
    assert kind("void flashinfer::norm::FusedAddRMSNormKernel<8u>") == "other"
    mainloop = "cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>"
    assert kind(f"void {mainloop}") == "attention"
    assert kind("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<...>>>") == "attention"
    assert kind("void flash::prepare_varlen_num_blocks_kernel<1, true>(...)") == "attention"
    assert kind("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>") == "matrix products"
    assert kind("oscar_decode") == "attention"
    assert kind("oscar_store") == "store"
    assert kind("void (anonymous namespace)::store_kvcache<2048l>") == "store"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("triton_red_fused_mm_t_3", "matrix products"),
        ("triton_red_fused__to_copy_add_mean_mm_mul_pow_rsqrt_t_0", "matrix products"),
        ("triton_per_fused_mm_mul_silu_slice_split_t_12", "matrix products"),
        ("triton_tem_fused_addmm_7", "matrix products"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "other"),
        ("triton_poi_fused_cat_index_select_mul_sub_unsqueeze_4", "other"),
        ("triton_poi_fused_mul_silu_slice_5", "other"),
        # Neither a store nor the merge of attention, although the operator's name has it.
        ("triton_poi_fused__to_copy_embedding_merge_store_cache_9", "other"),
    ],
)
def test_kinds_of_compiled_kernels(name: str, expected: str) -> None:
    """Matrix-vector products have norms and activations fused into them: their time is that of reading weights."""
    assert kind(name) == expected


def test_steps_where_activations_are_fused() -> None:
    """Three steps of two layers whose projections take two kernels each, with the activation inside both."""
    events = []
    for at in range(0, 600, 100):
        names = ("triton_red_fused_mm_mul_silu_0", "triton_per_fused_mm_mul_silu_1", "oscar_store", "oscar_decode")
        events += [kernel(name, at + 10 * number, at + 10 * number + 10) for number, name in enumerate(names)]
        events.append(kernel("void flashinfer::PersistentVariableLengthMergeStatesKernel", at + 40, at + 50))
    found = summarize(events, layers=2)
    assert found["steps"] == 3
    assert found["us_per_step"] == {"attention": 40, "matrix products": 40, "store": 20}


def test_two_steps_of_two_layers() -> None:
    """A kernel that starts before its predecessor ends counts from there on, and gaps are idle."""
    events: list[dict[str, Any]] = [{"cat": "cpu_op", "name": "oscar_decode", "ts": 0, "dur": 1e6}]
    for at in range(0, 400, 100):
        events += [
            kernel("gemm", at, at + 40),
            kernel("oscar_store", at + 40, at + 50),
            kernel("oscar_decode", at + 45, at + 75),
            kernel("act_and_mul_kernel", at + 85, at + 90),
        ]
    found = summarize(events, layers=2)
    assert found["steps"] == 2
    assert found["us_per_step"] == {"attention": 50, "matrix products": 80, "other": 10, "store": 20}
    # Ten between attention and activation in each layer, ten after the activation but for the last layer.
    assert found["idle_us_per_step"] == (4 * 10 + 3 * 10) / 2
    assert {"kernel": "oscar_decode", "us_per_step": 60, "launches": 2} in found["longest"]


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="not one whole step of 36 layers"):
        summarize([kernel("gemm", 0, 1)], layers=36)


class Log:
    """A server of which only the log is asked; it grows by a line every time."""

    def __init__(self, running: list[int]) -> None:
        speed = "gen throughput (token/s): 9.0, #queue-req: 0"
        self.lines = [f"Decode batch, #running-req: {count}, {speed}\n" for count in running]
        self.asked = 0

    def text(self) -> str:
        self.asked += 1
        return "".join(self.lines[: self.asked])


def test_recording_waits_for_the_whole_batch() -> None:
    asking: Future[object] = Future()
    log = Log([4, 1, 2, 3, 4, 4])
    wait_for_batch(cast(LocalServer, log), len(log.lines[0]), asking, 4)
    assert log.asked == 5
    asking.set_result(None)
    with pytest.raises(NeverAtOnceError, match="at most 3 requests"):
        wait_for_batch(cast(LocalServer, Log([3, 2])), 0, asking, 4)
    failed: Future[object] = Future()
    failed.set_exception(RuntimeError("refused"))
    with pytest.raises(RuntimeError, match="refused"):
        wait_for_batch(cast(LocalServer, Log([])), 0, failed, 4)
