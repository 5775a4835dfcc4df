"""A headless Chromium for a test, driven over chromedriver's HTTP protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from ipcsync._closing import Closing
from tests.kit.until import DEADLINE_S, until

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
_STARTS = 5  # further ones: it takes any free port of IPv4, and ends if another process has that of IPv6
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def why_not() -> str | None:
    """Why there can be no browser here, None if there can."""
    missing = [name for name in ("chromedriver", "chromium") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found (Debian: apt-get install chromium chromium-driver)" if missing else None


class Browser(Closing):
    """One browser with one page, with a new, empty profile under `home`; its driver answers within `seconds`."""

    def __init__(self, home: Path, seconds: float = DEADLINE_S) -> None:
        self._session, self._seconds = "", seconds
        self._start()
        port, said = self._port()
        for _ in range(_STARTS):
            if "port not available" in said:
                self._driver.communicate(timeout=self._seconds)
                self._start()
                port, said = self._port()
        try:
            assert port, f"chromedriver ended with status {self._driver.wait(self._seconds)}: {said}"
            self._address = f"http://127.0.0.1:{port}"
            options = {
                "binary": shutil.which("chromium"),
                "args": [*_ARGUMENTS, f"--user-data-dir={home / 'profile'}"],
                "perfLoggingPrefs": {"enableNetwork": True},
            }
            logs = {"browser": "ALL", "performance": "ALL"}
            wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": logs}}
            self._session = str(self._call("POST", "/session", {"capabilities": wanted})["sessionId"])
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        command = ["chromedriver", "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _port(self) -> tuple[int, str]:
        """The port on which it serves, 0 if it ended; and what it said until then."""
        assert self._driver.stdout is not None
        said = ""
        for line in self._driver.stdout:
            said += line
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return int(found[1]), said
        return 0, said

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}{path}", data, method=method)
        with _DIRECT.open(request, timeout=self._seconds) as response:
            return json.load(response)["value"]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return self._call(method, f"/session/{self._session}{path}", body)

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a JavaScript function body returns, with `arguments` as its own."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: Any, what: str) -> Any:
        """The first truthy value of a script run again and again; AssertionError, with `what`, if none comes."""
        return until(lambda: self.run(script, *arguments), what)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """Give the page a size, and the colours that its user prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._command("Emulation.setDeviceMetricsOverride", metrics)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._command("Emulation.setEmulatedMedia", {"features": media})

    def _command(self, name: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def picture(self) -> bytes:
        """The whole page as PNG."""
        taken = self._command("Page.captureScreenshot", {"captureBeyondViewport": True})
        return base64.b64decode(taken["data"])

    def console(self) -> list[str]:
        """What was written to the console since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def requested(self) -> list[str]:
        """The addresses of all requests since the last call."""
        entries = self._ask("POST", "/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def close(self) -> None:
        """End browser and driver."""
        try:
            if self._session:
                self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.communicate(timeout=self._seconds)
