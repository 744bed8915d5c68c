"""One HTTP request: who came, under which id, and what is to be remembered of it."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.server.texts import Texts

__all__ = ["Visit"]

_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(slots=True)
class Visit:
    """Lives in `request.state.visit`. `record` goes into the log when the answer is complete; it has no prompt text."""

    id: str
    method: str
    path: str
    client: str
    key: str | None = None  # the API key's name
    status: int = 0
    started: float = field(default_factory=time.perf_counter)
    record: dict[str, Any] = field(default_factory=dict)
    job: Texts | None = None  # those that it asked for, once they were handed to who writes them

    @classmethod
    def new(cls, offered: str, method: str, path: str, client: str) -> Visit:
        """`offered`: the client's X-Request-Id, taken if it is a harmless name."""
        return cls(offered if _ID.fullmatch(offered) else uuid.uuid4().hex, method, path, client)
