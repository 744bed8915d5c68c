"""Errors as OpenAI's clients know them: a status, and an object that names the parameter at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.params import ParameterError
from outrider.core.sampling import DrawError
from outrider.drafters.base import DrafterError
from outrider.models.errors import ModelError

__all__ = ["ERRORS", "SCHEMA", "ApiError", "of_draw", "of_refusal", "of_validation"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# for the OpenAPI document: the statuses that any generating route may answer with
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in {
        400: "The request is refused; `error.param` names the parameter.",
        401: "No key, or a wrong one.",
        404: "The model is not served here.",
        408: "The request did not come in time.",
        413: "The body is too large.",
        429: "Too many requests; come again after Retry-After seconds.",
        500: "The server failed.",
        503: "The server is shutting down or full; come again after Retry-After seconds.",
    }.items()
}
SCHEMA: dict[str, Any] = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class ApiError(Exception):
    """An answer that is an error. `retry_after` are seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message = _unicode(message)
        self.parameter = None if parameter is None else _unicode(parameter)
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`"""
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, "server_error"),
                "param": self.parameter,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        out = {}
        if self.retry_after is not None:
            out["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            out["WWW-Authenticate"] = "Bearer"
        return out


def of_refusal(error: ValueError, names: Mapping[str, str]) -> ApiError:
    """400 for what the engine refused. `names`: what a parameter of the engine is called in this API."""
    if isinstance(error, ParameterError):
        name = names.get(error.parameter, error.parameter)
        message = str(error).removeprefix(f"{error.parameter}: ")
        return ApiError(400, f"{name}: {message}", parameter=name)
    if isinstance(error, DrafterError):
        return ApiError(400, str(error), parameter="speculation.drafter")
    if isinstance(error, ModelError):
        name = names.get("prompt", "prompt")
        return ApiError(400, f"{name}: {error}", parameter=name)
    raise error


def of_draw(error: ValueError) -> ApiError:
    """A text that ended because nothing could be drawn: the request's fault if its parameters leave no token."""
    if isinstance(error, DrawError) and str(error).startswith("no token is left"):
        return ApiError(400, str(error), code="no_token_left")
    if isinstance(error, DrawError) and str(error).startswith("the grammar"):
        return ApiError(400, str(error), code="grammar_too_complex")
    if isinstance(error, DrawError) and "repetition_penalty" in str(error):
        return ApiError(400, str(error), parameter="repetition_penalty")
    return ApiError(500, f"the text cannot go on: {error}", code="draw_failed")


def of_validation(errors: Sequence[Any], body: Any) -> ApiError:
    """400 for a body that is not of the form; names the parameter at fault. `body`: what the client sent."""
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {errors[0].get('ctx', {}).get('error', errors[0]['msg'])}")
    if errors[0]["loc"][0] == "query":
        name = str(errors[0]["loc"][1])
        return ApiError(400, f"{name}: {errors[0]['msg'][:1].lower()}{errors[0]['msg'][1:]}", parameter=name)
    if not isinstance(body, dict):
        return ApiError(400, "the body is not a JSON object; send one with Content-Type: application/json")
    plain = (e for e in errors if e["type"] == "too_long" or (e["type"] == "extra_forbidden" and len(e["loc"]) == 2))
    # of the alternatives of a union, the one that got furthest is the one that was meant
    error = next(plain, None) or max(errors, key=lambda e: [len(_path(e, body)), *_indexes(_path(e, body))])
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _path(error, body)).lstrip(".")
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{name}: unknown parameter", parameter=name, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"{name}: it is missing", parameter=name, code="missing_required_parameter")
    told = f"{error['msg'][:1].lower()}{error['msg'][1:]}"
    return ApiError(400, f"{name}: {told}", parameter=name) if name else ApiError(400, told)


def _indexes(path: Sequence[str | int]) -> list[int]:
    return [part for part in path if isinstance(part, int)]


def _path(error: Any, body: Any) -> list[str | int]:
    """Where in the body the fault lies. pydantic's own path names the alternatives of unions too; those are dropped."""
    out: list[str | int] = []
    value = body
    for part in error["loc"][1:]:  # the first one is "body"
        there = isinstance(value, dict) and part in value
        if there or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
            out.append(part)
    if error["type"] == "missing":
        out.append(error["loc"][-1])
    return out


def _unicode(text: str) -> str:
    """Without lone surrogates, which a client can write in JSON and no answer can carry."""
    return text.encode("utf-8", "replace").decode()
