"""What can be wrong with this machine for Spark: its Java, and the Python that workers run."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

from orbitmq.console.checks.faults import Check, Fault, Weight

_QUESTION = """
import sys
print("%d.%d" % sys.version_info[:2])
try:
    import orbitmq, pyarrow, pyspark
except ImportError as error:
    print(error)
"""


def has_spark() -> bool:
    return importlib.util.find_spec("pyspark") is not None


def java(environment: Mapping[str, str]) -> Iterator[Fault]:
    """Whether Spark finds a Java that it runs on."""
    from orbitmq.spark.java import NoJava, find_java  # noqa: PLC0415  # few need it

    try:
        find_java(environment)
    except NoJava as error:
        problem, _, remedy = str(error).partition("; ")
        yield _bad(Check.JAVA, "Java", problem, remedy)


def workers(environment: Mapping[str, str]) -> Iterator[Fault]:
    """Whether Spark's workers run the Python of this process, with the same packages."""
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        named = environment.get(variable)
        if not named:
            continue
        unset = f"unset {variable}, or set it to {sys.executable}"
        executable = shutil.which(named, path=environment.get("PATH", ""))
        if executable is None:
            yield _bad(
                Check.WORKERS, variable, f"{variable} is {named}, which cannot be run", unset
            )
            continue
        try:
            said = subprocess.run(
                [executable, "-c", _QUESTION],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            ).stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            yield _bad(
                Check.WORKERS,
                variable,
                f"{variable} is {named}, which is no Python: {error}",
                unset,
            )
            continue
        if said[0] != ours:
            problem = f"{variable} is {named}, a Python {said[0]}, and this is Python {ours}"
            yield _bad(Check.WORKERS, variable, f"{problem}: Spark refuses to mix them", unset)
        elif len(said) > 1:
            yield _bad(
                Check.WORKERS,
                variable,
                f"{variable} is {named}, which lacks a package: {said[1]}",
                f"{named} -m pip install 'orbitmq[spark]', or {unset}",
            )


def _bad(check: Check, subject: str, problem: str, remedy: str) -> Fault:
    return Fault(
        check=check,
        kind="not ready for Spark",
        weight=Weight.BAD,
        subject=subject,
        text=problem,
        remedy=remedy,
    )
