"""One layer as a stage of its own: on torch alone, on other backends alone, and shared as the scheduler says."""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from transformers import BertConfig

from coterie.backends.backend import Backend, BackendInfo, Loaded, Saved
from coterie.backends.catalog import find_backends
from coterie.backends.shares import Array, Gradients, Inputs, Need, Outputs, Shape
from coterie.heads.dealing import count_of
from coterie.heads.install import install_split
from coterie.heads.pool import BackendPool
from coterie.heads.shapes import block_shapes
from coterie.jobs.model_spec import ModelSpec
from coterie.measure.allocator import free_memory, set_aside
from coterie.measure.backend_profile import ProfileSettings, profile_backends
from coterie.measure.share_work import Conditions
from coterie.measure.stand_in_weights import StandInWeights
from coterie.models import RandomKey, StageModule, build_stage
from coterie.planner.head_allocation import allocate
from coterie.profiles.cache import ProfileCache
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation, PartShare
from made_up import SHAPES as MADE_UP

SHAPES = ("bert-base", "minilm")
OTHER = "opencl"
THIRD = "numpy"
WARM_UP = 2
FREE = 1.8
"""Two loops at once do so many times the work of one while nobody else has the machine's second core."""

LEAST_FREE = 5
"""So many free rounds are enough; with fewer, all count."""

_MOST_ROUNDS = 4
"""For each that is asked for."""

_LOOP_SIZE, _LOOPS = 384, 20
_PATIENCE_S = 60.0

_T = TypeVar("_T")

Part = Literal["attention", "layer"]


class Timed(NamedTuple):
    """Median seconds of a forward and backward: alone, shared, and each alone while the other is at work beside it.

    The other is, for each part, what shares it with torch; OpenCL where nothing does. With two threads torch alone
    takes both cores: what a machine without a second kind of processor has instead.
    """

    torch_s: float
    other_s: float
    split_s: float
    two_threads_s: float
    torch_beside_s: float
    other_beside_s: float

    @property
    def ideal_s(self) -> float:
        """Both at work without any loss."""
        return 1 / (1 / self.torch_s + 1 / self.other_s)

    @property
    def beside_s(self) -> float:
        """Both at work without any loss but what two cores of this machine take from each other."""
        return 1 / (1 / self.torch_beside_s + 1 / self.other_beside_s)


class Slowed:
    """A backend that sleeps after each call until it has taken `factor` times as long."""

    def __init__(self, backend: Backend, factor: float) -> None:
        self._backend = backend
        self._factor = factor

    @property
    def info(self) -> BackendInfo:
        return self._backend.info

    def load(self, shape: Shape, weights: Mapping[str, Array]) -> Loaded:
        return self._slowly(lambda: self._backend.load(shape, weights))

    def forward(
        self, loaded: Loaded, inputs: Inputs, *, inner: bool = False, keep: bool = True
    ) -> tuple[Outputs, Saved]:
        return self._slowly(lambda: self._backend.forward(loaded, inputs, inner=inner, keep=keep))

    def backward(self, saved: Saved, gradient: Array, need: Need, *, inner_gradient: Array | None = None) -> Gradients:
        return self._slowly(lambda: self._backend.backward(saved, gradient, need, inner_gradient=inner_gradient))

    def trim(self) -> None:
        self._backend.trim()

    def close(self) -> None:
        self._backend.close()

    def _slowly(self, work: Callable[[], _T]) -> _T:
        start_s = time.perf_counter()
        result = work()
        time.sleep((self._factor - 1) * (time.perf_counter() - start_s))
        return result


