"""What a side-tuning server could read from what it gets, measured on a model and data of one's own."""

from collections.abc import Callable

import msgspec
import numpy as np

from coterie.config.recipe import Recipe
from coterie.coordinator.job import Job, prepare_job
from coterie.coordinator.side_spec import backbone_spec
from coterie.errors import RecipeError
from coterie.ids import RunId
from coterie.jobs.side_spec import SideSpec
from coterie.models import build_stage
from coterie.sidetuning.leakage import LabelLeak, TokenLeak, label_leak, token_leak
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.selection import Reads
from coterie.sidetuning.side_model import build_side_model
from coterie.sidetuning.taps import TappedStage
from coterie.sidetuning.upload_seen import Frame, Seen, watch_upload
from coterie.tasks.examples import EncodedExample
from coterie.tasks.task import GenerativeTask


class AuditWish(msgspec.Struct, frozen=True, kw_only=True):
    """How much to look at.

    Attributes:
        rows: Rows of the training data, drawn at random.
        candidates: Tokens that guesses choose from: those of these rows, and others at random; None for all there are.
    """

    rows: int = 200
    candidates: int | None = None


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        model: Its name.
        task: The task, which decides what is sent.
        side: The settings, ditto.
        rows: Rows that were looked at.
        vocabulary: Tokens of the model.
        tokens: What of the text can be read, per layer.
        labels: What of the labels can be read in additive mode; None where that mode is refused (language models).
    """

    model: str
    task: str
    side: SideSpec
    rows: int
    vocabulary: int
    tokens: TokenLeak
    labels: LabelLeak | None


def audit(recipe: Recipe, wish: AuditWish, progress: Callable[[str, int, int], None] | None = None) -> Audit:
    """Play the server: send it some rows as side-tuning would, and guess.

    Args:
        recipe: With `mode = "side"`: model, data, and what is sent.
        wish: How much to look at.
        progress: Told what is done, how much, and how much there is.

    Raises:
        UnsupportedModelError: Side-tuning does not take the model.
        RecipeError: The ladder starts above the last block.
        CoterieError: Model or data are not usable.
    """
    tell = progress or (lambda _what, _done, _total: None)
    job = prepare_job(recipe, RunId("audit"), lambda _text: None)
    side = recipe.side.spec
    last_unit = job.anatomy.unit_count - 1
    if side.first_layer >= last_unit:
        raise RecipeError(
            f"the ladder starts at layer {side.first_layer}, and the model has the layers 1 to {last_unit - 1}",
            hint="choose a lower first_layer",
        )
    tapped = TappedStage(build_stage(backbone_spec(job.spec), 0, last_unit, job.weights), side.first_layer)
    rows = _some_rows(job, wish.rows)
    selector = TokenSelector(job.spec, side)
    frame = _frame(job, selector.reads if side.selects_tokens else "labelled")
    seen = watch_upload(tapped, selector, rows, frame, upload=side.upload, progress=tell)
    vocabulary = len(tapped.stage.module.get_input_embeddings().weight)
    candidates = _candidates(seen, frame, vocabulary, wish.candidates, recipe.train.seed)
    return Audit(
        model=recipe.model.name,
        task=job.task.name,
        side=side,
        rows=len(rows),
        vocabulary=vocabulary,
        tokens=token_leak(tapped, seen, candidates, frame, tell),
        labels=_labels(job, side, seen),
    )


def _labels(job: Job, side: SideSpec, seen: Seen) -> LabelLeak | None:
    if isinstance(job.task, GenerativeTask):
        return None
    model = build_side_model(job.spec, side, job.weights)
    return label_leak(seen, model.read)


def _frame(job: Job, reads: Reads) -> Frame:
    """What the tokenizer puts around a text; before a causal model's first token the one that ends texts.

    Such models treat a row's very first token in a way of its own.
    """
    tokenizer = job.tokenizer
    before = tokenizer.leading_ids
    whole, plain = list(tokenizer.hf("a")["input_ids"]), tokenizer.encode_text("a")
    after = tuple(whole[len(before) + len(plain) :])
    before = before or (tokenizer.id_of_nothing,)
    return Frame(
        before=before,
        after=after,
        special=tokenizer.special_ids,
        pad=tokenizer.pad_token_id,
        has_types=job.splits["train"].rows[0].token_type_ids is not None,
        read_at={"first": 0, "last": len(before) + len(after), "labelled": len(before)}[reads],
    )


def _some_rows(job: Job, count: int) -> list[EncodedExample]:
    rows = job.splits["train"].rows
    order = _random_order(len(rows), job.recipe.train.seed)
    return [rows[index] for index in order[:count]]


def _candidates(seen: Seen, frame: Frame, vocabulary: int, count: int | None, seed: int) -> list[int]:
    """Ids that a guess chooses from, shuffled: all but special ones, or those of the rows and some others."""
    others = [int(index) for index in _random_order(vocabulary, seed + 1) if int(index) not in frame.special]
    if count is None:
        return others
    present = frozenset().union(*seen.texts)
    kept = [index for index in others if index not in present][: max(count - len(present), 0)]
    chosen = present | frozenset(kept)
    return [index for index in others if index in chosen]


def _random_order(count: int, seed: int) -> list[int]:
    bits = np.random.Philox(key=np.array([seed % 2**64, 0], dtype=np.uint64))
    order: list[int] = np.argsort(bits.random_raw(count), kind="stable").tolist()
    return order
