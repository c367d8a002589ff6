"""Bodies in Avro and Protobuf: schemas and message types from what people have of them.

The two packages are extras, and have no types. Whatever they raise for foreign bytes says that the
bytes do not match, and is left to the caller.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from io import BytesIO
from typing import Any, Final

from orbitmq.errors import OrbitError, install_command

#: The modules that formats need.
_MODULES: Final = {"avro": "fastavro", "protobuf": "google.protobuf"}

Read = Callable[[bytes], Any]
Write = Callable[[Any], bytes]


class FormatRefused(OrbitError):
    """A schema, a descriptor or a message type that cannot be used."""


def missing(form: str) -> str | None:
    """How to install what a format needs and this machine lacks; None: nothing is missing."""
    module = _MODULES.get(form)
    if module is None:
        return None
    try:
        importlib.import_module(module)
    except ImportError:
        return install_command("formats")
    return None


def check_installed(form: str) -> None:
    """Raises `FormatRefused` if the package of a format is not there."""
    if (remedy := missing(form)) is not None:
        raise FormatRefused(f"{form} needs a package that is not installed; {remedy}")


# Avro


def avro_schema(text: str) -> Any:
    """The parsed schema of a JSON text. Raises `FormatRefused`."""
    check_installed("avro")
    try:
        return importlib.import_module("fastavro").parse_schema(json.loads(text))
    except Exception as error:  # the package raises what it likes
        raise FormatRefused(f"not an Avro schema: {error}") from error


def avro_reader(schema: Any) -> Read:
    """Reads bytes of a parsed schema, without the header of a file."""
    read = importlib.import_module("fastavro").schemaless_reader

    def value(body: bytes) -> Any:
        source = BytesIO(body)
        found = read(source, schema, None)
        if rest := len(body) - source.tell():
            raise ValueError(f"{rest} bytes are left after the value")
        return found

    return value


def avro_writer(schema: Any) -> Write:
    """Writes values of a parsed schema, without the header of a file."""
    write = importlib.import_module("fastavro").schemaless_writer

    def body(value: Any) -> bytes:
        target = BytesIO()
        # A field that the schema does not have is a mistake.
        write(target, schema, value, strict_allow_default=True)
        return target.getvalue()

    return body


# Protobuf


def protobuf_class(descriptor: bytes, message: str) -> Any:
    """The class of a message type in a FileDescriptorSet. Raises `FormatRefused`."""
    check_installed("protobuf")
    pool = importlib.import_module("google.protobuf.descriptor_pool").DescriptorPool()
    sets = importlib.import_module("google.protobuf.descriptor_pb2").FileDescriptorSet()
    factory = importlib.import_module("google.protobuf.message_factory")
    try:
        sets.ParseFromString(descriptor)
        for file in sets.file:
            pool.Add(file)
        return factory.GetMessageClass(pool.FindMessageTypeByName(message))
    except KeyError as error:
        known = sorted(
            f"{file.package}.{each.name}".lstrip(".")
            for file in sets.file
            for each in file.message_type
        )
        raise FormatRefused(
            f"the descriptor has no message type {message!r}; it has {', '.join(known[:20])}"
        ) from error
    except Exception as error:  # the package raises what it likes
        raise FormatRefused(f"not a descriptor of Protobuf: {error}") from error
