"""What is wrong inside groups, as operators get it over the wire.

RocketMQ has no request for it, so it travels beside answers that have room for more:

* the answer to GET_CONSUMER_CONNECTION_LIST (203) has the findings of the group in the extra field
  `findings`, a JSON list, when there are any;
* the answer to GET_CONSUMER_LIST_BY_GROUP (38), which members ask for every 20 s, has them in the
  same field, each in words and without its details: a consumer puts them into its log;
* the runtime information (28) has one entry `groupFinding_<n>` for each, in words, and their number
  as `groupFindings`; `mqadmin brokerStatus` prints all of them.

Other tools and clients ignore all of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from orbitmq.broker.disagreements import DifferentSubscriptions, Finding

#: The field of an answer.
FIELD = "findings"
#: The keys of runtime information.
COUNT_KEY = "groupFindings"
ENTRY_KEY = "groupFinding_"
#: Findings that members of a group are told.
MOST_TOLD = 10
#: Findings that runtime information lists; more than that nobody reads.
MOST_LISTED = 100


class VariantBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What some members say of a topic; without an expression they do not subscribe to it."""

    clients: tuple[str, ...]
    expression: str | None = None
    expression_type: str | None = None


class FindingBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A finding: `different subscriptions` with topic and variants, or `duplicate client`."""

    kind: str
    group: str
    text: str
    topic: str | None = None
    variants: tuple[VariantBody, ...] = ()
    client_id: str | None = None
    addresses: tuple[str, ...] = ()


def findings_text(found: Iterable[Finding]) -> str:
    """Findings as the text of a field."""
    return msgspec.json.encode([_body(finding) for finding in found]).decode()


def findings_words(found: Iterable[Finding]) -> str:
    """Findings as the text of a field, in words only: short, however large the group is."""
    return msgspec.json.encode(
        [msgspec.structs.replace(body, variants=(), addresses=()) for body in map(_body, found)][
            :MOST_TOLD
        ]
    ).decode()


def findings_table(found: Iterable[Finding]) -> dict[str, str]:
    """Findings as entries of runtime information."""
    texts = [str(finding) for finding in found]
    table = {COUNT_KEY: str(len(texts))}
    for number, text in enumerate(texts[:MOST_LISTED], 1):
        table[f"{ENTRY_KEY}{number}"] = text
    return table


def _body(finding: Finding) -> FindingBody:
    if isinstance(finding, DifferentSubscriptions):
        return FindingBody(
            kind="different subscriptions",
            group=finding.group,
            text=str(finding),
            topic=finding.topic,
            variants=tuple(
                VariantBody(
                    clients=variant.clients,
                    expression=variant.expression,
                    expression_type=variant.expression_type,
                )
                for variant in finding.variants
            ),
        )
    return FindingBody(
        kind="duplicate client",
        group=finding.group,
        text=str(finding),
        client_id=finding.client_id,
        addresses=finding.addresses,
    )
