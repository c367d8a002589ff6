"""`Open in a notebook`: what the page gives to copy runs in Spark as it is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from orbitmq.cli import doctor

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

#: Seconds for Spark to start, read and end.
DEADLINE = 300


async def test_the_snippet_reads_the_chosen_letters(desk):
    if list(doctor.java(os.environ)):
        pytest.skip("no Java for Spark here")
    page = await desk.open("/dead-letters/billing?key=order-3")
    await page.locator(".pile").get_by_role("button", name="Open in a notebook").click()
    snippet = await page.locator("dialog pre").inner_text()

    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", snippet],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [line for line in ran.stdout.splitlines() if "order-" in line]
    assert len(rows) == 1
    assert "order-3" in rows[0]
