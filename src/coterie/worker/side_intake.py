"""What reaches a server becomes whole micro-batches: into the cache, or at once to the step that they belong to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.cluster.messages import unpack
from coterie.cluster.side_messages import (
    BLOCK_ROWS,
    COUNTS_TENSOR,
    LABELS,
    LABELS_TENSOR,
    LOSS_INDEX_TENSOR,
    SAMPLES_TENSOR,
    TAPS_TENSOR,
    TRAIN,
    AssignServer,
    TapsBody,
)
from coterie.errors import ProtocolError
from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.activations import ActivationBatch, join_layers, join_rows
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame

_Tensors = dict[str, Tensor]


class Intake:
    """Puts the parts of micro-batches together. All calls come from the server's compute thread.

    Rows are numbered within their split here; the cache has numbers of its own, which `ActivationCache.collection`
    gives to every block of rows. A row that is in the cache stays as it came first: sent again, in another company, it
    might differ in its last bits. A micro-batch that lacks parts is kept in memory alone: after a kill its parts are
    sent again.
    """

    def __init__(self, assign: AssignServer, cache: ActivationCache) -> None:
        self._assign = assign
        self._cache = cache
        self._ids = {split: _ids(cache, assign.digests[split], rows) for split, rows in assign.rows.items()}
        self._parts: dict[int, list[tuple[Frame, TapsBody]]] = {}
        self._passing: dict[int, list[ActivationBatch]] = {}

    @property
    def cache_bytes(self) -> int:
        """What the cache takes."""
        return self._cache.used_bytes

    def held(self, split: str) -> Tensor:
        """The rows of a split that are in the cache, ascending."""
        rows = [row for row, sample in enumerate(self._ids[split]) if sample in self._cache]
        return torch.tensor(rows, dtype=torch.int64)

    @property
    def lacking_tokens(self) -> int:
        """How many tokens are still to come into the cache, at most."""
        held = sum(self._cache.tokens_of(ids) for split, ids in self._ids.items() if not self._passes(split))
        return max(self._assign.tokens - held, 0)

    def is_whole(self, split: str) -> bool:
        """Whether every row of a split is in the cache."""
        return all(sample in self._cache for sample in self._ids[split])

    def take(self, frame: Frame) -> bool:
        """Take a part of a micro-batch; whether it was the last one, and the micro-batch is kept now.

        Raises:
            ProtocolError: The parts do not belong together.
            ActivationCacheError: The cache is full.
        """
        body = unpack(frame.header.body)
        if not isinstance(body, TapsBody) or body.split not in self._assign.rows:
            raise ProtocolError(f"{frame.header.source or 'a peer'} sent activations without saying of what")
        parts = self._parts.setdefault(frame.header.step, [])
        parts.append((frame, body))
        described = [part for sent, part in parts if sent.header.kind == LABELS]
        if not described or len(parts) < described[0].parts + 1:
            return False
        del self._parts[frame.header.step]
        batch = self._joined(parts)
        if self._passes(body.split):
            self._passing.setdefault(described[0].train_step, []).append(batch)
        else:
            new = [index for index, sample in enumerate(batch.samples.tolist()) if sample not in self._cache]
            self._cache.put(batch if len(new) == batch.rows else batch.pick(new), (frame.header.step,))
        return True

    def has_rows(self, step: int, rows: Sequence[int]) -> bool:
        """Whether an optimizer step's rows of the training split are there."""
        if self._passes(TRAIN):
            return sum(batch.rows for batch in self._passing.get(step, [])) >= len(rows)
        ids = self._ids[TRAIN]
        return all(ids[row] in self._cache for row in rows)

    def read(self, split: str, rows: Sequence[int]) -> ActivationBatch:
        """Some rows of a split from the cache, in this order."""
        ids = self._ids[split]
        return self._cache.read([ids[row] for row in rows])

    def of_step(self, step: int, rows: Sequence[int]) -> ActivationBatch:
        """An optimizer step's rows of the training split, in this order."""
        if not self._passes(TRAIN):
            return self.read(TRAIN, rows)
        batch = join_rows(self._passing.pop(step))
        place = {sample: index for index, sample in enumerate(batch.samples.tolist())}
        return batch.pick([place[row] for row in rows])

    def _passes(self, split: str) -> bool:
        """Whether activations are used once and not kept."""
        return split == TRAIN and not self._assign.side.two_phases

    def _joined(self, parts: list[tuple[Frame, TapsBody]]) -> ActivationBatch:
        labelled = [frame for frame, _ in parts if frame.header.kind == LABELS]
        if len(labelled) != 1:
            raise ProtocolError(f"micro-batch {parts[0][0].header.step} came with {len(labelled)} lists of its rows")
        (described,) = labelled
        rows = _tensors(described)
        split = parts[0][1].split
        try:
            samples, counts = rows[SAMPLES_TENSOR], rows[COUNTS_TENSOR]
            if not self._passes(split):
                samples = torch.tensor([self._ids[split][row] for row in samples.tolist()])
        except (KeyError, IndexError) as error:
            raise ProtocolError(f"the rows of a micro-batch are not known: {error}") from None
        batches = []
        for frame, body in parts:
            tensors = rows if frame is described else _tensors(frame)
            none = torch.empty(int(counts.sum()), 0, self._assign.width)
            labels = tensors.get(LABELS_TENSOR)
            batches.append(
                ActivationBatch(
                    samples=samples,
                    counts=counts,
                    layers=body.layers,
                    taps=tensors.get(TAPS_TENSOR, none),
                    labels=labels,
                    loss_index=None if labels is None else rows.get(LOSS_INDEX_TENSOR),
                )
            )
        return join_layers(batches)


def _ids(cache: ActivationCache, digests: Sequence[str], rows: int) -> list[int]:
    """The cache's number of each row of a split."""
    ids: list[int] = []
    for digest in digests:
        count = min(BLOCK_ROWS, rows - len(ids))
        first = cache.collection(digest, count)
        ids.extend(range(first, first + count))
    if len(ids) != rows:
        raise ProtocolError(f"{len(digests)} digests came for {rows} rows")
    return ids


def _tensors(frame: Frame) -> _Tensors:
    return {spec.name: decode(spec, data) for spec, data in zip(frame.header.tensors, frame.buffers, strict=True)}
