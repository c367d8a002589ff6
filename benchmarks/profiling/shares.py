"""From the samples of all threads to the share that each function has of its process's time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.profiling.paths import HotPath, role_of
from benchmarks.profiling.speedscope import Frame, Shared, Speedscope, Thread

ROOT = Path(__file__).parents[2]

#: How py-spy names a process, in frames of its own that lie outside of the process's functions.
_PROCESS = re.compile(r'process (\d+):"(.*)"', re.DOTALL)
_THREAD = re.compile(r'Process \d+ Thread (\S+) "(.*)"', re.DOTALL)
#: Behind these, the path of a file is that of its module. Spark's workers run from an archive.
_INSTALLED = re.compile(r".*(?:/(?:site|dist)-packages|\.zip)/")
_STANDARD = re.compile(r".*/python3\.\d+/")
#: Samples of a thread that have to begin alike; a few are always torn.
_ALIKE = 0.97
#: Share of a function's own from which it is more than a step on the way.
_NOTEWORTHY = 0.01
#: Of the samples of the busiest thread: one with fewer is seldom at work.
_SELDOM = 0.15


@dataclass(frozen=True, slots=True)
class Process:
    number: int
    command: str


@dataclass(slots=True)
class RoleProfile:
    """What all processes with one role did while they did something."""

    role: str
    samples: int = 0  #: of all threads together, of which more than one may run at a time
    #: Samples in the function itself, and those in what it calls as well.
    own: Counter[Frame] = field(default_factory=Counter)
    total: Counter[Frame] = field(default_factory=Counter)
    #: Functions through which a thread came to its work, whatever that is: `main`, `run` and so on.
    ways: set[Frame] = field(default_factory=set)

    def largest_own(self, count: int) -> list[tuple[Frame, float]]:
        """Functions with their shares, the largest first."""
        return self._shares(self.own, count)

    def largest_total(self, count: int) -> list[tuple[Frame, float]]:
        """Likewise, without those that merely lead to all the others."""
        least = _NOTEWORTHY * self.samples
        hidden = {frame for frame in self.ways if self.own[frame] < least}
        shown = {frame: each for frame, each in self.total.items() if frame not in hidden}
        return self._shares(Counter(shown), count)

    def _shares(self, samples: Counter[Frame], count: int) -> list[tuple[Frame, float]]:
        return [(frame, each / self.samples) for frame, each in samples.most_common(count)]


@dataclass(frozen=True, slots=True)
class PathProfile:
    """A hot path: the shares by role, the busiest first, and the same for a flame graph."""

    roles: list[RoleProfile]
    graph: Speedscope

    @property
    def samples(self) -> int:
        return sum(each.samples for each in self.roles)


def read_profile(content: bytes, path: HotPath, root: Path = ROOT) -> PathProfile:
    """What py-spy wrote, with names that mean something on other machines as well."""
    written = msgspec.json.decode(content, type=Speedscope)
    places = _Places(written.shared.frames, root)
    roles: dict[str, RoleProfile] = {}
    threads: list[Thread] = []
    for thread in _without_resting(written.profiles):
        process = _process_of(thread, written.shared.frames)
        role = role_of(process.command, path)
        profile = roles.setdefault(role, RoleProfile(role))
        samples: list[list[int]] = []
        weights: list[float] = []
        for sample, weight in zip(thread.samples, thread.weights, strict=True):
            stack = places.known(sample)
            if not stack:
                continue  # in no function of Python
            samples.append(stack)
            weights.append(weight)
            profile.samples += 1
            profile.own[places.frames[stack[-1]]] += 1
            # Once, however often it called itself.
            for place in set(stack):
                profile.total[places.frames[place]] += 1
        profile.ways.update(places.frames[place] for place in _common_start(samples))
        threads.append(
            Thread(
                name=_thread_name(role, process, thread.name),
                end_value=sum(weights),
                samples=samples,
                weights=weights,
            )
        )
    threads.sort(key=lambda thread: (-thread.end_value, thread.name))
    busy = [each for each in roles.values() if each.samples]
    return PathProfile(
        sorted(busy, key=lambda each: (-each.samples, each.role)),
        Speedscope(name=path.name, shared=Shared(places.frames), profiles=threads),
    )


def _without_resting(threads: list[Thread]) -> list[Thread]:
    """Without those that the profiler has woken by looking at them, where they wait for work.

    They are seen seldom, and never at any other place.
    """
    most = max((len(thread.samples) for thread in threads), default=0)
    return [
        thread
        for thread in threads
        if len(thread.samples) >= _SELDOM * most or len(set(map(tuple, thread.samples))) > 1
    ]


def _common_start(stacks: list[list[int]]) -> list[int]:
    """What nearly all of them begin with."""
    alike, start = stacks, list[int]()
    while alike:
        depth = len(start)
        nexts = Counter(stack[depth] for stack in alike if len(stack) > depth)
        if not nexts or nexts.most_common(1)[0][1] < _ALIKE * len(stacks):
            break
        start.append(nexts.most_common(1)[0][0])
        alike = [stack for stack in alike if stack[depth : depth + 1] == start[depth:]]
    return start


class _Places:
    """Frames of functions with short names, each once; py-spy has some of them several times."""

    def __init__(self, frames: list[Frame], root: Path) -> None:
        self.frames: list[Frame] = []
        self._new: dict[int, int] = {}  #: only of functions, not of processes
        known: dict[Frame, int] = {}
        for place, frame in enumerate(frames):
            if not frame.file:
                continue
            named = Frame(frame.name, short_name(frame.file, root), frame.line)
            if named not in known:
                known[named] = len(self.frames)
                self.frames.append(named)
            self._new[place] = known[named]

    def known(self, sample: list[int]) -> list[int]:
        return [self._new[place] for place in sample if place in self._new]


def short_name(file: str, root: Path) -> str:
    """Relative to the project, or to where Python finds the module."""
    if match := _INSTALLED.match(file):
        return file[match.end() :]
    if Path(file).is_relative_to(root):
        return str(Path(file).relative_to(root))
    if match := _STANDARD.match(file):
        return file[match.end() :]
    return file


def _process_of(thread: Thread, frames: list[Frame]) -> Process:
    """The innermost of the processes that a stack begins with: the others have started it."""
    found = Process(0, "")
    for place in thread.samples[0] if thread.samples else ():
        if frames[place].file or not (match := _PROCESS.fullmatch(frames[place].name)):
            break
        found = Process(int(match[1]), match[2])
    return found


def _thread_name(role: str, process: Process, name: str) -> str:
    match = _THREAD.fullmatch(name)
    thread = (match[2] or match[1]) if match else name
    return f"{role} ({process.number}), {thread}"
