"""A draft model beside the INT2 cache: how it is run, what is refused, and what its cache costs."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_cpu.server import STAND_IN
from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from sglang_oscar.attention import flash_attention3
from sglang_oscar.attention.verification import visible_words
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.speculation import arguments, draft_model
from sglang_oscar.formats import drafts
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory import sizing
from sglang_oscar.memory.plan import make_plan

QWEN3_8B = Geometry.uniform(RowLayout(8, 128, 128), Windows(sink=64, recent=256, ring=264), torch.bfloat16, layers=36)


def asked(**changes: Any) -> SimpleNamespace:
    """Server arguments of EAGLE as the operator gives them."""
    given = dict.fromkeys([*arguments.CHAIN, "speculative_draft_attention_backend"])
    plain = {"speculative_algorithm": "EAGLE", "device": "cuda", "enable_multi_layer_eagle": False}
    return SimpleNamespace(**given | plain | changes)


def config(**changes: Any) -> SimpleNamespace:
    """SGLang's ModelConfig of an EAGLE3 head for Qwen3-8B."""
    plain = {
        "model_path": "head",
        "attention_arch": SimpleNamespace(name="MHA"),
        "is_hybrid_swa": False,
        "hf_config": SimpleNamespace(architectures=["LlamaForCausalLMEagle3"]),
        "num_nextn_predict_layers": None,
        "num_hidden_layers": 1,
        "num_attention_layers": 1,
        "head_dim": 128,
        "v_head_dim": 128,
        "dtype": torch.bfloat16,
        "get_num_kv_heads": lambda ranks: max(8 // ranks, 1),
    }
    return SimpleNamespace(**plain | changes)


def test_drafts_are_a_chain_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = asked()
    arguments.configure(args, None)
    assert {name: getattr(args, name) for name in arguments.CHAIN} == arguments.CHAIN
    assert args.speculative_draft_attention_backend == "triton"
    args = asked(speculative_num_steps=5, device="cpu")
    arguments.configure(args, None)
    assert (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens) == (5, 1, None)
    assert args.speculative_draft_attention_backend == "torch_native"
    args = asked(speculative_draft_attention_backend="fa3", speculative_eagle_topk=4)
    arguments.configure(args, None)
    assert (args.speculative_draft_attention_backend, args.speculative_eagle_topk) == ("fa3", 4)
    ngram = asked(speculative_algorithm="NGRAM")
    arguments.configure(ngram, None)
    assert ngram == asked(speculative_algorithm="NGRAM")


@pytest.mark.parametrize(("device", "backend"), [("cuda", "fa3"), (None, "fa3"), ("cpu", "torch_native")])
def test_drafts_attend_by_flash_attention_3_where_prompts_do(
    device: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash_attention3, "measured", lambda head_dim: True)
    args = asked(device=device)
    arguments.configure(args, None)
    assert args.speculative_draft_attention_backend == backend


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"attention_arch": SimpleNamespace(name="MLA")}, "MLA"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"hf_config": SimpleNamespace(architectures=["Qwen3ForCausalLM"])}, "whole model"),
    ],
)
def test_refused_draft_models(changes: dict[str, Any], what: str) -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]))
    draft_model.check(config(), model)
    with pytest.raises(Int2Error, match=f"{what}.*: head; set --speculative-draft-model-path"):
        draft_model.check(config(**changes), model)


def test_bytes_of_a_draft_token() -> None:
    assert draft_model.cell_bytes(config(), 1, torch.bfloat16) == 8 * 256 * 2
    assert draft_model.cell_bytes(config(), 4, torch.bfloat16) == 2 * 256 * 2
    assert draft_model.cell_bytes(config(), 1, torch.float8_e4m3fn) == 8 * 256
    assert draft_model.cell_bytes(config(num_hidden_layers=2), 1, torch.float32) == 2 * 8 * 256 * 4
    brought = config(num_nextn_predict_layers=1, num_hidden_layers=46, num_attention_layers=46)
    assert draft_model.cell_bytes(brought, 1, torch.bfloat16) == 8 * 256 * 2
    assert draft_model.layers(config(num_nextn_predict_layers=0, num_hidden_layers=3)) == 3


