"""Where a peer listens, as people write it."""

from __future__ import annotations

from typing import Any, NamedTuple

from orbitmq.remoting.errors import AddressError


class Address(NamedTuple):
    """A host (name or number, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


#: Stands for an address that is not known.
NOWHERE = Address("", 0)


def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """`host:port`, `[IPv6]:port`, or without the port when there is a default for it."""
    if "://" in text:
        rest = text.partition("://")[2].strip().rstrip("/")
        raise AddressError(f"an address has no scheme: write {rest}, not {text!r}")
    host, port = _split(text.strip())
    if not host or any(character.isspace() or character in "/@" for character in host):
        raise AddressError(f"an address must be host:port or [IPv6]:port, got {text!r}")
    if port is None:
        if host.isdecimal():
            raise AddressError(f"a number alone is no address: write host:port, not {text!r}")
        if default_port is None:
            raise AddressError(f"an address needs a port, as in {host}:9876, got {text!r}")
        return Address(host, default_port)
    if not (port.isascii() and port.isdigit()) or not 0 <= int(port[:6]) <= 65535:
        raise AddressError(f"a port must be a number from 0 to 65535, got {port!r} in {text!r}")
    return Address(host, int(port))


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise AddressError(f"an IPv6 address must be [address]:port, got {text!r}")
        return host, rest[1:] if rest else None
    host, colon, port = text.partition(":")
    if ":" in port:
        raise AddressError(f"an IPv6 address must stand in brackets: [address]:port, got {text!r}")
    return host, port if colon else None


def socket_address(name: Any) -> Address:
    """A socket's name as an address; IPv4 in the clothes of IPv6 without them."""
    if not isinstance(name, tuple) or len(name) < 2:
        return NOWHERE
    host = str(name[0])
    return Address(host.removeprefix("::ffff:") if "." in host else host, int(name[1]))
