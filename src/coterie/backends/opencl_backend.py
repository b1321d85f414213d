"""OpenCL devices by pyopencl, with kernels of our own (`opencl_kernels.cl`, `opencl_attention.cl`).

GPUs multiply by local-memory tiles. Processors (PoCL, Intel's runtime) multiply panels of packed operands by a register
tile, in the order that keeps them in the caches; there memory is shared, so inputs and results are used where they
lie, and attention between the projections is one kernel (`opencl_mixer`). Which form and tile is fastest is tried when
a device is first used, with one small product for each candidate.
"""

import contextlib
import time
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.backends.backend import Backend, BackendInfo
from coterie.backends.buffer_pool import BufferPool
from coterie.backends.engine import Buffer, Positions, Product, View
from coterie.backends.kernel_backend import KernelBackend
from coterie.backends.opencl_driver import driver_errors, find_devices
from coterie.backends.opencl_forms import Form, candidates, packing_key, steps_up
from coterie.backends.opencl_mixer import OpenCLMixer
from coterie.backends.product_words import product_words
from coterie.backends.shares import Activation, Array, Mask
from coterie.errors import BackendError


def probe(threads: int) -> tuple[Backend, ...]:
    """All OpenCL devices; a processor's takes `threads` of its compute units.

    Raises:
        BackendError: pyopencl or a driver is absent.
    """
    return tuple(
        KernelBackend(OpenCLEngine(device, "opencl" if index == 0 else f"opencl:{index}", threads))
        for index, device in enumerate(find_devices())
    )


