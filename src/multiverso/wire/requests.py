"""What a node's requests look like: checked before anything is done with them.

Whatever a process of the same user sends, by mistake or on purpose, must not reach the code behind as another type than
it expects.
"""

from __future__ import annotations

from typing import Any

from multiverso.errors import StartupError
from multiverso.spec.modes import MODES
from multiverso.wire.messages import Message

_LONGEST_TEXT = 2000
_LARGEST = 2**62
_NUMBER, _TEXT, _OBJECT, _FLAG = "an integer", "a text", "an object", "true or false"
_NOTHING = " or null"

_FIELDS: dict[str, dict[str, str]] = {
    "attach": {
        "protocol": _NUMBER,
        "worker_id": _NUMBER + _NOTHING,
        "workers_num": _NUMBER + _NOTHING,
        "consistency": _OBJECT,
        "on_lost": _TEXT + _NOTHING,
        "exchange": _OBJECT + _NOTHING,
    },
    "hello": {},
    "challenge": {"nonce": _TEXT},
    "prove": {},  # whatever it gives is no proof, or it is
    "ready": {},
    "withdraw": {},
    "create": {"order": _NUMBER + _NOTHING, "spec": _OBJECT, "master": _FLAG, "mode": _TEXT},
    "share": {"spec": _OBJECT},
    "initialised": {},
    "close": {"number": _NUMBER},
    "cancel": {"why": _TEXT + _NOTHING},
    "arrived": {"barrier": _NUMBER},
    "gather": {"number": _NUMBER},
    "tell": {"number": _NUMBER, "note": _TEXT},
    "ask": {"question": _OBJECT},
    "say": {"saying": _OBJECT},
    "combine": {"number": _NUMBER, "signature": _NUMBER, "nbytes": _NUMBER, "dtype": _TEXT, "operation": _TEXT},
    "status": {},
    "look": {"kind": _TEXT, "name": _TEXT},
}


def asked(request: Message) -> str:
    """Returns what a request asks for.

    Raises:
        StartupError: nobody knows such a request.
    """
    do = request.get("do")
    if not isinstance(do, str) or do not in _FIELDS:
        raise StartupError(f"this node does not know the request {_cut(do)}")
    return do


def check(request: Message) -> None:
    """Looks whether a request's fields are what they have to be.

    Raises:
        StartupError: they are not, or nobody knows such a request.
    """
    do = asked(request)
    for name, kind in _FIELDS[do].items():
        if not _is(request.get(name), kind):
            raise StartupError(f"in the request {do!r}, {name} has to be {kind}; got {_cut(request.get(name))}")
    if do == "attach":
        _check_attach(request)


def _check_attach(request: Message) -> None:
    consistency = request["consistency"]
    if consistency.get("mode") not in MODES or not _is(consistency.get("staleness"), _NUMBER):
        raise StartupError(f"this node knows no consistency {_cut(consistency)}")
    if request["on_lost"] not in (None, "stop", "continue"):
        raise StartupError(f"on_lost is 'stop' or 'continue'; got {_cut(request['on_lost'])}")


def _is(value: Any, kind: str) -> bool:
    if kind.endswith(_NOTHING):
        return value is None or _is(value, kind.removesuffix(_NOTHING))
    if kind == _NUMBER:
        return type(value) is int and -_LARGEST < value < _LARGEST
    if kind == _TEXT:
        return isinstance(value, str) and len(value) <= _LONGEST_TEXT
    return isinstance(value, dict if kind == _OBJECT else bool)


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + " ..."
