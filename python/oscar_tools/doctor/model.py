"""Checks of a model on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from oscar_rotation.files.identity import ModelIdentity
from oscar_tools.doctor.account import MEM_FRACTION, account_of
from oscar_tools.doctor.check import Check, attempt, quiet
from oscar_tools.doctor.machine import EXTEND
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.cached_layers import cached_layer_ids
from sglang_oscar.formats.origin import cached_snapshot
from sglang_oscar.formats.warnings import rotation_warnings, served_identity


class Ranks(NamedTuple):
    """Devices that share a model: ``tp`` in all, in ``dp`` replicas of attention, each with tokens of its own."""

    tp: int = 1
    dp: int = 1

    @property
    def attention(self) -> int:
        """Those that share the heads of a replica."""
        return self.tp // self.dp


ALONE = Ranks()


def model_checks(
    path: str,
    group_size: int | None,
    memory: int,
    draft_path: str | None = None,
    host_size: int = 0,
    host_ratio: float = 0,
    config: Mapping[str, Any] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> list[Check]:
    """Checks of a model: architecture, group size, rotations, draft model, and an estimate of its memory account.

    ``config`` are further arguments of SGLang's ModelConfig: what a server's flags change of the model. ``ranks`` share
    it, with ``memory`` bytes each.
    """
    import torch

    from sglang_oscar.attach import refusals
    from sglang_oscar.attach.gate import check_sink
    from sglang_oscar.attention import decode_choice, extend_choice
    from sglang_oscar.formats.geometry import row_layouts
    from sglang_oscar.settings import Settings

    loaded: dict[str, Any] = {"ranks": ranks.attention, "all ranks": ranks.tp}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = arguments_for(device, draft_path is not None, bool(host_size or host_ratio), ranks.dp)

    def model() -> str:
        found = loaded["model"] = model_config(path, **config)
        refusals.check_model(found, arguments)
        check_ranks(found, ranks)
        kv_heads, channels = found.get_total_num_kv_heads(), dict.fromkeys((found.head_dim, found.v_head_dim))
        heads = f"{found.num_attention_heads} query and {kv_heads} kv heads of {' and '.join(map(str, channels))}"
        return f"{found.hf_config.architectures[0]}, {layer_facts(found)}, {heads}, {found.context_len:,} positions"

    def variables() -> str:
        windows = (settings := Settings.from_env()).windows
        check_sink(windows.sink)
        loaded["settings"] = settings
        return f"windows of {windows.sink} first and {windows.recent} newest tokens"

    def group() -> str:
        args = SimpleNamespace(kv_cache_quant_group_size=group_size)
        config = loaded["model"]
        layouts = loaded["layouts"] = row_layouts(args, loaded["settings"], config, config.get_total_num_kv_heads())
        said = [
            f"{layout.group_size} channels, {layout.bits_per_element:.2f} bits per element of {layout.bits} bits"
            for layout in dict.fromkeys(layouts)
        ]
        return said[0] if len(said) == 1 else f"keys {said[0]}; values {said[1]}"

    def prompts() -> str:
        config = loaded["model"]
        decode_choice.check(loaded["settings"].decode_backend, device)
        heads = (config.head_dim, config.v_head_dim)
        chosen = extend_choice.choose(loaded["settings"].extend_backend, device, heads, config.has_attention_sinks)
        return f"attention by {EXTEND[chosen] if chosen else 'the torch reference'}"

    def account() -> str:
        return account_of(loaded, (path, draft_path or path), memory)

    def host_tier() -> str:
        from oscar_tools.doctor.host import host_lines

        return "; ".join(host_lines(loaded["plan"], loaded["tokens"], host_size, host_ratio))

    checks = [attempt("model", model), attempt("variables", variables)]
    if all(check.ok for check in checks):
        checks.append(attempt("group size", group))
        if "layouts" in loaded:
            checks.append(attempt("rotations", lambda: rotation_source(path, group_size, loaded)))
        checks.append(attempt("prompts", prompts))
        if draft_path is not None:
            checks.append(attempt("draft model", lambda: draft_facts(draft_path, loaded)))
    if "layouts" in loaded:
        devices = "one device" if ranks.tp == 1 else f"each of {ranks.tp} devices"
        devices += f", tokens of one of {ranks.dp} replicas" if ranks.dp > 1 else ""
        checks.append(attempt(f"memory (estimate, {devices}, {MEM_FRACTION:.0%} of it)", account))
    if "tokens" in loaded and (host_size or host_ratio):
        checks.append(attempt("host tier", host_tier))
    return checks


def check_ranks(model: Any, ranks: Ranks) -> None:
    """Refuse a number of ranks that cannot share a model's heads.

    Raises:
        Int2Error: query heads are no multiple of it, or kv heads neither a multiple nor a divisor; or replicas of
            attention do not divide them.
    """
    queries, heads, share = model.num_attention_heads, model.get_total_num_kv_heads(), ranks.attention
    if share * ranks.dp != ranks.tp:
        raise Int2Error(f"--dp {ranks.dp} does not divide --tp {ranks.tp}; set --dp 1, 2, 4 or 8, up to --tp")
    if queries % share or (heads % share and share % heads):
        raise Int2Error(f"--tp {ranks.tp} cannot share {queries} query and {heads} kv heads; set --tp 1, 2, 4 or 8")


def arguments_for(device: str, drafts: bool, host_tier: bool, replicas: int = 1) -> Any:
    """Arguments of a server by their defaults, for checks of what does not go with a model.

    Args:
        device: of the server.
        drafts: with a draft model.
        host_tier: with hierarchical caching.
        replicas: of attention, with data-parallel attention.
    """
    from sglang.srt.server_args import ServerArgs

    from sglang_oscar.attach.arguments import DRAFT_MODELS
    from sglang_oscar.attach.releases import field_defaults
    from sglang_oscar.features import register_all

    register_all()
    asked = {
        "device": device,
        "speculative_algorithm": DRAFT_MODELS[0] if drafts else None,
        "enable_hierarchical_cache": host_tier,
        "dp_size": replicas,
        "enable_dp_attention": replicas > 1,
        "disable_overlap_schedule": True,  # a hybrid model may need it, which is told and not held against it
    }
    return SimpleNamespace(**field_defaults(ServerArgs) | asked)


def model_config(path: str, **kwargs: Any) -> Any:
    """SGLang's ModelConfig of a model.

    Raises:
        Int2Error: it cannot be read.
    """
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_oscar.features.sliding_windows.two_pools import give_two_pools

    try:
        with quiet():
            model = ModelConfig(path, **kwargs)
    except Exception as error:  # whatever transformers raises for what it cannot read
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise Int2Error(f"{path}: cannot be read ({text}); name a model folder or an id of the Hub") from None
    give_two_pools(model)
    return model


def layer_facts(config: Any) -> str:
    """How many layers a model has, of which kind where there are several, and what flag they need."""
    from sglang_oscar.attach.releases import tells_kept_states_apart

    layers, full = f"{config.num_hidden_layers} layers", len(cached_layer_ids(config))
    if full == config.num_hidden_layers:
        return layers
    if not config.is_hybrid_swa:
        flag = "" if tells_kept_states_apart() else " (to be served with --disable-overlap-schedule)"
        return f"{layers}, {full} of them with full attention{flag}"
    windows = f"{config.num_hidden_layers - full} with a window of {config.sliding_window_size}"
    return f"{layers} ({full} in 2 bits, {windows})"


def rotation_source(path: str, group_size: int | None, loaded: dict[str, Any]) -> str:
    """Where rotations of the model of :func:`model_checks` will come from; formats of those that there are, are kept.

    Raises:
        Int2Error: a server would not have any, or cannot use them.
    """
    from sglang_oscar.formats.rotations import load_formats
    from sglang_oscar.rotation_source import choice

    config, settings = loaded["model"], loaded["settings"]
    place = Path(path) if Path(path).exists() else cached_snapshot(path)
    args = SimpleNamespace(
        model_path=str(place or path), revision=None, download_dir=None, nnodes=1, kv_cache_quant_group_size=group_size
    )
    found = choice.of_variables(settings)
    if found is None and place is None:
        return "weights are not here yet: those beside them, those in the cache, or calibrated on the spot"
    chosen = found or choice.find(args, settings, config)
    if isinstance(chosen, choice.Missing):
        if (reason := choice.refusal(args, settings, chosen)) is not None:
            raise Int2Error(reason)
        return f"none yet: the first server calibrates on the spot, minutes, into {chosen.folder}"
    settings = settings.with_rotations(chosen.keys, chosen.values, chosen.origin)
    args.model_path = path
    identity = served_identity(args, config)
    loaded["formats"] = load_formats(
        settings, loaded["layouts"][0], cached_layer_ids(config), identity, loaded["layouts"][1]
    )
    return f"from {chosen.origin}: {rotation_facts(settings, config, identity, loaded['formats'])}"


def rotation_facts(settings: Any, model: Any, identity: ModelIdentity, formats: Any) -> str:
    """Where rotations come from, for which positions, and what is known of sharing one per layer among its kv heads."""
    from oscar_kernels.format import code_widths, fingerprint, mean_bits
    from oscar_rotation.recipes import BUILT_IN
    from oscar_rotation.report.inspect import describe

    named = {"keys": settings.k_rotation, "values": settings.v_rotation}
    facts = [", ".join(f"{side} {source}" for side, source in named.items()) + f", format {fingerprint(formats)[:12]}"]
    facts.append(f"{mean_bits(formats.values()):.2f} bits per element, bits by layer: {code_widths(formats.values())}")
    files = {side: source for side, source in named.items() if source not in BUILT_IN}
    found = {side: describe(file) for side, file in files.items()}
    if "keys" in found and (positions := found["keys"]["positions"]):  # values do not turn with them
        facts.append(f"keys fitted for {positions}")
    facts += [f"{side}: {remark}" for side, of in found.items() if (remark := of["sharing"])]
    facts += [f"warning: {warning}" for warning in rotation_warnings(settings, model, identity, formats)]
    return "; ".join(facts)


def draft_facts(path: str, loaded: dict[str, Any]) -> str:
    """What a draft model costs beside the model of :func:`model_checks`; a token's bytes are kept for the account.

    Raises:
        Int2Error: it cannot be read, or its cache is of another kind.
    """
    from sglang_oscar.features.speculation import draft_model

    config = model_config(path, is_draft_model=True)
    draft_model.check(config, loaded["model"])
    loaded["draft bytes"] = draft_model.cell_bytes(config, loaded["ranks"], config.dtype)
    return f"{config.hf_config.architectures[0]}, {loaded['draft bytes']} bytes a token in {config.dtype}"
