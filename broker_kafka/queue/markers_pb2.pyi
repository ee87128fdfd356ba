from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Version(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    V1: _ClassVar[Version]
    V2: _ClassVar[Version]
    V3: _ClassVar[Version]

class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    START: _ClassVar[Type]
    END: _ClassVar[Type]
    KEEPALIVE: _ClassVar[Type]
V1: Version
V2: Version
V3: Version
START: Type
END: Type
KEEPALIVE: Type

class MessageID(_message.Message):
    __slots__ = ("partition", "offset", "topic", "queue")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    partition: int
    offset: int
    topic: str
    queue: str
    def __init__(self, partition: _Optional[int] = ..., offset: _Optional[int] = ..., topic: _Optional[str] = ..., queue: _Optional[str] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: bytes
    def __init__(self, name: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class HeaderList(_message.Message):
    __slots__ = ("headers",)
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    def __init__(self, headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("topic", "partition", "offset", "timestamp_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., timestamp_ms: _Optional[int] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("of", "as_of")
    OF_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    of: int
    as_of: int
    def __init__(self, of: _Optional[int] = ..., as_of: _Optional[int] = ...) -> None: ...

class Marker(_message.Message):
    __slots__ = ("version", "type", "message_id", "redeliver_after_ms", "key", "value", "attempt", "headers", "origin", "released", "renewal", "holder", "reason", "max_attempts", "dead_letter", "packed", "more_offsets", "keys", "values", "times", "headers_of")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    REDELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    MORE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    HEADERS_OF_FIELD_NUMBER: _ClassVar[int]
    version: Version
    type: Type
    message_id: MessageID
    redeliver_after_ms: int
    key: bytes
    value: bytes
    attempt: int
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    origin: Origin
    released: bool
    renewal: Renewal
    holder: str
    reason: str
    max_attempts: int
    dead_letter: str
    packed: _containers.RepeatedScalarFieldContainer[bytes]
    more_offsets: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    times: _containers.RepeatedScalarFieldContainer[int]
    headers_of: _containers.RepeatedCompositeFieldContainer[HeaderList]
    def __init__(self, version: _Optional[_Union[Version, str]] = ..., type: _Optional[_Union[Type, str]] = ..., message_id: _Optional[_Union[MessageID, _Mapping]] = ..., redeliver_after_ms: _Optional[int] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., attempt: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., released: bool = ..., renewal: _Optional[_Union[Renewal, _Mapping]] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., max_attempts: _Optional[int] = ..., dead_letter: _Optional[str] = ..., packed: _Optional[_Iterable[bytes]] = ..., more_offsets: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., times: _Optional[_Iterable[int]] = ..., headers_of: _Optional[_Iterable[_Union[HeaderList, _Mapping]]] = ...) -> None: ...
