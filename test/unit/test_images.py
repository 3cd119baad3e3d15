"""Sinks with tokens of images: what tells them apart, and what computing one again takes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.mm_utils import (
    MultiModalityDataPaddingPatternMultimodalTokens,
    extend_mrope_positions_for_retracted_request,
)
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

from oscar_kernels.cache import Windows
from sglang_oscar.attach import refusals
from sglang_oscar.attention.refill_pass import parts_of, refill_batch
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.disaggregation import waiting
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.images import sink_images
from sglang_oscar.memory.sink_refill import Refill
from support.small_cache import small_cache

SINK, IMAGE_ID = 16, 262


def positions(before: int, height: int, width: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates of text, an image and text as Qwen's models have them, and how far they are from counting on."""
    text = torch.arange(before).expand(3, -1)
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    image = torch.stack([torch.zeros_like(rows), rows, columns]) + before
    follows = torch.arange(after).expand(3, -1) + before + max(height, width)
    every = torch.cat([text, image, follows], dim=1)
    return every, torch.tensor([[before + max(height, width) - before - height * width]])


def request(
    pixels: torch.Tensor | None, before: int = 1, height: int = 4, width: int = 4, after: int = 20, flat: bool = False,
    **fields: Any,
) -> Any:  # fmt: skip
    """A request as SGLang's scheduler has it once the ids of an image's tokens are replaced; ``flat``: of a model whose
    positions count on, and whose images have a token of text behind every line."""
    count = 0 if pixels is None else height * width
    ids, inputs = array("q", [1] * before + [IMAGE_ID] * count + [2] * after), None
    if pixels is not None:
        lines = [(before, before + count - 1)]
        if flat:
            lines = [(first, first + width - 1) for first in range(before, before + height * (width + 1), width + 1)]
            ids = array("q", [1] * before + ([IMAGE_ID] * width + [3]) * height + [2] * after)
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=pixels, offsets=lines)
        item.set_pad_value()
        inputs = MultimodalInputs(mm_items=[item], im_token_id=IMAGE_ID)
        if not flat:
            inputs.mrope_positions, inputs.mrope_position_delta = positions(before, height, width, after)
        ids = MultiModalityDataPaddingPatternMultimodalTokens().pad_input_tokens(ids, inputs)
    made = {
        "origin_input_ids": ids, "output_ids": [], "multimodal_inputs": inputs, "extra_key": None,
        "input_embeds": None, "positional_embed_overrides": None,
    }  # fmt: skip
    return SimpleNamespace(**made | fields)


def key(req: Any) -> Any:
    plan = SimpleNamespace(geometry=SimpleNamespace(windows=Windows(SINK, 8, 8)))
    return Int2Cache.sink_key(SimpleNamespace(plan=plan, sink_ids=ids_of, sink_images=images_of), req)  # type: ignore[arg-type]


def ids_of(req: Any) -> Any:
    plan = SimpleNamespace(geometry=SimpleNamespace(windows=Windows(SINK, 8, 8)))
    return Int2Cache.sink_ids(SimpleNamespace(plan=plan), req)  # type: ignore[arg-type]


def images_of(req: Any) -> Any:
    return sink_images(req, SINK)


BLACK, WHITE = torch.zeros(64, 8), torch.ones(64, 8)


def test_images_keep_sinks_apart() -> None:
    assert key(request(BLACK)) == key(request(BLACK.clone()))
    assert key(request(BLACK)) != key(request(WHITE))
    assert key(request(BLACK, before=SINK - 1)) != key(request(WHITE, before=SINK - 1)), "one token of the image"


def test_the_shape_of_an_image_keeps_sinks_apart() -> None:
    """Equal pixels in another shape have equal token ids, but other positions."""
    wide, tall = request(WHITE, height=2, width=8), request(WHITE, height=8, width=2)
    assert wide.origin_input_ids == tall.origin_input_ids
    assert key(wide) != key(tall)
    assert key(wide) == key(request(WHITE, height=2, width=8))


def test_lines_of_an_image_keep_sinks_apart() -> None:
    """Of models whose positions count on: an image of long lines and one of short ones, of one color, whose sinks end
    within the first line."""
    long, short = (
        request(WHITE, before=2, height=height, width=width, flat=True) for height, width in ((2, 32), (3, 20))
    )
    assert images_of(long).positions is None
    assert ids_of(long) == ids_of(short)
    assert key(long) != key(short)
    assert key(long) == key(request(WHITE, before=2, height=2, width=32, flat=True))
    assert key(long) != key(request(BLACK, before=2, height=2, width=32, flat=True))
    assert key(request(WHITE, before=SINK, flat=True)) == key(request(None, before=SINK))


def test_text_in_front_of_images_is_shared() -> None:
    behind = [request(pixels, before=SINK) for pixels in (BLACK, WHITE)]
    plain = request(None, before=SINK)
    assert key(behind[0]) == key(behind[1]) == key(plain)
    assert images_of(behind[0]) is None is images_of(plain)


def test_positions_of_a_sink() -> None:
    """Those of the prompt; behind it, as SGLang continues them in decoding and for a retracted request."""
    whole = request(WHITE, height=2, width=4, after=20)
    assert torch.equal(images_of(whole).positions, whole.multimodal_inputs.mrope_positions[:, :SINK])
    short = request(WHITE, height=2, width=4, after=1, output_ids=[3] * 9)
    assert torch.equal(images_of(short).positions, images_of(whole).positions)
    before = key(short)
    inputs = short.multimodal_inputs
    inputs.mrope_positions = extend_mrope_positions_for_retracted_request(inputs.mrope_positions, 9)
    assert key(short) == before


