"""GPUs by WebGPU (wgpu-native: Vulkan, Metal, Direct3D 12), with kernels of our own (`webgpu_kernels.wgsl`).

Also Mesa's lavapipe, which computes on the processor: right, and slow.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np

from coterie.backends.backend import Backend, BackendInfo
from coterie.backends.buffer_pool import BufferPool
from coterie.backends.engine import Buffer, Positions, Product
from coterie.backends.kernel_backend import KernelBackend
from coterie.backends.opencl_forms import steps_up
from coterie.backends.product_words import WORDS, product_words
from coterie.backends.shares import Activation, Array, Mask
from coterie.errors import BackendError

_MOST_GROUPS = 65_535
_TILE = 64
_KINDS = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3}


@contextlib.contextmanager
def _driver_errors(name: str) -> Iterator[None]:
    try:
        yield
    except BackendError:
        raise
    except Exception as error:  # the border of a foreign driver: wgpu has no common error class
        raise BackendError(f"{name}: the WebGPU driver failed: {error}") from error


def probe(threads: int) -> tuple[Backend, ...]:
    """All WebGPU adapters, each device once; a software adapter takes `threads` of the processor.

    Raises:
        BackendError: wgpu or a driver is absent.
    """
    # lavapipe reads it once, when the driver is loaded; loaders complain on standard error where there is no folder.
    os.environ.setdefault("LP_NUM_THREADS", str(threads))
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    try:
        import wgpu  # noqa: PLC0415 - absent on most devices
    except (ImportError, OSError) as error:  # OSError: its library cannot be loaded
        raise BackendError(
            f"webgpu: wgpu cannot be imported ({error})", hint="pip install 'coterie[backends]'"
        ) from error
    hint = "install a Vulkan driver: that of the GPU's maker, or mesa-vulkan-drivers"
    with _driver_errors("webgpu"):
        adapters = wgpu.gpu.enumerate_adapters_sync()
    unique: dict[str, Any] = {}
    for adapter in adapters:  # one device shows once for each of its interfaces; OpenGL's computes too little
        if adapter.info["backend_type"] != "OpenGL":
            unique.setdefault(adapter.info["device"], adapter)
    if not unique:
        raise BackendError("webgpu: no adapter was found", hint=hint)
    ordered = sorted(unique.values(), key=lambda adapter: bool(adapter.info["adapter_type"] == "CPU"))
    return tuple(
        KernelBackend(WebGPUEngine(adapter, "webgpu" if index == 0 else f"webgpu:{index}"))
        for index, adapter in enumerate(ordered)
    )


class WebGPUEngine:
    """A device with its pipelines and pool of memory (see `engine.Engine`)."""

    def __init__(self, adapter: Any, name: str) -> None:
        import wgpu  # noqa: PLC0415 - absent on most devices

        self._wgpu = wgpu
        info = adapter.info
        is_cpu = info["adapter_type"] == "CPU"
        self._info = BackendInfo(
            name=name,
            device=str(info["device"]),
            kind="cpu" if is_cpu else "gpu",
            driver=f"wgpu {wgpu.__version__}, {info['backend_type']}, {info['description']}".rstrip(", "),
            threads=int(os.environ["LP_NUM_THREADS"])
            if is_cpu and os.environ.get("LP_NUM_THREADS", "").isdigit()
            else 0,
            weight_copies=1 if is_cpu else 0,
        )
        with _driver_errors(name):
            # What is granted unasked are 128 MiB a binding; a layer's probabilities may be more.
            limits = {limit: adapter.limits[limit] for limit in ("max-storage-buffer-binding-size", "max-buffer-size")}
            self._most_bytes = min(limits.values())
            self._device = adapter.request_device_sync(required_limits=limits)
        self._sources = _kernel_sources()
        self._pipelines: dict[str, Any] = {}
        # What was recorded holds the buffers that it uses.
        self._pool = BufferPool(self._make_buffer, self._submit)
        self._words: dict[bytes, Any] = {}
        self._recorded: list[tuple[Any, Any, tuple[int, int, int]]] = []
        self._nothing = self.take(4)

    @property
    def info(self) -> BackendInfo:
        """Where it runs."""
        return self._info

    @property
    def mixer(self) -> None:
        """Products do it."""
        return

    # Memory

    def take(self, n: int) -> Buffer:
        """Memory, with any contents."""
        return self._pool.take(n)

    def _make_buffer(self, n: int) -> Buffer:
        if 4 * n > self._most_bytes:
            raise BackendError(
                f"{self._info.name}: {4 * n} bytes in one buffer, and the device allows {self._most_bytes}",
                hint="a smaller micro-batch needs smaller buffers",
            )
        usage = self._wgpu.BufferUsage
        with _driver_errors(self._info.name):
            flags = usage.STORAGE | usage.COPY_DST | usage.COPY_SRC
            return Buffer(self._device.create_buffer(size=4 * max(n, 1), usage=flags), n)

    def give(self, buffer: Buffer) -> None:
        """Give memory back; launches recorded before may still use it, as they keep their order."""
        self._pool.give(buffer)

    def trim(self) -> None:
        """Give free memory back to the driver."""
        self._pool.trim()

    def upload(self, array: Array | Mask, *, constant: bool = True) -> Buffer:
        """An array on the device."""
        del constant  # nothing is packed here
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size % 4:  # only whole numbers can be written
            data = np.concatenate([data, np.zeros(-data.size % 4, dtype=np.uint8)])
        buffer = self.take(data.size // 4)
        self._submit()  # what was recorded before may still read this memory, and writes do not wait for it
        with _driver_errors(self._info.name):
            self._device.queue.write_buffer(buffer.handle, 0, data)
        return buffer

    def load(self, array: Array) -> Buffer:
        """A weight on the device."""
        return self.upload(array)

    def settle(self) -> None:
        """Arrays are copied as they are uploaded."""

    def output(self, shape: tuple[int, ...]) -> Buffer:
        """Memory for a result that will be downloaded."""
        return self.take(int(np.prod(shape)))

    def download(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        """Wait, and give the contents as an array of its own; the buffer is given back."""
        result = self.read(buffer, shape)
        self.give(buffer)
        return result

    def read(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        """Wait, and copy the contents; the buffer is kept."""
        self._submit()
        with _driver_errors(self._info.name):
            data = self._device.queue.read_buffer(buffer.handle, 0, 4 * int(np.prod(shape)))
        return np.frombuffer(data, np.float32).reshape(shape).copy()

    # Kernels

    def _pipeline(self, name: str) -> Any:
        if name not in self._pipelines:
            with _driver_errors(self._info.name):
                module = self._device.create_shader_module(code=self._sources[name])
                self._pipelines[name] = self._device.create_compute_pipeline(
                    layout="auto", compute={"module": module, "entry_point": "main"}
                )
        return self._pipelines[name]

    def _record(self, name: str, groups: tuple[int, int, int], words: Any, *buffers: Buffer) -> None:
        pipeline, data = self._pipeline(name), words.tobytes()
        with _driver_errors(self._info.name):
            uniform = self._words.get(data)
            if uniform is None:
                uniform = self._device.create_buffer_with_data(data=data, usage=self._wgpu.BufferUsage.UNIFORM)
                self._words[data] = uniform
            handles = [uniform, *(buffer.handle for buffer in buffers)]
            entries = [
                {"binding": index, "resource": {"buffer": handle, "offset": 0, "size": handle.size}}
                for index, handle in enumerate(handles)
            ]
            group = self._device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        self._recorded.append((pipeline, group, groups))

    def _submit(self) -> None:
        if not self._recorded:
            return
        with _driver_errors(self._info.name):
            encoder = self._device.create_command_encoder()
            compute = encoder.begin_compute_pass()
            for pipeline, group, groups in self._recorded:
                compute.set_pipeline(pipeline)
                compute.set_bind_group(0, group)
                compute.dispatch_workgroups(*groups)
            compute.end()
            self._device.queue.submit([encoder.finish()])
        self._recorded.clear()

    def product(self, product: Product) -> None:
        """Multiply."""
        words, z = product_words(product), product.batch * product.heads
        across, down = steps_up(product.columns, _TILE), steps_up(product.rows, _TILE)
        if max(across, down) > _MOST_GROUPS:
            raise BackendError(f"{self._info.name}: a product of {product.rows} by {product.columns} is too large")
        buffers = (product.a.buffer, product.b.buffer, product.c.buffer, product.bias or self._nothing)
        for z0 in range(0, z, _MOST_GROUPS):
            words["z0"] = z0
            self._record("product", (across, down, min(z - z0, _MOST_GROUPS)), words, *buffers)

    def _over(self, name: str, n: int, buffers: tuple[Buffer, ...], **values: float) -> None:
        words = np.zeros(1, WORDS)
        for field, value in values.items():
            words[field] = value
        self._record(name, (min(steps_up(n, 64), _MOST_GROUPS), 1, 1), words, *buffers)

    def softmax(
        self, scores: Buffer, bias: Buffer | None, strides: tuple[int, int, int], sizes: tuple[int, int, int]
    ) -> None:
        """Scores [B,H,T,T] to probabilities, in place."""
        rows, heads, tokens = sizes
        total = rows * heads * tokens
        values = {"rows": total, "columns": tokens, "heads": heads, "has_bias": int(bias is not None)}
        steps = dict(zip(("a_row", "a_inner", "a_fold"), strides, strict=True))
        self._over("softmax", total, (scores, bias or self._nothing), **values, **steps)

    def softmax_gradient(self, probabilities: Buffer, gradient: Buffer, tokens: int, rows: int, scale: float) -> None:
        """Gradient of probabilities to that of scores, in place."""
        self._over("softmax_gradient", rows, (probabilities, gradient), rows=rows, columns=tokens, alpha=scale)

    def drop(self, source: Buffer, keep: Buffer, target: Buffer, n: int, scale: float) -> None:
        """`target = source * keep * scale`."""
        if target is source:  # one buffer cannot be bound twice where it is written
            self._over("drop_own", n, (target, keep), rows=n, alpha=scale)
        else:
            self._over("drop", n, (source, keep, target), rows=n, alpha=scale)

    def add(self, target: Buffer, source: Buffer, n: int) -> None:
        """`target += source`."""
        self._over("add", n, (target, source), rows=n)

    def column_sums(self, source: Buffer, target: Buffer, rows: int, columns: int) -> None:
        """Sum a matrix over its rows."""
        self._over("column_sums", columns, (source, target), rows=rows, columns=columns)

    def turn(self, target: Buffer, positions: Positions, rows: int, heads: int, head_dim: int, *, back: bool) -> None:
        """Turn [rows, heads * head_dim] by positions, in place."""
        self._over(
            "turn",
            rows,
            (target, positions.cos, positions.sin),
            rows=rows,
            heads=heads,
            columns=head_dim,
            inner=positions.dims,
            fold=positions.tokens,
            has_bias=int(positions.per_row),
            accumulate=int(positions.style == "interleaved"),
            alpha=-1.0 if back else 1.0,
        )

    def activate(self, kind: Activation, up: Buffer, gate: Buffer | None, target: Buffer, n: int) -> None:
        """`act(up)`, or `act(gate) * up`."""
        if gate is None:
            self._over("activate", n, (up, target), rows=n, heads=_KINDS[kind])
        else:
            self._over("activate_gated", n, (up, gate, target), rows=n, heads=_KINDS[kind])

    def activate_gradient(
        self, kind: Activation, values: tuple[Buffer, Buffer | None], gradients: tuple[Buffer, Buffer | None], n: int
    ) -> None:
        """Of up and gate."""
        (up, gate), (d_up, d_gate) = values, gradients
        if gate is None or d_gate is None:
            self._over("activate_gradient", n, (up, d_up), rows=n, heads=_KINDS[kind])
        else:
            self._over("activate_gated_gradient", n, (up, gate, d_up, d_gate), rows=n, heads=_KINDS[kind])

    def close(self) -> None:
        """Give everything back."""
        self._recorded.clear()
        self._pool.trim()
        self._words.clear()


def _kernel_sources() -> dict[str, str]:
    """Each kernel's own text, with what all share and the declarations of its buffers."""
    text = resources.files("coterie.backends").joinpath("webgpu_kernels.wgsl").read_text()
    shared, *kernels = text.split("\n//// ")
    sources = {}
    for kernel in kernels:
        title, _, body = kernel.partition("\n")
        name, _, access = title.partition(": ")
        modes = {"r": "read", "w": "read_write"}
        bindings = [
            f"@group(0) @binding({index}) var<storage, {modes[letter]}> b{index}: array<f32>;"
            for index, letter in enumerate(access.split(), start=1)
        ]
        sources[name] = "\n".join([shared, *bindings, body])
    return sources
