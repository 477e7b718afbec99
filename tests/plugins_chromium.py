"""A pytest plugin with a real headless Chromium: the fixture `browser`, driven through the DevTools protocol.

The protocol is JSON over two pipes (`--remote-debugging-pipe`), a NUL behind each message: no port, no client library.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import find_program

ANSWER_S = 60.0
OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers, and look at no page of others
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-proxy-server",
)


class Browser:
    """A running Chromium, with its profile and log in a folder."""

    def __init__(self, folder: Path) -> None:
        binary = find_program("chromium", "chromium/bin")
        folder.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        self._rest = b""
        self._log = folder / "log"
        home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # Chromium reads from 3 and writes to 4
                ["bash", "-c", "exec \"$@\" 3<&0 4>&1 0</dev/null 1>&2", "bash",
                 binary, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"],
                bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env={"PATH": os.environ.get("PATH", ""), "TZ": "UTC", **home},
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out, self._in = self._process.stdin.fileno(), self._process.stdout.fileno()

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Return the result of a command, which the browser must neither refuse nor leave without an answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while number not in self._answers:
            assert time.monotonic() < deadline, f"the browser did not answer {method}"
            self.pump(0.2)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def pump(self, timeout_s: float) -> None:
        """Read what the browser says."""
        readable, _, _ = select.select([self._in], [], [], timeout_s)
        if not readable:
            return
        read = os.read(self._in, 1 << 20)
        if not read:
            log = self._log.read_text(errors="replace")[-2000:]
            raise AssertionError(f"the browser's pipe has ended; its exit code: {self._process.poll()}; {log}")
        *messages, self._rest = (self._rest + read).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.note(message["method"], message["params"])

    def open(self, url: str) -> Page:
        """Open a page in a tab of its own, with cookies of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(1280, 900)
        page.set_dark(False)
        page.load(url)
        return page

    def close(self) -> None:
        """Kill it, and what it started."""
        with self._process, contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)


class Page:
    """A tab.

    Attributes:
        troubles: exceptions, errors on the console, violations of the security policy, in words.
        requests: URLs that were asked for.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self.troubles: deque[str] = deque(maxlen=100)
        self.requests: list[str] = []
        self._loads = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command for this tab."""
        return self._browser.call(method, self._session, **parameters)

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        """Keep what an event says."""
        if method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.troubles.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.troubles.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.troubles.append(f"{parameters['entry']['source']}: {parameters['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript, which must not throw; a promise's when it is there."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, f"{expression}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def _evaluate_loaded(self, expression: str) -> Any:
        """Return the value of JavaScript, None where the document goes away meanwhile."""
        try:
            return self.evaluate(expression)
        except AssertionError as exc:
            if "context" in str(exc) or "navigated" in str(exc):
                return None
            raise

    def wait(self, condition: str, timeout_s: float = 75.0) -> Any:
        """Wait until JavaScript is truthy, and return its value."""
        deadline = time.monotonic() + timeout_s
        # While a document is replaced, there is one without a body.
        while not (value := self._evaluate_loaded(f"document.body && ({condition})")):
            text = self._evaluate_loaded("document.body && document.body.innerText") or ""
            assert time.monotonic() < deadline, (
                f"{condition} within {timeout_s:g} s; {list(self.troubles)}; {text[:3000]}"
            )
            self._browser.pump(0.05)
        return value

    def load(self, url: str, timeout_s: float = 75.0) -> None:
        """Go to another address, and wait for its document.

        Where an interface of this machine comes or goes, as those of pods do, Chromium aborts what it loads: once more.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            loads, before = self._loads, list(self.troubles)
            self.call("Page.navigate", url=url)
            while self._loads == loads:
                assert time.monotonic() < deadline, f"{url} did not load within {timeout_s:g} s; {list(self.troubles)}"
                self._browser.pump(0.05)
            if not any("ERR_NETWORK_CHANGED" in trouble for trouble in self.troubles):
                return
            self.troubles.clear()
            self.troubles.extend(before)

    def resize(self, width: int, height: int) -> None:
        """Give the tab another size, in CSS pixels; below 500 it is a phone's."""
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=phone,
            deviceScaleFactor=2 if phone else 1,
        )  # fmt: skip

    def set_dark(self, dark: bool) -> None:
        """Have the page believe in a dark desktop, or a light one."""
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def close(self) -> None:
        """Close the tab, and forget its cookies."""
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A running browser, the same for all tests of a process; each opens its own tabs."""
    started = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        yield started
    finally:
        started.close()
