"""Whole runs over frozen weights in 8 and 4 bits: resumed elsewhere, refused, and what a merged export holds."""

import pytest
from transformers import AutoModelForTokenClassification

from coterie import api
from coterie.checkpoint.export import ExportOptions, export_model
from coterie.checkpoint.names import checkpoint_folder
from coterie.checkpoint.store import CheckpointStore
from coterie.coordinator.one_device import largest_difference
from coterie.errors import CheckpointError, RecipeError, StorageError
from coterie.metrics.records import StepRecord
from coterie.models import open_model
from coterie.worker.settings import WorkerSettings


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's own
def test_a_run_in_4_bits_stopped_on_three_workers_and_resumed_on_two_has_the_curve_of_one_device(
    tmp_path, make_recipe, cluster, run, changed, alone
):
    recipe = make_recipe(
        tmp_path / "run", method="lora", lora_dropout=0.1, frozen_dtype="int4", checkpoint_every=2, max_steps=4
    )
    watcher = cluster()

    def fail(record):
        if isinstance(record, StepRecord) and record.step == 2:
            raise StorageError("the test's disk is full")

    watcher.on_record = fail
    with pytest.raises(StorageError, match="disk is full"):
        run(recipe, watcher)
    before = watcher.losses[:2]
    two = changed(changed(recipe, "run", resume=True), "cluster", workers=2)
    two = changed(two, "plan", min_workers=2)
    with pytest.raises(CheckpointError, match="frozen_dtype"):
        api.train(changed(two, "model", frozen_dtype="int8"), cluster())
    again = cluster(*(WorkerSettings(name=name) for name in ("x", "y")))
    result = run(two, again)
    assert len(result.plan.stages) == 2
    assert largest_difference((*before, *result.losses), alone(recipe, 4)) < 1e-6
    assert watcher.failures == again.failures == {}


def test_full_fine_tuning_of_frozen_weights_is_refused_before_workers_are_asked(tmp_path, make_recipe, cluster):
    watcher = cluster()
    with pytest.raises(RecipeError, match="full fine-tuning trains all"):
        api.train(make_recipe(tmp_path / "run", frozen_dtype="int8"), watcher)
    assert not watcher.threads


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's own
def test_a_merged_export_is_merged_into_the_weights_in_full_precision(tmp_path, make_recipe, cluster, run, model):
    recipe = make_recipe(
        tmp_path / "run", method="lora", lora_targets=("query",), frozen_dtype="int4", workers=1, max_steps=2
    )
    run(recipe, cluster(WorkerSettings(name="only")))
    checkpoint = CheckpointStore(checkpoint_folder(recipe.run.output)).latest()
    folder = export_model(open_model(model), checkpoint, None, tmp_path / "merged", ExportOptions(merge=True))
    merged = AutoModelForTokenClassification.from_pretrained(folder).state_dict()
    base = AutoModelForTokenClassification.from_pretrained(model).state_dict()
    name = "bert.encoder.layer.0.attention.self.{}.weight"
    assert (merged[name.format("key")] == base[name.format("key")]).all()
    assert (merged[name.format("query")] != base[name.format("query")]).any()
