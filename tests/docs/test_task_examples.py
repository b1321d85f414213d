"""The examples of the page about tasks are read by the tasks themselves, and `coterie init` guesses them right."""

import re
from pathlib import Path

import pytest

from coterie.config.data_look import look_at_data
from coterie.config.guess import guess_task
from coterie.tasks import TASK_NAMES, DataFiles, get_task

PAGE = (Path(__file__).parents[2] / "docs" / "how-to-choose-a-task.md").read_text(encoding="utf-8")
SUFFIXES = {"conll": ".conll", "jsonl": ".jsonl", "csv": ".csv", "text": ".txt"}


def examples() -> list[object]:
    """Every data block with the task in whose section it stands."""
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        task = section.partition("\n")[0].strip()
        for number, block in enumerate(re.finditer(r"^```(\w+)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)):
            if block[1] in SUFFIXES:
                found.append(pytest.param(task, block[1], block[2], id=f"{task}-{number}"))
    return found


@pytest.mark.parametrize(("task", "language", "text"), examples())
def test_an_example_is_read_by_its_task_and_guessed_by_init(task, language, text, tmp_path):
    path = tmp_path / f"example{SUFFIXES[language]}"
    path.write_text(text, encoding="utf-8")
    read = get_task(task).prepare(DataFiles(train=path))
    assert read.splits["train"].examples
    assert guess_task(look_at_data(str(path))).task == task


@pytest.mark.parametrize("task", TASK_NAMES)
def test_every_task_has_a_section_with_an_example_and_a_row_with_its_metric(task):
    assert any(example.values[0] == task for example in examples())
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{task}` |"))
    assert f"`{get_task(task).main_metric}`" in row.split("|")[5]
