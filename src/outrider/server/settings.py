"""What the operator chose: names, limits, keys. Everything that a request cannot change."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from outrider.audit.store import Ledger
from outrider.audit.writer import Policy

__all__ = ["Auditing", "Keys", "Limits", "Settings", "SettingsError"]


class SettingsError(ValueError):
    """A server that may not start like this: names the option and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may cost."""

    body_bytes: int = 8 << 20
    prompt_tokens: int | None = None  # None = the model's context
    output_tokens: int | None = None  # None = the model's context
    choices: int = 128  # texts of one request
    queue: int = 256  # texts that wait for a place in the batch
    requests: int = 1024  # HTTP requests at once
    requests_per_key: int | None = None
    request_seconds: float = 600.0  # after which a text is cut
    body_seconds: float = 30.0  # that a client may take to send its request
    send_seconds: float = 30.0  # that a client may take to read what waits for it
    drain_seconds: float = 30.0  # that running texts get when the server is asked to end

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > (-1 if name in ("queue", "drain_seconds") else 0):
                raise SettingsError(f"--{name.replace('_', '-')}: {value} is too small")


class Keys:
    """API keys by name. Only their hashes are kept, and all of them are compared, in constant time."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = {name: sha256(key.encode()).digest() for name, key in keys.items()}

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def names(self) -> list[str]:
        return list(self._digests)

    def name_of(self, key: str) -> str | None:
        """The name of the key, or None if it is not one of them."""
        digest = sha256(key.encode("utf-8", "surrogatepass")).digest()
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found

    @classmethod
    def read(cls, given: Sequence[str] = (), file: Path | None = None) -> Keys:
        """Keys from options (named key-1, key-2 ...) and from a file of lines `NAME KEY`; # begins a comment."""
        keys = {f"key-{index}": key for index, key in enumerate(given, 1)}
        for index, line in enumerate(file.read_text("utf-8").splitlines() if file else (), 1):
            parts = line.partition("#")[0].split()
            if not parts:
                continue
            if len(parts) != 2:
                raise SettingsError(f"--api-key-file: line {index} of {file} is not of the form NAME KEY")
            if parts[0] in keys:
                raise SettingsError(f"--api-key-file: line {index} of {file}: the name {parts[0]!r} is given twice")
            keys[parts[0]] = parts[1]
        for name, key in keys.items():
            if len(key) < 8:
                raise SettingsError(f"--api-key: {name} has fewer than 8 characters")
            if not (key.isascii() and key.isprintable()):
                raise SettingsError(f"--api-key: {name} has characters that no HTTP header carries; use ASCII")
        return cls(keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Auditing:
    """How the server keeps its ledger. The ledger belongs to the server from now on."""

    ledger: Ledger
    on_error: Policy = "stop"
    keep_seconds: float | None = None  # None = for ever
    with_text: bool = False  # of prompts and answers
    # what only the process knows of itself: code, hardware, settings as they were given (no key among them)
    origin: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one server behaves."""

    names: Sequence[str]  # under which the model is served, the first one in answers
    drafters: Sequence[str]  # that a request may choose
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=lambda: Keys({}))
    cors_origins: Sequence[str] = ()
    dashboard: bool = True  # the page at /
    hosts: Sequence[str] = ()  # values of the Host header that are answered; empty = all
    auditing: Auditing | None = None


def check_exposure(host: str, keys: Keys, *, allow_anonymous: bool) -> None:
    """Raise SettingsError for an address that others can reach, without a key."""
    if keys or allow_anonymous or is_loopback(host):
        return
    raise SettingsError(
        f"--host: {host} can be reached from other machines: give an --api-key or --api-key-file, "
        "or say --allow-anonymous if anybody may use it"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
