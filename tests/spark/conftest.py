"""One Spark session and one cluster for all tests of the source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.sparksession import running_session

if TYPE_CHECKING:
    pass


@pytest.fixture(scope="session")
def spark():
    with running_session("orbitmq tests") as session:
        yield session
