"""Entry points of experiments/, from the top of the checkout."""

from collections.abc import Callable

import pytest

from tests.commands import Done, start


@pytest.fixture(scope="session")
def dry_run() -> Callable[..., list[Done]]:
    return start
