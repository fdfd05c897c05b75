"""Where the states of a checkpointed loop are kept: device memory, host memory, or disk.

A store holds rows; a row is one state, a list of arrays. What a program carries from one operation
to the next are the store's `rows`: arrays for memory, a ticket for a file.

The disk store works through callbacks to the host. Each takes the ticket and returns a new one, so
that they happen in the order of the program. Its file lives as long as one backward pass, which
fills it, reads it and closes it, because a program cannot know when a file of a forward pass is no longer
needed. That costs one further forward sweep. The operating system writes the file, and reads ahead the
state below the one that was read, while the program computes. The file has no name once it is open, so
nothing remains in the directory however the program ends.

Known limit: the file of a compiled backward pass that fails stays open, and its space in use, until
the compiled function is dropped. The next pass cannot reclaim it, because when a file is opened the failed
execution cannot be distinguished from one that is still running. Executions of one program overlap (JAX
dispatches them asynchronously, and from several threads), their callbacks run on threads of the
runtime, and under `vmap` or on several devices one execution has a file for each lane and device. A
number for each execution could only come from outside of the program, as an argument of the function
that the user compiles: a callback within the program would draw one for each lane and device.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from remat import _jax
from remat.aliases import Array, Arrays, PyTree
from remat.errors import ScheduleError, StoreError
from remat.loops.arguments import whole_number
from remat.loops.rows import read_row, write_row
from remat.units import format_bytes, parse_bytes


class Store(Protocol):
    """Rows of states, as operations of a program."""

    @property
    def one_pass(self) -> bool:
        """Return whether the rows must be filled and read in one pass, and closed after it."""

    def errors_of_callbacks(self) -> contextlib.AbstractContextManager:
        """Raise the store's own errors while a program runs in this context."""

    def create(self, n_rows: int, carry: Arrays, witnesses: Arrays) -> PyTree:
        """Return rows for states like `carry`.

        The values of `witnesses` are not read. They make the rows depend on what the loop depends on: under
        `vmap` each lane of a batch gets its own rows, and no loop around hoists their creation.
        """

    def write(self, rows: PyTree, row: Array, carry: Arrays) -> PyTree:
        """Return the rows with one of them replaced."""

    def read(self, rows: PyTree, row: Array, like: Arrays) -> tuple[PyTree, Arrays]:
        """Return the rows, and the state in one of them, with the types of `like`."""

    def close(self, rows: PyTree) -> None:
        """Release the memory or the file of the rows."""


