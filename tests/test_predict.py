"""Scoring files: whatever they are, the answers are those of the signature, in order, one for each example."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from pipelines.cli import main
from trainer.data.manifest import read_manifest
from trainer.data.reading import load_split
from trainer.errors import BadInput
from trainer.predict import predict


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def digits(digits_examples):
    return load_split(digits_examples, read_manifest(digits_examples), "test")


@pytest.fixture(scope="module")
def pictures(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "deeper").mkdir()
    for place, image in enumerate(digits[0]["image"][:10]):
        name = folder / ("deeper" if place % 2 else ".") / f"{place:02}.png"
        Image.fromarray(image[..., 0]).save(name)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\x00 no picture")
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_a_prepared_split_is_scored_whole_and_in_order(digits_model, digits_examples, digits, tmp_path):
    count = predict(str(digits_model), digits_examples, tmp_path / "out.jsonl", batch_size=50)
    rows = read(tmp_path / "out.jsonl")
    assert count == len(rows) == 360
    assert [row["example"] for row in rows[:2]] == ["test:0", "test:1"]
    right = np.mean([row["class_name"] == str(label) for row, label in zip(rows, digits[1], strict=True)])
    assert right > 0.85
    assert all(sum(row["probabilities"]) == pytest.approx(1, abs=1e-5) for row in rows)


def test_a_folder_is_scored_file_by_file_and_what_is_no_image_is_marked(
    digits_model, digits_examples, pictures, tmp_path
):
    assert predict(str(digits_model), pictures, tmp_path / "out.jsonl", batch_size=4) == 12
    rows = {row["example"]: row for row in read(tmp_path / "out.jsonl")}
    for name in ("broken.jpg", "notes.txt"):
        assert rows[name] == {
            "example": name, "ok": False, "class_name": None, "probability": None, "probabilities": None,
        }  # fmt: skip
    predict(str(digits_model), digits_examples, tmp_path / "split.jsonl")
    for place, expected in enumerate(read(tmp_path / "split.jsonl")[:10]):
        found = rows[f"{'deeper/' if place % 2 else ''}{place:02}.png"]
        assert found["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)


def test_a_table_is_scored_by_its_columns_in_any_order(table, tmp_path):
    _, model = table
    (tmp_path / "in.csv").write_text("Colour,other,size\nred,1,2.5\ngreen,2,\n".replace("Colour", "colour"))
    (tmp_path / "in.jsonl").write_text('{"size": 2.5, "colour": "red"}\n{"size": null, "colour": "green"}\n')
    for name in ("in.csv", "in.jsonl"):
        assert predict(str(model), tmp_path / name, tmp_path / f"{name}.out.jsonl") == 2
    one, other = (read(tmp_path / f"{name}.out.jsonl") for name in ("in.csv", "in.jsonl"))
    assert [row["probabilities"] for row in one] == [row["probabilities"] for row in other]
    assert one[0]["class_name"] == "big"


def test_numbers_go_into_a_csv_file(number_table, tmp_path):
    _, model = number_table
    (tmp_path / "in.csv").write_text("size,colour\n1,red\n-1,blue\n")
    assert main(["predict", str(model), str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["example", "ok", "prediction"]
    assert float(rows[0][2]) == pytest.approx(5, abs=1.5)
    assert float(rows[1][2]) == pytest.approx(-3, abs=1.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("size\n1\n", "has no colour, which the model takes"),
        ("size,colour\nbig,red\n", r"in.csv:2: size = 'big': must be a number"),
        ("size,colour\n1\n", "in.csv:2: has 1 values, the header has 2"),
        ("size,colour\n", "in.csv: holds no examples"),
        ("", "in.csv"),
        ('size,colour\n1,"red\n', "in.csv:2: unexpected end of data"),
    ],
)
def test_a_bad_table_is_refused_by_its_line_and_leaves_no_output(table, tmp_path, content, message):
    (tmp_path / "in.csv").write_text(content)
    with pytest.raises(BadInput, match=message):
        predict(str(table[1]), tmp_path / "in.csv", tmp_path / "out.csv")
    assert [file.name for file in tmp_path.iterdir()] == ["in.csv"]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_file_that_is_not_utf_8_is_refused(table, tmp_path, ending):
    line = {"csv": 'size,colour\n1,"r\u00f6d"\n', "jsonl": '{"size": 1, "colour": "r\u00f6d"}\n'}[ending]
    (tmp_path / f"in.{ending}").write_bytes(line.encode("latin-1"))
    with pytest.raises(BadInput, match=f"in.{ending}: is not UTF-8"):
        predict(str(table[1]), tmp_path / f"in.{ending}", tmp_path / "out.csv")
    assert [file.name for file in tmp_path.iterdir()] == [f"in.{ending}"]


def test_what_cannot_be_scored_is_refused(table, digits_model, pictures, tmp_path):
    (tmp_path / "in.xyz").write_text("")
    (tmp_path / "in.jsonl").write_text("\n")
    for model, source, output, message in (
        (tmp_path, pictures, "out.csv", "holds no saved_model.pb"),
        (digits_model, pictures, "out.txt", "must end in .jsonl or .csv"),
        (table[1], pictures, "out.csv", "not one image"),
        (table[1], tmp_path / "in.xyz", "out.csv", "must be an image, a folder"),
        (digits_model, tmp_path / "none.png", "out.csv", "none.png: there is no such file or folder"),
        (table[1], tmp_path / "in.jsonl", "out.csv", "in.jsonl: holds no examples"),
        (digits_model, table[0], "out.csv", "has no image, which the model takes"),
    ):
        with pytest.raises(BadInput, match=message):
            predict(str(model), source, tmp_path / output)
