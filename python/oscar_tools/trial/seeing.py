"""Prompts with images for a scheduler in this process, through SGLang's own processor of the model."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

Shape = tuple[int, int]
"""Width and height in pixels."""
WIDE, TALL = (320, 256), (256, 320)
QUESTION, OPENING, MESSAGE = 400, 150, 60
"""Letters: behind an image, before images that stand behind the sink, and of a second turn."""


Prompt = tuple[list[int], Any]
"""Token ids of a prompt, and what SGLang's processor made of its images; None where it has none."""


def prompts(server_args: Any, model_config: Any) -> Iterator[tuple[str, Prompt]]:
    """Prompts to ask one after the other, by name; there are more beginnings than sink blocks.

    ``first`` begins with an image; ``other`` with another of its shape, ``turned`` with its pixels in another shape;
    ``several`` has two images behind the sink, one in its chunk and one across chunks; ``text`` has none; ``hit`` goes
    on from ``first``, whose sink block is gone by then.

    Args:
        server_args: SGLang's; the model's folder has its processor.
        model_config: SGLang's.
    """
    processor = _processor(server_args, model_config)
    token, rng = processor.mm_tokens.image_token, random.Random(7)
    question, opening, message = (
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ,.", k=count)) for count in (QUESTION, OPENING, MESSAGE)
    )
    asked: dict[str, tuple[str, list[str]]] = {
        "first": (token + question, [image(1, WIDE)]),
        "other": (token + question, [image(2, WIDE)]),
        "turned": (token + question, [image(1, TALL)]),
        "several": (opening + token + "," + token + question, [image(1, WIDE), image(2, TALL)]),
        "text": (question, []),
        "hit": (token + question + message, [image(1, WIDE)]),
    }
    for name, (text, images) in asked.items():
        yield name, _prompt(processor, text, images)


def image(seed: int, shape: Shape) -> str:
    """A PNG of random pixels as a data URL; those of a seed are the same in all shapes of a size."""
    from PIL import Image

    width, height = shape
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _processor(server_args: Any, model_config: Any) -> Any:
    from sglang.srt.managers.multimodal_processor import get_mm_processor, import_processors
    from sglang.srt.managers.tokenizer_manager import get_processor_wrapper

    import_processors("sglang.srt.multimodal.processors")
    own = get_processor_wrapper()
    processor = get_mm_processor(model_config.hf_config, server_args, own, "default", model_config=model_config)
    return getattr(processor, "inner", processor)  # some only choose one by the vision tower


def _prompt(processor: Any, text: str, images: list[str]) -> Prompt:
    if not images:
        own = processor._processor
        return list(getattr(own, "tokenizer", own)(text)["input_ids"]), None
    asked = SimpleNamespace(image_data=images, video_data=None, audio_data=None, rid="trial")
    seen = asyncio.run(
        processor.process_mm_data_async(
            image_data=images, audio_data=None, input_text=text, request_obj=asked, max_req_input_len=None
        )
    )
    return seen.input_ids, seen
