"""Lets Spark find the `rocketmq` data source by itself.

Spark imports every top-level module whose name begins with `pyspark_`, once per session, and takes
its `DefaultSource`. One that raises would hide all others, so this one does not, whatever state
the installation is in.
"""

from __future__ import annotations

import logging

try:
    from orbitmq.spark.source import RocketMQSource as DefaultSource
except Exception:  # see above
    from orbitmq.errors import install_command

    logging.getLogger(__name__).warning(
        "the rocketmq data source cannot be used; %s", install_command("spark"), exc_info=True
    )
else:
    __all__ = ["DefaultSource"]
