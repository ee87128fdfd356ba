"""Spark's own Kafka connector with the options and columns of this package, if its jars are in the session.

It reads in the JVM, without the second process of a Python source. `docs/spark.md` lists the differences. Positions are
resolved here, when the read is planned, so that both readers start and end at the same records; the connector then
keeps its own offsets in the checkpoint. *Concurrency.* Driver only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import IntegerType

from broker.envelopes import DEAD_LETTER_PREFIX, RESERVED_PREFIX, RESERVED_PREFIXES, RETRY_LETTER_PREFIX
from broker.errors import ConfigurationError, Unsupported
from broker.hooks import logger
from broker.registry import read_target
from broker_spark.checkpoint.checkpoint_log import CheckpointLog
from broker_spark.checkpoint.topics_source import TopicsDataSource, check_planned, was_read_by_connector
from broker_spark.common.connections import bus_of
from broker_spark.common.offsets import ADVICE, LOG_SOURCE, Offsets
from broker_spark.common.options import CONNECTORS, Bound, Position, SourceOptions, as_texts, parse_choice
from broker_spark.common.topics import bounds_of, check_found, check_order, chosen_topics, resolve, skip_deleted
from broker_spark.session import hide_secrets, register
from broker_spark.spool.positions import SPOOL_SOURCE

__all__ = ["java_properties", "pipeline_stream", "read", "read_stream"]

_Found = TypeVar("_Found")
_PROVIDER: Final = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
_TIMES: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The years 1 to 9999 in microseconds since 1970; Python has no others."""
_OF_HEADERS: Final = frozenset({"id", "attributes", "publish_time"})
"""Columns that need headers, which cost the connector a sixth of its time."""
_TUNING: Final = {
    # Fewer polls, each of which requests the end offsets and starts a new fetch.
    "kafka.max.poll.records": "10000",
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    # A fetch at the end of the log delays the next fetch until it returns: half a second by default.
    "kafka.fetch.max.wait.ms": "10",
}
_PACKED: Final = f"{RESERVED_PREFIX}attributes"
"""The header with the attributes whose names are not valid header names."""
_RESERVED: Final = f"^({'|'.join(RESERVED_PREFIXES)})"
_SURROGATE: Final = "(?i)%ED%[AB][0-9A-F]%[89AB][0-9A-F]"
"""A surrogate, which Java replaces as one character, and Python byte by byte."""
_REPLACED: Final = "%EF%BF%BD" * 3
_INTERNAL: Final = "__"
"""The prefix of internal topics."""
_LOGIN: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_UNSUPPORTED: Final = ("maxBytes", "group", "subscription", "arrowRows")
"""Options without a counterpart in the connector."""


def read(spark: SparkSession, *, connector: str = "auto", **options: Any) -> DataFrame:
    """A batch read with the options of `format("broker")`, by Spark's own connector if it can.

    :param connector: `auto`, `always` (raises if it cannot), or `never`.
    :raises ConfigurationError: an option is invalid, or the connector cannot be used with `always`.
    """
    given = as_texts(options)
    source = SourceOptions.parse(given).for_batch()
    found = _settings(spark, source, connector)
    if found is None:
        return register(spark).read.format("broker").options(**given).load()
    found |= _bounds(source, stream=False)
    return _as_messages(spark.read.format("kafka").options(**found).load(), source)


