"""The same kernels built for plainer CPUs than this one: no tiles, no AVX512, nothing but SSE2."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch

from openzaya.kernels import attention, cca, cross_entropy, experts, norm
from openzaya.kernels.native import library as module
from openzaya.kernels.native.library import FLAGS, Library
from tests.kernels import (
    test_native_attention,
    test_native_cca,
    test_native_cross_entropy,
    test_native_experts,
    test_native_norm,
)
from tests.kernels.native import PACKINGS, check, needs_kernels, normal, starts

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 CPUs"),
]

BUILDS = {
    "sse2": ("-march=x86-64",),
    "avx2": ("-march=x86-64-v3",),
    "no-tiles": ("-DNO_TILES",),
}


@pytest.fixture(scope="module", params=["here", "sse2"])
def built(request, tmp_path_factory) -> Library:
    if request.param == "here":
        return module.library()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    flags = (*FLAGS, "-march=x86-64", "-O1")  # the last one counts; optimising takes seconds
    lib = Library(module._build(compiler, flags, tmp_path_factory.mktemp("build")))
    assert not lib.tiles
    return lib


@pytest.fixture
def used(built, monkeypatch) -> Library:
    """The build, in place of the one for this CPU."""
    for part in (module, attention, cca, cross_entropy, experts, norm):
        monkeypatch.setattr(part, "library", lambda: built)
    return built


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _paired(b: torch.Tensor) -> torch.Tensor:
    """[k, n] -> [k / 2, n, 2], how products want their right side."""
    return b.view(b.shape[0] // 2, 2, b.shape[1]).transpose(1, 2).contiguous()


@pytest.mark.parametrize("m", [16, 32, 48, 64])
@pytest.mark.parametrize("n", [16, 32, 80])
@pytest.mark.parametrize("k", [32, 96])
def test_products(built, m, n, k):
    """Oracle: double precision; sums start at zero, or grow. All rows are wider than needed."""
    a, b = normal(m, m, k + 32), normal(n, k, n + 16)
    right, size, stride = _paired(b), ctypes.c_int, ctypes.c_long
    out = normal(1, m, n + 8, dtype=torch.float32)
    before = out.clone()
    for accumulate, start in ((0, 0.0), (1, 1.0)):
        expected = a[:, :k].double() @ b[:, :n].double() + start * out[:, :n].double()
        built._functions.tiles_open()
        built._functions.product(
            *(size(m), size(n), size(k), _pointer(a), stride(k + 32), _pointer(right)),
            *(stride(n + 16), _pointer(out), stride(n + 8), size(accumulate)),
        )
        built._functions.tiles_close()
        check(out[:, :n], expected, 1e-6)
    assert torch.equal(out[:, n:], before[:, n:]), "wrote past its columns"


@pytest.mark.parametrize(("m", "n"), [(32, 16), (32, 96), (64, 64), (96, 160)])
def test_turning(built, m, n):
    x = normal(m, m, n)
    size, stride = ctypes.c_int, ctypes.c_long
    turned = torch.zeros(n, m, dtype=torch.bfloat16)
    arguments = size(m), size(n), _pointer(x), stride(n), _pointer(turned), stride(m)
    built._functions.transpose(*arguments)
    assert torch.equal(turned, x.T)
    rows = torch.zeros(m // 2, n, 2, dtype=torch.bfloat16)
    built._functions.pair_rows(*arguments[:4], _pointer(rows), stride(n))
    assert torch.equal(rows, _paired(x))
    columns = torch.zeros(m // 2, n, 2, dtype=torch.bfloat16)
    other = x.T.contiguous()
    built._functions.pair_columns(
        size(n), size(m), _pointer(other), stride(m), _pointer(columns), stride(n)
    )
    assert torch.equal(columns, _paired(x))


def test_rounding(built):
    """Oracle: torch. Ties to even, infinities, and not a number."""
    x = torch.cat(
        [
            normal(1, 992, dtype=torch.float32),
            torch.tensor([1.00390625, 1.01171875, 3.4e38, -3.4e38, 0.0, -0.0, 65280.5, 1e-30] * 3),
            torch.tensor([float("inf"), float("-inf"), float("nan"), -float("nan")] * 2),
        ]
    )
    out = torch.empty(len(x), dtype=torch.bfloat16)
    size, stride = ctypes.c_int(len(x)), ctypes.c_long(len(x))
    built._functions.narrow_rows(ctypes.c_int(1), size, _pointer(x), stride, _pointer(out), stride)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out[~x.isnan()], x[~x.isnan()].bfloat16())


def test_one_case_of_each_kernel(used):
    begins = starts(PACKINGS["rows-differ"])
    test_native_attention._compare(begins.shape[0], 4, 2, begins.shape[1], 32, begins, 40)
    test_native_cca._Case(PACKINGS["rows-differ"], 4, 2, 32).compare()
    test_native_experts._compare(test_native_experts._index(130, 3), 3, identity=True)
    test_native_cross_entropy._compare(*test_native_cross_entropy._inputs(130, 300, 32))
    test_native_norm.test_merge_and_norm((3, 5, 48))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_all_cases_of_all_kernels(name, tmp_path):
    """The neighbours' tests and the whole model's, on kernels built for another CPU."""
    code = (
        "import sys, pytest\n"
        "from openzaya.kernels.native import library\n"
        f"library.FLAGS += {BUILDS[name]!r}\n"
        "assert not library.library().tiles\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    files = [
        *(f"tests/kernels/test_native_{part}.py" for part in ("attention", "cca", "norm")),
        *(f"tests/kernels/test_native_{part}.py" for part in ("experts", "cross_entropy")),
        "tests/model/test_native.py",
    ]
    subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        check=True,
    )
