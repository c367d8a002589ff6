"""What can be wrong with a cluster: one set of checks, for the console and for `orbitmq doctor`.

A check takes what was seen and gives faults: what is wrong in words, what to do, and the command
that does it. None of them asks anybody; `examining` and the collector do that.
"""
