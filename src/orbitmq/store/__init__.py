"""Commit log, consume queues, key index: messages in files, in Apache RocketMQ's formats."""