def read_stream(
    spark: SparkSession, *, connector: str = "auto", checkpoint: str | None = None, **options: Any
) -> DataFrame:
    """A streaming read, as `read`. A checkpoint belongs to one of the two readers: set `connector` if jars may change.

    Spark's connector stores only offsets in a checkpoint. A second source without rows stores the topic ids there: a
    topic that is recreated, even while the query runs, fails the query when the next batch is planned. Spark repeats a
    batch that an earlier run planned without this check; with `checkpoint`, it is checked here.

    :param connector: as in `read`; `auto` uses Spark's connector only with `checkpoint` and in a classic session, and
        keeps the reader that wrote the checkpoint.
    :param checkpoint: the `checkpointLocation` of the query.
    :raises ConfigurationError: as in `read`; a topic was recreated since the checkpoint was written; or the checkpoint
        belongs to other topics or to the other reader.
    :raises Unsupported: `checkpoint` with `always` in a session of Spark Connect.
    """
    source = SourceOptions.parse(as_texts(options)).for_stream()
    log = CheckpointLog(spark, checkpoint) if checkpoint is not None and hasattr(spark, "_jvm") else None
    positions = log.positions() if log is not None else []
    was = was_read_by_connector(positions, source)
    found = _settings(spark, source, connector, _reason_against_connector(spark, checkpoint, was))
    if was is not None and was is not (found is not None):
        theirs, ours = "Spark's Kafka connector", "the Python source"
        before, now = (theirs, ours) if was else (ours, theirs)
        fix = 'connector="always" with its jars' if was else 'connector="never"'
        raise ConfigurationError(
            f"The checkpoint was written by a query on {before}, and this query uses {now}",
            advice=f"Set {fix}. Or: {ADVICE}",
        )
    if found is None:
        if positions and not any(each.get("source") in (LOG_SOURCE, SPOOL_SOURCE) for each in positions):
            # Neither reader wrote it: this raises with the source that did.
            Offsets.from_json(positions[0])
        return _stream(spark, source, found, options)
    if checkpoint is not None and log is None:
        raise Unsupported(
            "The topics of a checkpoint cannot be checked over Spark Connect: its files are on the server",
            advice='Remove checkpoint, or set connector="never", whose offsets include topic ids',
        )
    check_planned(positions, source)
    topics = register(spark).readStream.format(TopicsDataSource.name()).options(**as_texts(options)).load()
    return _stream(spark, source, found, options).union(topics)


def pipeline_stream(
    spark: SparkSession, *, unless: str = "", connector: str = "auto", **options: Any
) -> tuple[DataFrame, bool]:
    """`read_stream` without the topic check, which the pipeline does; and whether it uses Spark's connector.

    :param unless: why `auto` prefers the Python source; empty if it does not.
    """
    source = SourceOptions.parse(as_texts(options)).for_stream()
    found = _settings(spark, source, connector, unless)
    return _stream(spark, source, found, options), found is not None


def _reason_against_connector(spark: SparkSession, checkpoint: str | None, was: bool | None) -> str:
    """Why `auto` prefers the Python source for a stream; empty if it does not.

    :param was: whether the connector read the stream before; None if unknown.
    """
    if not hasattr(spark, "_jvm"):
        return "the checkpoint is on the server of Spark Connect and cannot be checked"
    if checkpoint is None:
        return "checkpoint is not given, so its topics cannot be checked"
    return "the checkpoint was written by a query on the Python source" if was is False else ""


def _stream(
    spark: SparkSession, source: SourceOptions, found: dict[str, str] | None, options: Mapping[str, Any]
) -> DataFrame:
    """:param found: the connector's options; None for the Python source."""
    if found is None:
        return register(spark).readStream.format("broker").options(**as_texts(options)).load()
    found |= _bounds(source, stream=True)
    found["maxOffsetsPerTrigger"] = str(source.max_rows)
    if source.min_rows is not None:
        found |= {"minOffsetsPerTrigger": str(source.min_rows), "maxTriggerDelay": f"{source.max_delay * 1000:.0f}ms"}
    return _as_messages(spark.readStream.format("kafka").options(**found).load(), source)


def _settings(spark: SparkSession, source: SourceOptions, connector: str, unless: str = "") -> dict[str, str] | None:
    """The connector's options without positions; None for the Python source.

    :param unless: why `auto` prefers the Python source; empty if it does not.
    :raises ConfigurationError: `always` is set, and the connector cannot read this.
    """
    wanted = parse_choice("connector", connector, CONNECTORS)
    if wanted == "never":
        return None
    found, reason = _translated(spark, source)
    if not reason and (wanted == "always" or not unless):
        return found
    if wanted == "always":
        raise ConfigurationError(
            f"connector is always, and Spark's Kafka connector cannot be used: {reason}",
            advice="Fix that, or remove connector",
        )
    logger.info("Reading with the Python source: %s", reason or unless)
    return None


