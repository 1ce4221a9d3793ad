"""The page over HTTP, on this machine only, for those who know the token in its address."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from multiverso.page.document import document, policy
from multiverso.page.feed import Feed
from multiverso.page.metrics import CONTENT_TYPE, metrics_of

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the token is in the address
    "X-Content-Type-Options": "nosniff",
}
_BEAT_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_END_SECONDS = 3


class _Guarded:
    """Answers 403 to whoever does not know the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or not."""
        if scope["type"] == "http" and not self._knows(Request(scope)):
            refusal = PlainTextResponse("This page needs the token that stands in its address.\n", 403, _HEADERS)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() not in ("bearer", "token"):
            given = request.query_params.get("token", "")
        return hmac.compare_digest(given.strip().encode(), self._token)


def application(feed: Feed, token: str, closing: Callable[[], bool]) -> ASGIApp:
    """Returns the page's application.

    Args:
        feed: what it shows.
        token: what a request has to know.
        closing: whether streams are to end.
    """
    page_headers = {**_HEADERS, "Content-Security-Policy": policy()}

    async def page(_: Request) -> Response:
        return HTMLResponse(document(), headers=page_headers)

    async def save(_: Request) -> Response:
        now = feed.history.now
        name = re.sub(r"[^\w.-]+", "-", now.program if now else "job", flags=re.ASCII)
        headers = {**page_headers, "Content-Disposition": f'attachment; filename="multiverso-{name}.html"'}
        return HTMLResponse(feed.saved(), headers=headers)

    async def metrics(_: Request) -> Response:
        return Response(metrics_of(feed.history.now), headers=_HEADERS, media_type=CONTENT_TYPE)

    async def events(_: Request) -> Response:
        return StreamingResponse(_stream(feed, closing), headers=_HEADERS, media_type="text/event-stream")

    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": page,
        "/save": save,
        "/metrics": metrics,
        "/events": events,
    }
    return _Guarded(Starlette(routes=[Route(path, handler) for path, handler in handlers.items()]), token)


async def _stream(feed: Feed, closing: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Server-sent events: a message each; a comment now and then, so that a browser that has gone is noticed."""
    queue = feed.listen()
    idle = 0.0
    try:
        yield b"retry: 1000\n\n"
        while not closing() or not queue.empty():
            try:
                message = await asyncio.wait_for(queue.get(), _LOOK_SECONDS)
            except TimeoutError:
                idle += _LOOK_SECONDS
                if idle >= _BEAT_SECONDS:
                    idle = 0.0
                    yield b":\n\n"
                continue
            if message is None:
                return
            yield b"data: " + message + b"\n\n"
    finally:
        feed.forget(queue)


class Server(uvicorn.Server):
    """Serves a feed until `should_exit` is set, or a signal comes."""

    def __init__(self, feed: Feed, token: str) -> None:
        config = uvicorn.Config(
            application(feed, token, lambda: self.should_exit),
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_END_SECONDS,
        )
        super().__init__(config)
