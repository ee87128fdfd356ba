"""Plans of Spark show no password and no private key: its web page and its event log print the same plans."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from pyspark.sql import SparkSession

import broker_spark
from broker.blocking import connect
from broker_kafka.settings import KafkaSettings
from broker_spark.common.options import SourceOptions
from broker_spark.kafka_connector import _translated, java_properties
from tests.servers import nats
from tests.spark.conftest import shared_session

# With the other tests on the session, of which a process has one.
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

REDACTION = "spark.sql.redaction.options.regex"
KEY = "-----BEGIN PRIVATE KEY-----\nhunter2key\n-----END PRIVATE KEY-----\n"
SPOOL = "s3://AKIA:hunter2spool@bucket/spools?region=eu-west-1"


@pytest.fixture
def spark() -> SparkSession:
    """The session as one that this package did not make."""
    session = shared_session()
    session.conf.unset(REDACTION)
    return session


def explained(frame: Any, capfd: pytest.CaptureFixture[str]) -> str:
    for mode in ("extended", "formatted", "cost"):
        frame.explain(mode)
    return str(frame._jdf.queryExecution().toString()) + capfd.readouterr().out


@pytest.mark.parametrize(
    "url",
    [
        "kafka://user:hunter2@127.0.0.1:1",
        "kafka://user:hunter2@127.0.0.1:1?sasl_mechanism=SCRAM-SHA-512",
        f"kafka://127.0.0.1:1?ssl_certificate_pem={quote('a' + KEY)}&ssl_key_pem={quote(KEY)}&ssl_key_password=hunter2",
        "kafka://127.0.0.1:1?ssl_keystore_location=/no/store.p12&ssl_keystore_password=hunter2",
    ],
)
def test_plans_of_the_connector(spark: SparkSession, url: str, capfd: pytest.CaptureFixture[str]) -> None:
    found, reason = _translated(spark, SourceOptions.parse({"url": url, "topic": "orders"}).for_stream())
    assert not reason
    assert "hunter2" in str(found)
    frame = spark.readStream.format("kafka").options(**found, subscribe="orders").load()
    shown = explained(frame, capfd)
    assert "subscribe=orders" in shown
    assert "hunter2" not in shown


def test_plans_of_our_sources(spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    url, topic = nats.shared_server().url.replace("://", "://user:hunter2@"), "spark.secrets"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic)
    broker_spark.register(spark)
    queue = {"subscription": "orders", "spool": SPOOL}
    stream = spark.readStream.format("broker").options(url=url, topic=topic, **queue).load()
    shown = explained(stream, capfd)
    assert "subscription=orders" in shown
    batch = spark.read.format("broker").options(url=url, topic=topic).load()
    batch.collect()
    jvm_session: Any = spark._jsparkSession
    executed = jvm_session.sharedState().statusStore().executionsList()
    # What the web page shows of everything that ran.
    pages = [
        f"{each.physicalPlanDescription()} {each.description()} {each.details()}"
        for each in (executed.apply(number) for number in range(executed.size()))
    ]
    shown += explained(batch, capfd) + "".join(pages)
    assert "BatchScan broker" in shown
    assert "hunter2" not in shown


def test_the_rule_of_a_session_stays(spark: SparkSession) -> None:
    spark.conf.set(REDACTION, "(?i)url|mine")
    broker_spark.register(spark)
    assert spark.conf.get(REDACTION) == "(?i)url|mine"
    spark.conf.unset(REDACTION)


def test_a_user_name_adds_no_class_to_the_login(spark: SparkSession) -> None:
    name, password = 'me\n" ; evil.Login required a="', 'p"\\\r\nx=y ;'
    found, _ = java_properties(
        KafkaSettings(sasl_username=name, sasl_password=password, security_protocol="SASL_SSL")  # pyright: ignore[reportArgumentType]
    )
    machine: Any = spark._jvm
    kafka = machine.org.apache.kafka.common
    context = kafka.security.JaasContext.loadClientContext(
        {"sasl.jaas.config": kafka.config.types.Password(found["sasl.jaas.config"])}
    )
    (entry,) = context.configurationEntries()
    assert entry.getLoginModuleName() == "org.apache.kafka.common.security.plain.PlainLoginModule"
    assert dict(entry.getOptions()) == {"username": name, "password": password}
