"""Asks an export what a server would, in a process of its own; run as a script by `trainer.serving`, never imported.

    python -I serving_probe.py request.json reply.json

It imports nothing of the project, so that whatever the export needs and does not carry is missed here. Every question
that fails is answered with its error; what kills the process is seen by whoever started it.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main(request_file, reply_file):
    """Reads the request, asks, and leaves the reply after each part, so that a death leaves what was known."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    partial = Path(reply_file + ".partial")
    reply = {}

    def keep(**facts):
        reply.update(facts)
        partial.write_text(json.dumps(reply), encoding="utf-8")
        partial.replace(reply_file)

    started = time.perf_counter()
    import tensorflow as tf

    keep(import_secs=time.perf_counter() - started, bytes_before=peak_bytes())
    started = time.perf_counter()
    try:
        loaded = tf.saved_model.load(request["saved_model"])
    except Exception as error:
        keep(load_error=first_line(error))
        return
    keep(load_secs=time.perf_counter() - started, signatures=sorted(loaded.signatures))
    if "serving_default" not in loaded.signatures:
        return
    features, answers = read_reference(request["reference"])
    serve = loaded.signatures["serving_default"]
    started = time.perf_counter()
    keep(**compared(tf, serve, features, answers), first_call_secs=time.perf_counter() - started)
    if "reference_error" in reply:
        return
    keep(**timed(tf, serve, features, request["num_requests"]), peak_bytes=peak_bytes())
    keep(hostile=[*hostile_values(tf, serve, features)])
    if "image_bytes" in loaded.signatures and request["images"]:
        keep(**compared_files(tf, loaded.signatures["image_bytes"], features, answers))
        images = read_images(request["images"])
        keep(images=[*hostile_images(tf, loaded.signatures["image_bytes"], features, images)])
    keep(
        peak_bytes=peak_bytes(), project_loaded=sorted(name for name in sys.modules if name.split(".")[0] == "trainer")
    )
    keep(done=True)


def compared(tf, serve, features, answers):
    """Largest difference from the trainer's answers, all rows together and each by itself."""
    count = len(next(iter(features.values())))
    try:
        together = numpy_of(serve(**batch(tf, features, slice(0, count))))
        alone = [numpy_of(serve(**batch(tf, features, slice(row, row + 1)))) for row in range(min(count, 16))]
        empty = numpy_of(serve(**batch(tf, features, slice(0, 0))))
    except Exception as error:
        return {"reference_error": first_line(error)}
    found = {"answers": {}, "num_reference": count}
    for name, wanted in answers.items():
        if name not in together:
            return {"reference_error": f"answers no {name}, only {', '.join(sorted(together))}"}
        if together[name].shape != wanted.shape:
            return {
                "reference_error": f"answers {name} of shape {list(together[name].shape)}, not {list(wanted.shape)}"
            }
        singles = np.concatenate([each[name] for each in alone])
        scale = np.maximum(np.abs(wanted), 1.0)
        found["answers"][name] = {
            "not_finite": int((~np.isfinite(together[name])).sum()),
            "together": largest(np.abs(together[name] - wanted) / scale),
            "alone": largest(np.abs(singles - wanted[: len(singles)]) / scale[: len(singles)]),
        }
        found["empty_rows"] = len(empty[name])
        if wanted.ndim == 2:  # a class may change where two are as probable as each other, and only there
            ranked = np.sort(wanted, axis=1)
            sure = ranked[:, -1] - ranked[:, -2] > 1e-4 if wanted.shape[1] > 1 else np.ones(count, bool)
            other = together[name].argmax(axis=1) != wanted.argmax(axis=1)
            found["other_classes"] = int((other & sure).sum())
    return found


def compared_files(tf, serve, features, answers):
    """Largest difference from the trainer's answers of the same examples sent as image files."""
    inputs = batch(tf, features, slice(0, None))
    for name, spec in serve.structured_input_signature[1].items():
        if inputs[name].dtype != spec.dtype:
            inputs[name] = tf.stack([tf.io.encode_png(pixels) for pixels in inputs[name]])
    try:
        found = numpy_of(serve(**inputs))
    except Exception as error:
        return {"files_error": first_line(error)}
    if not found["ok"].all():
        return {"files_error": f"{int((~found['ok']).sum())} of {len(found['ok'])} are marked as not ok"}
    differences = [
        largest(np.abs(found[name] - wanted) / np.maximum(np.abs(wanted), 1.0)) for name, wanted in answers.items()
    ]
    return {"files_difference": None if None in differences else max(differences)}


