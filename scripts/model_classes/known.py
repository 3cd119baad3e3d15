"""What is known of classes without a trial: kinds that int2 mode refuses, and those that tests of servers try."""

from __future__ import annotations

import re

from model_classes import seeing
from sglang_oscar.attach.model_classes import REFUSED, SERVED, UNTRIED, Row
from sglang_oscar.attach.refusals import BOTH_WAYS
from sglang_oscar.features.hybrids.refusals import MAMBA2
from sglang_oscar.features.hybrids.refusals import MODELS as HYBRIDS

DRAFT = re.compile(r"NextN|MTP|Eagle|DSpark|DFlash|Draft|Assistant")
NO_ANSWERS = re.compile(
    r"^Bert|^XLMRoberta|Contriever|Embedding|Reward|Classification|^CLIP|Bidirectional|VisionModel$"
)
LATENT = """DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM
GlmMoeDsaForCausalLM Glm4MoeLiteForCausalLM MiniCPM3ForCausalLM LongcatFlashForCausalLM SarvamMLAForCausalLM
KimiLinearForCausalLM KimiK3LinearForCausalLM BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM GigaChat35ForCausalLM
MistralLarge3ForCausalLM Dots3NoteForCausalLM""".split()  # noqa: SIM905

OTHERS = {
    "logit soft-capping": "Grok1ForCausalLM Grok1ModelForCausalLM Gemma2ForCausalLM",
    "no attention": "MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM",
    "block-sparse attention": "MiniMaxM3SparseForCausalLM MiniCPMSALAForCausalLM Phi3SmallForCausalLM",
    "this hybrid linear attention": "NemotronHPuzzleForCausalLM ZayaForCausalLM JetNemotronForCausalLM "
    "Lfm2ForCausalLM Lfm2MoeForCausalLM",
    "iRoPE": "Llama4ForCausalLM",
    "models of MindSpore": "MindSporeForCausalLM",
    "diffusion": "LLaDA2MoeModelLM DiffusionGemmaForBlockDiffusion",
    "images that code beside published weights reads, and nothing here": "MiniCPMV MiniCPMO",
    "images beside layers with windows": "Step3p7ForConditionalGeneration Cohere2VisionForConditionalGeneration",
    "several modalities": "YiVLForCausalLM MuseGlimmerForCausalLM",
    "layers with a window that have other heads": "Gemma4ForCausalLM",
    "an attention backend that SGLang insists on": "Exaone4ForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM",
    "a learned sink key, which needs sums that attention does not return": "IQuestQ1ForCausalLM",
    "layers that run several times": "IQuestLoopCoderForCausalLM NanbeigeForCausalLM",
    "bidirectional attention": "HrmTextForCausalLM",
    "layers that share a cache": "Gemma3nForCausalLM",
}
"""What stands in the way of classes that no trial is needed for."""
ON_A_GPU = {"MiniMaxM2ForCausalLM": "served on an H200 with random weights, not compared with stock"}
"""Classes that servers ran with on a GPU, where no trial on a CPU can."""
NEEDS_GPU = ["BeamForCausalLM", "DbrxForCausalLM"]
"""Classes that call kernels which SGLang has for GPUs only."""


def known(name: str) -> Row | None:
    """The row of a class that is not tried; None for others."""
    from sglang.srt.configs.model_config import is_generation_model, multimodal_model_archs

    if name in HYBRIDS - MAMBA2 | {"GptOssForCausalLM"}:
        return Row(SERVED, "tests of servers")
    if name in ON_A_GPU:
        return Row(SERVED, ON_A_GPU[name])
    for what, names in OTHERS.items():
        if name in names.split():
            return Row(REFUSED, what)
    for kind, what in (
        (bool(DRAFT.search(name)), "a draft model, which drafts for others"),
        (bool(NO_ANSWERS.search(name)) or not is_generation_model([name]), "does not generate"),
        (name in LATENT, "multi-head latent attention (MLA)"),
        (name in BOTH_WAYS, "attention in both directions within images"),
        (
            name not in seeing.SHAPES and (name in multimodal_model_archs or name.endswith("ForConditionalGeneration")),
            "several modalities",
        ),
        (name.startswith("Transformers"), "models of transformers"),
    ):
        if kind:
            return Row(REFUSED, what)
    if name in NEEDS_GPU:
        return Row(UNTRIED, "its kernels need a GPU")
    return None
