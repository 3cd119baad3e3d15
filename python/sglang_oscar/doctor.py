"""``oscar doctor``: can this machine, and this model on it, run int2 mode; if not, why, and what to change."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from sglang_oscar.attach.failure import supported, unsupported_release
from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.cached_layers import cached_layer_ids
from sglang_oscar.weights.model_identity import model_identity

MEM_FRACTION = 0.85
"""Share of the memory that the estimate gives to weights and cache; SGLang's own default depends on the GPU."""
IN_FLIGHT = 2 * 8192
"""Tokens of prompts that the estimate takes to be computed at once."""
NVIDIA_DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class Check:
    """One finding. ``detail`` says what was found; ``change``, of a failed check, what to do about it."""

    name: str
    ok: bool
    detail: str
    change: str = ""

    def line(self) -> str:
        """The finding as one line."""
        return f"ok   {self.name}: {self.detail}" if self.ok else f"FAIL {self.name}: {self.detail} -> {self.change}"


def attempt(name: str, what: Callable[[], str]) -> Check:
    """Run a check that returns what it found, or raises an Int2Error ``reason; what to change``."""
    try:
        return Check(name, True, what())
    except Int2Error as error:
        text = str(error)
        reason, _, change = text.rpartition("; ") if "; " in text else text.rpartition(": ")
        return Check(name, False, reason or text, change or "see the message")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what SGLang says on import off the report."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


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
    return installed


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

    from sglang_oscar.attach import failure, touchpoints

    with quiet():
        load_plugins()
    if (reason := failure.reason()) is not None:
        raise Int2Error(f"{reason}; remove other plugins, or install sglang anew")
    return f"all {len(touchpoints.TOUCHPOINTS)} touch points attached"


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


