"""What is learnt: data files in, token ids and labels out, loss as a sum, the metrics of the field."""

from coterie.tasks.catalog import TASK_NAMES, get_task
from coterie.tasks.samples import sample_path
from coterie.tasks.task import DataFiles, Task
from coterie.tasks.token_classification import TokenClassification

__all__ = ["TASK_NAMES", "DataFiles", "Task", "TokenClassification", "get_task", "sample_path"]
