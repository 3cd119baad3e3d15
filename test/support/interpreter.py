"""Triton's interpreter, without what it repeats for every call and every number type.

Before each call of a device function it looks through all of ``triton.language`` for what it has replaced already, and
it makes a table of types for every value: half the time of a kernel of many small programs.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

LANGUAGES = [tl, tl.core]
_replace = interpreter._patch_lang
_type = functools.cache(interpreter._get_np_dtype)


def _replace_once(function: Any) -> Any:
    """What a launch replaces holds until its end; only what it has not seen yet is looked through."""
    used = [value for value in function.__globals__.values() if inspect.ismodule(value) and value in LANGUAGES]
    if used and not any(tl.core.is_builtin(language.load) for language in used):
        return interpreter._LangPatchScope()
    return _replace(function)


def _type_of(dtype: Any) -> np.dtype[Any]:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _type(scalar)


def install() -> None:
    """Do so in this process, where Triton is new enough to take back what it replaces."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _replace_once
        interpreter._get_np_dtype = _type_of
