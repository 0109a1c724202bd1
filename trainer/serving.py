"""The serving check: do the very files that will be served give the trainer's answers, to good and to hostile requests?

    found = check_serving(ServingConfig(), Path("model"))      # starts a fresh process with nothing but TensorFlow
    found["passed"], found["findings"]

It starts `serving_probe.py` by its path in an isolated interpreter, compares what it says with the limits of the
configuration, and imports no TensorFlow itself.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import ServingConfig

SERVING_FILE = "serving.json"


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    """What must hold."""
    passed: bool
    """Whether it does."""
    message: str
    """What was found."""


def check_serving(config: ServingConfig, model: Path) -> dict[str, Any]:
    """Checks a trained model's export.

    Args:
        config: The serving section.
        model: Folder with `saved_model/` and `reference.npz`.

    Returns:
        Plain data: `passed`, `findings` (`check`, `passed`, `message`) and `measured`.
    """
    from trainer.export import METADATA_FILE, REFERENCE_FILE, SAVED_MODEL

    saved_model, reference = model / SAVED_MODEL, model / REFERENCE_FILE
    metadata = _read(saved_model / METADATA_FILE)
    if not reference.is_file():
        missing = Finding("there are answers to compare with", False, f"{reference} is missing; export the model again")
        return {"passed": False, "findings": [missing._asdict()], "measured": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        images = [kind for kind in metadata.get("features", {}).values() if kind["kind"] == "image"]
        request = {
            "saved_model": str(saved_model.absolute()),
            "reference": str(reference.absolute()),
            "num_requests": config.num_requests,
            "images": _image_files(folder, tuple(images[0]["shape"])) if images else [],
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        ended = _probe(folder, config.timeout_secs)
        reply = _read(folder / "reply.json")
    findings = list(_judge(config, metadata, reply, ended))
    measured = {key: reply[key] for key in _MEASURED if key in reply}
    return {
        "passed": all(finding.passed for finding in findings),
        "findings": [finding._asdict() for finding in findings],
        "measured": measured,
    }


_MEASURED = (
    "import_secs", "load_secs", "first_call_secs", "latency_1", "latency_64", "peak_bytes", "bytes_before", "answers",
)  # fmt: skip


def _probe(folder: Path, timeout_secs: float) -> str | None:
    """Runs the probe; why it did not come to its end, or None."""
    script = Path(__file__).with_name("serving_probe.py")
    # Isolated: neither the working directory nor PYTHONPATH, so that the project cannot be found even by chance.
    command = [sys.executable, "-I", str(script), str(folder / "request.json"), str(folder / "reply.json")]
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}  # a server has no Keras either, and this loads none
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_secs, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout_secs:g} s (serving.timeout_secs)"
    if done.returncode < 0:
        return f"was killed by signal {-done.returncode}, perhaps for want of memory"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return f"ended with exit code {done.returncode}: {lines[-1]}"
    return None


def _judge(config: ServingConfig, metadata: dict, reply: dict, ended: str | None) -> Any:
    """Findings, as far as the probe came."""
    yield Finding("the process that serves lives", ended is None, ended or "to its end")
    if "load_secs" not in reply:
        yield Finding("it loads without the project", False, reply.get("load_error", "it was never loaded"))
        return
    yield _limit("it loads in time", reply["load_secs"], config.max_load_secs, "s", "serving.max_load_secs")
    wanted = metadata.get("signatures", ["serving_default"])
    missing = [name for name in wanted if name not in reply["signatures"]]
    have = ", ".join(reply["signatures"]) or "none"
    told = f"missing: {', '.join(missing)}; it has {have}" if missing else have
    yield Finding("it has its signatures", not missing, told)
    if reason := reply.get("reference_error"):
        yield Finding("it answers as the trainer does", False, reason)
        return
    if "answers" not in reply:
        return
    yield from _same_answers(config, reply)
    for size in (1, 64):
        if latency := reply.get(f"latency_{size}"):
            for part in ("p50", "p99"):
                limit = getattr(config, f"max_{part}_ms") if size == 1 else None
                if limit is not None:
                    name = f"{part} latency of one example"
                    yield _limit(name, latency[f"{part}_ms"], limit, "ms", f"serving.max_{part}_ms")
    yield from _same_files(config, reply)
    for key, check in (("hostile", "odd values"), ("images", "odd images")):
        if cases := reply.get(key):
            bad = [f"{case['case']}: {case['message']}" for case in cases if not case["passed"]]
            told = "; ".join(bad) if bad else f"{len(cases)} cases"
            yield Finding(f"{check} are refused or answered, and harm no other row", not bad, told)
    if "peak_bytes" in reply:
        used = reply["peak_bytes"] / 1024**2
        yield _limit("it fits into memory", used, config.max_memory_bytes / 1024**2, "MiB", "serving.max_memory_bytes")
    if loaded := reply.get("project_loaded"):
        yield Finding("nothing of the project is needed", False, ", ".join(loaded))


def _same_answers(config: ServingConfig, reply: dict) -> Any:
    for name, found in reply["answers"].items():
        differences = [found["together"], found["alone"]]
        known = [value for value in differences if value is not None]
        passed = len(known) == 2 and max(known) <= config.tolerance
        told = f"largest difference {max(known):.2g}" if len(known) == 2 else f"{found['not_finite']} are not finite"
        told += f" over {reply['num_reference']} examples, together and alone (serving.tolerance {config.tolerance:g})"
        yield Finding(f"its {name} are the trainer's", passed, told)
    if reply.get("other_classes"):
        yield Finding(
            "its classes are the trainer's", False, f"{reply['other_classes']} of {reply['num_reference']} differ"
        )
    if reply.get("empty_rows") != 0:
        yield Finding("an empty batch has an empty answer", False, f"{reply.get('empty_rows')} rows")


def _same_files(config: ServingConfig, reply: dict) -> Any:
    check = "it answers image files as their pixels"
    if reason := reply.get("files_error"):
        yield Finding(check, False, reason)
    elif "files_difference" in reply:
        difference = reply["files_difference"]
        told = "some are not finite" if difference is None else f"largest difference {difference:.2g}"
        passed = difference is not None and difference <= config.tolerance
        yield Finding(check, passed, f"{told} (serving.tolerance {config.tolerance:g})")


def _limit(check: str, found: float, limit: float, unit: str, setting: str) -> Finding:
    return Finding(check, found <= limit, f"{found:.4g} {unit}, the limit is {limit:.4g} ({setting})")


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _image_files(folder: Path, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Image files that a client may send; `ok` says whether they must be understood."""
    import numpy as np
    from PIL import Image

    height, width = max(shape[0], 16), max(shape[1], 16)
    ramp = (np.arange(height * width * 3).reshape(height, width, 3) % 251).astype(np.uint8)
    colour = Image.fromarray(ramp)

    def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        return stream.getvalue()

    rotated = Image.Exif()
    rotated[0x0112] = 6
    jpeg, png = encoded(colour, "JPEG"), encoded(colour, "PNG")
    deep = Image.fromarray((ramp[..., 0].astype(np.uint16) << 8) + 7)
    frame = jpeg.index(b"\xff\xc0") + 5
    huge = (13_000).to_bytes(2, "big") * 2
    cases = [
        ("a JPEG", jpeg, True),
        ("a PNG", png, True),
        ("a grey JPEG", encoded(colour.convert("L"), "JPEG"), True),
        ("a rotated JPEG", encoded(colour, "JPEG", exif=rotated), True),
        ("a PNG with transparency", encoded(colour.convert("RGBA"), "PNG"), True),
        ("a PNG of 16 bits", encoded(deep, "PNG"), True),
        ("a PNG with a palette", encoded(colour.quantize(16), "PNG"), True),
        ("a JPEG in CMYK", encoded(colour.convert("CMYK"), "JPEG"), True),
        ("a WebP", encoded(colour, "WEBP"), True),
        ("a BMP", encoded(colour, "BMP"), True),
        ("a GIF", encoded(colour, "GIF"), False),
        ("a JPEG cut short", jpeg[: len(jpeg) // 3], False),
        ("a PNG cut short", png[:40], False),
        ("a JPEG that claims 13,000 × 13,000 pixels", jpeg[:frame] + huge + jpeg[frame + 4 :], False),
        ("a PNG that claims 30,000 × 30,000 pixels", png[:16] + (30_000).to_bytes(4, "big") * 2 + png[24:], False),
        ("an empty string", b"", False),
        ("text", b"<svg xmlns='http://www.w3.org/2000/svg'/>", False),
        ("a PNG after the bad ones", png, True),
    ]
    listed = []
    for index, (case, content, ok) in enumerate(cases):
        file = folder / f"image-{index}"
        file.write_bytes(content)
        listed.append({"case": case, "file": str(file), "ok": ok})
    return listed
