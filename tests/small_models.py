"""Models for tests of the training, named in configurations as `small_models:<function>`."""

import keras
import tensorflow as tf


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


def planted(spec, pixel, forward=1.0, backward=1.0):
    """One example, known by its first pixel, has its logits multiplied by `forward` and their gradient by `backward`."""

    @keras.saving.register_keras_serializable("small_models")
    class Plant(keras.layers.Layer):
        def call(self, inputs):
            images, x = inputs
            hit = (images[:, 0, 0, 0] == pixel)[:, None]
            factors = [tf.cast(tf.where(hit, factor, 1.0), x.dtype) for factor in (forward, backward)]

            @tf.custom_gradient
            def plant(x):
                return x * factors[0], lambda gradient: gradient * factors[1]

            return plant(x)

    inputs = spec.inputs()
    images = inputs["image"]
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 127.5, offset=-1.0)(images))
    x = Plant()([images, keras.layers.Dense(spec.num_outputs)(x)])
    return keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(x))


def wrong_answer(spec):
    """Fails when it is called, as a model whose author never ran it does."""

    class Failing(keras.layers.Layer):
        def call(self, x):
            if tf.executing_eagerly():  # not while the model is built
                raise ValueError("three heads expected, two found")
            return x

    inputs = spec.inputs()
    images = inputs["image"]
    x = Failing()(keras.layers.Flatten()(keras.layers.Rescaling(1.0)(images)))
    return keras.Model(inputs, keras.layers.Dense(spec.num_outputs)(x))


def breaks(spec):
    """Fails over its own mistake while it is built."""
    return keras.Model(spec.inputs(), {}["no_such"])


def two_answers(spec):
    """Has two heads where one is owed."""
    inputs = spec.inputs()
    x = keras.layers.Flatten()(keras.layers.Rescaling(1.0)(inputs["image"]))
    return keras.Model(inputs, [keras.layers.Dense(spec.num_outputs)(x), keras.layers.Dense(1)(x)])


def untrainable(spec):
    """Has weights, and none has a part in the answer."""
    inputs = spec.inputs()
    images = inputs["image"]
    x = keras.layers.Flatten()(keras.layers.Rescaling(1.0)(images))
    x = keras.layers.Lambda(lambda value: keras.ops.stop_gradient(value))(keras.layers.Dense(spec.num_outputs)(x))
    return keras.Model(inputs, x)


def own_step(spec, learning_rate=0.1):
    """Takes its own steps: plain gradient descent, and nothing but a loss. Compiles itself if there is a learning rate."""

    @keras.saving.register_keras_serializable("small_models")
    class OwnStep(keras.Model):
        def train_step(self, data):
            images, labels = data
            with tf.GradientTape() as tape:
                logits = self(images, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_mean(losses)
            variables = [variable.value for variable in self.trainable_variables]
            self.optimizer.apply(tape.gradient(loss, variables), self.trainable_variables)
            return {"loss": loss}

    plain_model = plain(spec)
    model = OwnStep(plain_model.inputs, plain_model.outputs[0])
    if learning_rate is not None:
        model.compile(optimizer=keras.optimizers.SGD(learning_rate))
    return model
