"""Dumping post-RoPE queries, keys and values of an ordinary serving process, for the fit of rotations.

Switched on with DUMP_KVCACHE=1. Sees every prefill as attention does, after RoPE and norms, under any attention
backend. Only sequences from position 0 are written, because the fit rebuilds causal attention; the launch therefore
runs without prefix cache and without prefill CUDA graphs, whose replay would bypass Python.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oscar_rotation.dump.covariances import CovarianceWriter
from oscar_rotation.dump.layout import TOKENS_NAME
from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.dump.writer import DumpWriter
from oscar_rotation.errors import DumpError
from sglang_oscar import names
from sglang_oscar.attach import releases
from sglang_oscar.attention.whole_prompts import whole_prompts
from sglang_oscar.errors import Int2Error, fatal, malformed
from sglang_oscar.formats.cached_layers import cached_layer_ids
from sglang_oscar.formats.content import attention_digest
from sglang_oscar.formats.model_identity import model_identity, weights_place
from sglang_oscar.formats.output_readers import output_projections, reader_of

logger = logging.getLogger(__name__)


class DumpSettings(BaseModel):
    """Settings of the dump; field aliases are the environment variables."""

    model_config = ConfigDict(frozen=True)

    enabled: bool = Field(False, alias="DUMP_KVCACHE", description="record queries, keys and values of prompts")
    tokens: int = Field(30000, alias="DUMP_KVCACHE_TOKENS", gt=0, description="stop after so many tokens per layer")
    folder: Path = Field(Path("qkv_dumps"), alias="DUMP_KVCACHE_DIR", description="folder that holds no dump yet")
    mode: Literal["activations", "covariances"] = Field(
        "activations", alias="DUMP_KVCACHE_MODE", description="`covariances` writes only the sums that a fit needs"
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> DumpSettings:
        """Read the settings.

        Raises:
            Int2Error: a value is malformed.
        """
        env = os.environ if env is None else env
        values = {str(f.alias): env[str(f.alias)] for f in cls.model_fields.values() if f.alias in env}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise malformed(error, values) from None


UNSEEN: dict[str, Callable[[Any], bool]] = {
    "--pp-size": lambda args: args.pp_size > 1,
    "--dp-size": lambda args: args.dp_size > 1,
    "--enable-dp-attention": lambda args: args.enable_dp_attention,
    "--attn-dp-size": lambda args: releases.argument(args, "attn_dp_size", 1) > 1,
    "--enable-torch-compile": lambda args: args.enable_torch_compile,
    "--speculative-algorithm": lambda args: args.speculative_algorithm is not None,
}
"""What a dump would miss calls of attention under, or mix those of several models or replicas."""


def is_wanted() -> bool:
    """Whether this process is to dump; a malformed setting counts as a wish, which :func:`configure` then refuses."""
    try:
        return DumpSettings.from_env().enabled
    except Int2Error:
        return True


def configure(args: Any) -> None:
    """Prepare server arguments for a dump; does nothing where none is asked for.

    Raises:
        Int2Error: the dump was asked for in a set-up that it cannot see into.
    """
    settings = DumpSettings.from_env()
    if not settings.enabled:
        return
    if args.kv_cache_dtype == names.DTYPE:
        raise Int2Error("DUMP_KVCACHE=1 needs an ordinary server: drop --kv-cache-dtype int2")
    given = [flag for flag, is_given in UNSEEN.items() if is_given(args)]
    if given:
        raise Int2Error(f"DUMP_KVCACHE=1 does not work with {', '.join(given)}; drop it for the dump")
    manifest = settings.folder / "manifest.json"
    if manifest.exists():
        raise Int2Error(f"DUMP_KVCACHE_DIR={settings.folder} holds a dump already; remove it or name another folder")
    args.disable_radix_cache = True
    args.disable_prefill_cuda_graph = True
    args.cuda_graph_backend_prefill = "disabled"  # weighs more than the flag before it
    logger.info("dumping q, k and v to %s", settings.folder)


def check_heads(args: Any, model: Any) -> None:
    """Refuse ranks among which SGLang does not part or copy the heads of the model, but others that it adds to them.

    Args:
        args: server arguments as SGLang resolved them.
        model: SGLang's ModelConfig, as the checkpoint states it.

    Raises:
        Int2Error: on a CPU, where heads are filled up with empty ones to a multiple of the ranks.
    """
    heads = (model.num_attention_heads, model.get_total_num_kv_heads())
    if args.device == "cpu" and any(count % args.tp_size for count in heads):
        raise Int2Error(
            f"DUMP_KVCACHE=1 does not work on a CPU with --tp-size {args.tp_size} and a model of {heads[0]} query and "
            f"{heads[1]} kv heads, to which SGLang adds empty ones there; set a --tp-size that divides both"
        )


def covariance_writer(shares: DumpWriter, num_layers: int, sm_scale: float) -> CovarianceWriter:
    """A writer of covariances for the same rank and heads as a writer of activations."""
    return CovarianceWriter(
        shares.root,
        num_layers=num_layers,
        kv_shard=shares.kv_shard,
        kv_shards=shares.kv_shards,
        tp_rank=shares.tp_rank,
        tp_size=shares.tp_size,
        sm_scale=sm_scale,
    )


class Dump:
    """A dump in progress in one worker.

    Args:
        settings: where to and how much.
        server_args: SGLang's.
        sm_scale: factor on the attention logits.
    """

    def __init__(self, settings: DumpSettings, server_args: Any, sm_scale: float) -> None:
        from sglang.srt.runtime_context import get_parallel

        model, parallel = releases.model_config(server_args), get_parallel()
        layers = cached_layer_ids(model)
        self.numbers = {layer_id: number for number, layer_id in enumerate(layers)}
        self.rank = parallel.attn_tp_rank
        self.settings = settings
        # Chunk 0 is the server's warm-up request, which a fit leaves out.
        self.chunk = 0 if server_args.skip_server_warmup else -1
        self.tokens, self.budget = 0, settings.tokens
        self.selected: torch.Tensor | None = None
        self.seq_lens: list[int] = []
        self.writer = DumpWriter(
            settings.folder,
            total_kv_heads=model.get_total_num_kv_heads(),
            tp_rank=parallel.attn_tp_rank,
            tp_size=parallel.attn_tp_size,
        )
        self.covariances = (
            covariance_writer(self.writer, len(layers), sm_scale) if settings.mode == "covariances" else None
        )
        found = {} if _model is None else output_projections(_model)
        self.projections = found if settings.mode == "activations" and all(layer in found for layer in layers) else {}
        identity = model_identity(server_args.model_path, model)
        self.manifest = DumpManifest(
            model_id=identity.model_id,
            model_hash=identity.model_hash,
            model_overrides=json.loads(server_args.json_model_override_args),
            weights_digest=self._weights_digest(server_args),
            weights=weights_place(server_args.model_path),
            num_layers=len(layers),
            layer_ids=None if len(layers) == model.num_hidden_layers else layers,
            q_heads=model.num_attention_heads,
            kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.head_dim,
            value_head_dim=None if model.v_head_dim == model.head_dim else model.v_head_dim,
            dtype=str(model.dtype).removeprefix("torch."),
            tp_size=parallel.attn_tp_size,
            sm_scale=sm_scale,
            output_readers=bool(self.projections),
            complete=False,
        )
        self._write_manifest()

    def _weights_digest(self, server_args: Any) -> str:
        """Of the weights that are dumped; rank 0 writes it."""
        asked = (server_args.model_path, server_args.revision, server_args.download_dir)
        return "" if self.rank else attention_digest(*asked)

    @property
    def done(self) -> bool:
        """Whether the token budget is reached."""
        return self.tokens >= self.budget

    def select(self, forward_batch: Any) -> None:
        """Choose the tokens of a forward pass: those of sequences that start at position 0, health checks aside."""
        self.seq_lens, self.selected = whole_prompts(forward_batch)
        self.chunk += self.selected is not None
        told = self.settings.folder / TOKENS_NAME
        if self.tokens == 0 and told.exists():
            self.budget = int(told.read_text())

    def write(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """Write the selected tokens of one layer; the last layer completes the chunk. Layers without an INT2 cache are
        left out.

        Args:
            layer_id: of the model.
            q, k, v: [tokens, heads of this rank, head_dim], heads of ``v`` of their own size.
            sinks: [q_heads of this rank], sink logits of the layer; None for a layer without.
        """
        if self.selected is None or layer_id not in self.numbers:
            return
        number = self.numbers[layer_id]
        index = self.selected.to(q.device)
        if (projection := self.projections.pop(layer_id, None)) is not None:
            self.writer.write_output_reader(number, reader_of(projection, q))
        writer = self.covariances or self.writer
        writer.write(number, self.chunk, q[index], k[index], v[index], self.seq_lens, sinks)
        if number < len(self.numbers) - 1:
            return
        if self.chunk:
            self.tokens += sum(self.seq_lens)
        if self.done:
            if self.covariances:
                self.covariances.finish()
            self._wait_for_other_ranks()
            facts = {"complete": True, "tokens": self.tokens, "sink_logits": tuple(sorted(self.writer.sink_layers))}
            self.manifest = self.manifest.model_copy(update=facts)
            self._write_manifest()
            logger.info("dump complete: %d tokens in %s", self.tokens, self.settings.folder)

    @staticmethod
    def _wait_for_other_ranks() -> None:
        """Complete is a dump whose every rank has written its last file; all of them pass here in the same batch."""
        from sglang.srt.distributed import get_tp_group

        get_tp_group().barrier()

    def _write_manifest(self) -> None:
        if self.rank == 0:
            self.manifest.write(self.settings.folder)


_model: Any = None
_dump: Dump | None = None
_settings: DumpSettings | None = None


def after_load_model(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Note the model of this worker."""
    global _model
    _model = self.model


def before_attention(self: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """See q, k and v of every attention layer; costs one comparison where no dump is asked for."""
    global _dump, _settings
    if _settings is None:
        _settings = DumpSettings.from_env()
    if not _settings.enabled or (_dump is not None and _dump.done):
        return
    if not forward_batch.forward_mode.is_extend() or not getattr(forward_batch, "rids", None) or k is None:
        return
    try:
        if _dump is None:
            from sglang.srt.runtime_context import get_server_args

            _dump = Dump(_settings, get_server_args(), self.scaling)
        if _dump.numbers.get(self.layer_id) == 0:
            _dump.select(forward_batch)
        tokens = sum(forward_batch.extend_seq_lens_cpu)
        heads = [(q, self.tp_q_head_num), (k, self.tp_k_head_num), (v, self.tp_v_head_num)]
        queries, keys, values = (x[:tokens].view(tokens, count, -1) for x, count in heads)
        _dump.write(self.layer_id, queries, keys, values, kwargs.get("sinks"))
    except (OSError, DumpError) as error:
        fatal(f"cannot write the dump to {_settings.folder}: {error}")
