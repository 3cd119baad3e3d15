"""Every class of models of every supported release has a row in the table of classes that are served or refused."""

from __future__ import annotations

import pytest

from sglang_oscar.attach import model_classes
from sglang_oscar.attach.feature import features
from sglang_oscar.attach.refusals import VISION_MODELS
from sglang_oscar.features import register_all
from support.releases import SGLANG_VERSIONS, tree

from model_classes.registered import classes  # isort: skip (support.releases finds it)


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_every_class_has_a_row(version: str) -> None:
    found = set(classes(tree(version) / "sglang" / "srt" / "models"))
    assert len(found) > 150
    missing = found - set(model_classes.rows())
    assert not missing, f"run scripts/try_classes.py: no row for {', '.join(sorted(missing))}"


def test_rows_say_what_and_why() -> None:
    for name, row in model_classes.rows().items():
        assert row.int2 in (model_classes.SERVED, model_classes.REFUSED, model_classes.UNTRIED), name
        assert row.known, name


def test_classes_of_rooms_are_served() -> None:
    """What a room of the plugin serves is not refused by the table."""
    register_all()
    served = VISION_MODELS.union(*(feature.architectures for feature in features()))
    assert {model_classes.rows()[name].int2 for name in served} == {model_classes.SERVED}
