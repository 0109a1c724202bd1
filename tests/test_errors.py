"""What a library raises becomes one line that says why."""

import keras
import pytest
import tensorflow as tf

from trainer.errors import reason_of


class Reef(keras.layers.Layer):
    """A layer of somebody's own that cannot work."""

    def call(self, x):
        match self.name:
            case "raises":
                raise RuntimeError("a wave")
            case "abstract":
                raise NotImplementedError
            case "checks":
                tf.debugging.assert_less(x, 0.0, message="a wave")
            case "multiplies":
                return x @ tf.zeros((3, 3))
            case "gathers":
                return tf.gather(x, tf.cast(x, tf.int32) + 5)
        return x


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "a wave"),
        ("abstract", "NotImplementedError"),
        ("checks", "a wave"),
        ("multiplies", "3,3]"),
        ("gathers", "indices[0,0] = 6 is not in [0, 2)"),
    ],
)
def test_the_reason_is_found_under_whatever_the_libraries_put_around_it(name, reason, traced):
    layer = Reef(name=name)
    function = tf.function(lambda x: layer(x)) if traced else layer
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each case has a type of its own
        function(tf.ones((2, 4)))
    said = reason_of(caught.value)
    assert reason in said
    assert not said.startswith(("in user code", "File", "Exception encountered", "Arguments received", "{{"))