def _translated(spark: SparkSession, source: SourceOptions) -> tuple[dict[str, str], str]:
    """The connector's options, and why it cannot be used, or an empty text."""
    backend, settings = read_target(source.url)
    if "kafka" not in backend.settings_type.schemes:
        return {}, f"{source.url.partition(':')[0]}: is not Kafka"
    for name in _UNSUPPORTED:
        if name in source.given:
            return {}, f"it has no counterpart of option {name}"
    if not _has_connector(spark):
        return {}, "its jars are not in the session"
    hide_secrets(spark)
    client, reason = java_properties(settings)
    found = {f"kafka.{name}": value for name, value in client.items()}
    found |= {
        "kafka.isolation.level": "read_committed",
        "includeHeaders": str(not _OF_HEADERS.isdisjoint(source.columns)).lower(),
        **_TUNING,
        "failOnDataLoss": str(source.on_data_loss == "fail").lower(),
    }
    return found, reason


def _has_connector(spark: SparkSession) -> bool:
    """Whether the session can load the connector's classes."""
    machine: Any = getattr(spark, "_jvm", None)
    if machine is not None:
        return bool(machine.org.apache.spark.util.Utils.classIsLoadable(_PROVIDER))
    if spark not in _servers:
        _servers[spark] = _is_loadable_by_server(spark, _PROVIDER)
    return _servers[spark]


_servers: Final[WeakKeyDictionary[SparkSession, bool]] = WeakKeyDictionary()
"""Whether the server of a session of Spark Connect has the connector: one question for each session."""


def _is_loadable_by_server(spark: SparkSession, name: str) -> bool:
    """Whether a server of Spark Connect can load a class. The error of a failed read would be in the server's log."""
    call = "SELECT reflect('org.apache.spark.util.Utils', 'classIsLoadable', :name)"
    try:
        return spark.sql(call, {"name": name}).collect()[0][0] == "true"
    except AnalysisException:
        # The server does not permit it.
        return False


def _bounds(source: SourceOptions, *, stream: bool) -> dict[str, str]:
    """Topics, start and end. A stream keeps `earliest` and `latest`, since it may get new partitions and topics."""
    bus = bus_of(source.url)
    topics = chosen_topics(bus, source)
    check_found("start", source.start, topics)
    check_found("end", source.end, topics)
    start_word, end_word = _word(source.start), _word(source.end)
    if stream and start_word is not None:
        # The connector resolves the word itself. Missing topics raise here.
        partitions = sum(map(len, _of_each(source, topics, bus.log.partitions)))
        found = {"startingOffsets": start_word}
    else:
        logs = _of_each(source, topics, lambda topic: bounds_of(bus, topic, shared=False))
        topics = [log.name for log in logs]
        partitions = sum(len(log.next) for log in logs)
        starts = {log.name: resolve(bus, "start", source.start, log) for log in logs}
        found = {"startingOffsets": _numbered(starts) if logs else start_word or "{}"}
        if not stream:
            ends = {log.name: resolve(bus, "end", source.end, log) for log in logs}
            if "end" in source.given:
                for topic in topics:
                    check_order(topic, starts[topic], ends[topic])
            found["endingOffsets"] = _numbered(ends) if logs else end_word or "{}"
    if source.pattern is not None and (stream or not topics):
        # The connector matches anywhere in the name, and matches internal topics.
        found["subscribePattern"] = f"^(?!{_INTERNAL})(?:{source.pattern})$"
    else:
        found["subscribe"] = ",".join(topics)
    if source.tasks_per_partition > 1 and partitions:
        found["minPartitions"] = str(source.tasks_per_partition * partitions)
    return found


def _of_each(source: SourceOptions, topics: Iterable[str], look: Callable[[str], _Found]) -> list[_Found]:
    """The result of `look` for each topic, except topics of a pattern that were deleted meanwhile."""
    found: list[_Found] = []
    for topic in topics:
        with skip_deleted(source, known=False):
            found.append(look(topic))
    return found


def _word(position: Position) -> Bound | None:
    """The word for the position of all partitions, if there is one."""
    return None if position.offsets or isinstance(position.default, datetime) else position.default


def _numbered(offsets: Mapping[str, Mapping[int, int]]) -> str:
    """Offsets by partition; the connector requires all partitions or none."""
    return json.dumps({topic: {str(number): at for number, at in places.items()} for topic, places in offsets.items()})


