"""The page at `/`: what the server does now, and a playground. It needs nothing from elsewhere.

The page itself is free for all, like a login page; what it shows comes from `/dashboard/state`, which asks for a key
like every other route.
"""

from __future__ import annotations

import time
from hashlib import sha256
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.server.desk import VERSION, Desk
from outrider.server.errors import ERRORS

__all__ = ["FREE_PATHS", "STATE_PATH", "router"]

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "elements.js": "text/javascript; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "playground.js": "text/javascript; charset=utf-8",
}
_PATHS = {name: "/" if name == "index.html" else f"/dashboard/{name}" for name in _TYPES}
FREE_PATHS = tuple(_PATHS.values())  # answered without a key
STATE_PATH = "/dashboard/state"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def router(desk: Desk) -> APIRouter:
    routes = APIRouter()

    def add(name: str) -> None:
        content = (files("outrider.server") / "page" / name).read_bytes()
        tag = f'"{sha256(content).hexdigest()[:16]}"'
        headers = _HEADERS | {"ETag": tag}

        async def send(request: Request) -> Response:
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            return Response(content, media_type=_TYPES[name], headers=headers)

        routes.add_api_route(_PATHS[name], send, methods=["GET"], include_in_schema=False)

    for name in _TYPES:
        add(name)

    @routes.get(STATE_PATH, responses=ERRORS)
    async def state(since: Annotated[int, Query(ge=0, le=2**53)] = 0) -> Response:
        """What the dashboard shows. `since`: the number of the first sample wanted, `samples.next` of the last answer.

        Its form may change with each version.
        """
        assert desk.history is not None  # there is no such route otherwise
        out = {
            "server": {
                "version": VERSION,
                "name": desk.name,
                "started": desk.created,
                "draining": desk.draining,
                "context": desk.context,
                "chat": desk.chats,
                "fingerprint": desk.fingerprint,
            },
            "models": desk.weights,
            "drafters": {"own": desk.own_drafter, "offered": list(desk.settings.drafters)},
            **desk.history.state(since, desk.jobs, time.perf_counter()),
        }
        return JSONResponse(out)

    @routes.get("/dashboard/transitions", responses=ERRORS)
    async def transitions() -> Response:
        """All changes of mode that the server remembers (the latest 4,096), oldest first; `/dashboard/state` has fewer.

        Earlier ones are in the ledger, if there is one.
        """
        assert desk.history is not None  # there is no such route otherwise
        return JSONResponse({"transitions": desk.history.transitions()})

    return routes
