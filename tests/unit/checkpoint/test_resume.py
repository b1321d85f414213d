"""What must be equal for a resume, what may change, and that all differences are named at once."""

import json

import msgspec
import pytest

from coterie.checkpoint.resume import check_resume, differences
from coterie.errors import CheckpointError
from coterie.ids import RunId
from coterie.jobs.model_spec import LoraSpec


def with_config(terms, **values):
    config = {**json.loads(terms.model.config_json), **values}
    return msgspec.structs.replace(terms, model=msgspec.structs.replace(terms.model, config_json=json.dumps(config)))


def test_equal_terms_resume_without_a_note(tiny):
    manifest = tiny.manifest(5)
    assert check_resume(manifest, tiny.terms, manifest.libraries) == ()


def test_every_difference_is_named_with_both_values(tiny):
    optimizer = msgspec.structs.replace(tiny.terms.optimizer, learning_rate=0.1, betas=(0.8, 0.999))
    wanted = msgspec.structs.replace(
        with_config(tiny.terms, hidden_size=5, num_labels=9),
        seed=8, batch_rows=16, micro_batches=2, schedule="stash", optimizer=optimizer, run_id=RunId("run-b"),
        group_by_length=False, lossy_links=True, prompt="Sum: {text}",
    )  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        check_resume(tiny.manifest(5), wanted)
    for line in (
        "batch_rows: 8 in the checkpoint, 16 now",
        "group_by_length: true in the checkpoint, false now",
        "lossy_links: false in the checkpoint, true now",
        'prompt: "" in the checkpoint, "Sum: {text}" now',
        "micro_batches: 4 in the checkpoint, 2 now",
        "model.config.hidden_size: 4 in the checkpoint, 5 now",
        "model.config.num_labels: absent in the checkpoint, 9 now",
        "optimizer.betas: [0.9,0.999] in the checkpoint, [0.8,0.999] now",
        "learning_rate: 0.00005 in the checkpoint, 0.1 now",
        'run_id: "run-a" in the checkpoint, "run-b" now',
        'schedule: "flush" in the checkpoint, "stash" now',
        "seed: 7 in the checkpoint, 8 now",
    ):
        assert line in caught.value.message
    assert "step 5" in caught.value.message


def test_full_training_does_not_resume_as_lora(tiny):
    model = msgspec.structs.replace(tiny.terms.model, method="lora", lora=LoraSpec(rank=4))
    lines = differences(tiny.terms, msgspec.structs.replace(tiny.terms, model=model))
    assert 'method: "full" in the checkpoint, "lora" now' in lines
    assert "lora_rank: absent in the checkpoint, 4 now" in lines


def test_where_the_model_came_from_and_which_transformers_wrote_it_may_change(tiny):
    before = with_config(tiny.terms, transformers_version="5.0.0", _name_or_path="/a")
    after = with_config(tiny.terms, transformers_version="5.1.0", _name_or_path="/b")
    assert differences(before, after) == ()


def test_other_libraries_are_allowed_and_said(tiny):
    notes = check_resume(tiny.manifest(5), tiny.terms, {"torch": "3.0", "numpy": "2.0"})
    assert len(notes) == 1
    assert notes[0].startswith("torch is 3.0 now, 2.")


@pytest.mark.parametrize(("lr_schedule", "allowed"), [("constant", True), ("linear", False), ("cosine", False)])
def test_the_number_of_epochs_may_change_only_under_a_constant_learning_rate(tiny, lr_schedule, allowed):
    optimizer = msgspec.structs.replace(tiny.terms.optimizer, lr_schedule=lr_schedule)
    before = msgspec.structs.replace(tiny.terms, optimizer=optimizer)
    longer = msgspec.structs.replace(before, optimizer=msgspec.structs.replace(optimizer, total_samples=200))
    assert (differences(before, longer) == ()) is allowed


@pytest.mark.parametrize("name", ["task", "data_digest", "base_digest"])
def test_task_and_hashes_are_compared_where_both_sides_took_them(tiny, name):
    taken, other = (msgspec.structs.replace(tiny.terms, **{name: value}) for value in ("a", "b"))
    assert differences(taken, tiny.terms) == differences(tiny.terms, taken) == ()
    words = {"data_digest": "training data (hash)", "base_digest": "pretrained weights (hash)", "task": "task"}
    assert differences(taken, other) == (f'{words[name]}: "a" in the checkpoint, "b" now',)


def test_a_long_value_is_cut_in_the_message_but_compared_whole(tiny):
    names = [f"encoder.layer.{i}.weight" for i in range(50)]
    before = msgspec.structs.replace(tiny.terms, model=msgspec.structs.replace(tiny.terms.model, frozen=tuple(names)))
    after = msgspec.structs.replace(before, model=msgspec.structs.replace(before.model, frozen=(*names, "x")))
    (line,) = differences(before, after)
    assert len(line) < 240


def test_the_run_s_length_is_named_by_the_recipe_s_words_and_a_seed_once(tiny):
    optimizer = msgspec.structs.replace(tiny.terms.optimizer, total_samples=144, warmup_samples=3)
    model = msgspec.structs.replace(tiny.terms.model, seed=8)
    terms = msgspec.structs.replace(tiny.terms, model=msgspec.structs.replace(tiny.terms.model, seed=tiny.terms.seed))
    assert differences(terms, msgspec.structs.replace(terms, optimizer=optimizer, model=model, seed=8)) == (
        "seed: 7 in the checkpoint, 8 now",
        "rows of the whole run (epochs, max_steps): 100 in the checkpoint, 144 now",
        "rows of the warm-up (warmup_ratio, warmup_steps): 0 in the checkpoint, 3 now",
    )
