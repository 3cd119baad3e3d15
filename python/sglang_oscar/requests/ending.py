"""Ending a request that cannot be answered, while others go on."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

logger = logging.getLogger(__name__)


def end(req: Any, reason: str, owned: object = "", status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR) -> None:
    """Abort a request at its next result, and keep what it has computed out of the prefix cache.

    Args:
        req: SGLang's request.
        reason: for the log, which names the request, and for its client.
        owned: for the log, what the request has.
        status: for its client.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    text = f"the request was ended, and what it computed is not kept: {reason}"
    req.to_finish = FINISH_ABORT(text, status, "BadRequestError" if status < 500 else "InternalServerError")
    req.skip_radix_cache_insert = True
    logger.error("int2 request %s: %s%s", req.rid, text, f" ({owned})" if owned else "")


def is_ended(req: Any) -> bool:
    """Whether a request ends at its next result, and nothing of it is kept."""
    return req.to_finish is not None and bool(getattr(req, "skip_radix_cache_insert", False))
