"""Statistics as one HTML page with pictures: what each feature holds in each split, and what is wrong with it.

page = render_statistics(manifest, statistics, samples, anomalies)
"""

import base64
from collections.abc import Sequence
from typing import Any

from trainer.data.manifest import Manifest
from trainer.data.statistics import FeatureStatistics, Statistics
from trainer.data.validation import Anomaly
from trainer.report.markup import Markup, element, join, printable
from trainer.report.numerals import count, decimal, percent
from trainer.report.page import assemble
from trainer.report.pictures import photograph
from trainer.report.tables import Column, Section, paragraphs, table

_SHOWN_VALUES = 12
_WIDTH, _HEIGHT = 360, 90


def render_statistics(
    manifest: Manifest,
    statistics: Statistics,
    samples: Sequence[dict[str, Any]] = (),
    anomalies: Sequence[Anomaly] | None = None,
) -> str:
    """One HTML document; the same inputs give the same bytes.

    Args:
        manifest: The dataset.
        statistics: Its statistics.
        samples: A few examples of the train split, as `records.decode` gives them.
        anomalies: What validation found. None: nothing was validated.
    """
    name = printable(manifest.source.get("name") or manifest.source.get("kind") or "data", 80)
    head = element(
        "header",
        element("h1", f"Data: {name}"),
        element("p", f"{manifest.task}, label {manifest.label.name}; {manifest.digest}"),
    )
    by_split = {split: statistics.splits[split] for split in manifest.splits}  # in the manifest's order, always
    sections = [_splits(manifest, statistics)]
    if anomalies is not None:
        sections.insert(0, _anomalies(anomalies))
    label = manifest.label.name
    sections.append(_feature(label, f"Label: {label}", {split: found[label] for split, found in by_split.items()}))
    for feature in sorted(manifest.features):
        sections.append(_feature(feature, feature, {split: found[feature] for split, found in by_split.items()}))
    if samples:
        sections.append(_samples(samples))
    return assemble(f"Data: {name}", head, sections)


def _anomalies(anomalies: Sequence[Anomaly]) -> Section:
    if not anomalies:
        return Section("anomalies", "Validation", paragraphs("Nothing is wrong."))
    columns = [Column(title) for title in ("Feature", "Severity", "Check", "Split", "Expected", "Found")]
    rows = [[a.feature, a.severity, a.check, a.split, a.expected, a.found] for a in anomalies]
    return Section("anomalies", "Validation", table("What is not as it should be", columns, rows))


def _splits(manifest: Manifest, statistics: Statistics) -> Section:
    columns = [Column("Split"), Column("Examples", "n"), Column("Files", "n"), Column("Bytes", "n")]
    rows = [
        [name, count(split.num_examples), count(len(split.shards)), count(split.num_bytes)]
        for name, split in manifest.splits.items()
    ]
    notes = [f"{count(found)} examples of {pair.split('/')[1]} are also in {pair.split('/')[0]}."
             for pair, found in statistics.shared_examples.items()]  # fmt: skip
    if manifest.num_skipped:
        notes.append(f"{count(manifest.num_skipped)} bad records were left out.")
    return Section("splits", "Splits", join([table("Splits", columns, rows), paragraphs(*notes)]))


def _feature(key: str, title: str, by_split: dict[str, FeatureStatistics]) -> Section:
    kind = next(iter(by_split.values())).kind
    columns = [Column("Split"), Column("Examples", "n"), Column("Missing", "n"), Column("Different", "n")]
    columns += [Column(name, "n") for name in ("Mean", "Deviation", "Lowest", "Median", "Highest")]
    rows = []
    for split, found in by_split.items():
        numbers = [found.mean, found.std_dev, found.low, found.quantile(50), found.high]
        missing = percent(found.num_missing / max(1, found.num_examples))
        different = "" if found.num_distinct is None else count(found.num_distinct)
        shown = ["" if number is None else decimal(number) for number in numbers]
        rows.append([split, count(found.num_examples), missing, different, *shown])
    measured = {"text": "Words in a text.", "image": "Pixels, 0 to 255; below, sizes before resizing."}.get(kind)
    drawn = [_drawing(split, found) for split, found in by_split.items()]
    body = join([paragraphs(f"Kind: {kind}.", measured), table(title, columns, rows), *drawn])
    return Section(f"feature-{key}", title, body)


def _drawing(split: str, found: FeatureStatistics) -> Markup | None:
    parts = []
    if found.histogram:
        parts.append(_bars(f"{split}: distribution", [bin_.count for bin_ in found.histogram]))
    if found.values and found.kind != "number":
        most = found.values[0].count
        rows = [
            [printable(value.value, 60), count(value.count), _share(value.count / most)]
            for value in found.values[:_SHOWN_VALUES]
        ]
        names = {"text": "word", "image": "size"}.get(found.kind, "value")
        caption = f"{split}: most frequent {names}s"
        parts.append(table(caption, [Column(names.capitalize()), Column("Times", "n"), Column("")], rows))
    return join(parts) if parts else None


def _bars(name: str, counts: list[int]) -> Markup:
    most, width = max(counts) or 1, _WIDTH / len(counts)
    bars = []
    for place, number in enumerate(counts):
        height = _HEIGHT * number / most
        bars.append(
            element(
                "rect",
                x=f"{place * width:.1f}",
                y=f"{_HEIGHT - height:.1f}",
                width=f"{width - 1:.1f}",
                height=f"{height:.1f}",
                fill="currentColor",
            )
        )
    picture = element("svg", *bars, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", width=_WIDTH, height=_HEIGHT, role="img",
                      aria_label=name)  # fmt: skip
    return element("figure", picture, element("figcaption", name))


def _share(part: float) -> Markup:
    bar = element("rect", x=0, y=0, width=f"{100 * part:.1f}", height=10, fill="currentColor")
    return element("svg", bar, viewBox="0 0 100 10", width=100, height=10, aria_hidden="true")


def _samples(samples: Sequence[dict[str, Any]]) -> Section:
    cards = []
    for sample in samples:
        shown, words = [], []
        for name, value in sorted(sample.items()):
            if getattr(value, "dtype", None) == "uint8":
                image = {"shape": list(value.shape), "pixels_base64": base64.b64encode(value.tobytes()).decode()}
                try:
                    shown.append(element("img", src=photograph(image)[0], alt=f"{name} of an example"))
                except ValueError:
                    words.append(f"{name}: {list(value.shape)}")
            elif isinstance(value, str):
                words.append(f"{name}: {printable(value, 200)}")
            else:
                words.append(f"{name}: {', '.join(decimal(float(number)) for number in value.reshape(-1)[:8])}")
        cards.append(element("li", element("figure", *shown, element("figcaption", "; ".join(words)))))
    return Section("samples", "Some examples of train", element("ul", *cards, class_="cards"))