def _as_messages(frame: DataFrame, source: SourceOptions) -> DataFrame:
    """The connector's rows in the columns of this package."""
    return frame.select(*[_COLUMNS[name](frame).alias(name) for name in source.columns])


def _headers(frame: DataFrame) -> Column:
    return F.coalesce(frame["headers"], F.expr("array()").cast(frame.schema["headers"].dataType))


def _own_header(frame: DataFrame, name: str) -> Column:
    """The text of the first SDK header of this name, or null."""
    mine = F.filter(_headers(frame), lambda h: (h["key"] == f"{RESERVED_PREFIX}{name}") & h["value"].isNotNull())
    return F.get(mine, 0)["value"].cast("string")


def _uncompiled(column: Column) -> Column:
    """The column without generated code, for expressions that few rows need.

    Java interprets a method of more than 8000 bytes, which is several times slower. Spark generates one method for all
    consecutive steps, except around expressions without code generation, such as `zip_with`; the steps before and after
    these get methods of their own, which Spark splits as needed.
    """
    return F.get(F.zip_with(F.array(F.lit(0)), F.array(F.lit(0)), lambda _, __: column), 0)


def _id(frame: DataFrame) -> Column:
    # Invalid UTF-8 is replaced as in Python.
    given = F.make_valid_utf8(_own_header(frame, "id"))
    return F.coalesce(given, F.concat_ws(":", frame["topic"], frame["partition"], frame["offset"]))


def _attributes(frame: DataFrame) -> Column:
    """Text headers in order; the last one of each name."""
    headers = _headers(frame)
    packed = F.exists(headers, lambda header: header["key"] == _PACKED)
    pairs = F.when(packed, _uncompiled(F.flatten(F.transform(headers, _pairs)))).otherwise(
        F.transform(F.filter(headers, _is_attribute), _pair)
    )
    # A lambda recomputes every captured expression for each element, but not its arguments.
    bound = F.transform(F.array(pairs.cast("array<struct<key:string,value:string>>")), _last_of_each)
    return F.map_from_entries(F.get(F.transform(bound, _shown), 0)).cast("map<string,string>")


def _shown(pairs: Column) -> Column:
    """The pairs without those that `shown_attributes` removes."""
    names = pairs["key"]

    def is_own(pair: Column) -> Column:
        own = ~pair["key"].rlike(_RESERVED)
        for prefix in (DEAD_LETTER_PREFIX, RETRY_LETTER_PREFIX):
            own |= pair["key"].startswith(prefix) & F.array_contains(names, f"{prefix}topic")
        return own

    suspect = F.exists(names, lambda name: name.rlike(_RESERVED))
    return F.when(suspect, _uncompiled(F.filter(pairs, is_own))).otherwise(pairs)


def _last_of_each(pairs: Column) -> Column:
    """The last pair of each name."""
    last = F.filter(
        pairs,
        lambda each, index: ~F.array_contains(F.slice(pairs["key"], index + 2, F.size(pairs) + 1), each["key"]),
    )
    return F.when(F.size(F.array_distinct(pairs["key"])) == F.size(pairs), pairs).otherwise(_uncompiled(last))


def _is_attribute(header: Column) -> Column:
    """Whether the header is itself an attribute."""
    key, value = header["key"], header["value"].cast("string")
    return (key != "") & ~key.startswith(RESERVED_PREFIX) & value.isNotNull() & F.is_valid_utf8(value)


def _pair(header: Column) -> Column:
    return F.struct(header["key"].alias("key"), header["value"].cast("string").alias("value"))


def _pairs(header: Column) -> Column:
    """The attributes of a header: one, none, or the packed ones."""
    value = header["value"].cast("string")
    # Invalid UTF-8 is replaced as in Python, which differs from Java.
    items = F.filter(F.split(F.make_valid_utf8(value), "&"), lambda item: F.instr(item, "=") > 1)
    hostile = F.transform(
        items,
        lambda item: F.struct(
            _unquoted(F.regexp_extract(item, "^([^=]+)=", 1)).alias("key"),
            _unquoted(F.regexp_extract(item, "(?s)^[^=]+=(.*)$", 1)).alias("value"),
        ),
    )
    one = F.array(_pair(header))
    return (
        F.when(_is_attribute(header), one)
        .when((header["key"] == _PACKED) & value.isNotNull(), hostile)
        .otherwise(F.slice(one, 1, 0))
    )


