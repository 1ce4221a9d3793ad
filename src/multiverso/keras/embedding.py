"""A Keras layer over a shared table, on the backends that let a step call Python: PyTorch and JAX."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from multiverso.params.embedded import Table, check_trainable, look_up, push_all

_BACKENDS = ("torch", "jax")


class Embedding(keras.layers.Layer):  # type: ignore[misc]  # Keras is seen as untyped
    """A lookup of rows by id, as `keras.layers.Embedding` is, over a table that all workers share.

    A call pulls the rows of its ids; the step's backward gives their summed gradients to the table's updater, at once.
    The rows are not weights: the compiled optimizer does not see them, a saved model does not hold them (`table.save`
    does), and memory in this process is that of a batch. Share the other weights with `MVCallback`.

    On PyTorch's backend it runs as all eager code does. On JAX's, calls from inside the jitted step reach the table by
    host callbacks, so the model must be on one device, and ids have 32 bits (64 with ``JAX_ENABLE_X64=1``). A weight
    that is always 0 makes Keras differentiate the layer. TensorFlow's backend compiles steps without Python in them.

    Args:
        table: a `KeyedTable` (any ids, rows begin when they are trained) or a `MatrixTableHandler` (ids in
            0 .. num_row - 1), of floats, whose updater descends: ``"sgd"`` and the like.
        learning_rate: a factor of the gradients before they are pushed; leave it at 1 for updaters with a
            learning rate of their own.

    Raises:
        TypeError, ValueError: no such table, or one whose updater adds gradients.
        RuntimeError: another backend.

    Examples:
        >>> words = Embedding(mv.KeyedTable(8, initial="uniform", updater="adagrad"))  # doctest: +SKIP
        >>> inputs = keras.Input((None,), dtype="int32")  # doctest: +SKIP
        >>> model = keras.Model(inputs, keras.layers.Dense(1)(words(inputs)))  # doctest: +SKIP
    """

    def __init__(self, table: Table, *, learning_rate: float = 1.0, **options: Any) -> None:
        backend = keras.config.backend()
        if backend not in _BACKENDS:
            raise RuntimeError(
                f"multiverso.keras.Embedding works on the backends {' and '.join(_BACKENDS)}; this is {backend}: set "
                "KERAS_BACKEND=torch before Keras is imported"
            )
        dim = check_trainable(table, learning_rate)
        super().__init__(**options)
        self.table, self.learning_rate, self.embedding_dim = table, learning_rate, dim
        # what is always 0: a model without a weight that could be trained would not be differentiated
        self._switch = self.add_weight(shape=(), initializer="zeros", name="switch")
        if backend == "jax":
            self._look_up = _jitted(table, learning_rate, dim)

    def call(self, ids: Any) -> Any:
        """Returns rows of shape ids' + (dim,), in the layer's compute dtype.

        Raises:
            TypeError: ids are not whole numbers: give `keras.Input` a dtype.
        """
        if "int" not in (dtype := keras.backend.standardize_dtype(ids.dtype)):
            raise TypeError(f'ids are whole numbers, and these are {dtype}: keras.Input(..., dtype="int32")')
        if keras.config.backend() == "jax":
            rows = self._look_up(ids, self._switch.value)
        else:
            rows, places = look_up(self.table, ids.long(), self.learning_rate)
            rows = rows[places] + 0 * self._switch.value.to(rows.dtype)
        return keras.ops.cast(rows, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of what `call` returns."""
        return (*input_shape, self.embedding_dim)

    def get_config(self) -> dict[str, Any]:
        """Not for this layer: a table is not part of a file.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a layer over a shared table cannot be made from a configuration: build the model in code, keep weights "
            "with model.save_weights(path) and the rows with table.save(path)"
        )


def _jitted(table: Table, learning_rate: float, dim: int) -> Any:
    """Returns ``look_up(ids, switch)`` for jitted steps; ``switch`` only makes JAX ask for a gradient."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback

    # NumPy in, NumPy out: allocating JAX memory in a callback can deadlock.
    def pull(ids: Any) -> Any:
        numbers = np.asarray(ids)
        different, places = np.unique(numbers, return_inverse=True)
        if not different.size:
            return np.zeros((*numbers.shape, dim), table.dtype)
        return np.take(table.get(different), places.reshape(numbers.shape), axis=0)

    def give(ids: Any, gradient: Any) -> None:
        push_all(table, np.asarray(ids), np.asarray(gradient), learning_rate)

    def rows_of(ids: Any) -> Any:
        shape = jax.ShapeDtypeStruct((*ids.shape, dim), table.dtype)
        return io_callback(pull, shape, ids, ordered=False)

    def forward(ids: Any, switch: Any) -> Any:
        return rows_of(ids), ids

    def backward(ids: Any, gradient: Any) -> Any:
        io_callback(give, None, ids, gradient, ordered=False)
        return None, jnp.zeros(())

    look_up = jax.custom_vjp(lambda ids, switch: rows_of(ids))
    look_up.defvjp(forward, backward)
    return look_up
