"""Faults against real processes, with a history of what happened and a checker that judges it.

`python -m tools.chaos` (or `make chaos`) runs every scenario and prints one table of figures
against the rules that they have to keep. The short versions run with the tests, from
`tests/faults`.

A run has four parts. *Workers* are producers and consumers as processes; each writes its own
history, a line before and after everything it does. The *nemesis* is a seeded list of faults:
kill -9, SIGSTOP, networks that lose and delay, disks that are full or lie. The *checker* reads all
histories afterwards and looks for what must not be. *Figures* are what came out, each with its
rule.
"""
