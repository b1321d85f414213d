"""The audit's attacks: they find what is there to be found, and nothing where nothing is."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, GPT2Config

from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_spec import SideSpec
from coterie.measure.stand_in_weights import StandInWeights
from coterie.models import build_stage, describe
from coterie.sidetuning.leakage import label_leak, token_leak
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.taps import TappedStage
from coterie.sidetuning.upload_seen import Frame, Seen, watch_upload
from coterie.tasks.examples import EncodedExample

SPECIAL = (0, 1, 2)  # pad, before, after
TEXTS = ((7, 8, 9), (10, 11), (12, 13, 14, 15), (16, 17, 7))
SHAPE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


class TokensAlone(StandInWeights):
    """Weights with which blocks pass on what they get: every activation is a token's and its position's embedding."""

    def get(self, names):
        found = super().get(names)
        for name, tensor in found.items():
            if "encoder.layer" in name and "LayerNorm" not in name:
                tensor.zero_()
            if "LayerNorm.weight" in name:
                tensor.fill_(1)
            if "LayerNorm.bias" in name or "position_embeddings" in name or "token_type_embeddings" in name:
                tensor.zero_()
        return found


def bert(auto_class, **settings):
    config = BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=3, **SHAPE, **settings)
    return ModelSpec(config_json=config.to_json_string(), auto_class=auto_class, method="none")


def rows_of(labels):
    return [
        EncodedExample(input_ids=np.array((1, *text, 2)), labels=np.asarray(label))
        for text, label in zip(TEXTS, labels, strict=True)
    ]


TAGGED = [(-100, *(0 for _ in text), -100) for text in TEXTS]
FRAME = Frame(before=(1,), after=(2,), special=frozenset(SPECIAL), pad=0, has_types=False, read_at=1)


def watch(spec, weights, rows, side, frame=FRAME):
    tapped = TappedStage(build_stage(spec, 0, describe(spec).unit_count - 1, weights), side.first_layer)
    told = []
    seen = watch_upload(
        tapped, TokenSelector(spec, side), rows, frame, upload=side.upload, progress=lambda *word: told.append(word)
    )
    assert told[-1] == ("rows", len(rows), len(rows))
    return tapped, seen


def nobody(*_):
    pass


@pytest.mark.parametrize("upload", ["float32", "float16", "int8", "int4"])
def test_activations_that_are_embeddings_give_every_token_away_in_every_layer(upload):
    spec = bert("AutoModelForTokenClassification")
    tapped, seen = watch(spec, TokensAlone(spec), rows_of(TAGGED), SideSpec(upload=upload))
    leak = token_leak(tapped, seen, list(range(39, 2, -1)), FRAME, nobody)
    assert [layer.layer for layer in leak.layers] == [1, 2, 3]
    for layer in leak.layers:
        assert layer.by_embedding is not None
        assert layer.by_embedding.own == layer.by_activation.own == 1
        # Token 7 stands in two of four rows, so that it tells nothing about either.
        assert layer.by_embedding.row == layer.by_activation.row == 10 / 12
    assert (leak.sent, leak.sent_text, leak.candidates) == (12, 12, 37)
    assert leak.guess.own == 2 / 12
    assert leak.guess.row == 4 / 12  # one of the longest row's tokens, at its four positions


def test_activations_without_a_token_in_them_give_nothing_away():
    spec = bert("AutoModelForTokenClassification")
    tapped, seen = watch(spec, TokensAlone(spec), rows_of(TAGGED), SideSpec(upload="float32"))
    draw = torch.Generator().manual_seed(5)
    noise = {layer: torch.randn(hidden.shape, generator=draw) for layer, hidden in seen.taps.items()}
    blind = Seen(**{**{name: getattr(seen, name) for name in Seen.__struct_fields__}, "taps": noise})
    leak = token_leak(tapped, blind, list(range(3, 40)), FRAME, nobody)
    assert all(layer.by_embedding.own <= 0.25 and layer.by_activation.own <= 0.25 for layer in leak.layers)


def test_only_what_is_sent_is_looked_at():
    spec = bert("AutoModelForTokenClassification")
    labels = [(-100, 0, *(-100 for _ in text[1:]), -100) for text in TEXTS]
    tapped, seen = watch(spec, TokensAlone(spec), rows_of(labels), SideSpec(first_layer=3))
    assert seen.tokens.tolist() == [7, 10, 12, 16]
    leak = token_leak(tapped, seen, list(range(3, 40)), FRAME, nobody)
    assert [layer.layer for layer in leak.layers] == [3]
    assert leak.sent == 4
    _, everything = watch(spec, TokensAlone(spec), rows_of(labels), SideSpec(selects_tokens=False))
    assert len(everything.tokens) == 12 + 8
    assert everything.labels.tolist() == [0, 0, 0, 0]


def test_a_special_token_that_is_sent_for_its_row_counts_for_the_row_alone():
    spec = bert("AutoModelForSequenceClassification")
    frame = Frame(before=(1,), after=(2,), special=frozenset(SPECIAL), pad=0, has_types=False, read_at=0)
    tapped, seen = watch(spec, StandInWeights(spec), rows_of((0, 1, 2, 0)), SideSpec(), frame)
    assert seen.tokens.tolist() == [1, 1, 1, 1]
    leak = token_leak(tapped, seen, list(range(3, 40)), frame, nobody)
    assert all(layer.by_activation.own is None for layer in leak.layers)
    assert (leak.sent, leak.sent_text) == (4, 0)


def test_a_decoders_last_token_is_read_at_the_end_of_the_row():
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, num_labels=3, pad_token_id=0)
    spec = ModelSpec(
        config_json=config.to_json_string(), auto_class="AutoModelForSequenceClassification", method="none"
    )
    rows = [EncodedExample(input_ids=np.array((1, *text)), labels=np.asarray(0)) for text in TEXTS]
    frame = Frame(before=(1,), after=(), special=frozenset(SPECIAL), pad=0, has_types=False, read_at=1)
    tapped, seen = watch(spec, StandInWeights(spec), rows, SideSpec(), frame)
    assert seen.tokens.tolist() == [9, 11, 15, 7]
    # A row of one token is what the attacker tries: there the activation is the very one.
    alone = EncodedExample(input_ids=np.array((1, 22)), labels=np.asarray(0))
    others = [EncodedExample(input_ids=np.array((1, token)), labels=np.asarray(0)) for token in (23, 24, 25)]
    tapped, seen = watch(spec, StandInWeights(spec), [alone, *others], SideSpec(upload="float32"), frame)
    leak = token_leak(tapped, seen, [22, 23, 24, 25, 30], frame, nobody)
    assert all(layer.by_activation.own == 1 for layer in leak.layers)


def test_every_label_is_read_from_prediction_differences():
    spec = bert("AutoModelForTokenClassification")
    labels = [(-100, *(token % 3 for token in text), -100) for text in TEXTS]
    _, seen = watch(spec, StandInWeights(spec), rows_of(labels), SideSpec())
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    leak = label_leak(seen, lambda hidden: hidden @ weight.T)
    assert (leak.labels, leak.recovered, leak.largest_error) == (12, 1.0, None)


def test_scores_are_read_up_to_the_uploads_rounding():
    spec = bert("AutoModelForSequenceClassification", problem_type="regression")
    frame = Frame(before=(1,), after=(2,), special=frozenset(SPECIAL), pad=0, has_types=False, read_at=0)
    weight = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))
    errors = {}
    for upload in ("float32", "int4"):
        rows = rows_of(np.array([0.5, 2.0, 3.5, 1.0], dtype=np.float32))
        _, seen = watch(spec, StandInWeights(spec), rows, SideSpec(upload=upload), frame)
        leak = label_leak(seen, lambda hidden: hidden @ weight.T)
        errors[upload] = leak.largest_error
        if upload == "float32":
            assert leak.recovered == 1
    assert errors["float32"] < 1e-5 < errors["int4"]
