"""What made a run: versions of the packages, the source's revision, the machine."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
    "trireme",
    "kfp",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "tensorflow-datasets",
    "numpy",
    "google-cloud-storage",
)
_ROOMS = ("trainer", "components", "pipelines")


def provenance() -> dict[str, Any]:
    """Versions, source and machine, as plain data."""
    return {"versions": versions(), "source": source(), "machine": machine()}


def versions() -> dict[str, str]:
    """Version of Python and of each package that shapes the result, where it is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_digest() -> str:
    """Digest of the three rooms' code: `sha256:…`."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        for file in sorted((_top() / room).rglob("*.py")):
            digest.update(f"{file.relative_to(_top())}\0".encode() + file.read_bytes() + b"\0")
    return f"sha256:{digest.hexdigest()}"


def source() -> dict[str, Any]:
    """Digest of the three rooms' code, and the git revision where the code stands in a repository."""
    top = _top()
    found: dict[str, Any] = {"digest": source_digest(), "revision": os.environ.get("TRIREME_REVISION")}
    if (top / ".git").exists():
        found["revision"] = _git(top, "rev-parse", "HEAD")
        found["modified"] = bool(_git(top, "status", "--porcelain", "--untracked-files=no"))
    return found


def _top() -> Path:
    return Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """What the work ran on."""
    return {"platform": platform.platform(), "processors": os.cpu_count()}


def _git(top: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(top), *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
