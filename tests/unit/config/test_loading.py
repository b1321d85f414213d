"""Reading recipes: good ones give their values, bad ones all their mistakes with lines."""

import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.config import LocalWorker, Recipe, load_recipe, recipe_to_toml
from coterie.config import recipe as recipe_module
from coterie.config.fields import recipe_fields
from coterie.errors import RecipeError
from coterie.planner import plan
from coterie.schedules.actions import ScheduleKind

MINIMAL = {"model": "folder/minilm", "train": "train.txt"}


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def mistakes(path: Path | None, overrides: dict[str, object] | None = None) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value.message.split("\n  ")[1:]


def test_a_minimal_recipe_gets_the_defaults(tmp_path):
    recipe = load_recipe(write(tmp_path, '[model]\nname = "m"\n[data]\ntrain = "t.txt"\n'))
    assert recipe.model.name == "m"
    assert recipe.data.dev is None
    assert recipe.train.schedule == "flush"
    assert recipe.train.micro_batches is None
    assert recipe.plan.lossy_links is False


def test_values_of_every_kind_are_read(tmp_path):
    text = """
[model]
name = "m"
[data]
train = "t.txt"
label_column = 3
text_column = "tokens"
[train]
learning_rate = 1
freeze = ["embeddings", "*.layer.0.*"]
[plan]
cuts = [2, 5]
[cluster]
workers = 4
[[cluster.local_workers]]
memory = "600MiB"
speed = 0.5
[[cluster.local_workers]]
"""
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.data.label_column == 3
    assert recipe.data.text_column == "tokens"
    assert recipe.train.learning_rate == 1.0
    assert recipe.train.freeze == ("embeddings", "*.layer.0.*")
    assert recipe.plan.cuts == (2, 5)
    assert recipe.cluster.local_workers == (LocalWorker(memory="600MiB", speed=0.5), LocalWorker())
    assert recipe.cluster.local_workers[0].memory_bytes == 600 * 2**20


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path):
    text = """\
[model]
name = ""
[data]
trian = "t.txt"
train = "t.txt"
[train]
epochs = 0
objective = "time"
schedule = "flus"
learning_rate = "fast"
[stuff]
[[cluster.local_workers]]
sped = 1
"""
    assert mistakes(write(tmp_path, text)) == [
        "line 2: model.name is '': expected str of length >= 1",
        "line 4: there is no key 'trian' in [data]; did you mean 'train'?",
        "line 7: train.epochs is 0: expected int >= 1",
        "line 8: there is no key 'objective' in [train]; it belongs into [plan]",
        "line 9: train.schedule is 'flus': expected flush or gpipe or stash or 2bw",
        "line 10: train.learning_rate is 'fast': expected a number without quotes",
        "line 11: there is no section [stuff]",
        "line 13: there is no key 'sped' in [cluster.local_workers[0]]; did you mean 'speed'?",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('learning_rate = "1e-4"', "train.learning_rate is '1e-4': expected a number without quotes"),
        ('epochs = "3"', "train.epochs is '3': expected a whole number without quotes"),
        ('group_by_length = "yes"', "train.group_by_length is 'yes': expected true or false without quotes"),
    ],
)
def test_a_quoted_number_is_told_to_lose_its_quotes(tmp_path, line, expected):
    text = f'[model]\nname = "m"\n[data]\ntrain = "t"\n[train]\n{line}\n'
    assert mistakes(write(tmp_path, text)) == [f"line 6: {expected}"]


def test_a_word_for_a_number_on_the_command_line_has_no_quotes_to_lose():
    assert mistakes(None, MINIMAL | {"epochs": "three"}) == ["--epochs: is 'three': expected a whole number"]


def test_a_memory_without_quotes_or_unit_is_refused_with_what_was_meant(tmp_path):
    start = '[model]\nname = "m"\n[data]\ntrain = "t"\n[[cluster.local_workers]]\n'
    (bare,) = mistakes(write(tmp_path, start + "memory = 600\n"))
    assert bare.endswith("memory is 600: expected text, in quotes")
    (unitless,) = mistakes(write(tmp_path, start + 'memory = "600"\n'))
    assert unitless.endswith("memory is wrong: '600' would be 600 bytes; did you mean 600MiB?")
    assert (
        load_recipe(write(tmp_path, start + 'memory = "838860800"\n')).cluster.local_workers[0].memory_bytes
        == 800 << 20
    )


