"""A Protobuf class as protoc generates it, without protoc."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf import timestamp_pb2 as timestamp_pb2
from google.protobuf import wrappers_pb2 as wrappers_pb2

__all__ = ["FILE", "Node", "Order"]

_F = descriptor_pb2.FieldDescriptorProto
FILE = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
FILE.dependency.extend(["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
_enum = FILE.enum_type.add(name="State")
for _number, _name in enumerate(["UNKNOWN", "PAID", "SENT"]):
    _enum.value.add(name=_name, number=_number)
_line = FILE.message_type.add(name="Line")
_line.field.add(name="name", number=1, type=_F.TYPE_STRING, label=_F.LABEL_OPTIONAL)
_line.field.add(name="count", number=2, type=_F.TYPE_UINT32, label=_F.LABEL_OPTIONAL)
_order = FILE.message_type.add(name="Order")


def _add(number: int, name: str, kind: int, *, of: str = "", repeated: bool = False) -> Any:
    label = _F.LABEL_REPEATED if repeated else _F.LABEL_OPTIONAL
    return _order.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)


_add(1, "id", _F.TYPE_INT64)
_add(2, "total", _F.TYPE_UINT64)
_add(3, "share", _F.TYPE_FLOAT)
_add(4, "state", _F.TYPE_ENUM, of=".shop.State")
_add(5, "lines", _F.TYPE_MESSAGE, of=".shop.Line", repeated=True)
_add(6, "first", _F.TYPE_MESSAGE, of=".shop.Line")
_add(7, "at", _F.TYPE_MESSAGE, of=".google.protobuf.Timestamp")
_add(8, "note", _F.TYPE_MESSAGE, of=".google.protobuf.StringValue")
_add(9, "labels", _F.TYPE_MESSAGE, of=".shop.Order.LabelsEntry", repeated=True)
_add(10, "states", _F.TYPE_ENUM, of=".shop.State", repeated=True)
_add(11, "body", _F.TYPE_BYTES)
_maybe = _add(12, "maybe", _F.TYPE_BOOL)
_maybe.proto3_optional = True
_maybe.oneof_index = 0
_order.oneof_decl.add(name="_maybe")
_entry = _order.nested_type.add(name="LabelsEntry")
_entry.options.map_entry = True
_entry.field.add(name="key", number=1, type=_F.TYPE_INT32, label=_F.LABEL_OPTIONAL)
_entry.field.add(name="value", number=2, type=_F.TYPE_ENUM, label=_F.LABEL_OPTIONAL, type_name=".shop.State")
_node = FILE.message_type.add(name="Node")
_node.field.add(name="next", number=1, type=_F.TYPE_MESSAGE, label=_F.LABEL_OPTIONAL, type_name=".shop.Node")

_pool = descriptor_pool.Default()
_pool.AddSerializedFile(FILE.SerializeToString())
Order: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("shop.Order"))
Node: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("shop.Node"))
