"""No secret of a URL is in a repr, an error with its causes, a traceback, an event, a log or the output of the CLI."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote, quote_plus

import pytest

import broker
from broker.cli import main
from broker.errors import BrokerError
from broker.hooks import Event
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
