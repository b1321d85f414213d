"""What a side-tuning server gets of some rows: the upload, played through on one machine to be looked at."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from coterie.jobs.side_spec import UploadDtype
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.taps import TappedStage
from coterie.sidetuning.upload_codecs import UPLOAD_CODECS
from coterie.tasks.collate import collate
from coterie.tasks.examples import EncodedExample
from coterie.tensors.codecs import decode, encode

_BATCH_ROWS = 16
_FEW = 10
"""A token tells something about a row if no more than one row in so many has it."""

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, and how much there is."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around a text: special tokens before and after it, which ids are special, and the one that pads.

    `has_types` says whether rows have segment ids, `read_at` which position of a row with one token of text is compared
    with what was sent: the one that would be sent.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    special: frozenset[int]
    pad: int
    has_types: bool
    read_at: int


class Seen(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the server got of some rows.

    Attributes:
        taps: Per layer (N, D), after the upload's rounding.
        tokens: The token at each position, (N,).
        rows: The row of each, (N,).
        texts: Per row the ids of its text.
        telling: Those of them that few rows have.
        loss_index: Which of the N enter the loss, (M,).
        labels: Their labels, (M,): what the server must not, or may, know.
        unrounded: The last layer of these as the device has it, (M, D).
    """

    taps: dict[int, Tensor]
    tokens: Tensor
    rows: Tensor
    texts: tuple[frozenset[int], ...]
    telling: tuple[frozenset[int], ...]
    loss_index: Tensor
    labels: Tensor
    unrounded: Tensor


def watch_upload(
    tapped: TappedStage,
    selector: TokenSelector,
    rows: Sequence[EncodedExample],
    frame: Frame,
    *,
    upload: UploadDtype,
    progress: Progress,
) -> Seen:
    """Run rows through the backbone and keep what a device would send of them."""
    taps: dict[int, list[Tensor]] = {layer: [] for layer in tapped.layers}
    tokens, owners, labels_sent, indices, unrounded = [], [], [], [], []
    sent = 0
    for start in range(0, len(rows), _BATCH_ROWS):
        part = rows[start : start + _BATCH_ROWS]
        arrays = {name: torch.from_numpy(array) for name, array in collate(part, pad_token_id=frame.pad).items()}
        labels = arrays.pop("labels")
        selection = selector.select(arrays, labels)
        _, found = tapped.forward(arrays, None, selection)
        for layer, hidden in found.items():
            taps[layer].append(_as_received(hidden, upload))
        tokens.append(arrays["input_ids"][selection.rows, selection.positions])
        owners.append(selection.rows + start)
        index = torch.arange(len(selection.rows)) if selection.loss_index is None else selection.loss_index
        indices.append(index + sent)
        labels_sent.append(selection.loss_labels(labels))
        unrounded.append(found[tapped.layers[-1]][index])
        sent += len(selection.rows)
        progress("rows", min(start + _BATCH_ROWS, len(rows)), len(rows))
    texts = tuple(frozenset(row.input_ids.tolist()) - frame.special for row in rows)
    return Seen(
        taps={layer: torch.cat(parts) for layer, parts in taps.items()},
        tokens=torch.cat(tokens),
        rows=torch.cat(owners),
        texts=texts,
        telling=_telling(texts),
        loss_index=torch.cat(indices),
        labels=torch.cat(labels_sent),
        unrounded=torch.cat(unrounded),
    )


def _telling(texts: Sequence[frozenset[int]]) -> tuple[frozenset[int], ...]:
    """What is left of each text without the tokens that many texts have, such as full stops and articles."""
    counts = Counter(token for text in texts for token in text)
    most = max(len(texts) // _FEW, 1)
    return tuple(frozenset(token for token in text if counts[token] <= most) for text in texts)


def _as_received(hidden: Tensor, upload: UploadDtype) -> Tensor:
    """Activations after the upload's rounding."""
    return decode(*encode(hidden, "taps", UPLOAD_CODECS[upload]))