def test_a_sink_that_an_answer_completes_brings_its_image() -> None:
    """On a decode server: the image, and a position for every token that is computed already."""
    cache = small_cache(Windows(SINK, 24, 32))
    for tokens in (11, 13):  # the second after a retraction
        req = request(WHITE, height=2, width=4, after=2, output_ids=[3] * 3, lora_id=None)
        waiting.acquire_block(cache, req, tokens)
        (refill,) = cache.refills.take()
        assert refill.images is not None
        assert refill.images.inputs is req.multimodal_inputs
        assert torch.equal(refill.images.positions, positions(1, 2, 4, 20)[0][:, :tokens])
        assert len(refill.token_ids) == tokens


def test_a_refill_brings_images_and_positions() -> None:
    seen, text = request(WHITE), request(None)
    refills = [Refill(1, ids_of(seen), images_of(seen)), Refill(2, ids_of(text), images_of(text))]
    empty = torch.empty(0, dtype=torch.int64)
    beside: Any = SimpleNamespace(
        input_ids=empty, req_pool_indices=empty, seq_lens=empty, out_cache_loc=empty, mrope_positions=empty,
        spec_algorithm=None, is_extend_in_batch=True, global_num_tokens_cpu=None, num_token_non_padded=None,
        global_num_token_non_padded=None,
    )  # fmt: skip
    cache: Any = SimpleNamespace(plan=SimpleNamespace(geometry=SimpleNamespace(windows=Windows(SINK, 8, 8))))
    batch = refill_batch(cache, refills, beside)
    assert batch.mm_inputs == [seen.multimodal_inputs, None]
    first = seen.multimodal_inputs.mrope_positions[:, :SINK]
    assert torch.equal(batch.mrope_positions, torch.cat([first, torch.arange(SINK).expand(3, -1)], dim=1))
    assert batch.input_ids.tolist() == [*seen.origin_input_ids[:SINK], *text.origin_input_ids[:SINK]]
    beside.mrope_positions = None
    flat = request(WHITE, flat=True)
    batch = refill_batch(cache, [Refill(1, ids_of(flat), images_of(flat)), refills[1]], beside)
    assert batch.mrope_positions is None
    assert batch.positions.tolist() == [*range(SINK)] * 2
    assert batch.mm_inputs == [flat.multimodal_inputs, None]


def test_passes_count_the_tokens_of_images() -> None:
    """The vision tower computes whole images, of whose tokens a sink holds the first."""
    large = request(WHITE, height=10, width=10)
    image, text = Refill(1, ids_of(large), images_of(large)), Refill(2, (0,) * SINK)
    assert image.tokens == 100
    assert [len(part) for part in parts_of([text, image, text, image, image], 132, 9)] == [3, 1, 1]


def model(**changes: Any) -> Any:
    fields = {
        "attention_arch": SimpleNamespace(name="MHA"), "is_hybrid_swa": False, "is_multimodal": True,
        "has_attention_sinks": False,
        "hf_config": SimpleNamespace(architectures=["Qwen3VLForConditionalGeneration"]), "is_encoder_decoder": False,
        "is_generation": True, "head_dim": 128, "v_head_dim": 128, "model_path": "somewhere",
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


@pytest.fixture(autouse=True)
def _plain_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.configs import hybrid_arch, model_config

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda config: None)
    monkeypatch.setattr(model_config, "is_minimax_sparse", lambda config: False)


def test_models_by_name() -> None:
    for name in refusals.VISION_MODELS:
        refusals.check_model(model(hf_config=SimpleNamespace(architectures=[name])))
    for name, why in {
        "Cohere2VisionForConditionalGeneration": "multimodal models other than",
        "Gemma3ForCausalLM": "multimodal models other than",
        "Gemma3ForConditionalGeneration": "attention in both directions within images",
    }.items():
        with pytest.raises(Int2Error, match=f"{why}.*{name}"):
            refusals.check_model(model(hf_config=SimpleNamespace(architectures=[name])))


@pytest.mark.parametrize(
    ("given", "known", "refused"),
    [
        ({"enable_torch_compile": True}, True, "drop --enable-torch-compile"),
        ({"speculative_algorithm": "NGRAM"}, False, "drop --speculative-algorithm"),
        ({"speculative_algorithm": "NGRAM"}, True, None),
        ({"speculative_algorithm": "NEXTN"}, False, None),
    ],
)
def test_arguments_that_do_not_go_with_images(
    given: dict[str, Any], known: bool, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of drafts those that SGLang makes of what stands for an image in a prompt."""
    monkeypatch.setattr(refusals, "drafts_token_ids", lambda: known)
    plain = {"enable_torch_compile": False, "speculative_algorithm": None, "disaggregation_mode": "null"}
    refusals.check_model(model(), SimpleNamespace(**plain))
    refusals.check_model(model(is_multimodal=False), SimpleNamespace(**plain | given))
    if refused is None:
        return refusals.check_model(model(), SimpleNamespace(**plain | given))
    with pytest.raises(Int2Error, match=refused):
        refusals.check_model(model(), SimpleNamespace(**plain | given))
