"""Feed-forward neurons as kernel launches on an engine: forward, and the backward written out."""

from collections.abc import Mapping

import msgspec

from coterie.backends.engine import Buffer, Engine
from coterie.backends.launches_products import (
    add_array,
    input_gradient,
    part_of_output,
    product_of_rows,
    project,
    weight_gradient,
)
from coterie.backends.shares import Array, Gradients, Need, NeuronInputs, NeuronShape, Outputs


class SavedNeurons(msgspec.Struct, kw_only=True, eq=False):
    """What a forward keeps, on the device.

    Attributes:
        rows: B.
        tokens: T.
        x: [B,T,D].
        up: First projection [B,T,n].
        gate: The gate's, if there is one.
        inner: What goes into the second product.
        added: Names of what was added to projections.
    """

    rows: int
    tokens: int
    x: Buffer
    up: Buffer
    gate: Buffer | None
    inner: Buffer
    added: tuple[str, ...]

    def buffers(self) -> list[Buffer]:
        """All that is held."""
        held = [self.x, self.up, self.inner]
        return held if self.gate is None else [*held, self.gate]


def forward_neurons(
    engine: Engine, shape: NeuronShape, weights: Mapping[str, Buffer], inputs: NeuronInputs, *, inner: bool
) -> tuple[Outputs, SavedNeurons]:
    """Compute the neurons' part of the output."""
    rows, tokens, _ = inputs.x.shape
    n, width = rows * tokens, shape.neurons
    x = engine.upload(inputs.x)
    up = project(
        engine, (x, shape.hidden), (weights["w1"], width), n, bias=weights.get("b1"), added=inputs.added.get("up")
    )
    gate = None
    if shape.gated:
        gate = project(
            engine, (x, shape.hidden), (weights["wg"], width), n, bias=weights.get("bg"), added=inputs.added.get("gate")
        )
    between = engine.take(n * width)
    saved = SavedNeurons(rows=rows, tokens=tokens, x=x, up=up, gate=gate, inner=between, added=tuple(inputs.added))
    engine.activate(shape.activation, up, gate, between, n * width)
    y = part_of_output(engine, (between, width), weights["w2"], (rows, tokens, shape.output))
    shown = engine.read(between, (rows, tokens, width)) if inner else None
    return Outputs(y=y, inner=shown), saved


def backward_neurons(
    engine: Engine,
    shape: NeuronShape,
    weights: Mapping[str, Buffer],
    saved: SavedNeurons,
    gradients: tuple[Array, Array | None],
    *,
    need: Need,
) -> Gradients:
    """Gradients from that of the output (and of `inner`, if any)."""
    rows, tokens, width = saved.rows, saved.tokens, shape.neurons
    n = rows * tokens
    d_y = engine.upload(gradients[0])
    names = {"up": "1", "gate": "g"} if shape.gated else {"up": "1"}
    of_projections = {
        name: engine.output((n, width)) if need.added and name in saved.added else engine.take(n * width)
        for name in names
    }
    product_of_rows(engine, (d_y, shape.output), (weights["w2"], width), of_projections["up"], n)
    if gradients[1] is not None:
        add_array(engine, of_projections["up"], gradients[1])
    results: dict[str, tuple[Buffer, tuple[int, ...]]] = {}
    if need.weights:
        results["w2"] = weight_gradient(engine, (d_y, shape.output), (saved.inner, width), n)
    engine.give(d_y)
    engine.activate_gradient(
        shape.activation, (saved.up, saved.gate), (of_projections["up"], of_projections.get("gate")), n * width
    )
    if need.weights:
        for name, letter in names.items():
            results[f"w{letter}"] = weight_gradient(engine, (of_projections[name], width), (saved.x, shape.hidden), n)
            if shape.biased:
                results[f"b{letter}"] = (engine.output((width,)), (width,))
                engine.column_sums(of_projections[name], results[f"b{letter}"][0], n, width)
    d_x = None
    if need.x:
        parts = [((of_projections[name], width), weights[f"w{letter}"]) for name, letter in names.items()]
        d_x = input_gradient(engine, parts, shape.hidden, n)
    added: dict[str, Array] = {}
    for name, buffer in of_projections.items():
        if need.added and name in saved.added:
            added[name] = engine.download(buffer, (rows, tokens, width))
        else:
            engine.give(buffer)
    return Gradients(
        x=None if d_x is None else engine.download(d_x, (rows, tokens, shape.hidden)),
        weights={name: engine.download(buffer, sizes) for name, (buffer, sizes) in results.items()},
        added=added,
    )
