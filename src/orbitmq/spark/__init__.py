"""RocketMQ topics as DataFrames, and what Spark needs around it on a laptop."""