def test_the_account_has_both_caches() -> None:
    plan = make_plan(QWEN3_8B, 40 * GIB, 48, 64, [draft_model.DraftCache(4096)])
    tokens = (plan.budget_bytes - plan.fixed_bytes) // plan.token_bytes
    line = next(line for line in plan.lines(tokens) if line.startswith("draft model's cache"))
    assert f"{tokens} tokens x 4096 bytes = {tokens * 4096 / GIB:.3f} GiB" in line
    assert "20% more tokens" in line
    assert not any("draft" in line for line in make_plan(QWEN3_8B, 40 * GIB, 48, 64).lines(tokens))


def test_two_pages_of_both_caches_must_fit() -> None:
    tight = make_plan(QWEN3_8B, 40 * GIB, 48, 64).fixed_bytes + 2 * 64 * QWEN3_8B.cell_bytes
    make_plan(QWEN3_8B, tight, 48, 64)
    with pytest.raises(Int2Error, match="too small"):
        make_plan(QWEN3_8B, tight, 48, 64, [draft_model.DraftCache(4096)])


def test_the_cache_of_a_draft_model_is_not_quantized() -> None:
    asked_for = {"server_args_kv_cache_dtype": "int2", "is_draft_worker": True, "model_dtype": torch.float16}
    for given in ({}, {"speculative_draft_kv_cache_dtype": None}, {"speculative_draft_kv_cache_dtype": "auto"}):
        assert sizing.around_configure_kv_cache_dtype(print, **asked_for, **given) == ("auto", torch.float16)
    named = sizing.around_configure_kv_cache_dtype(dict, **asked_for, speculative_draft_kv_cache_dtype="fp8_e4m3")
    assert named == asked_for | {"speculative_draft_kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("named", "dtype"),
    [(None, torch.float16), ("auto", torch.float16), ("bf16", torch.bfloat16), ("fp8_e4m3", torch.float8_e4m3fn)],
)
def test_the_type_of_that_cache(named: str | None, dtype: torch.dtype) -> None:
    args: Any = SimpleNamespace(speculative_draft_kv_cache_dtype=named)
    assert drafts.cache_dtype(args, SimpleNamespace(dtype=torch.float16)) == dtype


def test_one_branch_is_a_chain_whatever_the_mask_holds() -> None:
    """Where a CUDA graph is replayed the mask is a buffer that nobody need have filled."""
    words = visible_words(SimpleNamespace(custom_mask=torch.zeros(3, dtype=torch.bool), topk=1), torch.ones(2), 3)
    assert words.tolist() == [[1, 3, 7]] * 2


def test_trees_of_the_stand_in() -> None:
    """Two candidates a group: the root's are 0 and 1, those of candidate 1 are 4 and 5, of 4 (behind it) 8 and 9."""
    spec = importlib.util.spec_from_file_location("drafting", STAND_IN / "sgl_kernel" / "drafting.py")
    assert spec is not None
    assert spec.loader is not None
    drafting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drafting)
    parents, selected = torch.tensor([[-1, 0, 1, 2, 4]]), torch.tensor([[0, 1, 4, 5, 8]])
    mask, positions = torch.zeros(36, dtype=torch.bool), torch.zeros(6, dtype=torch.long)
    index, child, sibling = torch.full((3, 1, 6), -1)
    made = (parents, selected, torch.tensor([10]), mask, positions, index, child, sibling, 2, 3, 6)
    drafting.build_tree_kernel_efficient_cpu(*made, SimpleNamespace(name="QLEN_ONLY"))
    assert positions.tolist() == [10, 11, 11, 12, 12, 13]
    ancestors = [{0}, {0, 1}, {0, 2}, {0, 2, 3}, {0, 2, 4}, {0, 2, 3, 5}]
    assert [set(row.nonzero().flatten().tolist()) for row in mask.view(6, 6)] == ancestors
    assert child.tolist() == [[1, -1, 3, 5, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1, -1]]
    with pytest.raises(NotImplementedError, match="FULL_MASK"):
        drafting.build_tree_kernel_efficient_cpu(*made, SimpleNamespace(name="FULL_MASK"))
