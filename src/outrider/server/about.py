"""What the server says of itself: health, version, models, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from outrider.server.errors import ERRORS, ApiError
from outrider.server.metrics import CONTENT_TYPE
from outrider.server.service import VERSION, Service

__all__ = ["router"]


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "outrider",
            "root": service.engine.files.name,
            "parent": None,
            "max_model_len": service.context,
        }

    @routes.get("/health")
    async def health() -> Response:
        """200 while texts are written; 503 if the engine or the ledger has failed, or the server is shutting down."""
        if service.draining or not service.thread.alive:
            state = "shutting down" if service.draining else "the engine has ended"
            return JSONResponse({"status": state}, 503)
        if service.recorder is not None and service.recorder.refusal is not None:
            return JSONResponse({"status": f"the ledger cannot be written: {service.recorder.refusal}"}, 503)
        return JSONResponse({"status": "ok"})

    @routes.get("/version", responses=ERRORS)
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @routes.get("/v1/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """The served model under each of its names."""
        return {"object": "list", "data": [card(name) for name in service.settings.names]}

    @routes.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card(name)

    @routes.get("/metrics", responses=ERRORS)
    async def metrics() -> Response:
        """For Prometheus."""
        if not service.thread.alive:
            raise ApiError(503, "the engine has ended")
        memory = await service.thread.ask(lambda engine: engine.memory())
        return Response(service.metrics.render(memory), media_type=CONTENT_TYPE)

    return routes
