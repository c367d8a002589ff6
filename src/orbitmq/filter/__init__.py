"""Which messages a subscription selects: by tag, or by a SQL92 condition on properties.

Importing this needs nothing beyond the base install; the SQL parser is loaded with the first
SQL92 subscription.
"""

from orbitmq.errors import InvalidFilter
from orbitmq.filter.tags import (
    SQL92,
    TAG,
    IncomparableValues,
    MessageFilter,
    TagFilter,
    UnknownFilterType,
    compile_filter,
    parse_tags,
)

__all__ = [
    "SQL92",
    "TAG",
    "IncomparableValues",
    "InvalidFilter",
    "MessageFilter",
    "TagFilter",
    "UnknownFilterType",
    "compile_filter",
    "parse_tags",
]
