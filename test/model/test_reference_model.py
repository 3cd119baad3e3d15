"""The shipped model: format, size, tokenizer, key outliers that change nothing, and retrieval."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation")]

from accuracy.calibration import calibrate  # noqa: E402
from accuracy.measures.retrieval import Retrieval  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.models import load  # noqa: E402
from oscar_rotation.math.covariance import KeyCovariance, QueryCovariance  # noqa: E402
from reference_model import corpus, evaluate, export, retrieval  # noqa: E402
from reference_model.model import SIZES, ReferenceModel  # noqa: E402
from reference_model.outliers import choose_pair, scale_pair, scale_value_channel  # noqa: E402

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


@pytest.fixture(scope="module")
def hf32():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_folder_is_complete_and_small():
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert wanted | {"README.md"} <= files.keys()
    assert sum(files.values()) <= 8 * 2**20


def test_transformers_agrees_with_our_forward(hf32, model, tokenizer):
    ids = torch.tensor([tokenizer.encode("def scale(x):\n    return 1234 * x\n" * 8).ids])
    assert type(hf32).__name__ == "Qwen3ForCausalLM"
    assert hf32.config.head_dim == 128
    with torch.no_grad():
        theirs, ours = hf32(ids).logits, model(ids)
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


@pytest.mark.parametrize("factor", [1 / 4, 16])
def test_value_outliers_leave_bf16_logits_bit_identical(hf, tokenizer, factor):
    ids = torch.tensor([tokenizer.encode("def scale(x):\n    return 1234 * x\n" * 20).ids])
    state = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    changed = state
    for layer in range(hf.config.num_hidden_layers):
        for head in range(hf.config.num_key_value_heads):
            changed = scale_value_channel(changed, layer, head, 5 * layer + head, factor)
    for name in ("v_proj", "o_proj"):
        key = f"model.layers.1.self_attn.{name}.weight"
        assert not torch.equal(changed[key], state[key])
    with torch.no_grad():
        before = hf(ids).logits
        hf.load_state_dict(changed)
        after = hf(ids).logits
        hf.load_state_dict(state)
    assert torch.equal(before, after)


def test_outlier_arguments_are_checked(hf):
    state = hf.state_dict()
    with pytest.raises(ValueError, match="power of two"):
        scale_value_channel(state, 0, 0, 3, 6)
    with pytest.raises(ValueError, match=r"kv head must be in 0\.\.1"):
        scale_value_channel(state, 0, 2, 3, 8)
    with pytest.raises(ValueError, match="power of two"):
        scale_pair({}, 0, 3, 6)
    with pytest.raises(ValueError, match=r"0\.\.63"):
        scale_pair({}, 0, 64, 8)


def test_shipped_model_has_the_outliers_it_claims(hf32, tokenizer):
    """One pair per layer carries most of the key energy, in the two directions that queries read least."""
    calibration = calibrate(hf32, evaluate.calibration_prompts(tokenizer, 2))
    for layer in range(len(calibration.layers)):
        q_cov = calibration.covariance(layer, QueryCovariance).shared()
        k_cov = calibration.covariance(layer, KeyCovariance).shared()
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


@pytest.mark.slow
def test_retrieval_at_1k(hf32, tokenizer):
    """BF16 recalls; OSCAR INT2 nearly as well and naive INT2 nothing, document cached and question behind it."""
    task = Retrieval(hf32, evaluate.retrieval_questions(tokenizer, 1024, 2, 4, 8, seed=2), 4)
    calibration = calibrate(hf32, evaluate.calibration_prompts(tokenizer))
    methods = all_methods()
    found = {}
    for name in ("BF16", "naive INT2 g128", "OSCAR g64", "OSCAR g128", "plus g128"):
        methods[name].fit(calibration)
        found[name] = task.correct(methods[name]).float().mean().item()
    assert found["BF16"] >= 0.9
    assert found["naive INT2 g128"] <= 0.1
    assert found["OSCAR g64"] >= 0.75
    # Two outlier directions per layer and one group-constant row: what balancing is for.
    assert found["OSCAR g128"] <= 0.25
    assert found["plus g128"] >= 0.75


def test_loading_takes_the_outliers_out(hf32, tokenizer):
    """The laboratory starts from the model as trained: same logits, no outliers."""
    trained, _ = load(MODEL, "cpu")
    ids = torch.tensor([tokenizer.encode("import os\n" * 30).ids])
    with torch.no_grad():
        torch.testing.assert_close(trained(ids).logits, hf32(ids).logits, atol=1e-3, rtol=1e-3)
    norm = trained.model.layers[0].self_attn.k_norm.weight
    assert norm.max() < 16
    assert hf32.model.layers[0].self_attn.k_norm.weight.max() > 20


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
