"""Consumer groups that run on Spark.

    driver: a member of its group -> owned queues -> pieces of them -> one Spark job per batch
    tasks:  read a piece -> the handlers -> failed messages back to their broker -> what is done
    driver: progress to the brokers, and only then the next batch

The truth about such a group is its progress at the brokers, as with any other consumer: that is why
retries, dead letters, hand-over and mixed groups mean the same here. A batch that is lost, with
whatever process, has moved no progress, and its messages come again.
"""