def timed(tf, serve, features, num_requests):
    """Milliseconds of requests of one example and of 64."""
    count = len(next(iter(features.values())))
    single = batch(tf, features, slice(0, 1))
    many = {name: tf.repeat(values, 64, axis=0)[:64] for name, values in batch(tf, features, slice(0, count)).items()}
    found = {}
    for name, inputs, times in (("latency_1", single, num_requests), ("latency_64", many, max(10, num_requests // 10))):
        for _ in range(3):
            serve(**inputs)
        spent = []
        for _ in range(times):
            started = time.perf_counter()
            numpy_of(serve(**inputs))
            spent.append(1000 * (time.perf_counter() - started))
        found[name] = {"p50_ms": float(np.quantile(spent, 0.5)), "p99_ms": float(np.quantile(spent, 0.99))}
    return found


def hostile_values(tf, serve, features):
    """Wrong dtypes and shapes, which must be refused, and odd values, which must leave the other rows alone."""
    good = batch(tf, features, slice(0, 2))
    before = numpy_of(serve(**good))
    for name, values in good.items():
        wrong = tf.constant(["x"] * 2) if values.dtype != tf.string else tf.constant([1.0, 2.0])
        for case, inputs in (
            (f"{name} of the wrong dtype", {**good, name: wrong}),
            (f"{name} of the wrong shape", {**good, name: tf.zeros([2, 3, 5, 7, 1], tf.float32)}),
            (f"{name} left out", {other: kept for other, kept in good.items() if other != name}),
        ):
            try:
                serve(**inputs)
                yield {"case": case, "passed": False, "message": "was answered"}
            except Exception as error:
                yield {"case": case, "passed": True, "message": f"refused: {type(error).__name__}"}
        for case, odd in odd_values(tf, values):
            try:
                after = numpy_of(serve(**{**good, name: tf.concat([values[:1], odd], axis=0)}))
                same = all(
                    np.allclose(after[key][0], before[key][0], atol=1e-5)
                    for key in after
                    if before[key].dtype.kind == "f"
                )
                yield {
                    "case": f"{name}: {case}",
                    "passed": same,
                    "message": "answered" if same else "changed another row",
                }
            except Exception as error:
                yield {"case": f"{name}: {case}", "passed": False, "message": first_line(error)}
    after = numpy_of(serve(**good))
    same = all(np.array_equal(after[key], before[key]) for key in after)
    yield {
        "case": "a good request after the bad ones",
        "passed": same,
        "message": "same answer" if same else "another answer",
    }


def odd_values(tf, values):
    """One row each that a client may send."""
    if values.dtype == tf.string:
        yield "empty string", tf.constant([b""])
        yield "not UTF-8", tf.constant([b"\xff\xfe\x00\x80"])
        yield "100,000 characters", tf.constant([b"a " * 50_000])
    elif values.dtype.is_floating:
        for case, value in (("NaN", np.nan), ("infinity", np.inf), ("1e38", 1e38)):
            yield case, tf.fill([1, *values.shape[1:]], tf.constant(value, values.dtype))
    else:
        yield "all at the maximum", tf.fill([1, *values.shape[1:]], tf.constant(values.dtype.max, values.dtype))


def hostile_images(tf, serve, features, images):
    """Files good and bad in one batch: each answered or marked, and the good ones as if they were alone."""
    names = [name for name, spec in serve.structured_input_signature[1].items() if spec.dtype == tf.string]
    names = [name for name in names if features[name].dtype == np.uint8]
    others = {name: values for name, values in features.items() if name not in names}

    def ask(files):
        inputs = {name: tf.constant(files) for name in names}
        inputs |= {name: tf.repeat(tf.constant(values[:1]), len(files), axis=0) for name, values in others.items()}
        return numpy_of(serve(**inputs))

    try:
        started = time.perf_counter()
        whole = ask([image["bytes"] for image in images])
        spent = time.perf_counter() - started
    except Exception as error:
        yield {"case": "good and bad images in one batch", "passed": False, "message": first_line(error)}
        return
    yield {"case": "good and bad images in one batch", "passed": True, "message": f"answered in {spent:.2f} s"}
    for row, image in enumerate(images):
        ok = bool(whole["ok"][row])
        fits = image["ok"] == ok
        message = "answered" if ok else "marked as not ok"
        if fits and ok:
            single = ask([image["bytes"]])
            key = "probabilities" if "probabilities" in single else "prediction"
            if not np.allclose(single[key][0], whole[key][row], atol=1e-4, rtol=1e-4):
                fits, message = False, "answered differently among bad rows"
        yield {"case": image["case"], "passed": fits, "message": message}


def read_reference(file):
    """Features and the trainer's answers by name."""
    with np.load(file, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    features = {name.removeprefix("feature."): values for name, values in found.items() if name.startswith("feature.")}
    answers = {name.removeprefix("answer."): values for name, values in found.items() if name.startswith("answer.")}
    return features, answers


def read_images(listed):
    """The images that the request names, with their bytes."""
    return [{**image, "bytes": Path(image["file"]).read_bytes()} for image in listed]


def batch(tf, features, rows):
    """Some rows as tensors."""
    return {
        name: tf.constant(values[rows], tf.string if values.dtype.kind == "S" else None)
        for name, values in features.items()
    }


def numpy_of(answers):
    """Answers as arrays."""
    return {name: values.numpy() for name, values in answers.items()}


def largest(values):
    """The largest, or None where one is not a number."""
    return float(values.max()) if values.size and np.isfinite(values).all() else None


def peak_bytes():
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def first_line(error):
    """The first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


if __name__ == "__main__":
    main(*sys.argv[1:])