class LayerBench:
    """Measures the backends, deals out, and times the three variants in turn.

    Args:
        shape: `bert-base` or `minilm`.
        rows: B.
        tokens: T.
        budget_s: Seconds of measuring, for each backend and part.
        slow_down: How many times as long OpenCL takes as it would.
    """

    def __init__(self, shape: str, rows: int, tokens: int, budget_s: float, *, slow_down: float = 1) -> None:
        torch.set_num_threads(1)
        set_aside()
        self._folder = tempfile.TemporaryDirectory()
        self.scalings: list[float] = []
        self.rounds, self.free_rounds = 0, 0
        config = BertConfig(**MADE_UP[shape], attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        self._spec = ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForTokenClassification")
        found = find_backends(1, ("torch", OTHER, THIRD))
        backends = [Slowed(one, slow_down) if one.info.name == OTHER else one for one in found.backends]
        self._pool = BackendPool(backends)
        draw = torch.Generator().manual_seed(0)
        self._hidden = torch.randn(rows, tokens, config.hidden_size, generator=draw)
        ids = torch.arange(rows * tokens).view(rows, tokens) % 1000
        self._inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        shapes = block_shapes(self._stage(None))
        assert shapes.attention is not None
        assert shapes.neurons is not None
        wait_until_free()
        # Kept nowhere: a slowed backend has the name and the driver of one that is not.
        self._profiles = profile_backends(
            self._pool,
            shapes.attention,
            shapes.neurons,
            Conditions(rows=rows, tokens=tokens),
            ProfileSettings(budget_s=budget_s, cache=ProfileCache(Path(self._folder.name))),
        )
        self.allocation = allocate(self._profiles)
        self._counts = (count_of(shapes.attention), count_of(shapes.neurons))
        others = self._alone(_other(self.allocation.attention), _other(self.allocation.neurons))
        self._stages = [self._stage(None), others, self._stage(self.allocation)]
        free_memory()  # as a worker does before a stage runs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
        self._folder.cleanup()

    @property
    def allocation_in_words(self) -> str:
        """Who gets what, and why somebody gets nothing."""
        parts = {"heads": self.allocation.attention, "neurons": self.allocation.neurons}
        words = []
        for name, part in parts.items():
            if part is not None:
                shares = ", ".join(f"{share.backend} {share.count}" for share in part.shares)
                left_out = "; ".join(f"{backend} left out: {why}" for backend, why in part.left_out.items())
                words.append(f"{name}: {shares}" + (f" ({left_out})" if left_out else ""))
        return ". ".join(words)

    def compare(self, part: Part, rounds: int) -> Timed:
        """Alternating, after a warm-up of each."""

        def once() -> tuple[float, ...]:
            alone = [self._once(stage, part) for stage in self._stages]
            torch.set_num_threads(2)
            try:
                two_threads_s = self._once(self._stages[0], part)
            finally:
                torch.set_num_threads(1)
            return (*alone, two_threads_s, *self._beside(part))

        return Timed(*self._medians(once, rounds))

    def compare_with_each(self, rounds: int) -> dict[str, float]:
        """Median seconds of whole layers: each backend alone, and shared; alternating, after a warm-up of each."""
        stages = {
            "torch": self._stages[0],
            OTHER: self._alone(OTHER, OTHER),
            THIRD: self._alone(THIRD, THIRD),
            "shared": self._stages[2],
        }
        medians = self._medians(lambda: tuple(self._once(stage, "layer") for stage in stages.values()), rounds)
        return dict(zip(stages, medians, strict=True))

    def _medians(self, once: Callable[[], tuple[float, ...]], rounds: int) -> list[float]:
        """Of the rounds before and after which the machine was free, or of all if it hardly ever is."""
        for _ in range(WARM_UP):
            once()
        everything, free = [], []
        before = two_loops_scaling()
        while len(free) < rounds and len(everything) < _MOST_ROUNDS * rounds:
            row = once()
            after = two_loops_scaling()
            everything.append(row)
            if min(before, after) >= FREE:
                free.append(row)
            self.scalings.append(after)
            before = after
        self.rounds += len(everything)
        self.free_rounds += len(free)
        chosen = free if len(free) >= min(LEAST_FREE, rounds) else everything
        return [statistics.median(found) for found in zip(*chosen, strict=True)]

    def _alone(self, heads: str, neurons: str) -> StageModule:
        """One block, its heads on one backend and its neurons on one."""
        parts = [_whole(name, count) for name, count in zip((heads, neurons), self._counts, strict=True)]
        return self._stage(HeadAllocation(attention=parts[0], neurons=parts[1]))

    def _beside(self, part: Part) -> tuple[float, float]:
        """Seconds of torch's stage and the other's, at the same time; whoever is faster goes on until both are done."""
        seconds: tuple[list[float], list[float]] = ([], [])

        def work(stage: StageModule, found: list[float]) -> None:
            while not all(seconds):
                found.append(self._once(stage, part))

        threads = [threading.Thread(target=work, args=one) for one in zip(self._stages[:2], seconds, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seconds[0][0], seconds[1][0]

    def _stage(self, allocation: HeadAllocation | None) -> StageModule:
        """One block; torch's own code computes what torch alone would get, as a worker has it."""
        stage = build_stage(self._spec, 1, 2, StandInWeights(self._spec))
        if allocation is not None:
            parts = {"attention": allocation.attention, "neurons": allocation.neurons}
            kept = {name: one for name, one in parts.items() if one is not None and _is_shared(one)}
            report = install_split(stage, HeadAllocation(**kept), self._pool)
            assert not report.unsplit, report.unsplit
        return stage

    def _once(self, stage: StageModule, part: Part) -> float:
        hidden = self._hidden.clone().requires_grad_()
        parameters = list(stage.trainable().values())
        for parameter in parameters:
            parameter.grad = None
        increment_version(parameters)  # as after an optimizer step: weights are sent anew
        start_s = time.perf_counter()
        output = _attention(stage, hidden) if part == "attention" else self._layer(stage, hidden)
        torch.autograd.backward(output, torch.ones_like(output))
        return time.perf_counter() - start_s

    def _layer(self, stage: StageModule, hidden: Tensor) -> Tensor:
        return stage.forward(self._inputs, hidden, RandomKey(0, 0, 0))


def two_loops_scaling() -> float:
    """How much more two threads multiply than one at this moment: what the machine gives, whatever code runs on it."""
    matrix = torch.ones(_LOOP_SIZE, _LOOP_SIZE)

    def loop() -> None:
        for _ in range(_LOOPS):
            torch.mm(matrix, matrix)

    start_s = time.perf_counter()
    loop()
    one_s = time.perf_counter() - start_s
    threads = [threading.Thread(target=loop) for _ in range(2)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 2 * one_s / (time.perf_counter() - start_s)


def wait_until_free() -> None:
    """Wait until the machine gives two cores a few times in a row, or for a minute."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s and min(two_loops_scaling() for _ in range(5)) < FREE:
        time.sleep(1)


def _attention(stage: StageModule, hidden: Tensor) -> Tensor:
    """A block's attention with its output projection and residual; the norm after it is the layer's."""
    attention = stage.module.bert.encoder.layer[0].attention
    norm, attention.output.LayerNorm = attention.output.LayerNorm, nn.Identity()
    try:
        output: Tensor = attention(hidden)[0]
    finally:
        attention.output.LayerNorm = norm
    return output


def _whole(backend: str, total: int) -> PartAllocation:
    share = PartShare(backend=backend, count=total, predicted_s=1.0)
    return PartAllocation(shares=(share,), predicted_s=1.0, best_single_s=1.0, best_single=backend)


def _other(part: PartAllocation | None) -> str:
    """Who shares a part with torch, or computes it in its place."""
    shares = part.shares if part is not None else ()
    return next((share.backend for share in shares if share.backend != "torch"), OTHER)


def _is_shared(part: PartAllocation) -> bool:
    return {share.backend for share in part.shares} != {"torch"}
