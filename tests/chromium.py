"""Drives a headless Chromium through its debugging pipe: no package, no port, one process to end.

The protocol is JSON, a zero byte after each message, on the browser's file descriptors 3 and 4
(https://chromedevtools.github.io/devtools-protocol/).
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)

# The browser wants its pipe at exactly 3 and 4, and only a process can renumber its own descriptors.
_RENUMBER = """
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, wanted in zip(high, (3, 4)):
    os.dup2(number, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """A browser: `with Chromium(folder) as browser: tab = browser.open(url, width=320)`."""

    def __init__(self, folder, deadline_secs=60):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            # The frame of Kubeflow Pipelines stays in the page's process, where one session sees it.
            "--disable-features=IsolateSandboxedIframes",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        command = [sys.executable, "-c", _RENUMBER, str(to_browser), str(from_browser), PROGRAM, *arguments]
        self._log = (folder / "log.txt").open("wb")
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=self._log, stderr=self._log
        )
        os.close(to_browser)
        os.close(from_browser)
        self._deadline_secs, self._number, self._rest, self.events = deadline_secs, 0, b"", []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (OSError, TimeoutError, EOFError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._log.close()

    def call(self, method, session=None, **parameters):
        """Sends one command and returns its answer; what happens meanwhile is kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self.until(lambda answer: answer.get("id") == self._number)["result"]

    def until(self, wanted):
        """Reads until a message is `wanted`."""
        end = time.monotonic() + self._deadline_secs
        while True:
            while b"\0" not in self._rest:
                if not select.select([self._read], [], [], max(0, end - time.monotonic()))[0]:
                    raise TimeoutError(f"Chromium said nothing wanted in {self._deadline_secs} s")
                got = os.read(self._read, 1 << 20)
                if not got:
                    raise EOFError("Chromium ended")
                self._rest += got
            raw, self._rest = self._rest.split(b"\0", 1)
            message = json.loads(raw)
            assert "error" not in message, message
            self.events.append(message)
            if wanted(message):
                return message

    def open(self, url, width=1280, height=900, scheme="light"):
        """Returns a tab that has loaded `url`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", session, features=features)
        tab = Tab(self, session, len(self.events))
        self.call("Page.navigate", session, url=url)
        loaded = "Page.loadEventFired"
        if not tab.seen(loaded):
            self.until(lambda message: message.get("method") == loaded and message.get("sessionId") == session)
        return tab


class Tab:
    """One page: what it answers and what happened in it."""

    def __init__(self, browser, session, first_event):
        self._browser, self._session, self._first = browser, session, first_event

    def seen(self, method):
        """The parameters of every event of this kind."""
        return [
            event["params"]
            for event in self._browser.events[self._first :]
            if event.get("sessionId") == self._session and event.get("method") == method
        ]

    def ask(self, expression, context=None):
        """Evaluates JavaScript, awaits it, and returns its value."""
        where = {} if context is None else {"contextId": context}
        answer = self._browser.call(
            "Runtime.evaluate", self._session, expression=expression, awaitPromise=True, returnByValue=True, **where
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key):
        """Presses a key, as a person would."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        for kind in ("keyDown", "keyUp"):
            self._browser.call(
                "Input.dispatchKeyEvent", self._session, type=kind, key=key, windowsVirtualKeyCode=code, text=text
            )

    def complaints(self):
        """Everything that the page or the browser wrote to the console, and every exception."""
        self.ask("1")  # what happened before it has arrived when its answer has
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for kind in kinds for event in self.seen(kind)]

    def requests(self):
        """The URLs asked for, except those that hold their own content."""
        urls = [event["request"]["url"] for event in self.seen("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith("data:")]