@dataclass(frozen=True)
class DeviceStore:
    """One array for each leaf of the carry, in the device's memory."""

    one_pass: bool = False

    def errors_of_callbacks(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def create(self, n_rows: int, carry: Arrays, witnesses: Arrays) -> Arrays:
        return [jnp.broadcast_to(x[None], (n_rows, *x.shape)) for x in carry]

    def write(self, rows: Arrays, row: Array, carry: Arrays) -> Arrays:
        return [lax.dynamic_update_index_in_dim(a, x, row, 0) for a, x in zip(rows, carry)]

    def read(self, rows: Arrays, row: Array, like: Arrays) -> tuple[Arrays, Arrays]:
        return rows, [lax.dynamic_index_in_dim(a, row, 0, False) for a in rows]

    def close(self, rows: Arrays) -> None:
        pass


DEVICE = DeviceStore()
_PAGE = mmap.ALLOCATIONGRANULARITY  # bytes; maps must begin at multiples of it


@dataclass(frozen=True)
class HostStore(DeviceStore):
    """One array for each leaf of the carry, in pinned host memory; on CPU that is device memory."""

    def create(self, n_rows: int, carry: Arrays, witnesses: Arrays) -> Arrays:
        return jax.device_put(super().create(n_rows, carry, witnesses), jax.memory.Space.Host)

    def write(self, rows: Arrays, row: Array, carry: Arrays) -> Arrays:
        on_host = jax.device_put(carry, jax.memory.Space.Host)
        return [write_row(a, x, row) for a, x in zip(rows, on_host)]

    def read(self, rows: Arrays, row: Array, like: Arrays) -> tuple[Arrays, Arrays]:
        return rows, jax.device_put([read_row(a, row) for a in rows], jax.memory.Space.Device)


@dataclass(frozen=True, eq=False)
class DiskStore:
    """A memory-mapped file without a name in `directory`."""

    directory: str
    one_pass: bool = True
    _files: dict[int, list[np.ndarray]] = field(default_factory=dict)
    _tickets: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _failures: list[StoreError] = field(default_factory=list)
    # What the call that a thread is in opened; empty between calls. Files come from callbacks in JAX's
    # threads and have no other way to it. It decides which files are closed after an error, no result.
    _traced: threading.local = field(default_factory=threading.local)

    @property
    def n_open_files(self) -> int:
        """Return the number of files that are not closed yet."""
        return len(self._files)

    def create(self, n_rows: int, carry: Arrays, witnesses: Arrays) -> PyTree:
        types = [(x.shape, np.dtype(x.dtype)) for x in map(_as_data, carry)]
        for shape, _ in types:
            if any(map(_jax.is_symbolic, shape)):
                raise StoreError(
                    f"store='disk' needs arrays of known shape, but one that the loop carries has shape "
                    f"{shape}, with a symbolic dimension. Pass store='host' or export with numbers."
                )
        opened = getattr(self._traced, "opened", None)
        # The values are not looked at. Under vmap they make the call one for each lane of the
        # batch, so that each gets a file; and no loop can hoist it.
        # Sums, since slices of an array that is sharded explicitly need not be possible.
        seen = [jnp.sum(_as_data(x)) for x in witnesses]
        return io_callback(
            lambda *_: self._open(n_rows, types, opened), jax.ShapeDtypeStruct((), jnp.int32), *seen
        )

    def write(self, rows: PyTree, row: Array, carry: Arrays) -> PyTree:
        return io_callback(self._write, rows, rows, row, *map(_as_data, carry))

    def read(self, rows: PyTree, row: Array, like: Arrays) -> tuple[PyTree, Arrays]:
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(_as_data, like)]
        rows, *data = io_callback(self._read, [rows, *types], rows, row)
        return rows, [_from_data(d, x) for d, x in zip(data, like)]

    def close(self, rows: PyTree) -> None:
        io_callback(lambda ticket: self._files.pop(int(ticket)) and None, None, rows)

    def _open(
        self,
        n_rows: int,
        types: list[tuple[tuple[int, ...], np.dtype]],
        opened: set[int] | None,
    ) -> Array:
        try:
            ticket = self.open_file(n_rows, types)
        except StoreError as error:
            self._failures.append(error)
            raise
        except OSError as error:
            failure = StoreError(
                f"no file can be made in {self.directory!r}: {error}. Give a directory= that can be "
                f"written to while the program runs."
            )
            self._failures.append(failure)
            raise failure from error
        if opened is not None:
            opened.intersection_update(self._files)
            opened.add(int(ticket))
        return ticket

    @contextlib.contextmanager
    def errors_of_callbacks(self) -> Iterator[None]:
        """Raise the error of a callback of this store, which JAX turns into a `JaxRuntimeError`.

        If a program that is traced here fails, its files are closed. A program that is compiled here and
        called later has no such context: files that it did not close stay open as long as it exists.
        """
        opened: set[int] = set()
        self._failures.clear()
        self._traced.opened = opened
        try:
            yield
        except Exception as error:
            for ticket in opened:
                self._files.pop(ticket, None)
            if self._failures and isinstance(error, jax.errors.JaxRuntimeError):
                raise self._failures.pop() from error
            raise
        finally:
            self._traced.opened = None

    def open_file(self, n_rows: int, types: list[tuple[tuple[int, ...], np.dtype]]) -> Array:
        """Open a file for `n_rows` states of these types; return the number by which rows are found."""
        sizes = [n_rows * int(np.prod(shape)) * dtype.itemsize for shape, dtype in types]
        # Maps begin at multiples of a page.
        offsets = [0, *itertools.accumulate(-(-size // _PAGE) * _PAGE for size in sizes)]
        with tempfile.TemporaryFile(dir=self.directory, prefix="remat-") as file:
            try:
                # Without reserving the space, a full disk would kill the process later.
                os.posix_fallocate(file.fileno(), 0, max(offsets[-1], 1))
            except OSError as error:
                free = shutil.disk_usage(self.directory).free
                raise StoreError(
                    f"{n_rows} states need {format_bytes(offsets[-1])} in {self.directory!r}, "
                    f"where {format_bytes(free)} are free. Give fewer checkpoints= or another "
                    f"directory=."
                ) from error
            ticket = next(self._tickets)
            self._files[ticket] = [
                np.memmap(file, dtype, "r+", offset, (n_rows, *shape))
                if size
                else np.empty((n_rows, *shape), dtype)
                for (shape, dtype), size, offset in zip(types, sizes, offsets)
            ]
        return np.int32(ticket)

    def _write(self, ticket: Array, row: Array, *data: Array) -> Array:
        for rows, x in zip(self._files[int(ticket)], data):
            rows[int(row)] = x
        return np.int32(ticket)

    def _read(self, ticket: Array, row: Array) -> Arrays:
        rows = self._files[int(ticket)]
        found = [np.array(a[int(row)]) for a in rows]
        # States are read from the newest to the oldest: meanwhile the system reads the next one.
        for a in rows:
            if row and isinstance(a, np.memmap):
                first, last = (int(r) * a[0].nbytes // _PAGE for r in (row - 1, row))
                file: Any = a.base
                file.madvise(mmap.MADV_WILLNEED, first * _PAGE, (last - first + 1) * _PAGE)
        return [np.int32(ticket), *found]


@dataclass(frozen=True)
class Storage:
    """A level of storage for the states of a loop, as an element of `store=`.

    >>> Storage("host", budget="8GiB", write=2, read=2)
    Storage(where='host', checkpoints=None, budget='8GiB', write=2, read=2, directory=None)

    Attributes:
      where: "device", "host" or "disk".
      checkpoints: its capacity as a number of states.
      budget: its capacity in bytes, as a number or as "8GiB". One of the two is required.
      write, read: the time to write and to read one state, in units of the time of one step. The device's
        are part of a step's time.
      directory: of the file, for "disk".
    """

    where: Literal["device", "host", "disk"]
    checkpoints: int | None = None
    budget: str | int | None = None
    write: float = 1.0
    read: float = 1.0
    directory: str | os.PathLike | None = None

    def __post_init__(self) -> None:
        if (self.checkpoints is None) == (self.budget is None):
            raise ScheduleError(
                f"Storage({self.where!r}) requires its capacity: pass either checkpoints= or budget=."
            )
        if self.checkpoints is not None:
            whole_number(self.checkpoints, "checkpoints", 0)
        elif self.budget is not None:
            parse_bytes(self.budget, "budget=")
        for name, cost in (("write", self.write), ("read", self.read)):
            if not isinstance(cost, int | float) or not 0 <= cost < float("inf"):
                raise ScheduleError(
                    f"{name}= of Storage is a time in steps, a number of 0 or more, not {cost!r}."
                )

    def slots(self, state_bytes: int) -> int:
        """Return the number of states of this size that fit."""
        if self.budget is None:
            return int(self.checkpoints or 0)
        return parse_bytes(self.budget, "budget=") // max(state_bytes, 1)


def storages_of(store: str | Sequence[Storage]) -> tuple[Storage, ...]:
    """Return the levels of storage that a user listed; none for a name."""
    if isinstance(store, str):
        return ()
    listed = (store,) if isinstance(store, Storage) else tuple(store)
    wrong = next((s for s in listed if not isinstance(s, Storage)), None)
    if wrong is not None or not listed:
        raise ScheduleError(
            f"store= is 'device', 'host', 'disk', or a list of remat.Storage, but not {store!r}."
        )
    return listed


def make_store(store: str | Sequence[Storage], directory: str | os.PathLike | None) -> Store:
    """Return the store that a user named.

    Raises:
      ScheduleError: the name is invalid, or `directory` is missing or not applicable.
      StoreError: the directory does not exist or cannot be written to.
    """
    if not isinstance(store, str):
        raise ScheduleError(
            "several levels of store= require a length that is a number when the loop is traced. Pass one "
            "of 'device', 'host' and 'disk' here."
        )
    if store not in ("device", "host", "disk"):
        raise ScheduleError(f"store is 'device', 'host' or 'disk', not {store!r}.")
    if store != "disk":
        if directory is not None:
            raise ScheduleError(f"directory={str(directory)!r} has no use with store={store!r}.")
        return DEVICE if store == "device" else HostStore()
    if directory is None:
        raise ScheduleError("store='disk' needs a directory= to keep its file in.")
    if not os.path.isdir(directory) or not os.access(directory, os.W_OK):
        raise StoreError(f"{str(directory)!r} is not a directory that can be written to.")
    return DiskStore(os.fspath(directory))


def _as_data(x: Array) -> Array:
    """Return the data of random keys; other arrays unchanged."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _from_data(data: Array, like: Array) -> Array:
    sharding = jax.typeof(_as_data(like)).sharding
    if any(axes is not None for axes in sharding.spec):  # explicitly; the host gave one array
        data = jax.sharding.reshard(data, sharding)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    return data