def test_data_in_the_recipe_s_place_are_recognized(tmp_path):
    data = tmp_path / "train.conll"
    data.write_text("Ada\tB-PER\n")
    for path in (data, tmp_path, tmp_path / "absent.conll"):
        with pytest.raises(RecipeError) as refused:
            load_recipe(path)
        assert refused.value.hint.startswith(f"did you mean --train {path}?")
    with pytest.raises(RecipeError) as refused:
        load_recipe(tmp_path / "absent.toml")
    assert "--train" not in refused.value.hint


def test_missing_keys_name_the_flag_that_gives_them():
    assert mistakes(None) == ["model.name is missing: give --model", "data.train is missing: give --train"]


def test_a_missing_key_does_not_hide_other_mistakes(tmp_path):
    found = mistakes(write(tmp_path, "[train]\nbatch_rows = 4\nmicro_batches = 8\n"))
    assert "line 3: train.micro_batches is 8, more than the 4 rows of a batch (batch_rows)" in found
    assert len(found) == 3


@pytest.mark.parametrize("value", ["nan", "inf", "-1.0", "true", '"1e-4"'])
def test_a_learning_rate_that_is_no_positive_number_is_refused(tmp_path, value):
    text = f'[model]\nname = "m"\n[data]\ntrain = "t"\n[train]\nlearning_rate = {value}\n'
    found = mistakes(write(tmp_path, text))
    assert len(found) == 1
    assert found[0].startswith("line 6: train.learning_rate is ")


def test_a_syntax_error_names_its_line(tmp_path):
    with pytest.raises(RecipeError, match=r"recipe\.toml is not TOML: .*line 2"):
        load_recipe(write(tmp_path, "[model]\nname = \n"))


