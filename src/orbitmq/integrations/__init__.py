"""OrbitMQ inside other projects: `kombu` (a transport for Celery) and `faststream` (a broker).

Each module needs the extra of its name and is imported by nothing else of OrbitMQ.
"""
