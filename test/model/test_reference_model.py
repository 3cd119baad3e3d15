"""The shipped model: format, size, tokenizer, key outliers that change nothing, and retrieval."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "kernels")]

from reference_model import corpus, evaluate, export, retrieval, simulate  # noqa: E402
from reference_model.model import SIZES, ReferenceModel  # noqa: E402
from reference_model.outliers import choose_pair, scale_pair  # noqa: E402

MODEL = ROOT / "models" / "reference"


@pytest.fixture(scope="module")
def tokenizer():
    return export.load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    config, state = export.load_state(MODEL)
    return export.build_model(config, state, dtype=torch.float32)


@pytest.fixture(scope="module")
def hf():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()


def test_folder_is_complete_and_small():
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert wanted | {"README.md"} <= files.keys()
    assert sum(files.values()) <= 8 * 2**20


def test_transformers_agrees_with_our_forward(hf, model, tokenizer):
    ids = torch.tensor([tokenizer.encode("def scale(x):\n    return 1234 * x\n" * 8).ids])
    assert type(hf).__name__ == "Qwen3ForCausalLM"
    assert hf.config.head_dim == 128
    with torch.no_grad():
        theirs, ours = hf.float()(ids).logits, model(ids)
    hf.bfloat16()
    torch.testing.assert_close(theirs, ours, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("factor", [1 / 32, 1 / 4, 8])
def test_outliers_leave_bf16_logits_bit_identical(hf, tokenizer, factor):
    document = retrieval.build_document(lambda t: len(tokenizer.encode(t).ids), 600, 3, seed=5)
    ids = torch.tensor([tokenizer.encode(document.text).ids])
    state = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    changed = state
    for layer in range(hf.config.num_hidden_layers):
        changed = scale_pair(changed, layer, pair=7 + layer, factor=factor)
    assert not torch.equal(
        changed["model.layers.0.self_attn.k_norm.weight"], state["model.layers.0.self_attn.k_norm.weight"]
    )
    with torch.no_grad():
        before = hf(ids).logits
        hf.load_state_dict(changed)
        after = hf(ids).logits
        hf.load_state_dict(state)
    assert torch.equal(before, after)


def test_outlier_arguments_are_checked():
    with pytest.raises(ValueError, match="power of two"):
        scale_pair({}, 0, 3, 6)
    with pytest.raises(ValueError, match=r"0\.\.63"):
        scale_pair({}, 0, 64, 8)


def test_shipped_model_has_the_outliers_it_claims(model, tokenizer):
    """One pair per layer carries most of the key energy, in the two directions that queries read least."""
    moments = simulate.second_moments(model, evaluate.calibration_prompts(tokenizer)[:2])
    for q_cov, k_cov in zip(moments["q"], moments["k"], strict=True):
        pairs = k_cov.diagonal().unflatten(0, (2, -1)).sum(0)
        assert pairs.max() > 4 * (pairs.sum() - pairs.max())
        lowest = torch.linalg.eigh(q_cov.double()).eigenvectors[:, :2]
        inside = float((lowest.T @ k_cov.double() @ lowest).trace() / pairs.max())
        assert inside > 0.98


def test_choose_pair_prefers_energy_that_queries_do_not_read():
    q_cov, k_cov = torch.eye(128), torch.eye(128)
    k_cov[[9, 73], [9, 73]] = 5.0
    assert choose_pair(q_cov, k_cov, 8) == 9


def test_digits_are_single_tokens(tokenizer):
    assert len(tokenizer.encode("4096").ids) == 4
    text = "x = 1234567\n\n\ndef f(a):  # ünï\n\treturn a"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    hf_tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert hf_tokenizer(text).input_ids == tokenizer.encode(text).ids


def test_questions_tokenize_as_in_training(tokenizer):
    """A question and its answer must be one token sequence however they are cut."""
    question = tokenizer.encode(retrieval.question("falcon")).ids
    whole = tokenizer.encode(retrieval.question("falcon") + "1234567").ids
    assert whole[: len(question)] == question
    assert len(whole) == len(question) + retrieval.DIGITS


def test_documents_are_deterministic_and_fit(tokenizer):
    def count(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    one = retrieval.build_document(count, 1024, 8, seed=3)
    assert one == retrieval.build_document(count, 1024, 8, seed=3)
    assert one != retrieval.build_document(count, 1024, 8, seed=4)
    assert 960 < count(one.text) <= 1024
    depths = [count(one.text[: one.text.index(retrieval.fact_line(*fact))]) for fact in one.facts.items()]
    assert depths == sorted(depths)
    assert depths[0] >= 60
    assert depths[-1] <= count(one.text) - 256
    with pytest.raises(ValueError, match="facts"):
        retrieval.build_document(count, 300, 8, seed=3)


def test_retrieval_at_1k(model, tokenizer):
    """BF16 recalls; OSCAR INT2 nearly as well and naive INT2 nothing, document cached and question behind it."""
    prompts, answers, document = evaluate.prompts_and_answers(tokenizer, 1024, 2, 4, 8, seed=2)
    prefix = evaluate.prefix_length("prefix hit", prompts.shape[1], document)
    moments = simulate.second_moments(model, evaluate.calibration_prompts(tokenizer))
    recipes = {"bf16": simulate.BF16} | {
        recipe.name: recipe
        for recipe in [
            *simulate.baselines(64, 128, model.config.layers, prompts.device),
            *simulate.fitted(moments, 64),
        ]
    }
    found = {
        name: evaluate.retrieval(model, recipes[name], prompts, answers, prefix, 4)
        for name in ("bf16", "naive", "oscar")
    }
    assert found["bf16"] >= 0.9
    assert found["naive"] <= 0.1
    assert found["oscar"] >= 0.75


def test_chat_template_and_chat_retrieval(hf, tokenizer):
    """A chat question is answered in a sentence that ends the turn, and a second turn extends the first."""
    document = retrieval.build_document(lambda t: len(tokenizer.encode(t).ids), 900, 4, seed=21)
    hf_tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (first, number), (second, other), *_ = document.facts.items()
    messages = [{"role": "user", "content": document.text + retrieval.chat_question(first)}]
    for word, answer in ((first, number), (second, other)):
        text = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer.encode(text).ids])
        out = hf.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
        assert out[-1] == corpus.SPECIALS.index("<|im_end|>")
        assert tokenizer.decode(out) == retrieval.chat_answer(word, answer)
        messages += [
            {"role": "assistant", "content": tokenizer.decode(out)},
            {"role": "user", "content": retrieval.chat_question(second)},
        ]


def test_samples_and_export_round_trip(tokenizer, tmp_path):
    """A sample is what its text tokenizes to, and an exported model loads with equal weights."""
    import numpy as np

    ids = tokenizer.encode("import os\n\n\ndef f(x):\n    return os.path.join(x, 'a')\n" * 400).ids
    np.save(tmp_path / "tokens.npy", np.array(ids, dtype=np.uint16))
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    samples = corpus.Samples(tmp_path / "tokens.npy", tokenizer, words, 512, 0, 1.0)
    stream = iter(samples)
    for _ in range(4):
        row, weights = next(stream)
        text = tokenizer.decode(row.tolist(), skip_special_tokens=False)
        assert tokenizer.encode(text).ids == row.tolist()
        assert row.shape == weights.shape == (513,)
        answers = tokenizer.decode(row[weights == corpus.ANSWER_WEIGHT].tolist())
        facts = tokenizer.decode(row[weights == corpus.FACT_DIGIT_WEIGHT].tolist())
        assert len(answers) == len(facts)
        assert len(answers) in (3 * retrieval.DIGITS, 4 * retrieval.DIGITS)
    torch.manual_seed(0)
    config = SIZES["small"].replace(layers=1, hidden=32, ffn=32)
    source = ReferenceModel(config)
    export.save_model(tmp_path / "out", config, source.state_dict(), tokenizer)
    loaded_config, state = export.load_state(tmp_path / "out")
    assert loaded_config == config
    assert all(torch.equal(state[name], tensor.bfloat16()) for name, tensor in source.state_dict().items())
