"""Statistics: right against numpy, the same however the data is cut, and flat."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.statistics import Collector, split_words

numbers = st.lists(st.floats(width=32, allow_infinity=False), max_size=200)


def collected(kind, *batches):
    whole = Collector(kind)
    for batch in batches:
        part = Collector(kind)
        part.add(batch)
        whole.merge(Collector.from_json(part.to_json()))
    return whole.result()


@given(numbers)
def test_moments_and_bounds_are_those_of_the_numbers(values):
    found = collected("number", values)
    known = np.array([value for value in values if not math.isnan(value)], np.float64)
    assert found.num_missing == len(values) - len(known)
    if not len(known):
        assert found.mean is None
        return
    assert (found.low, found.high, found.num_zeros) == (known.min(), known.max(), int((known == 0).sum()))
    assert found.mean == pytest.approx(known.mean(), rel=1e-9, abs=1e-9 * np.abs(known).max())
    assert found.std_dev == pytest.approx(known.std(), rel=1e-6, abs=1e-6 * np.abs(known).max())
    assert found.num_distinct == len(set(known.tolist()))
    assert sum(bin_.count for bin_ in found.histogram) == len(known)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300))
def test_each_quantile_is_near_a_number_that_stands_there(values):
    found = collected("number", values)
    ranked = np.sort(np.array(values, np.float64))
    for percent in range(1, 100):
        exact = ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]
        assert found.quantile(percent) == pytest.approx(exact, rel=0.004, abs=1e-37)


@settings(deadline=None)
@given(st.lists(st.text(max_size=8), max_size=60), st.data())
def test_it_does_not_matter_how_the_data_is_cut(values, data):
    cut = data.draw(st.integers(0, len(values)))
    for kind in ("category", "text"):
        one, other = collected(kind, values[:cut], values[cut:]), collected(kind, values)
        moments = {"mean", "std_dev"}  # added up in another order, so the same to within rounding
        assert one.model_dump(exclude=moments) == other.model_dump(exclude=moments)
        assert one.mean == pytest.approx(other.mean)
        assert one.std_dev == pytest.approx(other.std_dev)
    found = collected("category", values)
    assert {value.value: value.count for value in found.values} == Counter(value for value in values if value)


def test_many_different_values_are_counted_within_a_few_percent_and_memory_stays_flat():
    collector = Collector("category")
    for start in range(0, 500_000, 10_000):
        collector.add([f"value {number}" for number in range(start, start + 10_000)])
        assert len(collector._values) <= 210_000
        assert len(collector._hashes) <= 20_000
    assert collector.result().num_distinct == pytest.approx(500_000, rel=0.06)


def test_frequent_words_survive_when_rare_ones_are_dropped():
    collector = Collector("text")
    for start in range(0, 300_000, 1_000):
        collector.add([f"Common, rare{number}!" for number in range(start, start + 1_000)])
    assert collector.result().values[0].value == "common"
    assert collector.result().values[0].count == 300_000


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
def test_words_are_those_that_the_model_will_see(text):
    import keras

    text = text.replace("\0", " ")
    words = split_words(text)
    layer = keras.layers.TextVectorization(vocabulary=sorted({*words, "some", "words"}), output_sequence_length=50)
    names = layer.get_vocabulary()
    seen = [names[number] for number in layer([text]).numpy()[0] if number]
    assert seen == words


def test_pixels_and_sizes_of_images_are_counted():
    collector = Collector("image")
    collector.add(np.full((3, 2, 2, 1), 7, np.uint8))
    collector.count_sizes(["9×9", "2×2", "9×9"])
    found = collector.result()
    assert (found.mean, found.std_dev, found.low, found.high) == (7.0, 0.0, 7.0, 7.0)
    assert [(value.value, value.count) for value in found.values] == [("9×9", 2), ("2×2", 1)]
