"""A tiny model, a few dozen sentences, and clusters: of threads where one process is enough, of processes where not."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from coterie import api
from coterie.checkpoint.names import checkpoint_folder
from coterie.checkpoint.store import CheckpointStore
from coterie.config.loading import load_recipe
from coterie.config.recipe import Recipe
from coterie.coordinator.job import prepare_job
from coterie.coordinator.one_device import run_on_one_device
from coterie.errors import CoterieError
from coterie.ids import RunId
from coterie.measure import device_profile
from coterie.metrics.records import AnyRecord, StepRecord
from coterie.planner.plan import Plan
from coterie.transport.join_link import JoinLink
from coterie.worker.program import run_worker
from coterie.worker.settings import WorkerSettings

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NAMES = ("anna", "bob", "carla", "dmitri", "eva")
PLACES = ("paris", "rome", "oslo", "lima", "cairo")
FIRMS = ("acme", "globex", "initech", "umbrella")
OTHER = (
    "lives",
    "works",
    "in",
    "for",
    "near",
    "the",
    "old",
    "new",
    "office",
    "of",
    "and",
    "met",
    "left",
    "joined",
    ".",
)
PIECES = ("##s", "##a", "##o", "##n")
BLOCKS = 4
TRAIN_ROWS = 36


def write_sentences(path: Path, count: int, seed: int) -> Path:
    """Sentences in which names, places and firms can be told apart by their words."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        words = [(draw.choice(NAMES), "B-PER"), (draw.choice(OTHER), "O")]
        for _ in range(draw.randint(1, 5)):
            kind, tag = draw.choice(((PLACES, "B-LOC"), (FIRMS, "B-ORG"), (OTHER, "O"), (OTHER, "O")))
            words.append((draw.choice(kind), tag))
        lines += [f"{word}\t{tag}" for word, tag in words] + [""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles of these tests away from the user's own; short measurements, since no plan here depends on them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name, value in {"_BUDGET_S": 0.01, "_MATRIX": 64, "_UPDATE_ELEMENTS": 1 << 12}.items():
            patch.setattr(device_profile, name, value)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of four blocks with dropout, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny-bert"
    words = (*SPECIAL, *NAMES, *PLACES, *FIRMS, *OTHER, *PIECES)
    torch.manual_seed(3)
    BertModel(
        BertConfig(
            vocab_size=len(words),
            hidden_size=32,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    ).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file per split."""
    folder = tmp_path_factory.mktemp("data")
    for seed, (split, rows) in enumerate({"train": TRAIN_ROWS, "dev": 12, "test": 12}.items()):
        write_sentences(folder / f"{split}.conll", rows, seed)
    return folder


MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="session")
def make_recipe(model: Path, data: Path) -> MakeRecipe:
    """Recipes for three workers that join; every option can be given."""

    def make(output: Path, **options: object) -> Recipe:
        defaults: dict[str, object] = {
            "model.name": str(model),
            "data.train": str(data),
            "run.output": str(output),
            "batch_rows": 4,
            "micro_batches": 2,
            "epochs": 1,
            "learning_rate": 5e-3,
            "workers": 3,
            "host": "127.0.0.1",
            "heartbeat_s": 0.5,
            "join_timeout_s": 200,
        }
        merged = defaults | options
        merged.setdefault("min_workers", merged["workers"])
        return load_recipe(None, merged)

    return make


class ThreadedCluster:
    """A `RunObserver` whose workers are threads of this process, joining over loopback like any other."""

    def __init__(self, *workers: WorkerSettings) -> None:
        self.settings = workers or tuple(WorkerSettings(name=f"device-{letter}") for letter in "abc")
        self.threads: list[threading.Thread] = []
        self.failures: dict[str, BaseException] = {}
        self.said: list[str] = []
        self.notices: list[str] = []
        self.progress: list[tuple[str, int, int]] = []
        self.records: list[AnyRecord] = []
        self.plan: Plan | None = None
        self.explanation = ""
        self.join_link = ""
        self.on_record: Callable[[AnyRecord], None] = lambda _record: None

    def joinable(self, join_link: str) -> None:
        self.join_link = join_link
        for settings in self.settings:
            self.start(settings)

    def start(self, settings: WorkerSettings) -> None:
        # Daemons: one that hangs fails its test in `wait`, and must not also keep the process from ending.
        thread = threading.Thread(target=self._work, args=(settings,), name=settings.name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _work(self, settings: WorkerSettings) -> None:
        try:
            asyncio.run(run_worker(JoinLink.from_text(self.join_link), settings, self.said.append))
        except CoterieError as error:
            self.failures[settings.name] = error

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def planned(self, plan: Plan, explanation: str, steps: int) -> None:
        self.plan, self.explanation, self.steps = plan, explanation, steps

    def advanced(self, what: str, done: int, total: int) -> None:
        self.progress.append((what, done, total))

    def record(self, record: AnyRecord) -> None:
        self.records.append(record)
        self.on_record(record)

    def wait(self) -> None:
        """Every worker must end by itself soon after the run."""
        for thread in self.threads:
            thread.join(100)
            assert not thread.is_alive(), f"{thread.name} is still there: {self.said[-6:]}, {self.notices}"

    @property
    def losses(self) -> list[float]:
        return [record.loss or 0.0 for record in self.records if isinstance(record, StepRecord)]


class Command:
    """A `coterie` command in a process of its own."""

    def __init__(self, *words: object, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coterie", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = 200.0) -> tuple[int, str, str]:
        """Exit code, output, errors; killed if it does not end."""
        try:
            out, error = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            out, error = self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{out}\n{error}") from None
        return self.process.returncode, out, error

    def kill(self) -> tuple[str, str]:
        """Its output so far. A child that holds the pipes open must not keep us waiting."""
        self.process.kill()
        return self.process.communicate(timeout=100)


@pytest.fixture
def commands() -> Iterator[Callable[..., Command]]:
    """Starts commands and makes sure that none outlives the test."""
    started: list[Command] = []

    def start(*words: object, environment: dict[str, str] | None = None) -> Command:
        started.append(Command(*words, environment=environment))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.kill()


@pytest.fixture(scope="session")
def cluster() -> type[ThreadedCluster]:
    """The observer whose workers are threads."""
    return ThreadedCluster


@pytest.fixture(scope="session")
def run() -> Callable[[Recipe, ThreadedCluster], api.FinetuneResult]:
    """Trains a recipe over a cluster whose workers must leave by themselves when it ends, well or not."""

    def train(recipe: Recipe, watcher: ThreadedCluster) -> api.FinetuneResult:
        try:
            return api.train(recipe, watcher)
        finally:
            watcher.wait()

    return train


@pytest.fixture(scope="session")
def alone() -> Callable[[Recipe, int], list[float]]:
    """The losses of a recipe's first steps on one device, in plain PyTorch."""

    def train(recipe: Recipe, steps: int) -> list[float]:
        job = prepare_job(recipe, RunId("alone"), lambda _text: None)
        assert recipe.train.micro_batches is not None, "no planner chooses here"
        return run_on_one_device(job, recipe.train.micro_batches, steps).losses

    return train


@pytest.fixture(scope="session")
def checkpoints() -> Callable[[Recipe], tuple[int, ...]]:
    """The steps whose checkpoints a run's folder holds."""
    return lambda recipe: CheckpointStore(checkpoint_folder(recipe.run.output)).steps()


@pytest.fixture(scope="session")
def changed() -> Callable[..., Recipe]:
    """A recipe with other values in one section."""

    def change(recipe: Recipe, section: str, **values: object) -> Recipe:
        part = msgspec.structs.replace(getattr(recipe, section), **values)
        return msgspec.structs.replace(recipe, **{section: part})

    return change


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """Waits for something that another process does."""

    def wait(
        condition: Callable[[], object], what: str, command: Command | None = None, timeout_s: float = 150.0
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not happen within {timeout_s:.0f} s"
            assert command is None or command.process.poll() is None, f"no {what}: {command.end()}"
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="session")
def recorded() -> Callable[[Path, str], list[dict[str, Any]]]:
    """Reads the records of one type that a run's folder holds so far."""

    def read(folder: Path, kind: str) -> list[dict[str, Any]]:
        path = folder / "events.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if record["type"] == kind]

    return read


@pytest.fixture(scope="session")
def children_of() -> Callable[[int], dict[str, int]]:
    """The worker processes of a coordinator: name to process id."""

    def find(pid: int) -> dict[str, int]:
        found = {}
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                for word in child.cmdline():
                    if word.startswith("--name="):
                        found[word.removeprefix("--name=")] = child.pid
        return found

    return find


@pytest.fixture(scope="session")
def running() -> Callable[[Iterable[int]], list[int]]:
    """Those of some processes that still run."""

    def look(pids: Iterable[int]) -> list[int]:
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    return look
