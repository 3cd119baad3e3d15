"""Folding the value rotation into the weights: what it adds to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AROUND, SRT, Touchpoint, at
from sglang_oscar.features.folding import absorption, updates

WORKER = SRT + "managers.tp_worker.BaseTpWorker."
RUNNER = SRT + "model_executor.model_runner_components.weight_updater.WeightUpdater."
MODEL_RUNNER = SRT + "model_executor.model_runner.ModelRunner."
UPDATER = SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."

FEATURE = Feature(
    name="folding",
    in_schedulers=[
        Touchpoint(at(MODEL_RUNNER + "load_model"), AROUND, absorption.around_load_model),
        Touchpoint(
            at(SRT + "model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"),
            AROUND,
            absorption.around_load_weights_and_postprocess,
        ),
        Touchpoint(at(RUNNER + "update_weights_from_disk"), AROUND, updates.around_update_from_disk),
        Touchpoint(at(WORKER + "init_weights_update_group"), AROUND, updates.around_update_weights),
        Touchpoint(
            at(WORKER + "update_weights_from_tensor", RUNNER + "update_weights_from_tensor"),
            AROUND,
            updates.around_update_weights,
        ),
        Touchpoint(
            at(WORKER + "update_weights_from_distributed", RUNNER + "load_weights_from_distributed"),
            AROUND,
            updates.around_update_weights,
        ),
        Touchpoint(
            at(WORKER + "update_weights_from_ipc", RUNNER + "update_weights_from_ipc"),
            AROUND,
            updates.around_update_weights,
        ),
        Touchpoint(at(UPDATER + "update_weights_from_tensor"), AROUND, updates.around_update_from_tensor),
        Touchpoint(at(UPDATER + "begin_weight_update"), AROUND, updates.around_begin_update, recent=True),
        Touchpoint(at(WORKER + "send_weights_to_remote_instance"), AROUND, updates.around_send_weights),
        Touchpoint(at(UPDATER + "save_remote_model"), AROUND, updates.around_save_weights),
        Touchpoint(at(UPDATER + "save_sharded_model"), AROUND, updates.around_save_weights),
    ],
    values_rotated=absorption.is_absorbed,
)
