"""Records with header names that are not UTF-8, written with librdkafka by ctypes. Blocking."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_ssize_t, c_void_p
from typing import Any

from confluent_kafka import cimpl

__all__ = ["produce_raw_headers"]

_PRODUCER = 0
_TOPIC, _VALUE, _KEY, _FLAGS, _HEADERS, _END = 1, 4, 5, 7, 10, 0
_COPY = 2
_SECONDS = 20


def produce_raw_headers(
    bootstrap: str, topic: str, value: bytes, headers: Sequence[tuple[bytes, bytes]], key: bytes = b""
) -> None:
    """Write one record, and wait until it is on the broker."""
    library: Any = ctypes.CDLL(cimpl.__file__)
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(library, name).restype = c_void_p
    error = ctypes.create_string_buffer(512)
    config = c_void_p(library.rd_kafka_conf_new())
    assert library.rd_kafka_conf_set(config, b"bootstrap.servers", bootstrap.encode(), error, c_size_t(512)) == 0
    producer = c_void_p(library.rd_kafka_new(c_int(_PRODUCER), config, error, c_size_t(512)))
    assert producer.value is not None, error.value
    try:
        native = c_void_p(library.rd_kafka_headers_new(c_size_t(len(headers))))
        for name, content in headers:
            library.rd_kafka_header_add(native, name, c_ssize_t(len(name)), content, c_ssize_t(len(content)))
        refused = library.rd_kafka_producev(
            *(producer, c_int(_TOPIC), c_char_p(topic.encode())),
            *(c_int(_VALUE), c_char_p(value), c_size_t(len(value))),
            *(c_int(_KEY), c_char_p(key), c_size_t(len(key))),
            *(c_int(_FLAGS), c_int(_COPY), c_int(_HEADERS), native, c_int(_END)),
        )
        assert refused == 0
        assert library.rd_kafka_flush(producer, c_int(1000 * _SECONDS)) == 0
    finally:
        library.rd_kafka_destroy(producer)
