"""Operators of hybrid models in the stand-in for sgl_kernel, against float64 token by token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_cpu.server import STAND_IN

K_HEADS, HEADS, K_DIM, V_DIM, SLOTS = 2, 4, 8, 6, 5


@pytest.fixture(scope="module")
def stand_in() -> Iterator[dict[str, ModuleType]]:
    """Modules of the stand-in, without what importing the package does to torch."""
    import importlib.util

    modules = {}
    for name in ("delta_rule", "convolution", "gated_layers", "state_space"):
        spec = importlib.util.spec_from_file_location(f"stand_in_{name}", STAND_IN / "sgl_kernel" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[name]
        spec.loader.exec_module(modules[name])
    yield modules
    for name in modules:
        del sys.modules[f"stand_in_{name}"]


def recurrence(q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
    """The gated delta rule of one sequence in float64, as it is written down: outputs and states before every token."""
    out, states = [], []
    for t in range(len(q)):
        states.append(state.clone())
        for h in range(HEADS):
            key, query = (x[t, h // (HEADS // K_HEADS)].double() for x in (k, q))
            key, query = (x / (x.square().sum() + 1e-6).sqrt() for x in (key, query))
            held = state[h] * torch.exp(g[t, h].double())
            held = held + torch.outer(beta[t, h].double() * (v[t, h].double() - held @ key), key)
            state[h] = held
            out.append(held @ query / K_DIM**0.5)
    return torch.stack(out).view(len(q), HEADS, V_DIM), [*states, state]


def sequences(lengths: list[int], seed: int):  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    tokens = sum(lengths)
    q, k = torch.randn(1, tokens, K_HEADS, K_DIM), torch.randn(1, tokens, K_HEADS, K_DIM)
    v, a, b = torch.randn(1, tokens, HEADS, V_DIM), torch.randn(tokens, HEADS), torch.randn(tokens, HEADS)
    return q, k, v, a, b, torch.randn(HEADS), torch.randn(HEADS)


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_prefill_and_decode_follow_the_recurrence(
    stand_in: dict[str, ModuleType], lengths: list[int], seed: int
) -> None:
    """Outputs, states at the end and states before every 64 tokens, in prefill; and one more token in decode."""
    rule = stand_in["delta_rule"]
    q, k, v, a, b, decay, bias = sequences(lengths, seed)
    g, beta = rule.gates(decay, a, b, bias)
    assert torch.allclose(g, -decay.exp() * torch.log1p((a + bias).exp())[None], atol=1e-5)
    states = torch.randn(SLOTS, HEADS, V_DIM, K_DIM)
    slots = torch.tensor([4, 1, 2][: len(lengths)])
    before, ends = states.clone(), torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    out, none, chunks = rule.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, states, ends, initial_state_indices=slots, head_first=False, use_qk_l2norm_in_kernel=True
    )
    assert none is None
    expected = []
    for index, slot in enumerate(slots.tolist()):
        part = slice(int(ends[index]), int(ends[index + 1]))
        of = [x[0, part] for x in (q, k, v, g, beta)]
        read, after = recurrence(*of, before[slot].double())
        assert torch.allclose(out[0, part].double(), read, atol=1e-4)
        assert torch.allclose(states[slot].double(), after[-1], atol=1e-4)
        expected += after[: len(of[0]) : 64]
    assert torch.allclose(chunks[0].double(), torch.stack(expected), atol=1e-4)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(states[untouched], before[untouched])

    count, last = len(lengths), states.clone()
    one = [x[:, :count] for x in (q, k, v)]
    read = rule.fused_sigmoid_gating_delta_rule_update_cpu(
        decay, bias, *one, a[:count], b[:count], states, slots, torch.arange(count + 1)
    )
    for index, slot in enumerate(slots.tolist()):
        of = [x[0, index : index + 1] for x in (*one, g, beta)]
        wanted, after = recurrence(*of, last[slot].double())
        assert torch.allclose(read[0, index : index + 1].double(), wanted, atol=1e-4)
        assert torch.allclose(states[slot].double(), after[-1], atol=1e-4)


@given(cut=st.integers(1, 19), seed=st.integers(0, 99))
def test_convolution_goes_on_where_it_stopped(stand_in: dict[str, ModuleType], cut: int, seed: int) -> None:
    """Two chunks and then single tokens give what one filter over all gives."""
    conv = stand_in["convolution"]
    torch.manual_seed(seed)
    x, weight, states = torch.randn(3, 24), torch.randn(3, 4), torch.full((2, 3, 3), 9.0)
    padded = torch.nn.functional.pad(x.double(), (3, 0))
    windows = torch.stack([padded[:, i : i + 4] for i in range(24)], dim=1)
    expected = torch.nn.functional.silu((windows * weight.double()[:, None]).sum(-1))
    slot, parts = torch.tensor([1]), []
    for begin, end in ((0, cut), (cut, 20)):
        ends, begun = torch.tensor([0, end - begin]), torch.tensor([begin > 0])
        parts.append(conv.causal_conv1d_fn_cpu(x[:, begin:end], weight, None, states, ends, slot, begun))
    for token in range(20, 24):
        one = conv.causal_conv1d_update_cpu(x[None, :, token], states, weight, None, "silu", slot)
        parts.append(one.T)
    assert torch.allclose(torch.cat(parts, dim=1).double(), expected, atol=1e-5)
    assert bool((states[0] == 9).all())


TREE = ([1, 3, -1, -1, 5, -1], [-1, 2, -1, 4, -1, -1], [-1, 0, 0, 1, 1, 4])
"""First children, next siblings and parents of a tree of six tokens."""


@pytest.mark.parametrize("tree", [False, True])
def test_verification_is_decode_along_every_path(stand_in: dict[str, ModuleType], tree: bool) -> None:
    """Outputs and states behind every token are those of decoding its path; nothing that is read is written."""
    conv, rule, tokens = stand_in["convolution"], stand_in["delta_rule"], 6
    assert conv.parents_of(*TREE[:2]) == TREE[2]
    parents = TREE[2] if tree else list(range(-1, tokens - 1))
    slots, units = torch.tensor([3, -1, 1]), torch.arange(3)
    links = [torch.tensor([x] * 3) for x in TREE[:2]]
    found = torch.full((3, tokens), 9) if tree else None

    x, weight, states = torch.randn(3, 7, tokens), torch.randn(7, 4), torch.randn(SLOTS, 7, 3)
    behind, before = torch.zeros(3, tokens, 7, 3), states.clone()
    of_tree = {"retrieve_next_token": links[0], "retrieve_next_sibling": links[1], "retrieve_parent_token": found}
    out = conv.causal_conv1d_update_cpu(
        x, states, weight, None, "silu", slots, intermediate_conv_window=behind, intermediate_state_indices=units,
        **of_tree if tree else {},
    )  # fmt: skip
    assert torch.equal(states, before)
    assert not bool(out[1].any())
    q, k, v, a, b, decay, bias = sequences([3 * tokens], 1)
    held = torch.randn(SLOTS, HEADS, V_DIM, K_DIM)
    matrices, unread = torch.zeros(3, tokens, HEADS, V_DIM, K_DIM), held.clone()
    read = rule.fused_sigmoid_gating_delta_rule_update_cpu(
        decay, bias, q, k, v, a, b, held, slots, torch.arange(4) * tokens, disable_state_update=True,
        intermediate_states_buffer=matrices, intermediate_state_indices=units, cache_steps=tokens,
        retrieve_parent_token=found,
    )  # fmt: skip
    assert torch.equal(held, unread)
    for sequence in (0, 2):
        for token in range(tokens):
            path = [token]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            for node in path:
                last = conv.causal_conv1d_update_cpu(
                    x[[sequence], :, node], states, weight, None, "silu", slots[[sequence]]
                )
                at = [sequence * tokens + node]
                one = rule.fused_sigmoid_gating_delta_rule_update_cpu(
                    decay, bias, q[:, at], k[:, at], v[:, at], a[at], b[at], held, slots[[sequence]], torch.arange(2)
                )
            slot = slots[sequence]
            assert torch.allclose(out[sequence, :, token], last[0], atol=1e-5)
            assert torch.equal(behind[sequence, token], states[slot])
            assert torch.allclose(read[:, at], one, atol=1e-5)
            assert torch.allclose(matrices[sequence, token], held[slot], atol=1e-5)
            states[slot], held[slot] = before[slot], unread[slot]


def test_norms_and_gates(stand_in: dict[str, ModuleType]) -> None:
    layers = stand_in["gated_layers"]
    torch.manual_seed(1)
    q_gate, k = torch.randn(5, 4 * 2 * 8), torch.randn(5, 2 * 8)
    q_weight, k_weight = torch.randn(8), torch.randn(8)
    q, keys, gate = layers.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, 1e-6, 8, 4)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())

    heads = q_gate.double().view(5, 4, 16)
    assert torch.allclose(q.double().view(5, 4, 8), norm(heads[..., :8], q_weight), atol=1e-5)
    assert torch.equal(gate.view(5, 4, 8), q_gate.view(5, 4, 16)[..., 8:])
    assert torch.allclose(keys.double().view(5, 2, 8), norm(k.double().view(5, 2, 8), k_weight), atol=1e-5)
    x, z, weight = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)
    wanted = norm(x.double(), weight - 1) * z.double() * z.double().sigmoid()
    assert torch.allclose(layers.fused_rmsnorm_gated_cpu(x, weight, z, 1e-6).double(), wanted, atol=1e-5)
    for said in ({}, {"inplace": True}):  # as newer and as older releases of SGLang call it
        y = x.clone()
        assert layers.fused_sigmoid_mul_cpu(y, z, **said) is y
        assert torch.allclose(y, x * z.sigmoid(), atol=1e-6)
    with pytest.raises(NotImplementedError, match="inplace=False"):
        layers.fused_sigmoid_mul_cpu(x.clone(), z, inplace=False)
    qkvz, ba = torch.randn(3, 2 * 2 * 8 + 2 * 4 * 6), torch.randn(3, 8)
    qkv, cut, b, a = layers.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 2, 4, 8, 6)
    assert torch.equal(torch.cat([qkv, cut.flatten(1)], 1), qkvz)
    assert torch.equal(torch.cat([b, a], 1), ba)


def test_state_spaces(stand_in: dict[str, ModuleType]) -> None:
    """Prefill of three sequences, then a token of each, against Mamba2's equation in float64 as a sum over tokens."""
    space, heads, groups, width, lengths = stand_in["state_space"], 4, 2, 6, [5, 9, 3]
    torch.manual_seed(2)
    tokens, chunk = sum(lengths), 4
    x, dt = torch.randn(1, tokens + 3, heads, 8), torch.randn(1, tokens + 3, heads)
    B, C = torch.randn(1, tokens + 3, groups, width), torch.randn(1, tokens + 3, groups, width)
    A, D, bias, before = -torch.rand(heads), torch.randn(heads), torch.randn(heads), torch.randn(3, heads, 8, width)
    steps = torch.nn.functional.softplus(dt[0].double() + bias)

    def state(sequence: int, own: list[int]) -> torch.Tensor:
        """Behind tokens ``own``: each decays by what follows it."""
        found = before[sequence].double() * torch.exp(A * steps[own].sum(0))[:, None, None]
        for place, token in enumerate(own):
            decay = torch.exp(A * steps[own[place + 1 :]].sum(0)) * steps[token]
            keys = B[0, token].double().repeat_interleave(heads // groups, 0)
            found += (decay[:, None] * x[0, token])[..., None] * keys[:, None]
        return found

    def read(sequence: int, own: list[int]) -> torch.Tensor:
        queries = C[0, own[-1]].double().repeat_interleave(heads // groups, 0)
        return (state(sequence, own) @ queries[..., None]).squeeze(-1) + D[:, None] * x[0, own[-1]]

    starts = [0, 5, 14, 17]
    first = [part[:, :tokens] for part in (x, dt, B, C)]
    out = torch.zeros(1, tokens, heads, 8)
    grid, last, wanted = space.mamba_chunk_scan_combined(
        first[0], first[1], A, first[2], first[3], chunk, D=D, dt_bias=bias, dt_softplus=True, out=out,
        cu_seqlens=torch.tensor(starts), initial_states=before, state_dtype=torch.float32,
        track_seq_idx=torch.tensor([1, 2]), track_end_locs=torch.tensor([9, 14]),
    )  # fmt: skip
    slots = torch.zeros(5, heads, 8, width)
    slots[[3, 0, 4]] = last
    after = torch.zeros(3, heads * 8)
    spread = [of[:, None].expand(-1, 8) for of in (bias, D)]
    space.selective_state_update(
        slots, x[0, tokens:], dt[0, tokens:, :, None].expand(-1, -1, 8), A[:, None, None].expand(-1, 8, width),
        B[0, tokens:], C[0, tokens:], spread[1], z=None, dt_bias=spread[0], dt_softplus=True,
        state_batch_indices=torch.tensor([3, 0, 4]), out=after,
    )  # fmt: skip
    for sequence in range(3):
        own = list(range(starts[sequence], starts[sequence + 1]))
        for place in range(len(own)):
            assert torch.allclose(out[0, own[place]].double(), read(sequence, own[: place + 1]), atol=1e-4)
        assert torch.allclose(last[sequence].double(), state(sequence, own), atol=1e-4)
        own.append(tokens + sequence)
        assert torch.allclose(after[sequence].view(heads, 8).double(), read(sequence, own), atol=1e-4)
        assert torch.allclose(slots[[3, 0, 4][sequence]].double(), state(sequence, own), atol=1e-4)
    assert torch.allclose(grid[0, 2].double(), state(1, [5, 6, 7]), atol=1e-4)  # in front of the batch's ninth token
    assert torch.allclose(wanted[0, 0].double(), state(1, [5, 6, 7, 8]), atol=1e-4)
    assert torch.equal(wanted[0, 1], before[2])
