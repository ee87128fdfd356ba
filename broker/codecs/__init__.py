"""Codecs turn payloads into bytes and back.

A codec is stateless: topics, consumers and threads may share one. `decode` raises `DecodeError` for bytes that it
cannot decode; consumers dead-letter such a message. `encode` raises `InvalidMessage` for a payload that it cannot
encode.

A tombstone (`data is None`) has no payload. If `T` includes None, `Json(T)` decodes a tombstone as None and encodes
None as a tombstone. Every other codec raises `DecodeError` for a tombstone. Without a codec, tombstones have the
payload None.
"""

from broker.codecs.avro import Avro
from broker.codecs.debezium import Change, Debezium
from broker.codecs.errors import reason_of
from broker.codecs.json import Json, json_decoder
from broker.codecs.plain import Bytes, Text
from broker.codecs.protobuf import Protobuf, is_protobuf

__all__ = [
    "Avro",
    "Bytes",
    "Change",
    "Debezium",
    "Json",
    "Protobuf",
    "Text",
    "is_protobuf",
    "json_decoder",
    "reason_of",
]
