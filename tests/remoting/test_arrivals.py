"""Connections do not take the handles that files need."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

#: A listener in a process whose limit is low. Says where it listens; how many connections it has,
#: and how many files can be opened, when it accepts no more; and when it has accepted others.
_LISTEN = """
import asyncio, contextlib, logging, os, resource
from orbitmq.remoting.settings import Address
from orbitmq.remoting.server import Listener

class Told(logging.Handler):
    def emit(self, record):
        is_full.set()

async def main():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, hard))
    logging.getLogger("orbitmq.remoting.server").addHandler(Told())
    accepted = []
    listener = Listener(accepted.append, pause=0.05)
    print((await listener.listen(Address("127.0.0.1", 0), 200)).port, flush=True)
    await is_full.wait()
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    print(len(accepted), len(opened), flush=True)
    for each in opened:
        os.close(each)
    before = len(accepted)
    for each in accepted[:20]:
        each.close()
    while len(accepted) < before + 20:
        await asyncio.sleep(0.01)
    print("went on", flush=True)

is_full = asyncio.Event()
asyncio.run(asyncio.wait_for(main(), 60))
"""


def test_the_last_handles_are_left_to_files():
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", _LISTEN], stdout=subprocess.PIPE, text=True)
        )
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(120):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        connections, files = map(int, process.stdout.readline().split())

        assert 40 <= connections < 80
        assert files == 10
        assert process.stdout.readline() == "went on\n"
