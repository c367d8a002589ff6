"""What the project's list of reliability tests asks for, row by row, for a whole night."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promise:
    """One row: a test, how much of it is asked for, and when it passes."""

    row: str
    about: str
    asked: str  #: of a whole night; a run of `make chaos` says beside it how much it did
    rule: str
    elsewhere: str = ""  #: what shows it, when no scenario and no suite of a chaos run does


PROMISES: tuple[Promise, ...] = (
    Promise(
        "R1",
        "kill -9 of the broker under load, sync flush",
        "200 kills",
        "no acknowledged message lost, none corrupt; opens in 2 s, and 2 s more per GB of log "
        "after the first",
    ),
    Promise(
        "R2",
        "the same with async flush, and power loss",
        "100 kills",
        "kill: none lost; power loss: at most what the flush policy says",
    ),
    Promise(
        "R3",
        "power loss, with unsynced pages lost in any order",
        "5,000 seeds",
        "none lost that was flushed; the store opens always",
    ),
    Promise(
        "R4",
        "torn and flipped bytes in every file",
        "20,000 mutations",
        "no changed body served as good; the tail is cut, damage in the middle is reported",
    ),
    Promise(
        "R5",
        "analysis of the histories of all scenarios",
        "all histories",
        "lost, inconsistent, aborted, reordered, unseen after the drain: 0",
    ),
    Promise(
        "R6",
        "consumers that start, stop, die and stand still",
        "1,800 s of faults",
        "each message at least once; again only what was in flight and 5 s of progress per kill; "
        "none again after a stop in order",
    ),
    Promise(
        "R7",
        "consuming in order under pauses and wrong dates",
        "1,800 s of faults",
        "two owners never overlap; no order violation",
    ),
    Promise(
        "R8",
        "network: delay, loss, half-open, partition, slow reader",
        "1,200 s of faults",
        "as R5; everybody goes on ≤ 5 s after healing",
    ),
    Promise(
        "R9",
        "rebalance: join, leave, crash, more queues",
        "each kind",
        "disjoint and complete; ≤ 1 s after notice, ≤ 21 s without, ≤ 125 s after a silent death "
        "(where the scenario has less than 300 s, clocks run 20 times as fast for the last)",
    ),
    Promise(
        "R10",
        "allocation strategies against the Java classes",
        "10,000 cases",
        "equal; no gap, no overlap",
        "`make test`: tests/client/consumer/test_allocation.py",
    ),
    Promise(
        "R11",
        "model of a consumer's window and progress",
        "200,000 steps",
        "progress never passes an unfinished offset",
        "`make test`, with fewer steps: tests/client/consumer/test_progress.py, test_window.py",
    ),
    Promise(
        "R12",
        "retry schedule and dead letters on a virtual clock",
        "all 16 attempts",
        "delays exact, dead letter after 16",
        "`make test`: tests/broker/test_retries.py",
    ),
    Promise(
        "R13",
        "delayed messages across kill -9",
        "100,000 delayed messages",
        "none lost, none early, ≤ 1 s late",
    ),
    Promise(
        "R14",
        "transactions with a crash at each step",
        "each step",
        "committed ones seen, rolled back ones never, unknown ones asked for",
    ),
    Promise(
        "R15",
        "Spark: kill -9 of driver, worker and broker in mid-batch",
        "50 kills",
        "ids in the sink = ids sent; lag 0 in the end",
    ),
    Promise(
        "R16",
        "Spark: topic scaled, messages expired, broker moved",
        "each kind",
        "new queues from their start; lost ranges are told",
    ),
    Promise(
        "R17",
        "fuzzing of every byte interface",
        "5,000,000 inputs",
        "no crash, no hang, memory bounded, only that connection closed",
    ),
    Promise(
        "R18",
        "deterministic simulation of the whole system",
        "20,000 seeds",
        "as R5; a failure repeats from its seed",
    ),
    Promise(
        "R19",
        "disk full, read-only, failing fsync, too few file handles",
        "each kind",
        "writes refused with a code, reads go on; nothing acknowledged after a failed fsync",
    ),
    Promise(
        "R20",
        "soak with 20 groups and rolling restarts",
        "3,600 s of load at 5,000 msg/s",
        "memory growth < 5 % (in a run of less than an hour 12 MiB, where that is more), "
        "descriptors flat, p99 of sends at most twice that of the beginning (50 ms, where that is "
        "more)",
    ),
    Promise(
        "R21",
        "a large backlog, cold start, consumer from the beginning",
        "10,000,000 messages of backlog",
        "open ≤ 10 s, first message ≤ 1 s, work per message steady within 20 %, time per message "
        "within 50 %, never 1 s without a message",
    ),
    Promise(
        "R22",
        "Java, C++ and our clients with both brokers",
        "the whole matrix",
        "all pass",
        "`make interop`",
    ),
    Promise(
        "R23",
        "many small things",
        "1,000 topics, 2,500 groups, 1,000 connections",
        "a round of heartbeats < 1 s of CPU, console's first page < 1 s",
    ),
    Promise(
        "R24",
        "stores of each earlier release open in this one",
        "each release",
        "byte-equal messages",
        "there is no earlier release",
    ),
)
