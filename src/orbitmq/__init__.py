"""OrbitMQ: RocketMQ-compatible messaging for Python people whose data pipelines run on Spark."""

from orbitmq.errors import OrbitError

__version__ = "0.1.0"

__all__ = [
    # Errors
    "OrbitError",
    # The release
    "__version__",
]
