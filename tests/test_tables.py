"""Tables: every row once, every fault named with its file and row, and splits that keep a person whole."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainer.config import DataConfig, Splits, parse
from trainer.data import tables
from trainer.data.manifest import verify
from trainer.data.prepare import BAD_RECORDS_FILE, prepare
from trainer.data.reading import load_split
from trainer.data.rows import pieces, read_rows
from trainer.data.tables import TableSource
from trainer.errors import BadInput, TriremeError

SHARES = Splits(train="60%", validation="20%", test="20%")
ROWS = "".join(f"{n % 7}.5,word{n % 3},{'yes' if n % 2 else 'no'}\n" for n in range(60))
GOOD = "size,colour,label\n" + ROWS


def config(path, source="csv", **settings):
    return DataConfig(source=source, path=str(path), splits=SHARES, label_key="label", **settings)


def everything(folder, manifest):
    """All examples of all splits as (features, label) tuples."""
    found = []
    for split in manifest.splits:
        features, labels = load_split(folder, manifest, split)[:2]
        names = sorted(features)
        for row, label in enumerate(labels.tolist()):
            found.append((*[features[name][row].item() if hasattr(features[name][row], "item") else features[name][row]
                            for name in names], label))  # fmt: skip
    return sorted(found, key=repr)


def test_the_same_table_in_four_formats_gives_the_same_examples(tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = [line.split(",") for line in ROWS.splitlines()]
    records = [{"size": float(size), "colour": colour, "label": label} for size, colour, label in columns]
    (tmp_path / "t.csv").write_text(GOOD)
    (tmp_path / "t.tsv").write_text(GOOD.replace(",", "\t"))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "t.parquet", row_group_size=17)
    found = []
    for form in ("csv", "tsv", "jsonl", "parquet"):
        manifest = prepare(config(tmp_path / f"t.{form}", form), 7, tmp_path / form)
        assert {name: feature.kind for name, feature in manifest.features.items()} == {
            "size": "number",
            "colour": "category",
        }
        assert manifest.class_names == ["no", "yes"]
        found.append(everything(tmp_path / form, manifest))
    assert len(found[0]) == 60
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("1.5,red\n", "has 2 fields, and the header has 3"),
        ("1.5,red,yes,more\n", "has 4 fields, and the header has 3"),
        ("large,red,yes\n", "size = 'large' is not a number"),
        ("inf,red,yes\n", "size = 'inf' is not a finite number"),
        ("1_000,red,yes\n", "size = '1_000' is not a number"),
        ("1.5,red,\n", "the label label is missing"),
        ("1.5,red,NA\n", "the label label is missing"),
        (b"1.5,r\xe9d,yes\n", "is not UTF-8"),
        ('1.5,"red"x,yes\n', "expected after"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_skipped_and_counted_where_that_is_allowed(tmp_path, row, fault):
    row = row if isinstance(row, bytes) else row.encode()
    (tmp_path / "t.csv").write_bytes(GOOD.encode() + row + b"1.5,red,yes\n")
    with pytest.raises(BadInput) as refused:
        prepare(config(tmp_path / "t.csv"), 7, tmp_path / "failed")
    assert "t.csv, row 62: " in str(refused.value)
    assert fault in str(refused.value)
    assert not (tmp_path / "failed").exists()
    manifest = prepare(config(tmp_path / "t.csv", on_bad_record="skip"), 7, tmp_path / "out")
    assert manifest.num_skipped == 1
    assert sum(split.num_examples for split in manifest.splits.values()) == 61
    listed = [json.loads(line) for line in (tmp_path / "out" / BAD_RECORDS_FILE).read_text().splitlines()]
    assert [(one["file"], one["row"]) for one in listed] == [("t.csv", 62)]
    assert fault in listed[0]["reason"]


def test_more_bad_rows_than_the_limit_end_the_preparation(tmp_path):
    (tmp_path / "t.csv").write_text(GOOD + "x\n" * 4)
    with pytest.raises(BadInput, match=r"max_bad_records = 3.*row 65"):
        prepare(config(tmp_path / "t.csv", on_bad_record="skip", max_bad_records=3), 7, tmp_path / "out")


def test_quoted_newlines_a_byte_order_mark_and_blank_lines_are_part_of_good_files(tmp_path):
    text = '\ufeffsize,colour,label\n1.5,"two\nlines",yes\n\n2.5,"a ""quoted"" word",no\n' + ROWS
    (tmp_path / "t.csv").write_text(text)
    manifest = prepare(config(tmp_path / "t.csv"), 7, tmp_path / "out")
    found = {row[0] for row in everything(tmp_path / "out", manifest)}
    assert {b"two\nlines", b'a "quoted" word'} <= found
    assert sum(split.num_examples for split in manifest.splits.values()) == 62


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("size,size,label\n1,2,a\n", 'two columns named "size"'),
        ("size,,label\n1,2,a\n", "column 2 has no name"),
        (GOOD + '1.5,"never closed,yes\n' + ROWS, "t.csv, row 62: a quote that opens here is never closed"),
        ("", "every file is empty"),
        ("size,colour,label\n", "t.csv: holds a header and no rows"),
        ("size,colour\n1,2\n", 'data.label_key = "label": there is no such column'),
        ("label\nyes\n", "there is no column besides the label"),
        ("a b,a-b,label\n1,2,yes\n", "would both be called a_b"),
        ("size;colour;label\n1;2;yes\n", """';' separates the names in "size;colour;label", and csv wants commas"""),
        (GOOD + f"1,word,{'very ' * 21}long\n", "whose name has 109 characters; at most 100 are allowed"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path, content, message):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(BadInput) as refused:
        prepare(config(tmp_path / "t.csv"), 7, tmp_path / "out")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{'size': 1}", "is not JSON"),
        ("[1, 2]", "is not an object"),
        ('{"size": NaN, "label": "yes"}', "NaN is not a JSON value"),
        ('{"size": {"cm": 3}, "label": "yes"}', "is not a number"),
        ('{"size": 1, "colour": "\\ud800", "label": "yes"}', "not valid Unicode"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, fault):
    good = "".join(json.dumps({"size": n, "colour": "red", "label": "no"}) + "\n" for n in range(30))
    (tmp_path / "t.jsonl").write_text(good + "\n" + line + "\n")
    with pytest.raises(BadInput) as refused:
        prepare(config(tmp_path / "t.jsonl", "jsonl"), 7, tmp_path / "out")
    assert "t.jsonl, row 32: " in str(refused.value)
    assert fault in str(refused.value)


def test_missing_values_are_nan_or_empty_and_counted(tmp_path):
    (tmp_path / "t.csv").write_text(GOOD + "NA,,yes\n" * 10)
    manifest = prepare(config(tmp_path / "t.csv"), 7, tmp_path / "out")
    rows = everything(tmp_path / "out", manifest)
    assert sum(row[0] == b"" and np.isnan(row[1]) for row in rows) == 10


def test_one_person_never_falls_into_two_splits(tmp_path):
    rows = "".join(f"{n},p{n % 40},{'ab'[n % 2]}\n" for n in range(400))
    (tmp_path / "t.csv").write_text("size,person,label\n" + rows)
    splits = SHARES.model_copy(update={"by": "person"})
    settings = DataConfig(
        source="csv", path=str(tmp_path / "t.csv"), splits=splits, label_key="label", input_keys=["size"]
    )
    manifest = prepare(settings, 7, tmp_path / "out")
    people = {
        split: {int(size) % 40 for size in load_split(tmp_path / "out", manifest, split)[0]["size"]}
        for split in manifest.splits
    }
    assert sum(map(len, people.values())) == 40
    assert len(set.union(*people.values())) == 40
    other = prepare(settings, 8, tmp_path / "other")  # another seed mixes anew and splits alike
    assert set(load_split(tmp_path / "other", other, "test")[0]["size"]) == set(
        load_split(tmp_path / "out", manifest, "test")[0]["size"]
    )


def test_identical_examples_on_both_sides_of_a_split_are_found(tmp_path, capfd):
    for split, first in (("train", 0), ("test", 55)):
        rows = "".join(f"{n},red,{'ab'[n % 2]}\n" for n in range(first, first + 60))
        (tmp_path / f"{split}.csv").write_text("size,colour,label\n" + rows)
    splits = Splits(train="train.csv", validation=None, test="test.csv")
    prepare(DataConfig(source="csv", path=str(tmp_path), splits=splits, label_key="label"), 7, tmp_path / "out")
    assert "5 examples of test are also in train" in capfd.readouterr().out


def test_the_label_decides_the_task_and_the_configuration_can_say_it(tmp_path):
    rows = "".join(f"{n / 3},{n},{n % 3},{n / 7}\n" for n in range(60))
    (tmp_path / "t.csv").write_text("size,many,few,ratio\n" + rows)
    found = []
    for label, task in (("many", None), ("few", None), ("ratio", None), ("few", "regression")):
        settings = DataConfig(source="csv", path=str(tmp_path / "t.csv"), splits=SHARES, label_key=label, task=task)
        found.append(prepare(settings, 7, tmp_path / f"{label}{task}").label.class_names)
    assert found == [None, ["0", "1", "2"], None, None]


def test_pictures_named_in_a_table_are_read_and_must_not_lead_out_of_its_folder(tmp_path):
    from PIL import Image

    folder = tmp_path / "data"
    folder.mkdir()
    for n in range(20):
        Image.new("L", (6, 4), n * 10).save(folder / f"{n}.png")
    Image.new("L", (6, 4)).save(tmp_path / "outside.png")
    table = folder / "t.csv"
    table.write_text("file,label\n" + "".join(f"{n}.png,{n / 2}\n" for n in range(20)))
    settings = config(table, kinds={"file": "image"}, image_channels=1)
    manifest = prepare(settings, 7, tmp_path / "out")
    assert manifest.task == "regression"
    assert manifest.features["file"].shape == (4, 6, 1)
    features, labels = load_split(tmp_path / "out", manifest, "train")
    assert (features["file"][:, 0, 0, 0] == labels * 20).all()
    table.write_text(table.read_text() + "../outside.png,3\n")
    with pytest.raises(BadInput, match=r"row 22: .*leads out of the table's folder"):
        prepare(settings, 7, tmp_path / "failed")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "csv"}, "data.path = null: source csv needs a folder, a file or a pattern"),
        ({"source": "csv", "path": "x"}, "data.label_key = null: source csv needs the name"),
        ({"source": "csv", "path": "x", "label_key": "y"}, 'data.splits.train = "train[:90%]": must be a share'),
        (
            {"source": "csv", "path": "x", "label_key": "y", "splits": {"train": "80%", "validation": None, "test": "30%"}},
            "shares must add up to 100 %",
        ),
        (
            {"source": "csv", "path": "x", "label_key": "y", "splits": {"train": "80%", "validation": None, "test": "t.csv"}},
            'data.splits.test = "t.csv": must be a share of whole percents such as 10%, because train is one',
        ),
        (
            {"source": "csv", "path": "x", "label_key": "y",
             "splits": {"train": "a", "validation": None, "test": "b", "by": "person"}},
            "goes with shares, and the splits are patterns of files",
        ),
        (
            {"source": "csv", "path": "x", "label_key": "y",
             "splits": {"train": "80%", "validation": None, "test": "20%", "by": "y"}},
            'data.splits.by = "y": is the label',
        ),
        ({"source": "csv", "path": "x", "label_key": "y", "weight_key": "y"}, 'data.weight_key = "y": is the label'),
        ({"source": "csv", "path": "x", "name": "mnist"}, 'data.name = "mnist": belongs to source tfds'),
        ({"source": "csv", "path": "x", "data_dir": "y"}, 'data.data_dir = "y": belongs to source tfds'),
        ({"source": "csv", "path": "s3://a/b"}, 'data.path = "s3://a/b": must be a folder, or gs:// with a bucket'),
        ({"source": "csv", "path": "gs:/a/b"}, 'data.path = "gs:/a/b": must be a folder, or gs:// with a bucket'),
        ({"source": "csv", "path": "gs://"}, 'data.path = "gs://": must be a folder, or gs:// with a bucket'),
        ({"splits": {"by": "person"}}, "goes with shares of files, and source is tfds"),
        ({"record_features": {"x": {"type": "bytes"}}}, "belongs to source tfrecord"),
        ({"source": "tfrecord", "path": "x", "label_key": "y"}, "needs the features of its records"),
        ({"image_channels": 1}, "a builder's images keep their own channels"),
    ],
)  # fmt: skip
def test_settings_that_do_not_belong_to_the_source_are_refused(settings, message):
    with pytest.raises(BadInput) as refused:
        parse(DataConfig, settings, path="data")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('[{"a": 1}, {"a": 2}]', "row 1: is not an object"),
        ('\n[\n {"a": 1},\n', "row 2: is not JSON"),
        ("[" * 100_000, "row 1: is nested too deeply"),
        ("{}\n{}\n", "row 1: names no columns"),
        ('{"\\ud800": 1, "label": "yes"}', r"column 1 is not valid Unicode: '\ud800'"),
    ],
)
def test_json_that_is_not_one_object_a_line_is_not_called_empty(tmp_path, content, fault):
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(BadInput) as refused:
        prepare(config(tmp_path / "t.jsonl", "jsonl"), 7, tmp_path / "out")
    assert fault in str(refused.value)


def test_columns_of_other_alphabets_have_names_of_their_own_wherever_they_stand(tmp_path):
    (tmp_path / "t.csv").write_text("年齢,цена,label\n" + "1,2,yes\n3,4,no\n" * 20)
    (tmp_path / "u.csv").write_text("цена,label,年齢\n" + "2,yes,1\n4,no,3\n" * 20)
    first, second = (prepare(config(tmp_path / name), 7, tmp_path / name[0]) for name in ("t.csv", "u.csv"))
    assert len(first.features) == 2
    assert first.features == second.features


def test_a_size_for_images_where_there_are_none_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text(GOOD + ROWS)
    with pytest.raises(BadInput, match=r"data.image_size = \[8, 8\]: no feature is an image"):
        prepare(config(tmp_path / "t.csv", image_size=(8, 8)), 7, tmp_path / "out")


def test_a_file_that_is_no_table_by_its_name_is_refused(tmp_path):
    (tmp_path / "t.csv.gz").write_text(GOOD)
    with pytest.raises(BadInput, match=r"there are no csv files \(their names end in .csv\)"):
        prepare(config(tmp_path / "t.csv.gz"), 7, tmp_path / "out")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.one_of(st.binary(max_size=300), st.text(alphabet='a1,"\n\r\t.{}:[]\ufeffé\0', max_size=120).map(str.encode)),
       form=st.sampled_from(["csv", "tsv", "jsonl", "parquet"]), skip=st.booleans())  # fmt: skip
def test_any_bytes_are_prepared_or_refused_and_nothing_is_written_elsewhere(tmp_path_factory, content, form, skip):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / f"t.{form}").write_bytes(content)
    before = set(folder.iterdir())
    settings = config(folder / f"t.{form}", form, on_bad_record="skip" if skip else "fail")
    try:
        manifest = prepare(settings, 7, folder / "out")
    except TriremeError:
        assert set(folder.iterdir()) == before
    else:
        verify(folder / "out", manifest)
        assert set(folder.iterdir()) == before | {folder / "out"}


@example('"a"a,"a\n"a\na\na"\na\n', 12, "csv", "")  # what a reader makes of it depends on where it begins
@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='a,"\n\r\u00e9', max_size=60), st.integers(1, 20), st.sampled_from(["csv", "tsv", "jsonl"]),
       st.sampled_from(["", "\ufeff"]))  # fmt: skip
def test_pieces_of_a_file_hold_the_rows_that_the_whole_holds(tmp_path_factory, content, num_bytes, form, mark):
    file = tmp_path_factory.mktemp("pieces") / f"t.{form}"
    if form == "jsonl":
        content = content.replace("a", '{"x": 1}')
    file.write_bytes(
        (mark + ("" if form == "jsonl" else "x\n") + content.replace(",", "\t" if form == "tsv" else ",")).encode()
    )

    def rows(some):
        try:
            found = [row for one in some for row in read_rows(file, form, ["x"], one)]
            return [row for row in found if row.number]  # 0: a file without any row, which no piece can tell
        except BadInput as refused:
            return str(refused)

    cut = pieces(file, form, num_bytes)
    assert [piece.start for piece in cut[1:]] == [piece.end for piece in cut[:-1]]
    assert all(piece.end - piece.start >= num_bytes for piece in cut[:-1])
    assert rows(cut) == rows([None])


def test_a_large_table_is_cut_where_rows_end_and_not_where_lines_do(tmp_path, monkeypatch):
    rows = "".join(f'{row},"two\nlines, ""{row}""",{"ab"[row % 2]}\n' for row in range(300))
    (tmp_path / "t.csv").write_text("size,words,label\n" + rows)
    whole = TableSource(config(tmp_path / "t.csv"), None)
    monkeypatch.setattr(tables, "_PIECE_BYTES", 1000)
    cut = TableSource(config(tmp_path / "t.csv"), None)
    assert len(whole.parts) == 1
    assert len(cut.parts) > 5

    def words(source):
        return [word for part in source.parts for chunk in source.read(part) for word in chunk.columns["words"]]

    assert words(cut) == words(whole) == [f'two\nlines, "{row}"' for row in range(300)]
