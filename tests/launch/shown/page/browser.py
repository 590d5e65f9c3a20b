"""Drives Debian's Chromium through chromedriver's HTTP interface (W3C WebDriver), with the standard library alone.

Selenium would do the same, but its packages would be installed in every environment of the tests, for one test file.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dhelix.tests.machine import PATIENCE

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
_ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
              "--disable-component-update", "--disable-sync", "--window-size=1400,1000")  # fmt: skip


class Browser:
    """A session of one browser window."""

    def __init__(self, port: int, profile: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        arguments = [*_ARGUMENTS, f"--user-data-dir={profile}"]
        chrome = {"binary": CHROMIUM, "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        self._wait_for_driver()
        told = self._call("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{told['sessionId']}"
        self._call(f"{self._session}/timeouts", {"script": int(1e3 * PATIENCE), "pageLoad": int(1e3 * PATIENCE)})

    def open(self, file: Path) -> None:
        self._call(f"{self._session}/url", {"url": file.as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """The value that a JavaScript function body returns."""
        return self._call(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def pictures(self, file: Path) -> None:
        """Writes what the window shows as a PNG."""
        file.write_bytes(base64.b64decode(self._call(f"{self._session}/screenshot")))

    def errors(self) -> list[str]:
        """What the console has said since the last call, but for plain messages."""
        entries = self._call(f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def pointer(self, *actions: dict[str, Any]) -> None:
        """Moves the mouse as WebDriver's actions say, such as {"type": "pointerMove", "x": 3, "y": 4}."""
        kind = {"type": "pointer", "id": "mouse", "actions": list(actions)}
        self._call(f"{self._session}/actions", {"actions": [kind]})

    def wheel(self, x: int, y: int, down: int) -> None:
        action = {"type": "scroll", "x": x, "y": y, "deltaX": 0, "deltaY": down, "duration": 0, "origin": "viewport"}
        self._call(f"{self._session}/actions", {"actions": [{"type": "wheel", "id": "wheel", "actions": [action]}]})

    def type(self, element: str, text: str) -> None:
        """Clicks on the element of this id and types."""
        self.run("document.getElementById(arguments[0]).focus()", element)
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._call(f"{self._session}/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})

    def close(self) -> None:
        self._call(self._session, method="DELETE")

    def _wait_for_driver(self) -> None:
        begun = time.monotonic()
        while True:
            try:
                if self._call("/status")["ready"]:
                    return
            except OSError:
                if time.monotonic() > begun + PATIENCE:
                    raise
            time.sleep(0.1)

    def _call(self, path: str, data: object = None, method: str = "") -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        request.method = method or ("GET" if data is None else "POST")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()[:500]}") from None


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose files lie in `folder`."""
    assert DRIVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "chromedriver.log").open("w") as log:
        driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=log)
    try:
        window = Browser(port, folder / "profile")
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait()
