"""The door of every HTTP server: it keeps out web pages of others that a browser here has open.

A page that points its own name at this machine (DNS rebinding) sends that name as `Host`. A page
that sends requests elsewhere (CSRF) is named by `Origin`. Programs that are no browsers pass.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.protocol.refusals import Code, Refused

MAX_NAMES = 64
_FOREIGN = ("cross-site", "same-site")  # same-site: another port of this machine


@dataclass(frozen=True)
class Door:
    """The names under which a server answers, beside addresses and localhost.

    An address in `Host` is always right: only names can be pointed elsewhere.
    """

    names: frozenset[str] = frozenset()
    any_name: bool = False

    def check(self, request: Request) -> None:
        """Refuse a request that another's web page makes, by its headers alone."""
        host = request.headers.get("host", "")
        name = host_name(host)
        if not (self.any_name or is_address_or_local(name) or name in self.names):
            raise Refused(Code.WRONG_HOST, f"Host is {host[:80]!r}")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            raise Refused(Code.WRONG_ORIGIN, f"Origin is {origin[:80]!r}")
        # Without an Origin a page can still ask, without reading the answer. A link may lead here.
        site, mode = (request.headers.get(f"sec-fetch-{name}") for name in ("site", "mode"))
        if site in _FOREIGN and mode != "navigate":
            raise Refused(Code.WRONG_ORIGIN, "the page is from elsewhere")


def make_door(listen: str, allowed: Iterable[str], *, secret: bool) -> Door:
    """The door of a server that listens on a host.

    With a secret (`secret`: every call needs one) any name is fine, unless some are allowed: a page
    under a false name does not know the secret.
    """
    chosen = frozenset(host_name(name) for name in allowed)
    if len(chosen) > MAX_NAMES or "" in chosen:
        raise ConfigError(f"--allow-host takes 1 to {MAX_NAMES} names such as run.example.org")
    own = {listen.lower(), socket.gethostname().lower()}
    return Door(chosen | own, any_name=secret and not chosen)


def host_name(host: str) -> str:
    """The name in host:port, in lower case."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name.strip("[]").lower().rstrip(".")


def is_address_or_local(name: str) -> bool:
    """Whether it is an IP address or a name of this machine that no domain can take."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


class Doorkeeper:
    """An ASGI app behind a door. `refuse` makes the answer to a request that may not pass."""

    def __init__(
        self, app: ASGIApp, door: Door, refuse: Callable[[BlockTrainError, Request], Response]
    ) -> None:
        self._app, self._door, self._refuse = app, door, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            request = Request(scope, receive)
            try:
                self._door.check(request)
            except Refused as error:
                app = self._refuse(error, request)
        await app(scope, receive, send)
