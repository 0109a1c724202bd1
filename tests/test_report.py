"""The report says what was measured, whatever is missing or hostile, in one page of a bounded size."""

import base64
import copy
import io
import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from PIL import Image
from report_samples import evaluation, everything, history, provenance, ramp, verdict

from trainer.report import markdown_summary, render
from trainer.report.charts import round_step, scale_for, thin_by_extremes, thin_by_length
from trainer.report.markup import Markup, element, printable
from trainer.report.numerals import count, decimal, lower_is_better, percent, signed
from trainer.report.pictures import photograph

MEGABYTE = 1_000_000
EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "<!-- ]]> --><svg/onload=alert(1)>",
]


class Page(HTMLParser):
    """The elements of a page, the text of each, and whether every one is closed."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self.open = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])
        if tag not in EMPTY:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for each in self.open:
            each[2] += data

    def all(self, tag, **wanted):
        return [
            (attributes, text)
            for name, attributes, text in self.elements
            if name == tag and all(attributes.get(key) == value for key, value in wanted.items())
        ]

    def texts(self, tag, **wanted):
        return [text for _, text in self.all(tag, **wanted)]

    def shape(self):
        return [(tag, sorted(attributes)) for tag, attributes, _ in self.elements]

    def rows(self, caption):
        """The cells of the table with this caption, line by line."""
        inside, rows = False, []
        for tag, _, text in self.elements:
            if tag == "table":
                inside = False
            elif tag == "caption":
                inside = text == caption
            elif inside and tag == "tr":
                rows.append([])
            elif inside and tag in ("td", "th"):
                rows[-1].append(text)
        return rows[1:]


def page(of=None, judged=None, learned=None, origin=None):
    html = render(
        evaluation() if of is None else of,
        verdict() if judged is None else judged,
        history() if learned is None else learned,
        provenance() if origin is None else origin,
    )
    parsed = Page(html)
    assert parsed.open == []
    return parsed


def test_the_same_inputs_give_the_same_bytes_and_stay_as_they_were():
    given = [everything(), verdict(), history(), provenance()]
    before = copy.deepcopy(given)
    assert render(*given) == render(*copy.deepcopy(given))
    assert markdown_summary(*given[:2]) == markdown_summary(*copy.deepcopy(given[:2]))
    assert given == before


def test_importing_the_report_loads_no_heavy_library():
    heavy = {"tensorflow", "matplotlib", "numpy", "PIL", "kfp"}
    code = f"import sys, trainer.report; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_verdict_comes_first_and_its_reasons_and_rules_next():
    blessed = page(judged=verdict(True))
    assert blessed.texts("h1") == ["digits is blessed "]
    assert blessed.texts("title")[0] == "digits is blessed"
    assert blessed.texts("h2")[0] == "Why"
    assert "Accuracy is high enough." in blessed.texts("li")
    assert blessed.rows("Rules of the judgement") == [
        ["accuracy ≥ 0.85Against a fixed value", "0.9000", "–", "Passed"],
        ["accuracy − baseline ≥ 0Against the baseline", "0.9000", "0.8900", "Passed"],
    ]
    refused = page(judged=verdict(False))
    assert refused.texts("h1") == ["digits is not blessed "]
    assert refused.texts("p", **{"class": "lead"})[0].startswith("1 of 2 rules failed")
    assert refused.rows("Rules of the judgement")[0][-1] == "Failed"


def test_a_verdict_that_is_neither_is_stated_in_its_own_words():
    judged = verdict(False) | {"verdict": "baseline_incompatible"}
    assert page(judged=judged).texts("p", **{"class": "stated"}) == ["Baseline incompatible"]
    assert page(judged={}).texts("h1") == ["digits was not judged "]


def test_metrics_stand_beside_the_baseline_with_the_side_each_change_falls_on():
    rows = {row[0]: row[1:4] for row in page(everything()).rows("Metrics on the test split")}
    assert rows["Accuracy"][0].endswith("0.8500 to 0.9500")
    assert rows["Accuracy"][2] == "▲ +0.0100 better−0.0200 to +0.0400, p 0.410"
    assert rows["Loss"] == ["0.0621", "0.0500", "▲ +0.0121 worse+0.0040 to +0.0200, p < 0.001"]
    assert rows["Macro F1"][2] == "0.0000 same"
    assert rows["ROC AUC"] == ["–", "–", "–"]


def test_slices_are_sorted_by_gap_times_examples_and_those_without_a_value_come_last():
    rows = page(everything()).rows("Accuracy by slice, most harmful first")
    assert [row[0] for row in rows] == ["country=DE", "country=FR", "country=IT", "country=VA"]
    assert rows[-1][1:4] == ["0", "–", "not judged"]
    worse = everything()
    worse["slices"][1]["num_examples"] = 500
    assert page(worse).rows("Accuracy by slice, most harmful first")[0][0] == "country=FR"


def test_slices_of_an_error_are_harmful_where_it_is_larger():
    of = {
        "metrics": {"rmse": 2.0},
        "slices": [
            {"slice": "small", "num_examples": 10, "metrics": {"rmse": 1.0}},
            {"slice": "large", "num_examples": 10, "metrics": {"rmse": 3.0}},
        ],
    }
    rows = page(of).rows("RMSE by slice, most harmful first")
    assert [(row[0], row[3]) for row in rows] == [("large", "+1.0000"), ("small", "−1.0000")]


def test_the_confusion_matrix_is_a_table_of_counts_up_to_thirty_classes():
    of = evaluation(30)
    parsed = page(of)
    caption = "Examples by true and predicted class. The stronger the colour, the larger its share of the row."
    rows = parsed.rows(caption)
    assert [[int(cell or 0) for cell in row[1:]] for row in rows] == of["confusion_matrix"]
    assert page(evaluation(31)).rows(caption) == []


def pixels_of(url):
    return Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1])))


def test_beyond_thirty_classes_the_matrix_is_a_picture_with_its_diagonal_and_the_worst_pairs_in_words():
    of = evaluation(100)
    of["confusion_matrix"][7][70] = 12
    parsed = page(of)
    (matrix,) = [img for img, _ in parsed.all("img") if "Confusion matrix of 100 classes" in img["alt"]]
    picture = pixels_of(matrix["src"]).convert("RGBA")
    assert picture.size == (100, 100)
    right, wrong, none = picture.getpixel((7, 7)), picture.getpixel((70, 7)), picture.getpixel((50, 7))
    assert right[2] > right[0]
    assert wrong[0] > wrong[2]
    assert none[3] == 0
    assert parsed.rows("Most frequent confusions")[0][:3] == ["7", "70", "12"]


@pytest.mark.parametrize(("num_classes", "dense"), [(100, False), (1000, False), (1000, True)])
def test_many_classes_stay_under_three_megabytes(num_classes, dense):
    of = evaluation(num_classes, [f"class number {index}" for index in range(num_classes)], 24, dense)
    for mistake in of["mistakes"]:
        mistake["image"] = ramp(224, 224, 3)
    html = render(of, verdict(), history(2000), provenance())
    assert len(html.encode()) < 3 * MEGABYTE
    assert len(Page(html).rows(f"The 30 weakest of {count(num_classes)} classes by F1")) == 30


def test_roc_curves_are_thinned_to_two_hundred_points():
    parsed = page(evaluation(3))
    drawn = [
        attributes["d"] for attributes, _ in parsed.all("path", **{"class": "strong"}) if len(attributes["d"]) > 99
    ]
    roc = max(drawn, key=len)
    assert roc.count("L") + 1 == 200


def test_learning_curves_mark_the_epoch_of_the_lowest_validation_loss():
    rows = history(12)
    best = min(rows, key=lambda row: row["validation_loss"])
    parsed = page(learned=rows)
    assert f"at epoch {best['epoch']:g}." in " ".join(parsed.texts("p"))
    assert len(parsed.all("circle", **{"class": "ring"})) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_not_finite_is_marked_and_does_not_draw(value):
    rows = history(12)
    rows[4]["loss"] = value
    parsed = page(learned=rows)
    assert "Training loss was not finite in 1 row (×)." in parsed.texts("p")
    assert len(parsed.all("path", **{"class": "cross"})) == 1
    curves = [a["d"] for a, _ in parsed.all("path", **{"class": "plain"}) if "L" in a["d"]]
    assert any(curve.count("M") == 2 for curve in curves)
    assert not any(word in a["d"].lower() for a, _ in parsed.all("path") for word in ("nan", "inf"))


def test_a_history_of_nothing_but_nan_still_says_so():
    rows = [{"step": 1, "epoch": 1.0, "loss": math.nan}, {"step": 2, "epoch": 2.0, "loss": math.nan}]
    assert "Training loss was not finite in 2 rows (×)." in page(learned=rows).texts("p")


def test_metrics_that_are_not_numbers_are_written_as_such():
    of = evaluation()
    of["metrics"] = {"accuracy": math.nan, "loss": math.inf, "macro_f1": None}
    of["per_class"][0] |= {"precision": None, "recall": math.nan, "f1": None, "intervals": {}}
    parsed = page(of)
    assert [row[:2] for row in parsed.rows("Metrics on the test split")] == [
        ["Accuracy", "NaN"],
        ["Loss", "∞"],
        ["Macro F1", "–"],
    ]
    assert parsed.rows("Precision and recall by class")[0][1:4] == ["–", "NaN", "–"]


def test_worst_mistakes_are_shown_as_the_pixels_they_are():
    parsed = page(everything())
    images = [img for img, _ in parsed.all("img") if img["alt"].startswith("Example")]
    assert len(images) == 7
    assert images[0]["alt"] == "Example 17: labelled 0, predicted 1"
    assert list(pixels_of(images[0]["src"]).convert("L").tobytes()) == list(range(64))
    assert pixels_of(images[-1]["src"]).size == (130, 96)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [5, 200])
def test_pictures_of_every_number_of_channels_can_be_shown(channels, size):
    image = ramp(size, 3, channels)
    url, side = photograph(image)
    picture = pixels_of(url)
    assert side == size
    assert max(picture.size) == min(size, 160)
    if size == 5:
        assert picture.tobytes() == base64.b64decode(image["pixels_base64"])


@pytest.mark.parametrize(
    "image",
    [
        {"shape": [8, 8, 1], "pixels_base64": "AAAA"},
        {"shape": [8, 8, 7], "pixels_base64": "AAAA"},
        {"shape": [8, 8, 1], "pixels_base64": "not base64"},
        {"shape": [8, 8, 1]},
    ],
)
def test_a_picture_that_cannot_be_drawn_says_why_and_spares_the_page(image):
    of = evaluation()
    of["mistakes"][0]["image"] = image
    (why,) = page(of).texts("p", **{"class": "absent"})
    assert why.startswith("No picture: ")


def test_hostile_text_changes_no_element_and_is_shown_as_it_is():
    def with_text(texts):
        of = everything(list(texts))
        of["split"] = texts[0]
        of["baseline"]["version"] = texts[1]
        of["metrics"][texts[2]] = 0.5
        of["slices"][0]["slice"] = texts[0]
        of["data_statistics"] = {texts[1]: {texts[2]: texts[0]}}
        of["mistakes"][1] = {"index": texts[0], "label": texts[1], "predicted": texts[2], "text": texts[0]}
        judged = verdict()
        judged["verdict"] = texts[0]
        judged["reasons"] = [texts[1]]
        judged["rules"][0] |= {"rule": texts[2], "kind": texts[0]}
        origin = {"name": texts[0], "configuration": {texts[1]: [texts[2], {texts[0]: texts[1]}]}, texts[2]: texts[0]}
        return page(of, judged, history(), origin)

    hostile = with_text(HOSTILE)
    assert hostile.shape() == with_text(["x" * len(text) for text in HOSTILE]).shape()
    assert len(hostile.all("script")) == 1
    assert hostile.texts("h1")[0].startswith(HOSTILE[0])
    for text in HOSTILE:
        assert any(text in cell for cell in hostile.texts("td") + hostile.texts("th"))


def test_text_that_html_cannot_hold_or_that_turns_directions_around_is_replaced():
    assert printable("a\x00b\x1b\ud800\u202ec\u2066") == "a�b���c�"
    assert str(element("p", "\ud800\u202e")) == "<p>��</p>"
    render(evaluation(3, ["\ud800", "\x00", "\u202eabc"]), verdict(), [], {"\udfff": "\ud800"}).encode()


def test_only_markup_is_let_through():
    assert element("p", "<b>", Markup("<i>"), title='"&') == '<p title="&quot;&amp;">&lt;b&gt;<i></p>'


def test_the_page_asks_for_nothing_and_uses_nothing_that_the_frame_of_kubeflow_forbids():
    html = render(everything(), verdict(), history(), provenance())
    for forbidden in (
        "http:",
        "https:",
        "//cdn",
        "localStorage",
        "_blank",
        'href="#',
        "<form",
        "<a ",
        "@import",
        "url(",
    ):
        assert forbidden not in html
    links = {tuple(attributes.items()) for attributes, _ in Page(html).all("link")}
    assert links == {(("rel", "icon"), ("href", "data:,"))}


def test_headings_tables_and_drawings_have_what_a_screen_reader_needs():
    parsed = page(everything())
    levels = [int(tag[1]) for tag, _, _ in parsed.elements if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _, _ in parsed.elements}
    assert len(parsed.all("caption")) == len(parsed.all("table"))
    assert all(text for text in parsed.texts("caption"))
    assert all(attributes.get("scope") in ("col", "row") for attributes, _ in parsed.all("th"))
    ids = [attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes, _ in parsed.all("svg"):
        if attributes.get("role") == "img":
            assert {attributes["aria-labelledby"], attributes["aria-describedby"]} <= set(ids)
        else:
            assert attributes["aria-hidden"] == "true"
    assert all(attributes["alt"] for attributes, _ in parsed.all("img"))
    assert all(attributes["data-to"] in ids for attributes, _ in parsed.all("button"))


OPTIONAL = {
    "intervals": "Under a value: its interval",
    "slices": "Slices",
    "pr": "Precision and recall curves",
    "calibration": "Calibration",
    "data_statistics": "Data",
}


@pytest.mark.parametrize("key", sorted(OPTIONAL))
def test_an_optional_part_that_is_missing_leaves_no_trace(key):
    def mentions(of):
        parsed = page(of)
        return OPTIONAL[key] in parsed.texts("h2") + [text[: len(OPTIONAL[key])] for text in parsed.texts("p")]

    without = everything()
    del without[key]
    assert mentions(everything())
    assert not mentions(without)


@pytest.mark.parametrize("key", sorted(everything()))
def test_no_key_of_the_evaluation_is_needed(key):
    of = everything()
    del of[key]
    assert page(of).texts("h1") == ["digits is blessed "]
    of[key] = None
    assert page(of).texts("h1") == ["digits is blessed "]
    markdown_summary(of, verdict())


def test_nothing_at_all_still_gives_a_page():
    parsed = page({}, {}, [], {})
    assert parsed.texts("h1") == ["This model was not judged "]
    assert parsed.texts("h2") == ["Why"]
    assert markdown_summary({}, {}) == "# Not judged\n"


@pytest.mark.parametrize("num_classes", [1, 2])
def test_few_classes_give_a_page(num_classes):
    parsed = page(evaluation(num_classes))
    assert len(parsed.rows("Precision and recall by class")) == num_classes
    assert ("ROC curves" in parsed.texts("h2")) == (num_classes > 1)


def test_a_class_without_an_example_gives_a_page():
    of = evaluation(3)
    of["confusion_matrix"][1] = [0, 0, 0]
    of["roc"][1] |= {"fpr": [], "tpr": [], "auc": None}
    of["per_class"][1] |= {"precision": None, "recall": None, "f1": None, "support": 0, "intervals": {}}
    assert page(of).rows("Precision and recall by class")[1] == ["1", "–", "–", "–", "0"]


def test_a_regression_has_metrics_and_no_classes():
    of = {"split": "test", "num_examples": 9, "task": "regression", "metrics": {"rmse": 1.5, "r2": 0.7}}
    parsed = page(of)
    assert parsed.texts("h2") == ["Why", "Metrics", "Learning curves", "Configuration and versions"]


def test_provenance_is_shown_by_dotted_path():
    parsed = page(origin={"name": "x", "train": {"layers": [1, 2], "stages": [{"rate": 0.1}], "off": None, "none": []}})
    assert parsed.rows("Train") == [
        ["layers", "1, 2"],
        ["stages[0].rate", "0.1"],
        ["off", "null"],
        ["none", "none"],
    ]
    assert parsed.rows("Run") == [["name", "x"]]


def test_the_summary_holds_verdict_rules_and_metrics():
    text = markdown_summary(everything(), verdict(False))
    assert text.startswith("# Not blessed\n")
    assert "| accuracy ≥ 0.85 | 0.7000 | – | **failed** |" in text
    assert "| Loss | 0.0621 | – | 0.0500 | +0.0121 worse |" in text


@pytest.mark.parametrize(
    "text", [*HOSTILE, "a | b", "[x](javascript:alert(1))", "https://example.org", "# h", "1. x", "*b*"]
)
def test_the_summary_shows_hostile_text_as_letters(text):
    judged = verdict() | {"reasons": [text]}
    reason = next(line for line in markdown_summary(evaluation(), judged).splitlines() if line.startswith("- "))[2:]
    assert "<" not in reason
    assert "://" not in reason
    for mark in "|[*`#":
        assert reason.count(mark) == reason.count("\\" + mark)
    assert not reason.startswith("1.")


def test_numbers_are_written_one_way():
    assert [decimal(value) for value in (0.5, -0.25, 0, 1e-7, 12345.678, None)] == [
        "0.5000",
        "−0.2500",
        "0.0000",
        "1.0e−7",
        "12\u202f345.7",
        "–",
    ]
    assert [decimal(value) for value in (math.nan, math.inf, -math.inf)] == ["NaN", "∞", "−∞"]
    assert [signed(value) for value in (0.01, -0.01, 0.0)] == ["+0.0100", "−0.0100", "0.0000"]
    assert [percent(value) for value in (0.5, 0.99999, 1.0, 0.00001)] == [
        "50.0\u202f%",
        "over 99.9\u202f%",
        "100.0\u202f%",
        "under 0.1\u202f%",
    ]
    assert lower_is_better("validation_loss")
    assert not lower_is_better("accuracy")


def test_thinning_keeps_ends_and_spikes():
    curve = [(index / 9999, (index / 9999) ** 0.1) for index in range(10_000)]
    thinned = thin_by_length(curve, 200)
    assert len(thinned) <= 200
    assert (thinned[0], thinned[-1]) == (curve[0], curve[-1])

    def area(points):
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))

    assert area(thinned) == pytest.approx(area(curve), abs=1e-3)
    spiky = [(float(index), 100.0 if index == 777 else 0.0) for index in range(5000)]
    assert (777.0, 100.0) in thin_by_extremes(spiky, 400)
    assert len(thin_by_extremes(spiky, 400)) <= 400


@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [-3.0, 5.0], [1e-12, 2e-12], [1e9, 3e9], [0.5, 0.50001]])
def test_scales_hold_their_values_and_have_ticks(values):
    scale = scale_for(values, 0, 100)
    assert all(0 <= scale(value) <= 100 for value in values)
    assert 2 <= len(scale.ticks()) <= 12
    assert round_step(10) == 2


def test_what_json_brings_back_gives_the_same_page():
    given = [everything(), verdict(), history(), provenance()]
    assert render(*given) == render(*json.loads(json.dumps(given)))


def body_of(evaluation):
    return Page(render(evaluation, verdict(), [], {})).texts("body")[0]


def test_a_change_has_its_interval_and_p_value_as_differences_of_the_value():
    page = body_of(everything())
    assert "−0.0200 to +0.0400, p 0.410" in page
    assert "+0.0040 to +0.0200, p < 0.001" in page  # a gain of −0.02 to −0.004 in a loss is a larger loss
    assert "holds the true value in 95\N{NARROW NO-BREAK SPACE}% of cases" in page


def test_a_slice_too_small_to_judge_says_so():
    assert "5too few to judge" in body_of(everything())


def test_a_metric_of_ones_own_is_better_in_its_own_direction():
    for lower, word in (([], "better"), (["cost"], "worse")):
        found = {
            "metrics": {"cost": 5.0},
            "lower_is_better": lower,
            "baseline": {"version": 1, "metrics": {"cost": 4.0}},
        }
        assert f"+1.0000 {word}" in body_of(found)
        assert f"+1.0000 {word}" in markdown_summary(found, verdict())


def test_each_class_shows_the_intervals_of_its_rates():
    page = render(everything(), verdict(), history(), provenance())
    for metric in ("0.613 to", "0.500 to"):
        assert page.count(metric) == 3  # one a class


def test_a_row_of_a_table_is_shown_value_by_value_and_an_interval_that_is_not_given_is_said():
    page = render(everything(), verdict(), history(), provenance())
    assert "<dt>bill_length_mm</dt><dd>46.5</dd>" in page
    assert "No interval of Weighted F1 below 50 examples." in page