def _unquoted(text: Column) -> Column:
    """Decode percent-encoding; invalid sequences stay, since other producers may write anything there."""
    quoted = F.regexp_replace(F.replace(text, F.lit("+"), F.lit("%2B")), "%(?![0-9A-Fa-f]{2})", "%25")
    return F.url_decode(F.regexp_replace(quoted, _SURROGATE, _REPLACED))


def _publish_time(frame: DataFrame) -> Column:
    given = _own_header(frame, "time").try_cast("bigint")
    ours = F.when(given.between(*_TIMES), F.timestamp_micros(given))
    return F.coalesce(ours, F.when(frame["timestampType"] == 0, frame["timestamp"]))


_COLUMNS: Final[Mapping[str, Callable[[DataFrame], Column]]] = {
    "topic": lambda frame: frame["topic"],
    "partition": lambda frame: frame["partition"],
    "offset": lambda frame: frame["offset"],
    "id": _id,
    "key": lambda frame: frame["key"],
    "value": lambda frame: frame["value"],
    "attributes": _attributes,
    "publish_time": _publish_time,
    "broker_time": lambda frame: F.when(frame["timestampType"] == 1, frame["timestamp"]),
    "delivery_attempt": lambda frame: F.lit(None).cast(IntegerType()),
}


def java_properties(settings: Any) -> tuple[dict[str, str], str]:
    """Servers and security of `KafkaSettings`, and why Java's client cannot use them, or an empty text.

    Settings that only tune librdkafka are left out.

    :raises OSError: a PEM file cannot be read.
    """
    if settings.properties:
        return {}, f"{next(iter(settings.properties))!r} is a property of librdkafka"
    protocol: str = settings.protocol
    found = {"bootstrap.servers": ",".join(settings.servers), "security.protocol": protocol}
    if protocol.endswith("SSL"):
        if not settings.enable_ssl_certificate_verification:
            return {}, "Java's client always verifies certificates, and enable_ssl_certificate_verification is false"
        found |= _tls(settings)
    if protocol.startswith("SASL"):
        mechanism = settings.sasl_mechanism or "PLAIN"
        if mechanism not in _LOGIN:
            return {}, f"sasl_mechanism {mechanism} is not supported with Java's client"
        found["sasl.mechanism"] = mechanism
        found["sasl.jaas.config"] = (
            f"{_LOGIN[mechanism]} required username={_quoted(settings.sasl_username)} "
            f"password={_quoted(settings.sasl_password.get_secret_value())};"
        )
    return found, ""


def _tls(settings: Any) -> dict[str, str]:
    found = {
        "ssl.endpoint.identification.algorithm": ""
        if settings.ssl_endpoint_identification_algorithm == "none"
        else "https"
    }
    authorities = _pem(settings.ssl_ca_pem, settings.ssl_ca_location)
    if authorities is not None:
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authorities}
    if settings.ssl_keystore_location is not None:
        found |= {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": str(settings.ssl_keystore_location)}
        if settings.ssl_keystore_password is not None:
            found["ssl.keystore.password"] = settings.ssl_keystore_password.get_secret_value()
        return found
    certificate = _pem(settings.ssl_certificate_pem, settings.ssl_certificate_location)
    secret = settings.ssl_key_pem
    key = _pem(None if secret is None else secret.get_secret_value(), settings.ssl_key_location)
    if certificate is not None and key is not None:
        found |= {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": certificate, "ssl.keystore.key": key}
        if settings.ssl_key_password is not None:
            found["ssl.key.password"] = settings.ssl_key_password.get_secret_value()
    return found


def _pem(text: str | None, place: Path | None) -> str | None:
    if text is not None or place is None:
        return text
    files = sorted(each for each in place.iterdir() if each.is_file()) if place.is_dir() else [place]
    return "\n".join(each.read_text() for each in files)


def _quoted(text: str) -> str:
    """A text of JAAS. An end of a line would end it, and what follows would name a class that Java loads."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'
