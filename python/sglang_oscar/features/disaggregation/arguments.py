"""What int2 mode serves of prefill/decode disaggregation, by server arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.attach.arguments import disaggregated, drafts_with_model
from sglang_oscar.attach.feature import Refusal
from sglang_oscar.attach.releases import argument, differs_from_default, sends_states
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.cached_layers import linear_config
from sglang_oscar.settings import Settings

BACKENDS = ("mooncake", "mooncake_tcp", "nixl")
BACKUP = "disaggregation_decode_retraction_backup"


def waiting_seats(args: Any) -> int:
    """Seats in the request pool for requests whose prompts are on their way, beyond those of running requests.

    Args:
        args: server arguments as SGLang resolved them.
    """
    return int(args.disaggregation_decode_extra_slots or 0) if args.disaggregation_mode == "decode" else 0


def configure(args: Any, model: Any) -> None:
    """Keep the rows of retracted requests in tensors of the host where the operator leaves it open.

    Args:
        args: server arguments as the operator gave them; they are written.
        model: SGLang's ModelConfig; None where it cannot be read.
    """
    if args.disaggregation_mode == "decode" and argument(args, BACKUP, "cpu_tensor") is None:
        setattr(args, BACKUP, "cpu_tensor")


def check(args: Any, settings: Settings, model: Any) -> None:
    """Refuse settings of int2 mode that do not go with disaggregation.

    Raises:
        Int2Error: a prefill server may lack the newest tokens of a prompt in 16 bits.
    """
    if disaggregated(args) and not settings.recompute_recent:
        raise Int2Error("SGLANG_OSCAR_RECOMPUTE_RECENT=0 does not go with --disaggregation-mode; unset it")


def check_model(model: Any, server_args: Any) -> None:
    """Refuse releases of SGLang and drafts with which models with more than rows of text were not tried.

    Args:
        model: SGLang's ModelConfig.
        server_args: None where there are none yet.

    Raises:
        Int2Error: naming the model.
    """
    if server_args is None:
        return
    hybrid_or_seeing = model.is_multimodal or linear_config(model) is not None
    tables = [(hybrid_or_seeing, NO_DRAFTS_WITH), (hybrid_or_seeing or model.is_hybrid_swa, REFUSED_WITH)]
    for refused, what in (row for concerned, table in tables if concerned for row in table):
        if refused(server_args):
            name = f"{model.model_path} ({', '.join(model.hf_config.architectures)})"
            raise Int2Error(f"--kv-cache-dtype int2 does not support {what}: {name}")


def _slices_rows(args: Any) -> bool:
    """Whether SGLang sends through a buffer that it cuts rows for by bytes per head."""
    from sglang.srt.environ import envs

    return disaggregated(args) and bool(envs.SGLANG_DISAGG_STAGING_BUFFER.get())


def _both(what: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda args: disaggregated(args) and what(args)


REFUSED: list[Refusal] = [
    (
        _both(lambda a: a.disaggregation_transfer_backend not in BACKENDS),
        "disaggregation over other ways than mooncake and nixl; set --disaggregation-transfer-backend mooncake",
    ),
    (
        _both(lambda a: a.enable_hierarchical_cache),
        "hierarchical caching with disaggregation; drop --enable-hierarchical-cache",
    ),
    (
        lambda a: argument(a, "enable_pd_role_switch", False),
        "servers that change between prefill and decode; drop --enable-pd-role-switch",
    ),
    (
        _both(lambda a: a.speculative_algorithm is not None and not (drafts_with_model(a) and sends_states())),
        "drafts with disaggregation, but for draft models from SGLang 0.5.23; drop --speculative-algorithm",
    ),
    (
        _both(lambda a: argument(a, "disaggregation_decode_enable_radix_cache", False)),
        "a prefix cache on a decode server; drop --disaggregation-decode-enable-radix-cache",
    ),
    (
        _both(lambda a: a.disaggregation_decode_enable_offload_kvcache),
        "a decode server's cache in host memory; drop --disaggregation-decode-enable-offload-kvcache",
    ),
    (
        _both(lambda a: argument(a, BACKUP, None) == "host_pool"),
        "a host pool for retracted requests; drop --disaggregation-decode-retraction-backup host_pool",
    ),
    (
        # 0 is off in the release that brought it, 1 in later ones.
        _both(lambda a: differs_from_default(a, "disaggregation_decode_host_receive_threshold")),
        "receiving into host memory; drop --disaggregation-decode-host-receive-threshold",
    ),
    (
        _both(lambda a: argument(a, "disaggregation_decode_allocation_policy", "eager") == "prefill_complete"),
        "memory that is allocated when a prompt is computed; drop --disaggregation-decode-allocation-policy",
    ),
    (
        # SGLang's sums know the components of its own pools, and recent windows are one of ours.
        _both(lambda a: argument(a, "disaggregation_enable_kv_checksum", False)),
        "checksums of what is sent; drop --disaggregation-enable-kv-checksum",
    ),
    (
        lambda a: argument(a, "enable_kv_cache_sharding", False),
        "prompts whose rows are spread over ranks; drop --enable-kv-cache-sharding",
    ),
    (_slices_rows, "staging buffers, which cut rows by bytes; unset SGLANG_DISAGG_STAGING_BUFFER"),
]

NO_DRAFTS_WITH: list[Refusal] = [
    (
        lambda a: disaggregated(a) and a.speculative_algorithm is not None,
        "drafts with disaggregation; drop --speculative-algorithm",
    ),
]
"""Refused with models that have states besides, or see images."""

REFUSED_WITH: list[Refusal] = [
    (
        lambda a: disaggregated(a) and not sends_states(),
        "disaggregation before SGLang 0.5.23; drop --disaggregation-mode",
    ),
]
"""Refused with models that have states or windows besides, or see images."""
