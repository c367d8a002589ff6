"""What the doctor can say: each finding is what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Found(NamedTuple):
    """What a check finds wrong."""

    subject: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRecord:
    """Something that is wrong."""

    check: str  #: the check that found it
    subject: str  #: what it is about: a server, topic, group, client or setting
    problem: str  #: what is wrong
    remedy: str  #: what to do


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
        self._checks: list[CheckRecord] = []
        self._findings: list[FindingRecord] = []

    def add(self, check: str, about: str, findings: Iterable[Found]) -> None:
        """A check that was made, and what it found."""
        found = [
            FindingRecord(
                check=check, subject=each.subject, problem=each.problem, remedy=each.remedy
            )
            for each in findings
        ]
        self._findings += found
        self._checks.append(CheckRecord(check=check, is_well=not found, about=about))

    def record(self) -> DiagnosisRecord:
        return DiagnosisRecord(
            is_well=not self._findings,
            checks=tuple(self._checks),
            findings=tuple(self._findings),
        )
