"""Compiles the C kernels of this folder once per machine, and calls them.

The system's C compiler builds them on first use, for exactly this CPU, into the user's cache; that
takes some seconds, once. Without a compiler, or with `OPENZAYA_NATIVE=0`, everything runs on torch
alone, slower. What each function computes is written in C beside this file; its place in autograd
is in the module of the operation (`kernels/attention.py` and its neighbours).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
FLAGS = (
    *("-O3", "-march=native", "-mprefer-vector-width=512", "-std=gnu11", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
SWITCH = "OPENZAYA_NATIVE"

TILE = 32
"""Inner sizes of the kernels' matrix products must be multiples of this."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class Library:
    """The compiled kernels.

    Attributes:
        tiles: whether matrix products run on the CPU's tile unit (AMX).
    """

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))
        if self._functions.openzaya_init():
            raise OSError("the system does not grant the tile registers")
        self.tiles = bool(self._functions.openzaya_tiles())

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Run a kernel with torch's number of threads.

        Args:
            name: of the C function; it takes pointers, ints and floats in this order, then the
                number of threads, and returns 0 unless memory is short.
            arguments: tensors must be contiguous, on the CPU, and outlive the call.

        Raises:
            MemoryError: if the kernel found no scratch memory.
        """
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                assert argument.is_contiguous()
                values.append(_POINTER(argument.data_ptr()))
            elif argument is None:
                values.append(_POINTER(None))
            elif isinstance(argument, float):
                values.append(_FLOAT(argument))
            else:
                values.append(_INT(argument))
        function: Callable[..., int] = getattr(self._functions, name)
        if function(*values, _INT(torch.get_num_threads())):
            raise MemoryError(f"no memory for the scratch space of {name}")


_written_out: ContextVar[bool] = ContextVar("written_out", default=False)


@contextmanager
def written_out() -> Iterator[None]:
    """Compute step by step with torch, so that what lies between the steps can be looked at."""
    token = _written_out.set(True)
    try:
        yield
    finally:
        _written_out.reset(token)


def kernels_for(x: Tensor, dtype: torch.dtype | None = None) -> Library | None:
    """The kernels, if there are any for an operation that computes in bf16 on this tensor's device.

    Args:
        dtype: that the operation computes in, if it is not the tensor's.
    """
    if x.device.type != "cpu" or (dtype or x.dtype) != torch.bfloat16 or _written_out.get():
        return None
    return library()


@functools.cache
def library() -> Library | None:
    """The kernels for this machine, compiled if they have not been; None where they cannot be."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    try:
        return Library(_build(compiler))
    except (OSError, subprocess.SubprocessError):
        return None


def _build(compiler: str) -> Path:
    """Path of the library in the cache, compiled if it is not there."""
    sources = sorted(HERE.glob("*.c"))
    texts = [path.read_text() for path in sorted(HERE.glob("*.[ch]"))]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    key = "\0".join([*texts, *FLAGS, version.stdout, _cpu()])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openzaya"
    target = cache / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        out = Path(folder) / target.name
        command = [compiler, *FLAGS, *map(str, sources), "-o", str(out), "-lm"]
        # Clang on macOS comes without OpenMP: one thread is better than none.
        for openmp in (["-fopenmp"], []):
            done = subprocess.run([*command, *openmp], capture_output=True, text=True)
            if done.returncode == 0:
                break
        done.check_returncode()
        out.rename(target)  # several processes may build at once: the last one wins
    return target


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    kept = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))