def test_a_file_that_is_absent_or_not_text_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*absent\.toml: No such file"):
        load_recipe(tmp_path / "absent.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"[model]\n\xff\xfe")
    with pytest.raises(RecipeError, match=r"not UTF-8 text \(byte 8\)"):
        load_recipe(binary)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\nname = "m"\n[data]\ntrain = "t"\n')
    assert load_recipe(path).model.name == "m"


def test_a_section_that_is_a_value_and_a_key_outside_its_section_are_explained(tmp_path):
    found = mistakes(write(tmp_path, 'epochs = 3\nmodel = "m"\n[data]\ntrain = "t"\n'))
    assert found[0] == "line 1: epochs belongs into the section [train]"
    assert found[1] == "line 2: model is a section: write [model] and its keys below it"


def test_lines_of_keys_in_multi_line_strings_are_not_mistaken_for_keys(tmp_path):
    text = '[model]\nname = """\nepochs = 1\n"""\n[data]\ntrain = "t"\n[train]\nepochs = 0\n'
    assert mistakes(write(tmp_path, text)) == ["line 8: train.epochs is 0: expected int >= 1"]


class TestOverrides:
    def test_they_win_over_the_file_by_dotted_key_field_name_or_flag_name(self, tmp_path):
        path = write(tmp_path, '[model]\nname = "m"\n[data]\ntrain = "t"\n[train]\nepochs = 9\nseed = 1\n')
        recipe = load_recipe(path, {"train.epochs": 2, "seed": "7", "batch-rows": "32", "model": "other"})
        assert (recipe.train.epochs, recipe.train.seed, recipe.train.batch_rows) == (2, 7, 32)
        assert recipe.model.name == "other"

    def test_none_means_not_given(self):
        assert load_recipe(None, MINIMAL | {"epochs": None}).train.epochs == 3

    def test_text_is_read_as_the_fields_type(self):
        options: dict[str, object] = {"learning-rate": "2e-4", "cuts": ["1", "3"], "label-column": "2", "workers": "3"}
        recipe = load_recipe(None, MINIMAL | options)
        assert recipe.train.learning_rate == 2e-4
        assert recipe.plan.cuts == (1, 3)
        assert recipe.data.label_column == 2

    def test_workers_are_read_from_pairs(self):
        recipe = load_recipe(None, MINIMAL | {"local-worker": ["memory=600MiB,speed=0.5", "name=phone, threads=2"]})
        assert recipe.cluster.local_workers == (
            LocalWorker(memory="600MiB", speed=0.5),
            LocalWorker(name="phone", threads=2),
        )

    def test_workers_may_be_given_as_structs(self):
        workers = (LocalWorker(speed=0.25),)
        assert load_recipe(None, MINIMAL | {"local_workers": workers}).cluster.local_workers == workers

    def test_mistakes_name_the_flag_and_overrule_the_files_line(self, tmp_path):
        path = write(tmp_path, '[model]\nname = "m"\n[data]\ntrain = "t"\n[train]\nepochs = 9\n')
        assert mistakes(path, {"epochs": "many"}) == ["--epochs: is 'many': expected a whole number"]

    def test_an_unknown_option_gets_a_suggestion(self):
        assert mistakes(None, MINIMAL | {"epoch": 3}) == ["there is no option 'epoch'; did you mean 'epochs'?"]

    @pytest.mark.parametrize("text", ["fast", "speed", ""])
    def test_a_worker_that_is_no_list_of_pairs_is_refused(self, text):
        if text == "":
            assert load_recipe(None, MINIMAL | {"local-worker": [text]}).cluster.local_workers == (LocalWorker(),)
        else:
            found = mistakes(None, MINIMAL | {"local-worker": [text]})
            expected = "expected key=value pairs such as memory=600MiB,speed=0.5"
            assert found == [f"--local-worker: cluster.local_workers[0] is {text!r}: {expected}"]

    def test_float16_is_refused_with_the_reason(self):
        (found,) = mistakes(None, MINIMAL | {"compute_dtype": "float16"})
        assert "expected float32 or bfloat16 (float16 loses small gradients unless losses are scaled" in found


class TestContradictions:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"lora_rank": 4}, "has no effect with method"),
            ({"packing": True}, 'is for task = "causal-lm"'),
            ({"task": "summarization", "packing": True}, 'is for task = "causal-lm"'),
            ({"prompt": "{text}"}, 'is for task = "causal-lm" or "summarization"'),
            ({"task": "causal-lm", "label_names": ["a"]}, 'is for task = "token-classification" or'),
            ({"label_names": ["O", "B-X", "O"]}, "names 'O' twice"),
            ({"task": "regression", "label_names": ["a"]}, 'but the task is "regression"'),
            ({"task": "sequence-classification", "sentence_column": "0"}, 'is for task = "token-classification"'),
            ({"pair_column": "0"}, 'but the task is "token-classification"'),
            ({"task": "summarization", "pair_column": "b"}, 'but the task is "summarization"'),
            ({"task": "summarization", "prompt": "{text} {input}"}, "has no second column"),
            ({"task": "regression", "max_new_tokens": 5}, 'is for task = "causal-lm" or "summarization"'),
            ({"generate": "on"}, 'but the task is "token-classification"'),
            ({"task": "causal-lm", "prompt": "Say:"}, "has no place for the text"),
            ({"method": "lora", "freeze": ["embeddings"]}, "has no effect with method"),
            ({"method": "bitfit", "lora_variant": "dora"}, 'has no effect with method = "bitfit"'),
            ({"method": "head", "freeze": ["embeddings"]}, 'has no effect with method = "head"'),
            ({"method": "head", "trainable": ["block 1"]}, 'has no effect with method = "head"'),
            ({"freeze": ["block 0"], "trainable": ["block 1"]}, "from two ends; give one"),
            ({"momentum": 0.9}, 'is for optimizer = "sgd"'),
            ({"micro_batches": 8, "batch_rows": 4}, "more than the 4 rows"),
            ({"warmup_steps": 10, "warmup_ratio": 0.1}, "exclude each other"),
            ({"min_workers": 3, "max_workers": 2, "workers": 4}, "less than min_workers (3)"),
            ({"min_workers": 3}, "but the run starts with 1 worker "),
            ({"cuts": [3, 2], "workers": 3}, "units must rise"),
            ({"cuts": [2, 3], "workers": 2}, "makes 3 stages, but only 2 workers"),
            ({"workers": 1, "local_workers": ["", ""]}, "but 2 local workers are given"),
            ({"local_workers": ["memory=lots"]}, "'lots' is not a size"),
            ({"local_workers": ["memory=0"]}, "leave it out for no limit"),
            ({"local_workers": ["name=a", "name=a"]}, "another worker is called already"),
            ({"heartbeat_s": 5.0, "heartbeat_timeout_s": 5.0}, "every worker would count as lost"),
        ],
    )
    def test_options_that_exclude_each_other_are_refused(self, options, expected):
        found = mistakes(None, MINIMAL | options)
        assert len(found) == 1
        assert expected in found[0]

    def test_a_contradiction_with_a_wrong_value_is_not_reported_twice(self):
        assert len(mistakes(None, MINIMAL | {"micro_batches": 32, "batch_rows": 0})) == 1


