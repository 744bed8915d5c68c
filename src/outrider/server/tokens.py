"""`/tokenize` and `/detokenize`, as vLLM and llama.cpp's server have them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, Response

from outrider.core.params import ParameterError
from outrider.server.body import Body, Listed, names
from outrider.server.chat import Message, rendered
from outrider.server.errors import ERRORS
from outrider.server.service import Service

__all__ = ["router"]


class TokenizeRequest(Body):
    """A text (`prompt`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Listed[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True  # what the model wants in front of a text
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Listed[int]


def _tokens(body: TokenizeRequest, service: Service) -> list[int]:
    tokenizer = service.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError("prompt", "give one of prompt and messages")
    if body.messages is not None:
        template = "" if tokenizer.template is None else tokenizer.template.source
        return service.render_chat(rendered(body.messages, template), {})
    text = body.prompt or ""
    return tokenizer.prompt(text) if body.add_special_tokens else tokenizer.encode(text, special=True)


def _tokenized(body: TokenizeRequest, service: Service) -> Response:
    """The whole answer, which may be long: made beside the event loop, and as it is, without FastAPI's checks."""
    tokens = _tokens(body, service)
    out: dict[str, Any] = {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}
    if body.return_token_strs:
        out["token_strs"] = [service.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return JSONResponse(out)


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text, or of a conversation's prompt."""
        if body.model is not None:
            service.check_model(body.model)
        return await service.refusing(names(), lambda: _tokenized(body, service))

    @routes.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of the tokens, special ones written out."""
        if body.model is not None:
            service.check_model(body.model)

        def text() -> str:
            for token in body.tokens:
                if not 0 <= token < service.engine.config.vocabulary:
                    raise ParameterError(
                        "tokens", f"token {token} is outside the vocabulary of {service.engine.config.vocabulary:,}"
                    )
            return service.tokenizer.decode(body.tokens, skip_special=False)

        return {"prompt": await service.refusing(names(), text)}

    return routes
