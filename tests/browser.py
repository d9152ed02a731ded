"""A real browser for tests of pages: Chromium without a window, spoken to over a pipe in its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import pytest

BROWSER: Final = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_OPTIONS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_KEYS: Final = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Escape": 27,
    "Enter": 13,
    "Home": 36,
    "End": 35,
    "Tab": 9,
}


class Browser:
    """One page of a running Chromium."""

    def __init__(self, folder: Path) -> None:
        """Start it with a profile of its own in ``folder``; skips the test where it does not run."""
        assert BROWSER is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4; each message ends with a zero byte.
        program = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = ("bash", "-c", program, BROWSER, *_OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank")
        with (folder / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                arguments, pass_fds=(to_browser, from_browser), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        os.close(to_browser)
        os.close(from_browser)
        self._folder, self._number, self._session, self._pending = folder, 0, "", b""
        self.events: list[dict[str, Any]] = []
        try:
            pages = self.ask("Target.getTargets")["targetInfos"]
            target = next(one["targetId"] for one in pages if one["type"] == "page")
            self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        except EOFError:
            pytest.skip(f"the browser does not run here: {(folder / 'browser.log').read_text()[-300:]}")
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        """End it."""
        with suppress(EOFError, BrokenPipeError):
            self._session = ""
            self.ask("Browser.close")
        self._process.wait(timeout=600)
        os.close(self._out)
        os.close(self._in)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the protocol ------------------------------------------------------------------------------------------------

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command; events that come in between are kept in ``events``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            piece = os.read(self._in, 2**16)
            if not piece:
                raise EOFError
            self._pending += piece
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read())

    # -- what a reader does ------------------------------------------------------------------------------------------

    def open(
        self, html: str, *, width: int = 1280, height: int = 800, is_dark: bool = False, touch: bool = False
    ) -> None:
        """Open a page, once it is laid out."""
        page = self._folder / "page.html"
        page.write_text(html, encoding="utf-8")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.ask("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        self._wait_for("Page.loadEventFired")

    @property
    def complaints(self) -> list[str]:
        """Errors of scripts and breaches of the page's policy since it was opened."""
        self.ask("Runtime.evaluate", expression="0")
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
        return found

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys one after another, where the focus is."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            code = {"windowsVirtualKeyCode": _KEYS[key]} if key in _KEYS else {}
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One event of the mouse: ``mouseMoved``, ``mousePressed``, ``mouseReleased``, ``mouseWheel``."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """One event of fingers: ``touchStart``, ``touchMove``, ``touchEnd``."""
        self.ask(
            "Input.dispatchTouchEvent",
            type=kind,
            touchPoints=[{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)],
        )

    def heard(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader is told, in order."""
        self.ask("Accessibility.enable")
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]

    def picture(self, path: Path, *, selector: str | None = None) -> None:
        """Save a picture of the whole page, or of one element, as PNG."""
        place = "document.documentElement" if selector is None else f"document.querySelector({json.dumps(selector)})"
        box = self.run(
            f"(() => {{ const box = {place}.getBoundingClientRect();"
            " return [box.x + scrollX, box.y + scrollY, box.width, box.height]; })()"
        )
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
        shot = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that is closed in the end."""
    with Browser(folder) as running:
        yield running
