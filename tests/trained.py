"""Models small enough to train in a test, and exported as every training exports them. Fixtures, found through conftest."""

import numpy as np
import pytest

TABLE_ROWS = 400


def write_table(file, *, regression=False, rows=TABLE_ROWS):
    """A table whose label follows from size and colour; every tenth size is missing."""
    random = np.random.default_rng(0)
    lines = ["size,colour,label"]
    for row in range(rows):
        size, colour = random.normal(), ("red", "green", "blue")[random.integers(3)]
        number = 3 * size + (2 if colour == "red" else 0) + random.normal() / 4
        label = f"{number:.4f}" if regression else ("big" if number > 0.5 else "small")
        lines.append(f"{'' if row % 10 == 9 else f'{size:.4f}'},{colour},{label}")
    file.write_text("\n".join(lines) + "\n")
    return file


def table_config(file, **more):
    from trainer.config import DataConfig, Splits

    shares = Splits(train="50%", validation="10%", test="40%")
    return DataConfig(source="csv", path=str(file), splits=shares, label_key="label", **more)


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory, digits_examples):
    """A perceptron that knows the digits; its folder."""
    from trainer.config import TrainConfig
    from trainer.loop import fit

    folder = tmp_path_factory.mktemp("digits-model")
    config = TrainConfig(model="mlp", epochs=8, model_args={"hidden_units": [64]}, learning_rate=3e-3)
    fit(config, 3, digits_examples, folder / "model", folder / "checkpoints")
    return folder / "model"


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    """Examples and model of a table of a number and a category, with two classes to tell."""
    return _trained_on_table(tmp_path_factory.mktemp("table"), regression=False)


@pytest.fixture(scope="session")
def number_table(tmp_path_factory):
    """The same with a number to tell."""
    return _trained_on_table(tmp_path_factory.mktemp("number-table"), regression=True)


def _trained_on_table(folder, regression):
    from trainer.config import TrainConfig
    from trainer.data.prepare import prepare
    from trainer.loop import fit

    data = table_config(write_table(folder / "table.csv", regression=regression))
    prepare(data, 7, folder / "examples")
    config = TrainConfig(model="tabular", epochs=12, global_batch_size=32, learning_rate=1e-2, keep_best="loss")
    fit(config, 3, folder / "examples", folder / "model", folder / "checkpoints")
    return folder / "examples", folder / "model"
