"""No secret of a URL, a variable or a file is in a repr, an error with its causes, a traceback, an event, a log or the
output of the CLI."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from pydantic import SecretStr

import broker
from broker.cli import main
from broker.driver.settings import BackendSettings
from broker.errors import BrokerError, UnknownSetting
from broker.hooks import Event
from broker.registry import read_target
from broker_kafka.settings import KafkaSettings
from tests.servers.server_process import hold_port

SECRET = "s3cret+V4lue/x"
SHAPES = (SECRET, quote(SECRET), quote(SECRET, safe=""), quote_plus(SECRET), "V4lue")
S = quote(SECRET, safe="")
"""As a URL holds it; {h} is an address at which nothing listens."""
FAST = "connect_timeout=0.3"
OIDC = (
    "sasl_mechanism=OAUTHBEARER&sasl_oauthbearer_method=oidc&sasl_oauthbearer_client_id=me"
    "&sasl_oauthbearer_token_endpoint_url="
)
UNSECURED = "sasl_mechanism=OAUTHBEARER&enable_sasl_oauthbearer_unsecure_jwt=true"
PASSPHRASE = "sasl.oauthbearer.assertion.private.key.passphrase"

URLS = [
    # Well formed.
    f"nats://me:{S}@{{h}}?{FAST}",
    f"nats://{S}@{{h}}?{FAST}",
    f"nats://{{h}}?{FAST}&token={S}",
    f"tls://me:{S}@{{h}}?{FAST}",
    f"nats://{{h}}?{FAST}&servers=nats://me:{S}@{{h}}",
    f"kafka://me:{S}@{{h}}?{FAST}",
    f"kafka://me:{S}@{{h}}?{FAST}&security_protocol=SASL_PLAINTEXT",
    f"kafka://{{h}}?{FAST}&sasl.username=me&sasl.password={S}",
    f"kafka://{{h}}?{FAST}&ssl_key_pem={S}&ssl_certificate_pem=x",
    f"kafka://{{h}}?{FAST}&{OIDC}https://{{h}}/token&sasl_oauthbearer_client_secret={S}",
    f"kafka://{{h}}?{FAST}&properties=client.rack%3Da,{PASSPHRASE}%3D{S}",
    f"kafka://{{h}}?{FAST}&properties={PASSPHRASE}+%3D+{S},client.rack%3Da",
    f"kafka://{{h}}?{FAST}&{UNSECURED}&sasl_oauthbearer_config=principal%3Dme,secret%3D{S}",
    f"pulsar://{{h}}?{FAST}&request_timeout=1&token={S}",
    f"pulsar+ssl://{{h}}?{FAST}&request_timeout=1&token={S}",
    f"pulsar://{{h}}?{FAST}&request_timeout=1&oauth2_issuer=https://{{h}}&oauth2_client_id=me&oauth2_client_secret={S}",
    f"servicebus://me:{S}@{{h}}?{FAST}&request_timeout=1&emulator=true",
    f"servicebus://{{h}}?{FAST}&request_timeout=1&sas_token={S}",
    f"servicebus:?{FAST}&connection_string={quote(f'Endpoint=sb://h;SharedAccessKeyName=n;SharedAccessKey={SECRET}')}%20",
    # Malformed, each in another way.
    f"nats://me:{SECRET}@{{h}}",
    f"nats://me:a/{S}@{{h}}",
    f"nats://me:a#{S}@{{h}}",
    f"nats://me:a?{S}@{{h}}",
    f"nats://me:a%{S}@{{h}}",
    f"nats://me:{S}@{{h}}:x",
    f"nats://me:{S}@h:99999",
    f"nats://me:{S}@[::1",
    f"nats://me:{S}@{{h}}?tokn=1",
    f"nats://me:{S}@{{h}}?connect_timeout=x",
    f"nats://me:{S}@{{h}}?token={S}",
    f"nats://{{h}}?user=me&user={S}&password={S}",
    f"http://me:{S}@{{h}}",
    f"me:{S}@{{h}}",
    f"kafka://me:{S}@{{h}}/topic",
    f"kafka://me:{S}@{{h}}?sasl_password={S}",
    f"kafka://:{S}@{{h}}",
    f"kafka://{{h}}?sasl_password={S}",
    f"kafka://me:{S}@{{h}}?security_protocol=PLAINTEXT",
    f"kafka://me:{S}@{{h}}?no.such.token={S}",
    f"kafka://me:{S}@{{h}}?ssl.key.password={S}&{FAST}&security_protocol=SASL_SSL",
    f"kafka://{{h}}?properties=sasl.password%3D{S}",
    f"kafka://{{h}}?properties={PASSPHRASE}%3Da,{S}",
    f"kafka://{{h}}?properties={PASSPHRASE}%3Da,{S}%3Db",
    f"kafka://{{h}}?properties={PASSPHRASE}%3D{S}%00",
    f"kafka://{{h}}?sasl_mechanism=GSSAPI&sasl_kerberos_service_name=k&sasl_kerberos_kinit_cmd=kinit+-w+{S}",
    f"kafka://{{h}}?properties=sasl.kerberos.kinit.cmd%3Dkinit+-w+{S}",
    f"kafka:?servers=me:{S}@{{h}}",
    f"kafka://{{h}}?{OIDC}http://me:{S}@{{h}}",
    f"kafka://{{h}}?{OIDC}https://me:{S}@{{h}}&{FAST}",
    f"pulsar://me:{S}@{{h}}",
    f"pulsar://{{h}}?token={S}%0A&{FAST}",
    f"pulsar://{{h}}?token={S}&token_file=x",
    f"pulsar://{{h}}?oauth2_client_secret={S}",
    f"pulsar://{{h}}?oauth2_issuer=http://me:{S}@{{h}}&oauth2_client_id=me&oauth2_client_secret={S}",
    f"pulsar://{{h}}?admin_url=http://me:{S}@{{h}}",
    f"pulsar://{{h}}?admin_url=http://me:%E2%84%80{S}@{{h}}",
    f"pulsar:?service_url=pulsar://me:{S}@{{h}}",
    f"servicebus://me:{S};x@{{h}}",
    f"servicebus://{S}@{{h}}",
    f"servicebus://{{h}}?sas_token={S}&key={S}",
    f"servicebus://{{h}}?connection_string={S}",
    f"servicebus:?connection_string={S}",
    f"servicebus://me:k@{{h}}?proxy=me:{S}@{{h}}",
    f"pubsub://p?emulator_host=me:{S}@{{h}}",
    f"inmem://me:{S}@name",
    f"inmem:?token={S}",
]

VARIABLES = [
    ("BROKER_KAFKA_PROPERTIES", f"sasl.password={SECRET}"),
    ("BROKER_KAFKA_PROPERTIES", f"client.rack=a, {PASSPHRASE} = {SECRET}"),
    ("BROKER_KAFKA_PROPERTIES", f"{PASSPHRASE}=a,{SECRET},client.rack=a"),
    ("BROKER_KAFKA_PROPERTIES", f"no.such.password={SECRET},bad"),
    ("BROKER_KAFKA_SERVERS", f"me:{SECRET}@{{h}}"),
    ("BROKER_KAFKA_SASL_KERBEROS_KINIT_CMD", f"kinit -w {SECRET}"),
    ("BROKER_KAFKA_SASL_OAUTHBEARER_EXTENSIONS", f"secret={SECRET}"),
    ("BROKER_KAFKA_SASL_PASSWORD", SECRET),
    ("BROKER_NATS_SERVERS", f"nats://me:{SECRET}@{{h}},me:{SECRET}@{{h}}"),
    ("BROKER_NATS_TOKEN", f"{SECRET}\n"),
    ("BROKER_PULSAR_TENANT", f"me:{SECRET}@{{h}}"),
    ("BROKER_PULSAR_TOKEN", f"{SECRET}\n"),
    ("BROKER_SERVICEBUS_CONNECTION_STRING", SECRET),
]
FILES = [
    f"properties = 'sasl.password={SECRET}'",
    f"properties = ['sasl.password={SECRET}']",
    f"properties = {{ 'sasl.password' = '{SECRET}' }}",
    f"properties = {{ '{PASSPHRASE}' = '{SECRET}' }}",
    f"properties = {{ '{PASSPHRASE}' = ['{SECRET}'] }}",
    f"properties.{PASSPHRASE} = '{SECRET}'",
    f"properties = {{ 'no.such.password' = '{SECRET}' }}",
    f"servers = [{{ password = '{SECRET}' }}]",
    f"client_id = {{ password = '{SECRET}' }}",
    f"sasl.password = '{SECRET}'",
    f"sasl_password = ['{SECRET}']",
    f"sasl_kerberos_kinit_cmd = 'kinit -w {SECRET}'",
]


@pytest.fixture
def address() -> Iterator[str]:
    with hold_port() as held:
        yield f"127.0.0.1:{held.getsockname()[1]}"


def shown(error: BaseException) -> str:
    """Everything that a program prints of an error."""
    texts = [repr(error), str(error), *traceback.format_exception(error)]
    if isinstance(error, BrokerError):
        texts += [error.message, error.advice, repr(error.native), str(error.native), repr(vars(error))]
    with suppress(Exception):  # some errors of clients cannot be pickled
        texts.append(repr(pickle.dumps(error)))
    return "\n".join(texts)


@pytest.mark.parametrize("template", URLS, ids=lambda url: url.replace(S, "S").replace(SECRET, "s"))
async def test_a_url_shows_no_secret(template: str, address: str, caplog: pytest.LogCaptureFixture) -> None:
    url = template.replace("{h}", address)
    seen: list[str] = []
    with caplog.at_level(logging.DEBUG):
        try:
            bus = broker.connect(url)
            events: list[Event] = []
            bus.hooks.listen(events.append)
            seen.append(repr(bus))
            with suppress(BrokerError):
                # One that fails is shown below.
                pass
            try:
                async with bus:
                    pass
            finally:
                seen += [repr(event) for event in events]
        except BrokerError as error:
            seen.append(shown(error))
    seen += [record.getMessage() for record in caplog.records]
    seen += [record.exc_text or "" for record in caplog.records]
    for text in seen:
        assert not any(shape in text for shape in SHAPES), text


@pytest.mark.parametrize("template", URLS, ids=lambda url: url.replace(S, "S").replace(SECRET, "s"))
@pytest.mark.parametrize("command", [["doctor"], ["--debug", "topics", "list", "--json"]], ids=["doctor", "debug"])
def test_the_command_line_shows_no_secret(
    template: str, address: str, command: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_URL", template.replace("{h}", address))
    text = ""
    try:
        main(command)
    except BrokerError as error:
        text = shown(error)  # --debug raises it
    text += "\n".join(capfd.readouterr())
    assert text
    assert not any(shape in text for shape in SHAPES), text


def described(settings: BackendSettings) -> str:
    """Everything that a program prints of settings."""
    return "\n".join([settings.url, repr(settings), str(settings), *(line.value for line in settings.explain())])


@pytest.mark.parametrize(("variable", "value"), VARIABLES)
def test_a_variable_shows_no_secret(
    variable: str, value: str, address: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value.replace("{h}", address))
    scheme = variable.split("_")[1].lower()
    url = f"{scheme}:" if variable.endswith(("SERVERS", "STRING")) else f"{scheme}://{address}?{FAST}"
    monkeypatch.setenv("BROKER_URL", url)
    try:
        text = described(read_target(url)[1])
    except BrokerError as error:
        text = shown(error)
    main(["doctor"])
    text += "\n".join(capfd.readouterr())
    assert not any(shape in text for shape in SHAPES), text


@pytest.mark.parametrize("line", FILES)
def test_a_file_shows_no_secret(line: str, tmp_path: Path) -> None:
    (tmp_path / "kafka.toml").write_text(line)
    try:
        text = described(KafkaSettings.from_toml(tmp_path / "kafka.toml"))
    except BrokerError as error:
        text = shown(error)
    assert not any(shape in text for shape in SHAPES), text


def test_a_name_that_may_be_a_part_of_a_secret_is_not_shown() -> None:
    with pytest.raises(UnknownSetting) as caught:
        KafkaSettings.from_url(f"kafka://h?properties={PASSPHRASE}%3Da,tail%3Db")
    assert "tail" not in str(caught.value)


def test_settings_in_code_show_no_command_of_kinit() -> None:
    text = described(
        KafkaSettings(
            sasl_mechanism="GSSAPI",
            sasl_kerberos_service_name="kafka",
            sasl_kerberos_kinit_cmd=SecretStr(f"kinit -w {SECRET}"),
        )
    )
    assert SECRET not in text
