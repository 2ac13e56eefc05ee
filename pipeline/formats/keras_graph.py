"""Walk through the graph of a Keras model, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from ul2q.pipeline.errors import UsageError

#: (layer or operation, arguments, keyword arguments) -> its outputs, in place of the tensors
Visit = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

ALTERNATIVE = "build it as keras.Sequential([...]) or keras.Model(inputs, outputs)"


def functional(model: keras.Model) -> keras.Model:
    """Return ``model`` as a functional one with a graph.

    Raises:
        UsageError: it has none: it is subclassed, or was never built.
    """
    if isinstance(model, keras.Sequential):
        if not model.built:
            raise UsageError(f"{model.name} is not built: add keras.Input(shape) as its first layer")
        return keras.Model(model.inputs, model.outputs, name=model.name)
    if not isinstance(model, keras.Model) or not hasattr(model, "_run_through_graph"):
        kind = type(model).__name__
        raise UsageError(
            f"{kind} is a subclassed model, whose wiring is in Python code that cannot be read: {ALTERNATIVE}"
        )
    return model


def walk(model: keras.Model, inputs: list[Any], visit: Visit) -> list[Any]:
    """Run ``visit`` instead of each layer of a functional model, on values of any kind.

    Nested models are walked through as if their layers were part of the model.

    Args:
        model: what `functional` returned.
        inputs: one value for each input.
        visit: takes a layer and its arguments, with values for tensors, and returns those of its outputs.

    Returns:
        The values of the outputs.
    """

    def step(layer: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if isinstance(layer, keras.Model):
                return walk(functional(layer), keras.tree.flatten(args), visit)[0]
            return visit(layer, args, kwargs)

        return run

    # What keras.models.clone_model does; only here values are not Keras tensors, and no layer is called.
    outputs = model._run_through_graph(_structured(model, inputs), operation_fn=step)
    return list(keras.tree.flatten(outputs))


def _structured(model: keras.Model, inputs: list[Any]) -> Any:
    return keras.tree.pack_sequence_as(model._inputs_struct, inputs)


def check_layout(layer: Any) -> None:
    """Refuse channels_first.

    Raises:
        UsageError: the layer takes channels_first data.
    """
    if getattr(layer, "data_format", "channels_last") == "channels_first":
        raise UsageError(
            f"{layer.name} takes channels_first data: build the model with channels_last "
            "(keras.config.set_image_data_format('channels_last')) and copy the weights"
        )
