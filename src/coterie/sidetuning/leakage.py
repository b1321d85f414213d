"""What a server can read from what it gets: tokens from activations, labels from prediction differences.

Two simple attacks on tokens, both with nothing but the public backbone. *By embedding*: the token whose input embedding
has the largest cosine with an activation. *By activation*: the token which, alone between the tokenizer's special
tokens, makes the activation of the same layer that has the largest cosine, both sides less their mean: at the position
that is sent, if that is the first or the last of a row, else at the token's own. They are lower bounds: a server that
trains a model to invert activations, or uses the neighbours' tokens, reads more.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from coterie.sidetuning.additive import prediction_differences
from coterie.sidetuning.selection import TokenSelection
from coterie.sidetuning.taps import TappedStage
from coterie.sidetuning.upload_seen import Frame, Progress, Seen

_BATCH_CANDIDATES = 256
_CLOSE = 0.01
"""A score that is read off to a hundredth of the scores' standard deviation counts as read."""


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of activations, 0 to 1.

    Attributes:
        own: The guess is the token at that very position; None if only special tokens were sent.
        row: The guess is one of the telling tokens of that row, which at most a tenth of the rows have.
    """

    own: float | None
    row: float


class LayerLeak(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of the ladder; `by_embedding` is None where embeddings have another width than hidden states."""

    layer: int
    by_embedding: Hits | None
    by_activation: Hits


class TokenLeak(msgspec.Struct, frozen=True, kw_only=True):
    """What of the text can be read.

    Attributes:
        layers: From the ladder's first layer to the last block.
        guess: The same shares for whoever always makes the same guess: the commonest token, or telling token.
        sent: Activations of each layer, one a token.
        sent_text: Those of them whose own token is no special one.
        candidates: Tokens that a guess chose from.
    """

    layers: tuple[LayerLeak, ...]
    guess: Hits
    sent: int
    sent_text: int
    candidates: int


def token_leak(
    tapped: TappedStage, seen: Seen, candidates: Sequence[int], frame: Frame, progress: Progress
) -> TokenLeak:
    """Try both attacks on every layer.

    Args:
        tapped: The backbone; the attacker has it, too.
        seen: What was sent.
        candidates: Ids to choose from, in no order that means anything.
        frame: The tokenizer's special tokens.
        progress: Told how many candidates are done.
    """
    ids = torch.as_tensor(candidates)
    embeddings = tapped.stage.module.get_input_embeddings().weight.detach()
    by_activation = {layer: _Nearest(hidden - hidden.mean(0)) for layer, hidden in seen.taps.items()}
    by_embedding = {
        layer: _Nearest(hidden) for layer, hidden in seen.taps.items() if hidden.shape[1] == embeddings.shape[1]
    }
    means: dict[int, Tensor] = {}
    for start in range(0, len(ids), _BATCH_CANDIDATES):
        part = ids[start : start + _BATCH_CANDIDATES]
        for layer, alone in _activations_alone(tapped, part, frame).items():
            if layer not in means:
                means[layer] = alone.mean(0)  # of the first candidates: a sample of all
            by_activation[layer].offer(part, alone - means[layer])
        for nearest in by_embedding.values():
            nearest.offer(part, embeddings[part])
        progress("candidates", min(start + _BATCH_CANDIDATES, len(ids)), len(ids))
    return TokenLeak(
        layers=tuple(
            LayerLeak(
                layer=layer,
                by_embedding=_hits(by_embedding[layer].best, seen, frame) if layer in by_embedding else None,
                by_activation=_hits(by_activation[layer].best, seen, frame),
            )
            for layer in seen.taps
        ),
        guess=_blind_hits(seen, frame),
        sent=len(seen.tokens),
        sent_text=sum(token not in frame.special for token in seen.tokens.tolist()),
        candidates=len(ids),
    )


class LabelLeak(msgspec.Struct, frozen=True, kw_only=True):
    """What of the labels can be read from the differences that additive mode sends in their place.

    Attributes:
        labels: How many were sent.
        recovered: Share of them that is read off: of classes the largest entry of a difference, of scores the
            difference plus the prediction that the server makes itself from the last layer.
        largest_error: Of scores: the largest distance between one and what is read; None of classes.
    """

    labels: int
    recovered: float
    largest_error: float | None = None


def label_leak(seen: Seen, read: Callable[[Tensor], Tensor]) -> LabelLeak:
    """Read labels from prediction differences.

    Args:
        seen: What was sent.
        read: The output layer, which device and server have: from hidden states (M, D) to logits (M, C).
    """
    last = max(seen.taps)
    with torch.no_grad():
        differences = prediction_differences(read(seen.unrounded), seen.labels)
        if differences.ndim == 2:
            hits = differences.argmax(1) == seen.labels
            return LabelLeak(labels=len(hits), recovered=float(hits.float().mean()))
        scores = differences + read(seen.taps[last][seen.loss_index]).float().reshape(-1)
    errors = (scores - seen.labels).abs()
    close = errors <= _CLOSE * max(float(seen.labels.std()), torch.finfo(torch.float32).tiny)
    return LabelLeak(labels=len(errors), recovered=float(close.float().mean()), largest_error=float(errors.max()))


class _Nearest:
    """For each of N vectors the candidate with the largest cosine so far."""

    def __init__(self, vectors: Tensor) -> None:
        self._vectors = torch.nn.functional.normalize(vectors, dim=-1)
        self._largest = torch.full((len(vectors),), -torch.inf)
        self.best = torch.zeros(len(vectors), dtype=torch.int64)

    def offer(self, ids: Tensor, vectors: Tensor) -> None:
        """More candidates: ids (C,), vectors (C, D)."""
        cosines = self._vectors @ torch.nn.functional.normalize(vectors, dim=-1).T
        largest, index = cosines.max(1)
        better = largest > self._largest
        self._largest = torch.where(better, largest, self._largest)
        self.best = torch.where(better, ids[index], self.best)


def _activations_alone(tapped: TappedStage, ids: Tensor, frame: Frame) -> dict[int, Tensor]:
    """Per layer (C, D): what a text of each token alone makes of the position that is read."""
    count = len(ids)
    before, after = (torch.tensor(part, dtype=torch.int64).expand(count, -1) for part in (frame.before, frame.after))
    rows = torch.cat([before, ids.unsqueeze(1), after], dim=1)
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    if frame.has_types:
        inputs["token_type_ids"] = torch.zeros_like(rows)
    selection = TokenSelection(
        rows=torch.arange(count),
        positions=torch.full((count,), frame.read_at),
        counts=torch.ones(count, dtype=torch.int64),
    )
    return tapped.forward(inputs, None, selection)[1]


def _hits(guesses: Tensor, seen: Seen, frame: Frame) -> Hits:
    triples = list(zip(guesses.tolist(), seen.tokens.tolist(), seen.rows.tolist(), strict=True))
    own = [guess == token for guess, token, _ in triples if token not in frame.special]
    row = [guess in seen.telling[index] for guess, _, index in triples]
    return Hits(own=sum(own) / len(own) if own else None, row=sum(row) / len(row))


def _blind_hits(seen: Seen, frame: Frame) -> Hits:
    """The best that one guess for all activations reaches."""
    sent = Counter(token for token in seen.tokens.tolist() if token not in frame.special)
    telling = Counter(token for index in seen.rows.tolist() for token in seen.telling[index])
    return Hits(
        own=max(sent.values()) / sent.total() if sent else None,
        row=max(telling.values(), default=0) / max(len(seen.tokens), 1),
    )
