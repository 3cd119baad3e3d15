"""What a trainer may ask for: ``oscar_sample`` and then, with nothing under way, ``oscar_refit``."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oscar_kernels.format import fingerprint
from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.dump.writer import DumpWriter
from oscar_rotation.files.pair import rotation_files
from sglang_oscar import metrics, worker
from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import disaggregated
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.refitting.fitting import fit_again, fitted_recipe
from sglang_oscar.features.refitting.in_place import put, replacements
from sglang_oscar.features.refitting.ranks import Ranks
from sglang_oscar.features.refitting.samples import Samples, Sampling
from sglang_oscar.features.refitting.temporary import TemporaryFolder
from sglang_oscar.formats import origin
from sglang_oscar.formats.content import attention_digest
from sglang_oscar.formats.geometry import own_heads
from sglang_oscar.formats.model_identity import model_identity, weights_place
from sglang_oscar.formats.output_readers import output_projections
from sglang_oscar.formats.rotations import model_rotations
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.facts import facts
from sglang_oscar.names import CHOSEN_ROTATIONS

logger = logging.getLogger(__name__)

TOKENS = 16384
"""Sampled unless a number is given: `oscar_sample:NUMBER`."""


def around_check_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Take our actions; hand others on.

    Args:
        original: SGLang's.
        self: its SchedulerWeightUpdaterManager.
        recv_req: CheckWeightsReqInput.
    """
    action, _, said = recv_req.action.partition(":")
    if action not in ACTIONS:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        message, done = ACTIONS[action](self, said), True
    except Int2Error as error:
        message, done = f"{action}: {error}", False
    logger.log(logging.INFO if done else logging.WARNING, "int2 refit: %s", message)
    return CheckWeightsReqOutput(success=done, message=message)


def sample(updater: Any, said: str) -> str:
    """Begin to sample prompts; what was sampled before is forgotten.

    Raises:
        Int2Error: it cannot be refitted; nothing has changed.
    """
    runner, cache, samples = _server(updater)
    if not (said or str(TOKENS)).isdecimal() or int(said or TOKENS) < 1:
        raise Int2Error(f"{said!r} is no number of tokens; leave it out for {TOKENS}")
    recipe = fitted_recipe(cache.recipe)
    ranks, model = Ranks(updater.tp_cpu_group), releases.model_config(runner.server_args)
    folder = Path(ranks.first(lambda: str(samples.new_folder())))
    projections = output_projections(runner.model) if recipe.needs_weights else {}
    layers = sorted(cache.layers)
    if recipe.needs_weights and (missing := [layer for layer in layers if layer not in projections]):
        raise Int2Error(f"the output projection of layer {missing[0]} is not known; fit elsewhere, and start anew")
    writer = ranks.all(
        lambda: DumpWriter(
            folder / "dump", total_kv_heads=model.get_total_num_kv_heads(), tp_rank=ranks.rank, tp_size=ranks.size
        )
    )
    numbers = {layer: number for number, layer in enumerate(layers)}
    kept = {layer: projections[layer] for layer in layers if layer in projections}
    samples.sampling = Sampling(writer, numbers, kept, int(said or TOKENS), origin.changes())
    return f"sampling {samples.sampling.budget} tokens of prompts; serve some, then ask for {REFIT}"


def refit(updater: Any, said: str) -> str:
    """Fit to what was sampled and serve that; files go to the folder ``said``, where one is named.

    Raises:
        Int2Error: the matrices are the old ones, on every rank.
    """
    runner, cache, samples = _server(updater)
    sampling, out = samples.sampling, Path(said).absolute() if said else None
    if sampling is None:
        raise Int2Error(f"nothing was sampled; ask for {SAMPLE}, serve prompts, then ask again")
    ranks = Ranks(updater.tp_cpu_group)
    ranks.all(lambda: _check(sampling))
    if not updater.flush_cache():
        raise Int2Error("requests run or wait; let them finish, then ask again")
    files = Path(ranks.first(lambda: _fitted(runner, cache, samples, sampling, ranks.size)))
    model = releases.model_config(runner.server_args)
    fresh = cache.settings.with_rotations(**_chosen(files))
    loaded = ranks.all(lambda: model_rotations(runner.server_args, fresh, model))
    heads = own_heads(model)
    own = {layer_id: of.of_heads(heads) for layer_id, of in loaded.formats.items()}
    found = ranks.all(lambda: replacements(cache, own))
    if out is not None:
        files = Path(ranks.first(lambda: _copied(files, out)))
    # From here on nothing can fail.
    put(found, cache.seats.device)
    cache.fingerprint, cache.key_errors = fingerprint(loaded.formats), loaded.key_errors
    _note(_chosen(files))
    cache.settings = worker.of_this_process()
    # Keys of storage change with it.
    origin.note_updated()
    samples.files, samples.fresh = samples.fresh, None
    samples.drop()
    metrics.publish(facts(cache))
    where = f"; files in {out}" if out else ""
    return f"fitted {cache.recipe} to {sampling.tokens} tokens, format {cache.fingerprint[:12]}{where}"


