"""The web console: what a cluster does, what is wrong with it, and what to do about it.

The page asks this process, this process asks the brokers: lists, a few requests per broker however
many topics and groups there are. Everything goes through the client's administration, so it works
with Apache RocketMQ as well.
"""
