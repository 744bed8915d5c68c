"""What a deployment of several replicas is told: the `args` of a Serve config file, or `outrider serve --ray`."""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["Options"]


class Options(BaseModel):
    """What `serve run` and a Serve config file may give under `args`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(default=None, description="Name or path of the model, on every node.")
    options: list[str] = Field(default=[], description="Options of `outrider serve`, as words or as one text.")
    replicas: int = Field(default=1, ge=0, description="At least so many.")
    max_replicas: int | None = Field(
        default=None, ge=1, description="At most so many; as many as `replicas` if not given."
    )
    requests: float = Field(
        8.0, gt=0, description="Running or waiting requests of a replica that call for another one."
    )
    max_requests: int = Field(
        default=264, ge=1, description="Requests that a replica takes at once, running and waiting."
    )
    cpus: float = Field(default=1.0, gt=0, description="Cores that a replica reserves; give it as many --threads.")
    gateways: int = Field(default=1, ge=1, description="Replicas of the gateway.")
    body_bytes: int = Field(default=8 << 20, ge=1, description="Largest request; more gets 413.")
    drain_seconds: float = Field(default=30.0, ge=0, description="Left to running texts when a replica is taken away.")

    @model_validator(mode="before")
    @classmethod
    def _words(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("options"), str):
            return {**values, "options": shlex.split(values["options"])}
        return values

    @model_validator(mode="after")
    def _check(self) -> Options:
        if self.max_replicas is not None and self.max_replicas < max(1, self.replicas):
            raise ValueError(f"max_replicas: {self.max_replicas} is fewer than replicas, {self.replicas}")
        for word in self.options:
            if word.partition("=")[0] in ("--host", "--port", "--api-key"):
                raise ValueError(
                    f"options: {word} does not belong here; Ray's proxy listens, keys come from --api-key-file"
                )
        return self