class TestCluster:
    def test_nothing_said_means_one_local_worker_and_this_machine_only(self):
        cluster = load_recipe(None, MINIMAL).cluster
        assert cluster.effective_local_workers == (LocalWorker(),)
        assert cluster.workers_expected == 1
        assert cluster.listen_host == "127.0.0.1"

    def test_workers_from_elsewhere_open_every_interface(self):
        cluster = load_recipe(None, MINIMAL | {"workers": 3, "local_workers": [""]}).cluster
        assert cluster.workers_expected == 3
        assert len(cluster.effective_local_workers) == 1
        assert cluster.listen_host == "0.0.0.0"  # noqa: S104 - compared, not bound

    def test_a_host_that_was_given_is_kept(self):
        assert load_recipe(None, MINIMAL | {"workers": 3, "host": "10.0.0.5"}).cluster.listen_host == "10.0.0.5"


texts = st.text(min_size=1).filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))


@given(
    name=texts,
    freeze=st.lists(texts, max_size=3),
    rate=st.floats(min_value=1e-12, max_value=1e3),
    label=st.none() | st.integers(0, 9) | texts,
    cuts=st.none() | st.lists(st.integers(1, 20), unique=True, min_size=1, max_size=4).map(sorted),
    speeds=st.lists(st.floats(min_value=0.01, max_value=1), max_size=3),
)
def test_a_written_recipe_reads_back_equal(tmp_path_factory, name, freeze, rate, label, cuts, speeds):
    options: dict[str, object] = {
        "model": name,
        "train": "t",
        "freeze": freeze,
        "learning_rate": rate,
        "cuts": cuts,
        "workers": 9,
        "local_workers": [LocalWorker(name=f"w{index}", speed=speed) for index, speed in enumerate(speeds)],
    }
    recipe = load_recipe(None, options)
    recipe = msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, label_column=label))
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(recipe_to_toml(recipe), encoding="utf-8", newline="")
    assert load_recipe(path) == recipe


def test_field_and_flag_names_are_unique_and_every_field_is_described():
    fields = recipe_fields()
    names = [field.name for field in fields]
    flags = [field.flag for field in fields]
    assert len(set(names)) == len(names)
    assert len(set(flags)) == len(flags)
    for field in fields:
        assert field.description.endswith("."), field.key


def test_no_field_name_is_another_fields_flag():
    owners: dict[str, str] = {}
    for field in recipe_fields():
        for name in {field.name, field.flag.removeprefix("--")}:
            assert owners.setdefault(name, field.key) == field.key


def test_choices_are_those_of_the_floors_below():
    assert set(typing.get_args(recipe_module.Objective)) == set(typing.get_args(plan.Objective))
    assert set(typing.get_args(recipe_module.Allocator)) == {"auto", *typing.get_args(plan.Allocator)}
    assert set(typing.get_args(recipe_module.TrainSchedule)) == set(typing.get_args(ScheduleKind)) - {"forward"}


def test_every_default_passes_its_own_range():
    recipe = load_recipe(None, MINIMAL)
    assert msgspec.convert(msgspec.to_builtins(recipe), Recipe) == recipe
