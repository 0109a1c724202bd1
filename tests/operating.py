"""What the tests of the server's commands share: a configuration file and the command line as a function."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_kfp import FakeKubeflow

from pipelines import cli
from pipelines.targets import access


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Operator:
    """Somebody at the command line, before a fake server whose clock is theirs."""

    def __init__(self, server: FakeKubeflow, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.folder, self.config = server, folder, folder / "digits.yaml"
        clock = access.Clock(server.clock.now, server.clock.sleep)
        monkeypatch.setattr(access, "system_clock", lambda: clock)
        for name in ("HOST", "TOKEN", "NAMESPACE", "COOKIES"):
            monkeypatch.delenv(f"TRIREME_KFP_{name}", raising=False)
        self.write()

    def write(self, more: str = "", cluster: str = "", kubeflow: str = "") -> None:
        self.config.write_text(
            f"name: digits\ncluster:\n  image: trireme:0.1.0\n  pipeline_root: {self.folder}/root\n{cluster}"
            f"kubeflow:\n  host: {self.server.url}\n{kubeflow}{more}",
            encoding="utf-8",
        )

    def __call__(self, *words: str) -> Said:
        """Runs a command; `@` stands for the configuration file."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main([str(self.config) if word == "@" else word for word in words])
            except SystemExit as leave:
                code = int(leave.code or 0)
        return Said(code, out.getvalue(), err.getvalue())
