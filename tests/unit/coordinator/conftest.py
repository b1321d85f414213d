"""A job on a tiny model, prepared once; a coordinator's door to knock at."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from coterie.clock import FakeClock
from coterie.cluster.messages import HIDDEN, AnyMessage, Hello, Welcome, control, unpack
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.config.loading import load_recipe
from coterie.coordinator.door import Door
from coterie.coordinator.job import Job, prepare_job
from coterie.coordinator.members import Members
from coterie.coordinator.run_folder import LOCK
from coterie.ids import RunId, WorkerId
from coterie.transport.connect import connect_plain
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.server import FrameServer
from coterie.transport.stream_link import StreamLink

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "anna", "paris", "is", "in", "far")


def _model(folder: Path) -> Path:
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)
    return folder


def _sentences(path: Path, lengths: tuple[int, ...]) -> Path:
    lines = []
    for length in lengths:
        lines += ["anna B-PER", *(["is O", "in O", "paris B-LOC", "far O"] * 15)[: length - 1], ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Eleven training rows of 2 to 20 words in batches of 4; dev rows of up to 60 words, longer than in training."""
    folder = tmp_path_factory.mktemp("job")
    train = _sentences(folder / "train.conll", (2, 20, 3, 8, 5, 5, 13, 2, 9, 4, 6))
    dev = _sentences(folder / "dev.conll", (60, 2, 2, 30, 2, 7, 19, 3, 1, 1, 40, *(2,) * 60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_CACHE", str(folder / "cache"))
        recipe = load_recipe(
            None,
            {
                "model.name": str(_model(folder / "model")),
                "data.train": str(train),
                "data.dev": str(dev),
                "run.output": str(folder / "run"),
                "batch_rows": 4,
                "epochs": 2,
            },
        )
        yield prepare_job(recipe, RunId("run"), lambda _text: None)


SILENCE_S = 30.0


class Table:
    """A coordinator's door, and peers that knock."""

    silence_s = SILENCE_S

    def __init__(self, seats: int) -> None:
        self.clock = FakeClock()
        self.door = Door(clock=self.clock)
        self.token = self.door.issue(uses=seats)
        self.members = Members(RunId("run"), self.door, self.clock, heartbeat_s=0.05, silence_limit_s=SILENCE_S)
        self.server = FrameServer(self.members.admit)
        self.links: list[StreamLink] = []

    @staticmethod
    def hello(token: str, name: str = "laptop", **changes: object) -> Frame:
        """A worker's first words."""
        fields = {
            "wire_version": WIRE_VERSION,
            "package_version": "0",
            "token": token,
            "name": name,
            "device_type": "cpu",
            "threads": 1,
            "memory_bytes": 1,
            "host_id": "here",
            "hosts": (),
            "port": 0,
            "fingerprint": "",
        }
        return control(Hello(**(fields | changes)))

    async def knock(self, frame: Frame | None = None) -> StreamLink:
        link = await connect_plain("127.0.0.1", self.server.plain_port)
        self.links.append(link)
        if frame is not None:
            await link.send(frame)
        return link

    async def join(self, name: str = "laptop") -> tuple[StreamLink, WorkerId]:
        link = await self.knock(self.hello(self.token, name))
        welcome = unpack((await link.receive()).header.body)
        assert isinstance(welcome, Welcome)
        return link, welcome.worker

    @staticmethod
    def tensor_frame(source: str, target: str, size: int = 16) -> Frame:
        """Hidden states of step 7, as a worker sends them."""
        specs = (TensorSpec(name="x", dtype="uint8", shape=(size,), nbytes=size),)
        header = FrameHeader(kind=HIDDEN, source=WorkerId(source), target=WorkerId(target), step=7, tensors=specs)
        return Frame(header, (bytes(size),))

    @staticmethod
    async def until(condition: Callable[[], object]) -> None:
        """Waits for what the coordinator does by itself."""
        while not condition():
            await asyncio.sleep(0.005)

    async def answer(self, frame: Frame) -> AnyMessage:
        link = await self.knock(frame)
        return unpack((await link.receive()).header.body)


AtTable = Callable[..., None]


@pytest.fixture
def at_table() -> AtTable:
    """Runs `test(table)` with an open door."""

    def run(test: Callable[[Table], Awaitable[None]], seats: int = 2) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                table = Table(seats)
                await table.server.start("127.0.0.1", plain_loopback=True)
                try:
                    await test(table)
                finally:
                    for link in table.links:
                        await link.close()
                    await table.server.close()

        asyncio.run(bounded())

    return run


@pytest.fixture
def held_folder() -> Iterator[Callable[[Path], None]]:
    """Holds a run's folder as the process that works on it does, until the test ends."""
    with contextlib.ExitStack() as held:
        yield lambda folder: held.enter_context(FileLock(folder / LOCK, timeout=0))
