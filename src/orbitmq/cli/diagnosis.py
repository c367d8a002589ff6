"""What the doctor says: each finding is what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orbitmq.console.checks.faults import Check, Fault, sorted_faults


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRecord:
    """Something that is wrong."""

    check: str  #: the check that found it
    kind: str  #: what it is, in a word or two
    weight: str  #: bad, or warn
    subject: str  #: what it is about: a server, topic, group, pipeline or setting
    problem: str  #: what is wrong
    remedy: str  #: what to do
    command: str | None  #: that does it, or looks into it

    @classmethod
    def of(cls, fault: Fault) -> FindingRecord:
        return cls(
            check=fault.check.value,
            kind=fault.kind,
            weight=fault.weight.value,
            subject=fault.subject,
            problem=fault.text,
            remedy=fault.remedy,
            command=fault.command,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord:
    """A check that was made."""

    check: str
    is_well: bool
    about: str  #: what was looked at, or why it could not be


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisRecord:
    """Everything that was looked at, and everything that is wrong."""

    is_well: bool
    checks: tuple[CheckRecord, ...]
    findings: tuple[FindingRecord, ...]


class Diagnosis:
    """Collects what checks find."""

    def __init__(self) -> None:
        self._made: dict[Check, str] = {}
        self._faults: list[Fault] = []

    def made(self, about: str, *checks: Check) -> None:
        """Checks that were made, and what was looked at."""
        self._made |= dict.fromkeys(checks, about)

    def found(self, faults: Iterable[Fault]) -> None:
        """What they found."""
        self._faults += faults

    def record(self) -> DiagnosisRecord:
        ill = {fault.check for fault in self._faults}
        return DiagnosisRecord(
            is_well=not self._faults,
            checks=tuple(
                CheckRecord(check=check.value, is_well=check not in ill, about=about)
                for check, about in self._made.items()
            ),
            findings=tuple(map(FindingRecord.of, sorted_faults(self._faults))),
        )
