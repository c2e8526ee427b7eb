from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.helpers import one_thread


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
