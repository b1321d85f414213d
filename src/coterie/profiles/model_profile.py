"""What one unit of a model costs, counted on the meta device at the run's shapes."""

import msgspec

UnitKind = str
"""Units of equal kind have equal shapes and so equal cost: `embedding`, `output layer`, or `block-<digest>`."""


class AffineBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes as a function of the rows in a micro-batch: `fixed + per_row * rows` (exact for dense transformers)."""

    fixed: int = 0
    per_row: int = 0

    def at(self, rows: int) -> int:
        """Bytes for a micro-batch of `rows` rows."""
        return self.fixed + self.per_row * rows


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One unit: the embedding, one block, or the output layer; what a cut can fall between.

    Attributes:
        name: `embedding`, `block 0` ... `block n-1`, `output layer`.
        kind: See `UnitKind`.
        parameter_bytes: Own parameters in memory, trained and frozen; tied ones count in both ends.
        trainable_bytes: The part of them that is trained (float32).
        largest_trainable_bytes: The largest single trained tensor (optimizer transients scale with it).
        saved: Activations kept for backward per micro-batch, distinct storages, no parameters, at `memory_tokens`; none
            below everything that is trained.
        boundary: The unit's output, sent to the next stage if a cut follows, at `memory_tokens` (float32).
        transient: Largest working memory of one forward + backward above parameters, gradients and what is saved, where
            gradients are added to those of an earlier micro-batch; at `memory_tokens`.
        fresh_transient: The same where none exist yet (each update follows one micro-batch: `stash`).
        forward_flops_per_row: Multiply-adds x 2 of a forward at `typical_tokens`.
        backward_flops_per_row: The same for backward, given what is trained here and below.
        kept_bytes_per_row: What the unit keeps of one row while others run: in a generation keys and values, at their
            longest; in side-tuning activations that wait to be sent; else 0.
    """

    name: str
    kind: UnitKind
    parameter_bytes: int
    trainable_bytes: int
    largest_trainable_bytes: int
    saved: AffineBytes
    boundary: AffineBytes
    transient: AffineBytes
    fresh_transient: AffineBytes = AffineBytes()
    forward_flops_per_row: float
    backward_flops_per_row: float
    kept_bytes_per_row: int = 0


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model at a run's shapes.

    Attributes:
        key: Digest of everything these figures depend on (config, trainable parts, shapes, library versions).
        name: What to call it in tables.
        layers: All units in order: embedding, blocks, output layer.
        tied: The output layer uses the embedding's matrix; trained, both ends exchange its gradient each step.
        tied_bytes: Bytes of that matrix; 0 if not tied.
        memory_tokens: Tokens per row for memory figures: the longest padded micro-batch of the run.
        typical_tokens: Tokens per row for time figures: the mean padded length.
        shared: Kept once per stage and micro-batch, whatever the number of its blocks: attention masks, rotary tables;
            at `memory_tokens`. Not part of any layer's `saved`.
        unpacks: Frozen weights are held in fewer bits and unpacked, one after another, wherever they are used.
        notes: What a reader of the figures should know about how they were taken.
    """

    key: str
    name: str
    layers: tuple[LayerProfile, ...]
    tied: bool
    tied_bytes: int
    memory_tokens: int
    typical_tokens: int
    shared: AffineBytes = AffineBytes()
    unpacks: bool = False
    notes: tuple[str, ...] = ()

    @property
    def first_backward_unit(self) -> int:
        """The lowest unit with anything trained: stages below it run forward only, no gradient goes there.

        0 if nothing is trained, which only a forward-only run is.
        """
        return next((unit for unit, layer in enumerate(self.layers) if layer.trainable_bytes), 0)
