"""Images built and run by buildah, on a machine without a container engine.

Every program runs in namespaces of its own: what it mounts and starts goes away with it, and it
goes away with this process. Containers share the network of the host.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TOOLS = ("buildah", "debootstrap", "setpriv", "unshare")
#: Java looks processes up in /proc, which therefore must be that of the namespace.
NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
#: The release of Debian with each Python that the Dockerfile may ask for.
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
#: What Debian has in packages of its own, and the official image of Python has.
PACKAGES = ("ca-certificates", "python-is-python3", "python3", "python3-pip", "python3-venv")
#: Seconds from one line of a long step to the next.
PACE = 20.0


class Failed(Exception):
    """A step that did not succeed, with what to look at."""


def missing() -> str | None:
    """Why images cannot be built here, in a sentence; None if they can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return (
            f"the images were not built, because {' and '.join(absent)} cannot be found; "
            "on Debian: apt-get install buildah debootstrap"
        )
    if os.geteuid() != 0:
        return "the images were not built, because debootstrap and buildah need root; use sudo"
    return None


@dataclass(frozen=True, slots=True)
class Buildah:
    """The storage of images and containers in a folder; the logs of long steps are beside it."""

    folder: Path

    def words(self, *words: str | Path) -> list[str]:
        storage = ("--root", str(self._storage), "--runroot", str(self.folder / "run"))
        return [*NAMESPACES, "buildah", *storage, "--storage-driver", "vfs", *map(str, words)]

    def ask(self, *words: str | Path) -> str:
        """What a short command says."""
        done = subprocess.run(
            self.words(*words), capture_output=True, encoding="utf-8", check=False
        )
        if done.returncode != 0:
            raise Failed(f"buildah {words[0]} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def do(self, title: str, log_name: str, command: list[str]) -> None:
        """A long step, which says how far it is."""
        log = self.folder / f"{log_name}.log"
        began = time.monotonic()
        print(f"{title} ...", flush=True)
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                while True:
                    try:
                        process.wait(PACE)
                        break
                    except subprocess.TimeoutExpired:
                        passed = time.monotonic() - began
                        print(f"  {passed:.0f} s: {_last_line(log)[:90]}", flush=True)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise Failed(
                f"{title} ended with {process.returncode}: {_last_line(log)} "
                f"(the whole of it is in {log})"
            )
        print(f"  done in {time.monotonic() - began:.0f} s", flush=True)

    def make_base(self, name: str, python: str) -> None:
        """An image under a name of the official Python image, made of Debian's own packages."""
        if python not in RELEASES:
            raise Failed(f"no release of Debian is known here that has Python {python}")
        container = self.ask("from", "scratch")
        root = self.root_of(container)
        packages = f"--include={','.join(PACKAGES)}"
        command = ["debootstrap", "--variant=minbase", packages, RELEASES[python], str(root)]
        self.do(f"making the base image {name}", "base", [*NAMESPACES, *command])
        for unneeded in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(root / unneeded)
        path = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.ask("config", "--env", f"PATH={path}", "--cmd", "python3", container)
        self.ask("commit", "--quiet", "--rm", container, name)

    def build(self, dockerfile: Path, target: str, tag: str, context: Path) -> None:
        """An image of the Dockerfile, with the settings that pip has on this machine."""
        how = ("--isolation", "chroot", "--format", "docker", "--pull=never", "--layers=false")
        ignored = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
        what = ("--file", dockerfile, "--ignorefile", ignored, "--target", target, "--tag", tag)
        volumes = (f"--volume={each}:{inside}:ro" for each, inside in self._pip_settings())
        command = self.words("build", *how, *what, *volumes, context)
        self.do(f"building the image {tag}", tag, command)

    def config(self, image: str) -> dict[str, Any]:
        """What an engine would run of an image, and how."""
        document = json.loads(self.ask("inspect", "--type", "image", image))
        config: dict[str, Any] = document["Docker"]["config"]
        return config

    def root_of(self, container: str) -> Path:
        return Path(self.ask("mount", container))

    def new_volume(self, container: str, place: str) -> Path:
        """A folder as an engine makes it for a new volume: with the owner that the image says."""
        given = (self.root_of(container) / place.lstrip("/")).stat()
        volume = self.folder / "volumes" / container
        volume.mkdir(parents=True)
        os.chown(volume, given.st_uid, given.st_gid)
        volume.chmod(given.st_mode & 0o7777)
        return volume

    def run_words(
        self,
        container: str,
        command: list[str],
        environment: Mapping[str, str],
        volumes: Mapping[Path, str],
    ) -> list[str]:
        """What runs a command in a container, as the user and with the variables of its image."""
        given = [f"--env={name}={value}" for name, value in environment.items()]
        given += [f"--volume={each}:{inside}" for each, inside in volumes.items()]
        # An engine puts the name of the host into /etc/hosts; buildah does not.
        how = ("--isolation", "chroot", "--hostname", "localhost")
        return self.words("run", *how, *given, container, "--", *command)

    def remove(self) -> None:
        """Everything but the logs."""
        for part in (self._storage, self.folder / "run", self.folder / "volumes"):
            shutil.rmtree(part, ignore_errors=True)
        self._pip_file.unlink(missing_ok=True)

    @property
    def _storage(self) -> Path:
        return self.folder / "storage"

    @property
    def _pip_file(self) -> Path:
        return self.folder / "pip.conf"

    def _pip_settings(self) -> Iterator[tuple[Path, str]]:
        """pip's settings here as a file, and the files that they name: where each belongs.

        They are mounted while the image is built, and so are no part of it.
        """
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout
        settings = {}
        # The lines of files come before those of variables if sorted by this, and so give way.
        for line in sorted(listed.splitlines(), key=lambda each: each.startswith(":env:")):
            name, _, value = line.partition("=")
            settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
        if certificates := os.environ.get("SSL_CERT_FILE"):
            settings.setdefault("cert", certificates)
        parser = configparser.RawConfigParser()
        parser["global"] = settings
        self._pip_file.touch(0o600)  # an address may have a password in it
        with self._pip_file.open("w") as file:
            parser.write(file)
        yield self._pip_file, "/etc/pip.conf"
        for value in settings.values():
            if value.startswith("/") and Path(value).exists():
                yield Path(value), value


class Running:
    """A command that runs in a container, with what it writes to its output and its errors."""

    def __init__(self, words: list[str], log: Path, patience: float) -> None:
        self._log = log
        self._patience = patience
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=self._patience)

    def lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        yield from self._process.stdout

    def process_id(self) -> int:
        """Of the command itself, below the processes that prepare the container."""
        found = self._process.pid
        while children := _children(found):
            (found,) = children
        return found

    def ended(self) -> int:
        """Wait for its end; returns the exit status."""
        self._process.communicate(timeout=self._patience)
        return self._process.returncode

    @property
    def log(self) -> str:
        return self._log.read_text()


def _children(process: int) -> list[int]:
    # Each is listed with the thread that started it, which in buildah may be any.
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(number) for thread in threads for number in thread.read_text().split()]


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next(filter(None, reversed(lines)), "it has said nothing")
