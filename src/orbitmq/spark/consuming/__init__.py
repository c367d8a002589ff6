"""Consumer groups that run on Spark.

    driver: a member of its group -> owned queues -> pieces of them -> one Spark job for each batch
    tasks:  read a piece -> call the handlers -> send failed messages back -> report
    driver: commit offsets, and only then plan the next batch

Invariant: the group's offsets at the brokers are the only truth. A batch that is lost with any
process has committed nothing, and its messages come again. See docs/internals/spark-groups.md.
"""
