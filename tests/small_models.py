"""Models for tests of the training, named in configurations as `small_models:<function>`."""

import keras


def plain(spec, units=8, l2=0.0, dropout=0.0, batch_norm=None):
    """One hidden layer, with whatever a test wants in it."""
    inputs = spec.inputs()
    images = inputs["image"]
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 127.5, offset=-1.0)(images))
    regularizer = keras.regularizers.L2(l2) if l2 else None
    x = keras.layers.Dense(units, activation="tanh", kernel_regularizer=regularizer, name="hidden")(x)
    if batch_norm is not None:
        x = keras.layers.BatchNormalization(synchronized=batch_norm == "synchronized", name="norm")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="drop")(x)
    return keras.Model(inputs, keras.layers.Dense(spec.num_outputs, dtype="float32", name="head")(x))


def overflowing(spec, pixel, factor):
    """The logits of an example whose first pixel is `pixel` are multiplied: its gradient overflows float16."""

    @keras.saving.register_keras_serializable("small_models")
    class Plant(keras.layers.Layer):
        def call(self, inputs):
            images, x = inputs
            hit = keras.ops.cast(keras.ops.equal(images[:, 0, 0, 0], pixel), x.dtype)[:, None]
            return x * (1 + hit * (factor - 1))

    inputs = spec.inputs()
    images = inputs["image"]
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 127.5, offset=-1.0)(images))
    x = Plant()([images, keras.layers.Dense(spec.num_outputs)(x)])
    return keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(x))


def wrong_answer(spec):
    """Fails when it is called, as a model whose author never ran it does."""

    class Failing(keras.layers.Layer):
        def call(self, x):
            if not isinstance(x, keras.KerasTensor):
                raise ValueError("three heads expected, two found")
            return x

    inputs = spec.inputs()
    images = inputs["image"]
    x = Failing()(keras.layers.Flatten()(keras.layers.Rescaling(1.0)(images)))
    return keras.Model(inputs, keras.layers.Dense(spec.num_outputs)(x))


def untrainable(spec):
    """Has weights, and none has a part in the answer."""
    inputs = spec.inputs()
    images = inputs["image"]
    x = keras.layers.Flatten()(keras.layers.Rescaling(1.0)(images))
    x = keras.layers.Lambda(lambda value: keras.ops.stop_gradient(value))(keras.layers.Dense(spec.num_outputs)(x))
    return keras.Model(inputs, x)
