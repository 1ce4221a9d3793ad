"""A headless Chromium, told what to do over a pipe (the DevTools protocol): no driver and no other package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60.0


class Chromium:
    """One tab. Owner: one thread; ends with the context."""

    def __init__(self) -> None:
        assert PROGRAM, "there is no chromium here: apt-get install chromium"
        self._folder = tempfile.mkdtemp(prefix="multiverso-tests-chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [
            "bash",
            "-c",
            'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"',
            "-",
            str(theirs_in),
            str(theirs_out),
            PROGRAM,
        ]
        command += ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-extensions", "--hide-scrollbars"]
        command += [f"--user-data-dir={self._folder}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs_in, theirs_out],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        (target,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attach = {"targetId": target["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **attach)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Accessibility", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Returns the answer to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._read:
            assert select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0], "the browser does not answer"
            block = os.read(self._in, 1 << 20)
            assert block, "the browser has ended"
            self._read += block
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:2000])
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"])
        return message

    def open(self, address: str) -> None:
        """Goes to an address."""
        self.call("Page.navigate", url=address)

    def look(self, width: int, height: int, dark: bool = False, mobile: bool = False) -> None:
        """Sets the window's size and whether its user likes it dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """Returns what an expression of JavaScript is, once it is there."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = SECONDS) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"):
            assert time.monotonic() < end, f"{expression} did not become true; errors: {self.errors}"
            select.select([], [], [], 0.05)

    def tree(self) -> list[tuple[str, str]]:
        """Returns the accessibility tree: role and name of each part that a reader of the screen gets."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], str(node.get("name", {}).get("value", ""))) for node in nodes if not node["ignored"]
        ]

    def picture(self, path: Path, whole: bool = True) -> None:
        """Writes what is seen, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
