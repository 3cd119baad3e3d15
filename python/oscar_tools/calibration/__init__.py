"""Calibration and evaluation from a model id to a table: what the scripts under ``rotation/`` run."""
