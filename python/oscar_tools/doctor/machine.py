"""Checks that need no model: SGLang, the plugin, PyTorch, the device."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oscar_rotation.errors import first_line
from oscar_tools.bench.cards import known
from oscar_tools.doctor.check import Check, attempt, quiet
from sglang_oscar.attach.failure import newer_release, supported, unsupported_release
from sglang_oscar.attention.extend_workspace import FLASH_ATTENTION
from sglang_oscar.errors import Int2Error

NVIDIA_DRIVER = Path("/proc/driver/nvidia")
DECODE = {"cuda": "the CUDA kernel", "triton": "the Triton kernel"}
EXTEND = {**FLASH_ATTENTION, "flashinfer": "FlashInfer", "triton": "our Triton kernel"}
"""What attends to prompts, by its setting."""


def machine_checks() -> list[Check]:
    """Checks that need no model."""
    checks = [attempt("sglang", check_sglang), attempt("plugin", check_entry_point)]
    if all(check.ok for check in checks):
        checks.append(attempt("hooks", check_hooks))
    kernels = attempt("kernels", check_kernels)
    return [*checks, attempt("device", check_torch), attempt("sgl_kernel", check_sgl_kernel), kernels]


def check_sglang() -> str:
    """A supported release.

    Raises:
        Int2Error: none, or another one.
    """
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise Int2Error(f'sglang is not installed; pip install "{supported()}"') from None
    if unsupported_release() is not None:
        raise Int2Error(f'{installed} is installed, int2 mode is for {supported()}; pip install "{supported()}"')
    return f"{installed}, newer than what was tested, {supported()}" if newer_release() else installed


def check_entry_point() -> str:
    """SGLang finds plugins by entry point.

    Raises:
        Int2Error: not found, or switched off by SGLANG_PLUGINS.
    """
    if not importlib.metadata.entry_points(group="sglang.srt.plugins", name="oscar"):
        raise Int2Error("SGLang does not see the plugin; pip install sglang-oscar into the environment of sglang")
    chosen = os.environ.get("SGLANG_PLUGINS")
    if chosen is not None and "oscar" not in [name.strip() for name in chosen.split(",")]:
        raise Int2Error(f"SGLANG_PLUGINS={chosen} leaves the plugin out; add oscar to it, or unset it")
    return "sglang.srt.plugins lists oscar"


def check_hooks() -> str:
    """All touch points attach to the installed SGLang.

    Raises:
        Int2Error: naming those that do not.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_oscar.attach import bindings, failure, touchpoints

    with quiet(), named_imports():
        load_plugins()
        if (reason := failure.reason()) is None:
            # This process launches nothing, so it can be what the scheduler of a server is.
            points = touchpoints.of_arguments() + touchpoints.of_scheduler(int2=True)
            targets = touchpoints.register_all(points)
            bindings.install(targets)
            HookRegistry.apply_hooks()
            failure.expect(targets)
            reason = failure.reason()
    if reason is not None:
        raise Int2Error(f"{reason}; remove other plugins, or install sglang anew")
    return f"all {len(set(targets))} touch points attached"


@contextmanager
def named_imports() -> Iterator[None]:
    """Say of an import that fails in SGLang what is missing: kernels say so in many lines.

    Raises:
        Int2Error: the first line of what failed.
    """
    try:
        yield
    except ImportError as error:
        raise Int2Error(
            f"SGLang cannot be imported ({first_line(error)}); install sglang anew, or on a machine without a GPU put "
            "the stand-in for sgl_kernel on PYTHONPATH"
        ) from error


def check_torch() -> str:
    """PyTorch, Triton and the device.

    Raises:
        Int2Error: a GPU that cannot be used.
    """
    import torch

    from sglang_oscar.attach.gate import check_device

    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "missing"
    versions = f"torch {torch.__version__}, triton {triton}, CUDA {torch.version.cuda or 'none'}"
    if not torch.cuda.is_available():
        if NVIDIA_DRIVER.exists():
            raise Int2Error(
                f"{versions}: PyTorch cannot use the NVIDIA GPU; update the driver or install a fitting torch"
            )
        return f"{versions}; no GPU: int2 mode runs on the CPU engine, for tests (SGLANG_USE_CPU_ENGINE=1)"
    check_device("cuda")
    major, minor = torch.cuda.get_device_capability()
    return f"{versions}; {torch.cuda.get_device_name()}, compute capability {major}.{minor}"


def check_sgl_kernel() -> str:
    """SGLang's kernel package; on a machine without a GPU the stand-in takes its place.

    Raises:
        Int2Error: it cannot be imported.
    """
    import torch

    if not torch.cuda.is_available():
        return "not needed without a GPU"
    try:
        module = importlib.import_module("sgl_kernel")
    except (ImportError, OSError, RuntimeError) as error:
        raise Int2Error(f"cannot be imported ({error}); reinstall sglang for this CUDA") from None
    return f"version {getattr(module, '__version__', 'unknown')}"


def check_kernels() -> str:
    """What decodes on this GPU by default, how fast that is, and what attends to prompts with head_dim 128."""
    import torch

    from sglang_oscar.attention import extend_choice

    if not torch.cuda.is_available():
        return "none without a GPU: torch computes"
    decode = "cuda" if torch.cuda.get_device_capability() == (9, 0) else "triton"
    chosen = str(extend_choice.choose("auto", "cuda", (128, 128), sink_logits=False))
    against = extend_choice.why_not_flash("auto", (128, 128), sink_logits=False)
    prompts = EXTEND[chosen] if against is None else f"{EXTEND[chosen]} ({against})"
    reach = known(torch.cuda.get_device_name(), decode)
    return f"{DECODE[decode]} decodes, {reach}; prompts by {prompts}"


def memory_bytes() -> int:
    """Memory of the first GPU, or of the machine where there is none."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
