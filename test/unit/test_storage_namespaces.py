"""Name spaces of requests part pages in storage, also where SGLang's own keys do not know them (up to 0.5.19)."""

from __future__ import annotations

from array import array
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import utils
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_oscar.features.tiers import hooks, host_releases

PAGE = 4
SPACES = list(product([None, "", "a", "b", "ab"], [None, "a", "b"]))
HASH = utils.get_hash_str


@pytest.fixture(autouse=True)
def _hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "get_hash_str", lambda *given, **named: hooks.around_get_hash_str(HASH, *given, **named))


def node(extra_key: str | None, salt: str | None = None, length: int = 8) -> Any:
    """A node at the root of a prefix tree."""
    key = RadixKey(array("q", range(length)), extra_key)
    if salt is not None:
        key.cache_salt = salt
    root = SimpleNamespace(key=RadixKey(array("q")), hash_value=[])
    return SimpleNamespace(parent=root, key=key, hash_value=None)


def test_no_name_space_finds_pages_of_another() -> None:
    """By key and by salt, where a release has salts."""
    spaces = SPACES if "cache_salt" in RadixKey.__slots__ else [space for space in SPACES if space[1] is None]
    hashes = [utils.compute_node_hash_values(node(*space), PAGE) for space in spaces]
    pages = [page for of in hashes for page in of]
    assert len(set(pages)) == len(pages) == 2 * len(spaces)


def test_a_prefix_goes_on_in_its_name_space() -> None:
    """What is looked for behind a page has the key that it was written with, and neither is changed without names."""
    for space in (None, "a"):
        whole = utils.compute_node_hash_values(node(space), PAGE)
        rest = RadixKey(array("q", range(PAGE, 8)), space)
        assert utils.get_hash_str(rest, whole[0], page_size=PAGE) == whole[1:]
    assert utils.compute_node_hash_values(node(None), PAGE) == HASH(array("q", range(8)), None, PAGE)


def test_of_newer_releases_keys_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_releases, "stores_namespaces", lambda: True)
    assert utils.get_hash_str(node("a").key, None, PAGE) == HASH(node("b").key, None, PAGE)
