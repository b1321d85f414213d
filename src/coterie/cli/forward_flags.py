"""What `evaluate` and `predict` share: which model, which data, how to read them, over which devices."""

import argparse

from coterie.config.flags import add_recipe_flags

SPLITS = ("train", "dev", "test")

READING = (
    "data.task",
    "data.format",
    "data.text_column",
    "data.pair_column",
    "data.label_column",
    "data.sentence_column",
    "data.label_names",
    "data.encoding",
    "data.max_tokens",
    "data.prompt",
)
"""The recipe's keys that say how data are read."""

DEVICES_TEXT = (
    "Runs in this process; with --workers or --local-worker as a pipeline over those devices, planned like a training\n"
    "run but forward only."
)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The folder of the trained model."""
    parser.add_argument(
        "folder",
        help="a trained model: the folder that a run exported, plain or a PEFT adapter; or a hub name. Its task is "
        "known from there unless --task names another",
    )


def add_forward_flags(parser: argparse.ArgumentParser) -> None:
    """Flags after the verb's own: split, reading, devices."""
    parser.add_argument("--split", choices=SPLITS, default="test", help="which split, if the data hold several (test)")
    add_recipe_flags(
        parser,
        sections=("generate", "cluster", "plan"),
        keys=(*READING, "train.batch_rows", "train.seed", "model.compute_dtype", "model.frozen_dtype"),
    )
