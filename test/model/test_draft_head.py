"""The draft head: a checkpoint with SGLang's names, what it reads of its target, its chains, and its training."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation")]

from draft_head.acceptance import right_drafts, steps_of_verification, tokens_per_step  # noqa: E402
from draft_head.head import DraftHead, load_head, read_layers  # noqa: E402
from draft_head.prompts import held_out_prompts  # noqa: E402
from draft_head.target import Target  # noqa: E402
from draft_head.training import Plan, rate, texts, train  # noqa: E402
from reference_model import retrieval  # noqa: E402
from reference_model.export import load_tokenizer  # noqa: E402
from reference_model.model import rope, rotate_half  # noqa: E402

MODEL = ROOT / "models" / "reference"
HIDDEN, WIDTH, KV_WIDTH, FFN, VOCABULARY = 192, 512, 256, 512, 4096
SGLANG = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.self_attn.q_proj.weight": (WIDTH, 2 * HIDDEN),
    "midlayer.self_attn.k_proj.weight": (KV_WIDTH, 2 * HIDDEN),
    "midlayer.self_attn.v_proj.weight": (KV_WIDTH, 2 * HIDDEN),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, WIDTH),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "midlayer.mlp.gate_proj.weight": (FFN, HIDDEN),
    "midlayer.mlp.up_proj.weight": (FFN, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, FFN),
    "norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
"""What ``LlamaForCausalLMEagle3`` reads, by the names that it splits into its own."""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(MODEL, "cpu")


@pytest.fixture(scope="module")
def work(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    text = "".join(retrieval.filler_lines()[:4000])
    np.save(folder / "tokens.npy", np.array(tokenizer.encode(text).ids, dtype=np.uint16))
    return folder


def trained(target: Target, tokenizer, work: Path, plan: Plan) -> tuple[DraftHead, dict]:
    torch.manual_seed(plan.seed)
    head = target.new_head()
    report = train(head, target, texts(plan, work, tokenizer, ["alpha", "beta", "gamma", "delta", "epsilon"]), plan)
    return head, report


def test_a_saved_head_is_what_sglang_loads(target: Target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = target.new_head()
    head.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == SGLANG
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert (config["num_hidden_layers"], config["head_dim"], config["draft_vocab_size"]) == (1, 128, VOCABULARY)
    # With tied embeddings SGLang would take the model's embeddings for the output matrix.
    assert config["tie_word_embeddings"] is False
    loaded = load_head(tmp_path, target.config).state_dict()
    assert all(torch.equal(loaded[name], tensor.bfloat16().float()) for name, tensor in head.state_dict().items())


def test_features_are_what_goes_into_the_layers_behind(target: Target, tokenizer) -> None:
    """SGLang hands out the residual stream before a layer; the last norm and the last layer are not in it."""
    ids = torch.tensor([tokenizer.encode("def scale(x):\n    return 1234 * x\n").ids])
    seen: list[torch.Tensor] = []
    layers = target.model.model.layers
    handles = [layers[i + 1].register_forward_pre_hook(lambda _, args: seen.append(args[0])) for i in read_layers(4)]
    handed = target.read(ids)
    for handle in handles:
        handle.remove()
    assert torch.equal(handed.features, torch.cat(seen, -1))
    assert torch.equal(handed.embeddings, target.model.model.embed_tokens(ids))


def served_chain(head: DraftHead, embeddings: torch.Tensor, features: torch.Tensor, begin: int, steps: int) -> list:
    """Logits of one chain as a server computes them: a cache, one new token after the other."""
    layer, config = head.midlayer, head.config
    keys, values, found = [], [], []
    state = torch.empty(0)
    for position in range(begin + steps):
        if position <= begin:
            state = head.fc(features[position])
        x = torch.cat([layer.input_layernorm(embeddings[position + 1]), layer.hidden_norm(state)])
        q, k, v = (getattr(layer.self_attn, name)(x).view(-1, 128) for name in ("q_proj", "k_proj", "v_proj"))
        cos, sin = rope(torch.tensor([position]), 128, config.rope_theta)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        keys.append(k)
        values.append(v)
        groups = config.heads // config.kv_heads
        heads = [
            (torch.stack(keys)[:, i // groups] @ q[i] / 128**0.5).softmax(0) @ torch.stack(values)[:, i // groups]
            for i in range(config.heads)
        ]
        state = state + layer.self_attn.o_proj(torch.cat(heads))
        state = state + layer.mlp(layer.post_attention_layernorm(state))
        if position >= begin:
            found.append(head.lm_head(head.norm(state)))
    return found


@torch.no_grad()
def test_chains_beside_each_other_are_those_of_a_server(target: Target, tokenizer) -> None:
    torch.manual_seed(3)
    head = target.new_head()
    for parameter in head.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    handed = target.read(torch.tensor([tokenizer.encode("import os\n\n\ndef f(x):\n    return os.sep\n").ids]))
    logits = head(handed.embeddings, handed.features, 3)
    count = handed.embeddings.shape[1] - 3
    assert [tuple(one.shape) for one in logits] == [(1, count, VOCABULARY)] * 3
    for begin in (0, 4, count - 1):
        wanted = served_chain(head, handed.embeddings[0], handed.features[0], begin, 3)
        for step in range(3):
            torch.testing.assert_close(logits[step][0, begin], wanted[step], atol=2e-4, rtol=2e-4)


@pytest.mark.slow
def test_training_learns_and_repeats_itself(target: Target, tokenizer, work: Path) -> None:
    plan = Plan(updates=24, lengths=(192,), batch_tokens=384, lr=2e-3)
    head, report = trained(target, tokenizer, work, plan)
    first, last = report["loss"]
    assert last < first - 1
    again, other = (
        trained(target, tokenizer, work, Plan(updates=2, lengths=(192,), batch_tokens=192, seed=seed))[0].state_dict()
        for seed in (1, 2)
    )
    repeated = trained(target, tokenizer, work, Plan(updates=2, lengths=(192,), batch_tokens=192))[0].state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in repeated.items())
    assert not torch.equal(again["fc.weight"], other["fc.weight"])
    prompts = held_out_prompts(tokenizer, [500], 1, questions=1)
    torch.manual_seed(plan.seed)
    before, after = tokens_per_step([target.new_head().eval(), head], target, prompts, 24, 3)
    assert 1 <= before["all"] <= after["all"] <= 4


def test_steps_of_verification_go_on_behind_what_is_kept() -> None:
    assert steps_of_verification([0, 0, 3, 0, 0, 0, 1, 0], prompt=3, tokens=7) == 2
    assert steps_of_verification([0] * 12, prompt=4, tokens=6) == 5
    # The last step may bring more than is asked for.
    assert steps_of_verification([3] * 12, prompt=4, tokens=6) == 2


def test_right_drafts_end_at_the_first_wrong_one(target: Target) -> None:
    ids = [5, 6, 7, 8, 9, 10]

    class Told(torch.nn.Module):
        """Drafts of three steps: right but for the second of chain 0."""

        def forward(self, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
            drafts = [[7, 8, 9], [0, 9, 10], [9, 10, 0]]
            return [functional.one_hot(torch.tensor([one]), VOCABULARY).float() for one in drafts]

    assert right_drafts(Told(), target, ids, 3) == [1, 3]


def test_prompts_are_longer_than_the_windows_and_repeat_themselves(tokenizer) -> None:
    prompts = held_out_prompts(tokenizer, [500, 700], 2, questions=2)
    assert prompts == held_out_prompts(tokenizer, [500, 700], 2, questions=2)
    assert [prompt.kind for prompt in prompts] == ["continuation", "question", "question"] * 4
    documents = {prompt.document: prompt.ids for prompt in prompts if prompt.kind == "continuation"}
    assert len(documents) == 4
    for prompt in prompts:
        assert prompt.ids[: len(documents[prompt.document]) - 1] == documents[prompt.document][:-1]
        assert len(prompt.ids) > 64 + 256
        assert len(prompt.answer) == (retrieval.DIGITS if prompt.kind == "question" else 0)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [rate(done / 100, 1.0) for done in range(1, 101)]
    assert max(rates) > 0.95
    assert all(a <= b for a, b in itertools.pairwise(rates[:5]))
    assert all(a >= b for a, b in itertools.pairwise(rates[5:]))
    assert rates[-1] == pytest.approx(0)


def test_a_target_needs_two_layers() -> None:
    assert read_layers(2) == [0]
    assert read_layers(3) == [0, 1]
    with pytest.raises(ValueError, match="two layers"):
        read_layers(1)