SAMPLE, REFIT = "oscar_sample", "oscar_refit"
ACTIONS: dict[str, Callable[[Any, str], str]] = {SAMPLE: sample, REFIT: refit}


def _server(updater: Any) -> tuple[Any, Int2Cache, Samples]:
    """SGLang's ModelRunner, its cache and its sampler.

    Raises:
        Int2Error: it is a server that is not refitted.
    """
    runner = updater.tp_worker.model_runner
    cache, args = cache_of(runner.req_to_token_pool), releases.resolved(runner.server_args)
    assert cache is not None
    assert isinstance(cache.sampler, Samples)
    if disaggregated(args):
        raise Int2Error("prefill and decode servers compare rotations once; start both on files of a new fit")
    layer = cache.plan.geometry.any_layer
    if layer.head_dim != layer.value_head_dim:
        raise Int2Error("heads of keys and values that differ in size are not refitted; start a server on a new fit")
    if max(args.nnodes, args.dp_size, args.pp_size) > 1:
        raise Int2Error(
            "servers of several nodes, replicas or stages are not refitted; start one on files of a new fit"
        )
    return runner, cache, cache.sampler


def _check(sampling: Sampling) -> None:
    """Whether samples do.

    Raises:
        Int2Error: they do not.
    """
    if sampling.fault:
        raise Int2Error(f"prompts could not be sampled ({sampling.fault}); ask for {SAMPLE} again")
    if sampling.changes != origin.changes():
        raise Int2Error(f"weights have changed since {SAMPLE}; ask for it again, serve prompts, then ask again")
    if not sampling.tokens:
        raise Int2Error(f"no whole prompt was served since {SAMPLE}; serve some, then ask again")


def _fitted(runner: Any, cache: Int2Cache, samples: Samples, sampling: Sampling, ranks: int) -> str:
    """The folder of the files of a new fit; rank 0 makes it."""
    dump, args, model = sampling.writer.root, runner.server_args, releases.model_config(runner.server_args)
    _manifest(runner, sampling, ranks).write(dump)
    whole = model_rotations(args, cache.settings, model).formats
    result = fit_again(dump, cache.settings, whole, cache.recipe, cache.seats.device)
    samples.fresh = TemporaryFolder()
    result.save(samples.fresh.path, (".safetensors",))
    return str(samples.fresh.path)


def _copied(files: Path, out: Path) -> str:
    """The same files in another folder, which holds none of another fit."""
    out.mkdir(parents=True, exist_ok=True)
    if others := sorted(path.name for path in out.glob("[kv]_rotation_*")):
        raise Int2Error(f"{out} holds {others[0]} of another fit; name another folder")
    for path in files.iterdir():
        shutil.copy(path, out)
    return str(out)


def _chosen(files: Path) -> dict[str, str]:
    """Where rotations are from, as settings have it."""
    keys, values = rotation_files(files)
    return {"keys": str(keys), "values": str(values), "origin": "a refit"}


def _manifest(runner: Any, sampling: Sampling, ranks: int) -> DumpManifest:
    args, model = releases.resolved(runner.server_args), releases.model_config(runner.server_args)
    identity = model_identity(args.model_path, model)
    layers = tuple(sampling.numbers)
    digest = "" if origin.changes() else attention_digest(args.model_path, args.revision, args.download_dir)
    return DumpManifest(
        model_id=identity.model_id, model_hash=identity.model_hash, weights_digest=digest,
        model_overrides=json.loads(args.json_model_override_args), weights=weights_place(args.model_path),
        num_layers=len(layers), layer_ids=None if len(layers) == model.num_hidden_layers else layers,
        q_heads=model.num_attention_heads, kv_heads=model.get_total_num_kv_heads(), head_dim=model.head_dim,
        dtype=sampling.dtype, tokens=sampling.tokens, tp_size=ranks, sm_scale=sampling.sm_scale,
        sink_logits=tuple(sorted(sampling.writer.sink_layers)), output_readers=sampling.has_readers,
    )  # fmt: skip


def _note(chosen: dict[str, str]) -> None:
    """What this process says of its rotations, and loads for storage that is attached later."""
    from sglang.srt.runtime_context import get_server_args

    get_server_args().__dict__[CHOSEN_ROTATIONS] = chosen
    worker.of_this_process.cache_clear()