def memory_bytes() -> int:
    """Memory of the first GPU, or of the machine where there is none."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def weight_bytes(model: str) -> int:
    """Size of the weight files of a local model; 0 where they are not here."""
    return sum(path.stat().st_size for path in Path(model).glob("*.safetensors")) if Path(model).is_dir() else 0


def estimated_geometry(loaded: dict[str, Any]) -> Any:
    """Costs of the model of :func:`model_checks`, also where its rotations cannot be had."""
    from sglang_oscar.memory.plan import Geometry

    settings, layers = loaded["settings"], cached_layer_ids(loaded["model"])
    windows = settings.windows, settings.window_torch_dtype
    if "formats" in loaded:
        return Geometry(loaded["formats"], *windows)
    return Geometry.uniform(loaded["layout"], *windows, len(layers))


def memory_account(loaded: dict[str, Any], budget: int) -> str:
    """Where the memory for states and cache of the model of :func:`model_checks` would go; tokens are kept for later.

    Raises:
        Int2Error: there is too little.
    """
    from sglang_oscar.hybrids import states
    from sglang_oscar.hybrids.layers import linear_config
    from sglang_oscar.memory.plan import make_plan
    from sglang_oscar.names import DEFAULT_PAGE_SIZE
    from sglang_oscar.sliding_windows.plan import window_pool

    geometry, linear = estimated_geometry(loaded), linear_config(loaded["model"])
    slots = None if linear is None else states.estimate(linear, geometry, budget)
    budget -= 0 if slots is None else slots.bytes
    draft, model, settings = loaded.get("draft bytes", 0), loaded["model"], loaded["settings"]
    windows = window_pool(model, settings, model.sliding_window_size, 1, DEFAULT_PAGE_SIZE, IN_FLIGHT, None)
    plan = make_plan(geometry, budget, None, DEFAULT_PAGE_SIZE, draft_bytes=draft, states=slots, windows=windows)
    loaded["tokens"] = (budget - plan.fixed_bytes) // plan.token_bytes
    return "; ".join(plan.lines(loaded["tokens"]))


def host_facts(loaded: dict[str, Any], size: int, ratio: float) -> str:
    """What host memory would hold of the model of :func:`model_checks`."""
    from sglang_oscar.names import DEFAULT_PAGE_SIZE
    from sglang_oscar.tiers.pages import PageLayout, host_line, host_tokens

    page = PageLayout.of_formats(estimated_geometry(loaded).formats, DEFAULT_PAGE_SIZE)
    return host_line(host_tokens(page, size, ratio, loaded["tokens"]), page)


def rotation_facts(settings: Any, formats: Any) -> str:
    """Where rotations come from, and what is known of sharing one per layer among its kv heads."""
    from oscar_kernels.format import code_widths, fingerprint, mean_bits
    from oscar_rotation.recipes import BUILT_IN
    from oscar_rotation.report.inspect import describe
    from sglang_oscar.weights.sharing import sharing_warning

    named = {"keys": settings.k_rotation, "values": settings.v_rotation}
    facts = [", ".join(f"{side} {source}" for side, source in named.items()) + f", format {fingerprint(formats)[:12]}"]
    facts.append(f"{mean_bits(formats.values()):.2f} bits per element, bits by layer: {code_widths(formats.values())}")
    files = {side: source for side, source in named.items() if source not in BUILT_IN}
    facts += [f"{side}: {remark}" for side, file in files.items() if (remark := describe(file)["sharing"])]
    if (warning := sharing_warning(settings, formats)) is not None:
        facts.append(f"warning: {warning}")
    return "; ".join(facts)


def model_config(path: str, **kwargs: Any) -> Any:
    """SGLang's ModelConfig of a model.

    Raises:
        Int2Error: it cannot be read.
    """
    from sglang.srt.configs.model_config import ModelConfig

    try:
        with quiet():
            return ModelConfig(path, **kwargs)
    except Exception as error:  # whatever transformers raises for what it cannot read
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise Int2Error(f"{path}: cannot be read ({text}); name a model folder or an id of the Hub") from None


def draft_facts(path: str, loaded: dict[str, Any]) -> str:
    """What a draft model costs beside the model of :func:`model_checks`; a token's bytes are kept for the account.

    Raises:
        Int2Error: it cannot be read, or its cache is of another kind.
    """
    from sglang_oscar.speculation import draft_model

    config = model_config(path, is_draft_model=True)
    draft_model.check(config, loaded["model"])
    loaded["draft bytes"] = draft_model.cell_bytes(config, 1)
    return f"{config.hf_config.architectures[0]}, {loaded['draft bytes']} bytes a token in {config.dtype}"


def layer_facts(config: Any) -> str:
    """How many layers a model has, and of which kind where there are several."""
    layers, full = f"{config.num_hidden_layers} layers", len(cached_layer_ids(config))
    if full == config.num_hidden_layers:
        return layers
    if not config.is_hybrid_swa:
        return f"{layers}, {full} of them with full attention"
    windows = f"{config.num_hidden_layers - full} with a window of {config.sliding_window_size}"
    return f"{layers} ({full} in 2 bits, {windows})"


def model_checks(
    path: str,
    group_size: int | None,
    memory: int,
    draft_path: str | None = None,
    host_size: int = 0,
    host_ratio: float = 0,
) -> list[Check]:
    """Checks of a model: architecture, group size, rotations, draft model, and an estimate of its memory account."""
    import torch

    from sglang_oscar.attach import refusals
    from sglang_oscar.attention import extend_choice
    from sglang_oscar.memory.plan import row_layout
    from sglang_oscar.settings import Settings
    from sglang_oscar.weights.rotations import load_formats

    loaded: dict[str, Any] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = SimpleNamespace(
        device=device,
        speculative_algorithm=None,
        enable_torch_compile=False,
        tp_size=1,
        linear_attn_backend="triton",
        enable_mixed_chunk=False,
        enable_hierarchical_cache=False,
        disaggregation_mode="null",
        chunked_prefill_size=None,
    )

    def model() -> str:
        config = loaded["model"] = model_config(path)
        refusals.check_model(config, arguments)
        heads = f"{config.num_attention_heads} query and {config.get_total_num_kv_heads()} kv heads"
        return f"{config.hf_config.architectures[0]}, {layer_facts(config)}, {heads} of {config.head_dim}"

    def variables() -> str:
        loaded["settings"] = Settings.from_env()
        windows = loaded["settings"].windows
        return f"windows of {windows.sink} first and {windows.recent} newest tokens"

    def group() -> str:
        args = SimpleNamespace(kv_cache_quant_group_size=group_size)
        config = loaded["model"]
        layout = row_layout(args, loaded["settings"], config, config.get_total_num_kv_heads())
        loaded["layout"] = layout
        return f"{layout.group_size} channels, {layout.bits_per_element:.2f} bits per element of {layout.bits} bits"

    def prompts() -> str:
        names = {None: "the torch reference", "flashinfer": "FlashInfer", "triton": "our Triton kernel"}
        return f"attention by {names[extend_choice.choose(loaded['settings'].extend_backend, device)]}"

    def rotations() -> str:
        config = loaded["model"]
        identity = model_identity(path, config)
        found = load_formats(loaded["settings"], loaded["layout"], cached_layer_ids(config), identity)
        loaded["formats"] = found
        return rotation_facts(loaded["settings"], found)

    def account() -> str:
        budget = int(MEM_FRACTION * memory) - sum(map(weight_bytes, {path, draft_path or path}))
        return memory_account(loaded, budget)

    def host_tier() -> str:
        return host_facts(loaded, host_size, host_ratio)

    checks = [attempt("model", model), attempt("variables", variables)]
    if all(check.ok for check in checks):
        checks.append(attempt("group size", group))
        if "layout" in loaded:
            checks.append(attempt("rotations", rotations))
        checks.append(attempt("prompts", prompts))
        if draft_path is not None:
            checks.append(attempt("draft model", lambda: draft_facts(draft_path, loaded)))
    if "layout" in loaded:
        checks.append(attempt(f"memory (estimate, one device, {MEM_FRACTION:.0%} of it)", account))
    if "tokens" in loaded and (host_size or host_ratio):
        checks.append(attempt("host tier", host_tier))
    return checks


def machine_checks() -> list[Check]:
    """Checks that need no model."""
    checks = [attempt("sglang", check_sglang), attempt("plugin", check_entry_point)]
    if all(check.ok for check in checks):
        checks.append(attempt("hooks", check_hooks))
    return [*checks, attempt("device", check_torch), attempt("sgl_kernel", check_sgl_kernel)]


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Model folder or id; without it only the machine is checked.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--kv-cache-quant-group-size", help="Group size to check the model with.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option("--speculative-draft-model-path", help="Draft model to check with it; MODEL itself if it drafts."),
    ] = None,
    host_size: Annotated[
        int, typer.Option("--hicache-size", help="Host memory of a hierarchical cache, 10^9 bytes a rank.")
    ] = 0,
    host_ratio: Annotated[
        float, typer.Option("--hicache-ratio", help="The same as a multiple of the tokens on the device.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether this machine, and MODEL on it, can run int2 mode and, if not, why."""
    checks = machine_checks()
    if model is not None and all(check.ok for check in checks[:1]):
        checks = [*checks, *model_checks(model, group_size, memory_bytes(), draft, host_size, host_ratio)]
    ok = all(check.ok for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            typer.echo(check.line())
    raise typer.Exit(0 if ok else 1)
