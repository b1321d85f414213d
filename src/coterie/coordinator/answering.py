"""From a generative task's rows to prompts, and from generated tokens to answers and their figures."""

import msgspec

from coterie.config.recipe import Recipe
from coterie.coordinator.generation import Generated
from coterie.coordinator.job import Job
from coterie.coordinator.prompt_groups import Prompts
from coterie.errors import RecipeError
from coterie.jobs.generation_spec import GenerationSpec
from coterie.metrics.records import EvaluationRecord
from coterie.models import Anatomy, ModelSource
from coterie.models.generation import end_ids
from coterie.tasks.examples import Example
from coterie.tasks.task import GenerativeTask, Split
from coterie.tasks.tokenizer import LoadedTokenizer, context_limit


def make_prompts(
    recipe: Recipe,
    task: GenerativeTask,
    split: Split,
    tokenizer: LoadedTokenizer,
    *,
    anatomy: Anatomy,
    source: ModelSource,
) -> Prompts:
    """The prompt of every row, cut so that an answer has room in the model's context.

    Raises:
        RecipeError: The context leaves no room for a prompt.
    """
    new_tokens = recipe.generate.max_new_tokens
    context = context_limit(tokenizer, model_positions=anatomy.context_length)
    room = context - new_tokens
    if room < 1:
        raise RecipeError(
            f"generate.max_new_tokens is {new_tokens}, and the model's context holds {context} tokens, "
            "which leaves no room for a prompt",
            hint="generate fewer tokens with --max-new-tokens",
        )
    room = min(room, recipe.data.max_tokens or room)
    return Prompts(
        examples=split.examples,
        ids=tuple(task.prompt(example, tokenizer, room) for example in split.examples),
        stop_ids=frozenset(task.stop_ids(tokenizer)) | frozenset(end_ids(source)),
        pad_id=tokenizer.pad_token_id,
        spec=GenerationSpec(
            max_new_tokens=new_tokens,
            temperature=recipe.generate.temperature,
            top_p=recipe.generate.top_p,
            seed=recipe.train.seed,
        ),
    )


def answers(job: Job, generated: Generated) -> tuple[Example, ...]:
    """The rows of a job with prompts, each with what was generated for it."""
    task, prompts = job.task, job.prompts
    assert isinstance(task, GenerativeTask)
    assert prompts is not None
    return tuple(task.answer(example, job.tokenizer, generated[row]) for row, example in enumerate(prompts.examples))


def generated_texts(job: Job, generated: Generated) -> tuple[str, ...]:
    """What was generated for each row of a job with prompts, as text, special tokens left out."""
    assert job.prompts is not None
    rows = range(len(job.prompts.examples))
    return tuple(job.tokenizer.hf.decode(list(generated[row]), skip_special_tokens=True) for row in rows)


def with_answers(record: EvaluationRecord, job: Job, generated: Generated) -> EvaluationRecord:
    """An evaluation's record with the figures of the generated answers, by which the model is then judged."""
    task, prompts = job.task, job.prompts
    assert isinstance(task, GenerativeTask)
    assert prompts is not None
    metric = task.generation_metric()
    for gold, answered in zip(prompts.examples, answers(job, generated), strict=True):
        metric.add(gold, answered)
    figures = metric.result()
    shown = tuple(dict.fromkeys((metric.main_metric, *metric.shares)))
    others = {name: value for name, value in figures.items() if name not in shown}
    # Beside the main one only shares are shown: perplexity is no longer the main one, and none of those.
    numbers = {} if record.main_is_share else {record.main_metric: record.main_value}
    return msgspec.structs.replace(
        record,
        metrics={name: figures[name] for name in shown}
        | {name: value for name, value in record.metrics.items() if name not in numbers},
        main_metric=metric.main_metric,
        main_is_share=metric.main_metric in metric.shares,
        report="\n".join(filter(None, (record.report, metric.report()))),
        details=record.details | numbers | others,
    )
