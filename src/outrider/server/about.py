"""What the server says of itself: health, version, models, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from outrider.server.desk import VERSION, Desk
from outrider.server.errors import ERRORS
from outrider.server.metrics import CONTENT_TYPE

__all__ = ["router"]


def router(desk: Desk) -> APIRouter:
    routes = APIRouter()

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": desk.created,
            "owned_by": "outrider",
            "root": desk.root,
            "parent": None,
            "max_model_len": desk.context,
        }

    @routes.get("/health")
    async def health() -> Response:
        """200 while texts can be written; 503 if the engine or the ledger failed, or the server is shutting down."""
        if desk.draining or desk.fault is not None:
            return JSONResponse({"status": "shutting down" if desk.draining else desk.fault}, 503)
        if desk.recorder is not None and desk.recorder.refusal is not None:
            return JSONResponse({"status": f"the ledger cannot be written: {desk.recorder.refusal}"}, 503)
        return JSONResponse({"status": "ok"})

    @routes.get("/version", responses=ERRORS)
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @routes.get("/v1/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """The served model under each of its names."""
        return {"object": "list", "data": [card(name) for name in desk.settings.names]}

    @routes.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> dict[str, Any]:
        desk.check_model(name)
        return card(name)

    @routes.get("/metrics", responses=ERRORS)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(await desk.metrics_page(), media_type=CONTENT_TYPE)

    return routes