class OpenCLEngine:
    """A device with its queue, kernels and pool of memory (see `engine.Engine`)."""

    def __init__(self, device: Any, name: str, threads: int, *, form: Form | None = None) -> None:
        import pyopencl as cl  # noqa: PLC0415 - absent on most devices

        self._cl = cl
        self._is_cpu = bool(device.type & cl.device_type.CPU)
        units = device.max_compute_units
        if self._is_cpu and threads < units:
            with contextlib.suppress(cl.Error):  # a driver that cannot divide its device uses all of it
                device = device.create_sub_devices([cl.device_partition_property.BY_COUNTS, threads])[0]
                units = threads
        self._info = BackendInfo(
            name=name,
            device=str(device.name).strip(),
            kind="cpu" if self._is_cpu else "gpu" if device.type & cl.device_type.GPU else "accelerator",
            driver=f"pyopencl {cl.VERSION_TEXT}, {device.platform.name} {device.driver_version}",
            threads=units if self._is_cpu else 0,
            weight_copies=2 if self._is_cpu else 0,  # packed in both orders
        )
        self._device = device
        self._shares_memory = self._is_cpu and bool(device.host_unified_memory)
        self._pool = BufferPool(self._make_buffer, self._wait)
        self._words: dict[bytes, Any] = {}
        self._in_flight: list[Any] = []
        self._kernels: dict[str, Any] = {}
        self._form = form
        self._mixer: OpenCLMixer | None = None
        with driver_errors(name):
            self._context = cl.Context([device])
            # Unasked, PoCL's queue is that of the whole processor, whatever part of it the context was made for.
            self._queue = cl.CommandQueue(self._context, device)
            self._nothing = self.take(16)

    @property
    def info(self) -> BackendInfo:
        """Where it runs."""
        return self._info

    @property
    def form(self) -> Form:
        """How products are computed; chosen, and its kernels built, when first asked for."""
        if self._form is None:
            width = self._device.native_vector_width_float
            self._form = self._fastest(candidates(is_cpu=self._is_cpu, native_width=width))
        if not self._kernels:
            self._kernels = self._build(self._form)
        return self._form

    @property
    def mixer(self) -> OpenCLMixer | None:
        """On processors, whose local memory is a cache."""
        if self._mixer is None and self.form.panels:
            self._mixer = OpenCLMixer(
                self.form,
                self._start,
                self._constant,
                local=self._cl.LocalMemory,
                local_bytes=self._device.local_mem_size,
                nothing=self._nothing,
            )
        return self._mixer

    def _build(self, form: Form) -> dict[str, Any]:
        folder = resources.files("coterie.backends")
        source = "".join(folder.joinpath(name).read_text() for name in ("opencl_kernels.cl", "opencl_attention.cl"))
        with driver_errors(self._info.name):
            # No relaxed maths: it may drop what keeps a masked row finite. `mad` only fuses c += a * b.
            program = self._cl.Program(self._context, source).build(
                ["-cl-mad-enable", "-cl-no-signed-zeros", *form.options]
            )
            return {kernel.function_name: kernel for kernel in program.all_kernels()}

    def _fastest(self, forms: tuple[Form, ...]) -> Form:
        """The form with the shortest product of a middling size; one whose kernels do not build is passed over."""
        sides = (384, 384, 384)
        times: dict[int, float] = {}
        problem: BackendError | None = None
        a, b = (self.load(np.full(sides[:2], 0.5, dtype=np.float32), pack=False) for _ in range(2))
        c = self.take(sides[0] * sides[1])
        product = Product(
            a=View(buffer=a, row=384),
            b=View(buffer=b, row=384),
            c=View(buffer=c, row=384),
            rows=384,
            columns=384,
            inner=384,
        )
        for index, form in enumerate(forms):
            try:
                self._form, self._kernels = form, self._build(form)
                self._drop_packed(b)
                self._time(product)  # the driver may compile once more when a kernel first runs
                times[index] = min(self._time(product) for _ in range(5))
            except BackendError as error:
                problem = error
        for buffer in (a, b, c):
            self.give(buffer)
        self._form, self._kernels = None, {}
        if not times:
            assert problem is not None, "there are candidates"
            raise problem
        first, best = min(times), min(times, key=times.__getitem__)
        # The first is the usual one; a small difference is chance, and the machine may have other work.
        return forms[best if times[best] < 0.85 * times[first] else first]

    def _time(self, product: Product) -> float:
        start = time.perf_counter()
        self.product(product)
        self._wait()
        return time.perf_counter() - start

    # Memory

    def take(self, n: int) -> Buffer:
        """Memory, with any contents."""
        return self._pool.take(n)

    def _make_buffer(self, n: int) -> Buffer:
        with driver_errors(self._info.name):
            return Buffer(self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, size=4 * max(n, 1)), n)

    def give(self, buffer: Buffer) -> None:
        """Give memory back; kernels that were started before may still use it, as the queue keeps its order."""
        self._drop_packed(buffer)
        if buffer.host is not None:
            self._in_flight.append(buffer)
        else:
            buffer.constant = False
            self._pool.give(buffer)

    def trim(self) -> None:
        """Give free memory back to the driver."""
        self._pool.trim()

    def _drop_packed(self, buffer: Buffer) -> None:
        for packed in buffer.packed.values():
            self.give(packed)
        buffer.packed = {}

    def _in_place(self, array: npt.NDArray[Any]) -> Buffer:
        flags = self._cl.mem_flags.READ_WRITE | self._cl.mem_flags.USE_HOST_PTR
        with driver_errors(self._info.name):
            return Buffer(self._cl.Buffer(self._context, flags, hostbuf=array), array.nbytes // 4, array, constant=True)

    def upload(self, array: Array | Mask, *, constant: bool = True) -> Buffer:
        """An array on the device; read in place where the device works in the processor's memory."""
        data: npt.NDArray[Any] = np.ascontiguousarray(array)
        if self._shares_memory and data.flags.writeable and data.size:
            buffer = self._in_place(data)
        else:
            buffer = self.take(-(-data.nbytes // 4))
            with driver_errors(self._info.name):
                self._cl.enqueue_copy(self._queue, buffer.handle, data, is_blocking=True)
        buffer.constant = constant
        return buffer

    def load(self, array: Array, *, pack: bool = True) -> Buffer:
        """A weight on the device, for a processor already in the two orders that products read."""
        if not (self._shares_memory and pack and array.ndim == 2 and array.flags.writeable and self.form.panels):
            buffer = self.take(array.size)
            with driver_errors(self._info.name):
                self._cl.enqueue_copy(self._queue, buffer.handle, np.ascontiguousarray(array), is_blocking=True)
            buffer.constant = True
            return buffer
        buffer = self._in_place(np.ascontiguousarray(array))
        rows, columns = array.shape
        lying = View(buffer=buffer, row=columns)
        for view, sides in ((lying, (rows, columns)), (lying.turned, (columns, rows))):
            product = Product(a=view, b=view, c=view, rows=1, columns=sides[1], inner=sides[0])
            self._packed_b(product, self._words_of(product))
        return buffer

    def settle(self) -> None:
        """Wait until the arrays that were loaded are read."""
        self._wait()

    def output(self, shape: tuple[int, ...]) -> Buffer:
        """Memory for a result that will be downloaded."""
        if self._shares_memory and np.prod(shape):
            buffer = self._in_place(np.empty(shape, dtype=np.float32))
            buffer.constant = False
            return buffer
        return self.take(int(np.prod(shape)))

    def download(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        """Wait, and give the contents as an array of its own; the buffer is given back."""
        if buffer.host is None:
            result = self.read(buffer, shape)
            self.give(buffer)
            return result
        with driver_errors(self._info.name):
            self._wait()
            flags = self._cl.map_flags.READ
            mapped, _ = self._cl.enqueue_map_buffer(self._queue, buffer.handle, flags, 0, (buffer.floats,), np.float32)
            mapped.base.release(self._queue)
        host: Array = buffer.host
        return host.reshape(shape)

    def read(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        """Wait, and copy the contents; the buffer is kept."""
        result = np.empty(shape, dtype=np.float32)
        with driver_errors(self._info.name):
            self._wait()
            self._cl.enqueue_copy(self._queue, result, buffer.handle, is_blocking=True)
        return result

    def _wait(self) -> None:
        with driver_errors(self._info.name):
            self._queue.finish()
        self._in_flight.clear()

    # Kernels

    def _start(self, name: str, sizes: tuple[int, ...], group: tuple[int, ...] | None, *arguments: Any) -> None:
        kernel = self._kernels[name]
        with driver_errors(self._info.name):
            kernel.set_args(*arguments)
            self._cl.enqueue_nd_range_kernel(self._queue, kernel, sizes, group)
        self._in_flight.append(arguments)  # the driver keeps no reference to what a kernel reads

    def _words_of(self, product: Product) -> Any:
        """The product's sizes and strides on the device; the same few come again at every step."""
        return self._constant(product_words(product))

    def _constant(self, numbers: npt.NDArray[Any]) -> Any:
        words = numbers.tobytes()
        known = self._words.get(words)
        if known is None:
            flags = self._cl.mem_flags.READ_ONLY | self._cl.mem_flags.COPY_HOST_PTR
            with driver_errors(self._info.name):
                known = self._words[words] = self._cl.Buffer(
                    self._context, flags, hostbuf=np.frombuffer(words, np.int32).copy()
                )
        return known

    def _packed_b(self, product: Product, words: Any) -> Buffer:
        source, form = product.b.buffer, self.form
        key = packing_key(product, product.b)
        known = source.packed.get(key)
        if known is None:
            panels, z = steps_up(product.columns, form.columns), product.batch * product.heads
            known = self.take(z * panels * product.inner * form.columns)
            self._start("pack_b", (panels, z), (1, 1), words, source.handle, known.handle)
            if source.constant:
                source.packed[key] = known
        return known

    def product(self, product: Product) -> None:
        """Multiply."""
        form, words, z = self.form, self._words_of(product), product.batch * product.heads
        bias = (product.bias or self._nothing).handle
        a, c = product.a.buffer, product.c.buffer.handle
        if not form.panels:
            side = form.side * form.tile
            sizes = (steps_up(product.columns, side) * form.side, steps_up(product.rows, side) * form.side, z)
            group = (form.side, form.side, 1)
            self._start("product_tiled", sizes, group, words, a.handle, product.b.buffer.handle, c, bias)
            return
        b = self._packed_b(product, words)
        panels_m, panels_n = steps_up(product.rows, form.rows), steps_up(product.columns, form.columns)
        sizes = (steps_up(panels_n, form.block_columns), steps_up(panels_m, form.block_rows), z)
        if product.a.column == 1 and not product.fold:
            self._start("product_direct", sizes, (1, 1, 1), words, a.handle, b.handle, c, bias)
        else:
            packed = self.take(z * panels_m * product.inner * form.rows)
            self._start("pack_a", (panels_m, z), (1, 1), words, a.handle, packed.handle)
            self._start("product_packed", sizes, (1, 1, 1), words, packed.handle, b.handle, c, bias)
            self.give(packed)
        if not product.b.buffer.constant:
            self.give(b)

    def _rows(self, rows: int) -> tuple[int]:
        return (steps_up(rows, self.form.rows_at_once),)

    def _each(self, n: int) -> tuple[int]:
        return (steps_up(n, self.form.numbers_at_once),)

    def softmax(
        self, scores: Buffer, bias: Buffer | None, strides: tuple[int, int, int], sizes: tuple[int, int, int]
    ) -> None:
        """Scores [B,H,T,T] to probabilities, in place."""
        rows, heads, tokens = sizes
        total = rows * heads * tokens
        numbers = np.array([bias is not None, *strides, heads, tokens, total], dtype=np.int32)
        self._start("softmax", self._rows(total), None, scores.handle, (bias or self._nothing).handle, *numbers)

    def softmax_gradient(self, probabilities: Buffer, gradient: Buffer, tokens: int, rows: int, scale: float) -> None:
        """Gradient of probabilities to that of scores, in place."""
        arguments = (np.int32(tokens), np.float32(scale), np.int32(rows))
        self._start("softmax_gradient", self._rows(rows), None, probabilities.handle, gradient.handle, *arguments)

    def drop(self, source: Buffer, keep: Buffer, target: Buffer, n: int, scale: float) -> None:
        """`target = source * keep * scale`."""
        arguments = (source.handle, keep.handle, target.handle, np.float32(scale), np.int32(n))
        self._start("drop", self._each(n), None, *arguments)

    def add(self, target: Buffer, source: Buffer, n: int) -> None:
        """`target += source`."""
        self._start("add", self._each(n), None, target.handle, source.handle, np.int32(n))

    def column_sums(self, source: Buffer, target: Buffer, rows: int, columns: int) -> None:
        """Sum a matrix over its rows."""
        sizes = (steps_up(columns, self.form.sums_at_once),)
        self._start("column_sums", sizes, None, source.handle, target.handle, np.int32(rows), np.int32(columns))

    def turn(self, target: Buffer, positions: Positions, rows: int, heads: int, head_dim: int, *, back: bool) -> None:
        """Turn [rows, heads * head_dim] by positions, in place."""
        interleaved = positions.style == "interleaved"
        numbers = np.array(
            [heads, head_dim, positions.dims, positions.tokens, positions.per_row, interleaved], dtype=np.int32
        )
        sign = np.float32(-1.0 if back else 1.0)
        arguments = (target.handle, positions.cos.handle, positions.sin.handle, *numbers, sign, np.int32(rows))
        self._start("turn", (rows,), None, *arguments)

    def activate(self, kind: Activation, up: Buffer, gate: Buffer | None, target: Buffer, n: int) -> None:
        """`act(up)`, or `act(gate) * up`."""
        arguments = (up.handle, (gate or up).handle, target.handle, np.int32(gate is not None), np.int32(n))
        self._start(kind, self._each(n), None, *arguments)

    def activate_gradient(
        self, kind: Activation, values: tuple[Buffer, Buffer | None], gradients: tuple[Buffer, Buffer | None], n: int
    ) -> None:
        """Of up and gate."""
        (up, gate), (d_up, d_gate) = values, gradients
        handles = (up.handle, (gate or up).handle, d_up.handle, (d_gate or d_up).handle)
        self._start(f"{kind}_gradient", self._each(n), None, *handles, np.int32(gate is not None), np.int32(n))

    def close(self) -> None:
        """Give everything back."""
        self._pool.trim()
        self._words.clear()
