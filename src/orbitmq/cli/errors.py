"""What the command refuses to do, and the exit code that says so."""

from __future__ import annotations

from typing import ClassVar

from orbitmq.errors import OrbitError

#: Something could not be started, or ended by itself.
FAILED = 1
#: What was asked for cannot work: a setting, a flag, an address. As every Unix tool has it.
MISUSED = 2
#: What a shell reports for a program that Ctrl-C ended.
INTERRUPTED = 130


class CommandError(OrbitError):
    """The command ends with this sentence."""

    exit_code: ClassVar[int] = FAILED


class Misused(CommandError):
    """Words and flags that cannot be meant like that."""

    exit_code: ClassVar[int] = MISUSED


class NeedsConsent(CommandError):
    """A change was to be made, and there is nobody at a terminal to ask."""

    exit_code: ClassVar[int] = MISUSED

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; there is no terminal to ask at: say --yes to do it, or --dry-run to see what "
            "would happen"
        )


class Unheard(CommandError):
    """Whoever read the output has left, as `head` does: nothing more can be said to it."""

    #: What a shell reports for a program that ends with it.
    exit_code: ClassVar[int] = 141


class SettingRefused(CommandError):
    """A setting is unknown or has a value that cannot work; says where it comes from."""

    exit_code: ClassVar[int] = MISUSED


class Exposed(CommandError):
    """An address that others reach was to be listened on without protection."""

    exit_code: ClassVar[int] = MISUSED

    def __init__(self, setting: str, host: str, danger: str, remedy: str) -> None:
        ways = f"{remedy}, listen" if remedy else "listen"
        super().__init__(
            f"{setting} is {host!r}, which other machines reach, and anybody there could {danger}; "
            f"{ways} on 127.0.0.1, or say --insecure if the network is trusted"
        )


class PortTaken(CommandError):
    """An address cannot be listened on; says which flag chooses another."""

    def __init__(self, problem: object, option: str) -> None:
        said = str(problem).partition("; ")[0]
        super().__init__(f"{said}; choose another port with {option}, or any free one with 0")


class ProcessEnded(CommandError):
    """A process that was to serve has ended by itself."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} ended by itself with exit code {code}; everything was stopped")


class NotStopped(CommandError):
    """A process did not save and close everything when it was stopped."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(
            f"{name} did not stop in order (exit code {code}); its next start repairs what is open"
        )
