"""The ASGI application: the routes behind the door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from outrider.engine.engine import Engine
from outrider.server import about, chat, completions, dashboard, responses, tokens
from outrider.server.answers import error_answer
from outrider.server.desk import VERSION, Desk
from outrider.server.door import Door
from outrider.server.errors import SCHEMA, ApiError, of_validation
from outrider.server.service import Service
from outrider.server.settings import Settings

__all__ = ["assemble", "create_app"]


def create_app(engine: Engine, settings: Settings) -> tuple[FastAPI, Service]:
    """The application over an engine, which belongs to it from now on, and the service behind its routes."""
    service = Service(engine, settings)
    return assemble(service, [module.router(service) for module in (completions, chat, responses, tokens)]), service


def assemble(desk: Desk, routers: Sequence[APIRouter]) -> FastAPI:
    """The application over a desk, with the routes that write texts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await desk.start()
        try:
            yield
        finally:
            await desk.stop()

    app = FastAPI(
        title="Outrider",
        version=VERSION,
        description="OpenAI's API, with speculative decoding that no answer shows.",
        lifespan=lifespan,
        docs_url=None,  # these two pages fetch their scripts from elsewhere
        redoc_url=None,
        middleware=[*_cors(desk.settings), Middleware(Door, desk=desk)],
    )
    for router in (about.router(desk), *routers):
        app.include_router(router)
    if desk.settings.dashboard:
        app.include_router(dashboard.router(desk))
    _answer_errors(app)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _cors(settings: Settings) -> list[Middleware]:
    if not settings.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    ]


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_answer(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return error_answer(of_validation(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def missed(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        known = {400: _unread(error.__cause__), 404: f"there is no {where}", 405: f"{where} is not allowed"}
        text = known.get(error.status_code, error.detail)
        answer = error_answer(ApiError(error.status_code, text))
        answer.headers.update(error.headers or {})
        return answer


def _unread(cause: BaseException | None) -> str:
    """Why FastAPI could make no JSON of a body, where it is not the JSON itself."""
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not UTF-8: {cause.reason} at byte {cause.start}"
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply"
    return f"the body cannot be read: {cause}"


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: bodies that are not of the form are answered with 400, never FastAPI's 422."""
    if not app.openapi_schema:
        document = FastAPI.openapi(app)
        document.setdefault("components", {}).setdefault("schemas", {})["Error"] = SCHEMA
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
        app.openapi_schema = document
    return app.openapi_schema
