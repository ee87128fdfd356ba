"""URLs: parsing, errors, and masked secrets."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import InvalidSetting
from broker.urls import Host, UrlParts, mask_url, mask_within, parse_url


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("inmem:", UrlParts("inmem")),
        ("INMEM:", UrlParts("inmem")),
        ("inmem://shared", UrlParts("inmem", hosts=(Host("shared"),))),
        ("embedded:///var/lib/broker", UrlParts("embedded", path="/var/lib/broker")),
        ("embedded:relative/dir", UrlParts("embedded", path="relative/dir")),
        ("embedded:///with%20space", UrlParts("embedded", path="/with space")),
        ("nats://localhost:4222", UrlParts("nats", hosts=(Host("localhost", 4222),))),
        ("nats://a,b:2,[::1]:3/", UrlParts("nats", hosts=(Host("a"), Host("b", 2), Host("::1", 3)), path="/")),
        ("nats://me:p%40ss@h", UrlParts("nats", "me", "p@ss", (Host("h"),))),
        ("nats://tok-en@h", UrlParts("nats", "tok-en", None, (Host("h"),))),
        ("nats://:only@h", UrlParts("nats", None, "only", (Host("h"),))),
        ("a+b://h?x=1&y=a%26b+c&z=", UrlParts("a+b", hosts=(Host("h"),), query={"x": "1", "y": "a&b c", "z": ""})),
        (" nats://h ", UrlParts("nats", hosts=(Host("h"),))),
    ],
)
def test_a_url_is_taken_apart(url: str, parts: UrlParts):
    assert parse_url(url) == parts


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "form scheme://"),
        ("a b:c", "form scheme://"),
        ("localhost", "form scheme://"),
        ("://h", "form scheme://"),
        ("nats://h:port", "port"),
        ("nats://h:0", "port"),
        ("nats://h:65536", "port"),
        ("nats://h:²", "port"),
        ("nats://h:", "port"),
        ("nats://a,,b", "host"),
        ("nats://::1", "host"),
        ("nats://[::1", "host"),
        ("nats://h#x", "%23"),
        ("nats://h/100%", "%25"),
        ("nats://h?x", "name=value"),
        ("nats://h?=1", "name=value"),
        ("nats://h?a=1&a=2", "'a' twice"),
    ],
)
def test_a_malformed_url_is_refused_with_advice(url: str, says: str):
    with pytest.raises(InvalidSetting, match=says.replace("?", r"\?")):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("nats://me:pw@h:1/p?x=1", "nats://me:***@h:1/p?x=1"),
        ("nats://token@h", "nats://***@h"),
        ("nats://h?token=abc&servers=a:1,b:2", "nats://h?token=***&servers=a:1,b:2"),
        ("kafka://h?sasl_password=abc", "kafka://h?sasl_password=***"),
        ("kafka://h?ssl_key_pem=abc&ssl_ca_pem=x", "kafka://h?ssl_key_pem=***&ssl_ca_pem=x"),
        ("kafka://h?ssl.key.pem=abc", "kafka://h?ssl.key.pem=***"),
        ("inmem:", "inmem:"),
        ("nats://h?servers=nats://me:pw@b", "nats://h?servers=nats://me:***@b"),
        ("nats://h?proxy=http://h/?token=abc", "nats://h?proxy=http://h/%3Ftoken%3D***"),
        ("kafka://h?properties=a=1,b.password=2,3&x=1", "kafka://h?properties=a%3D1,b.password%3D***&x=1"),
    ],
)
def test_secrets_are_masked_and_the_rest_is_kept(url: str, masked: str):
    assert mask_url(url) == masked


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://user:1?s3cret=@host:4222/", "nats://user:***?***"),
        ("nats://user:1?a=s3cret&b=@host", "nats://user:***?***"),
        ("nats://to?k=en@host", "nats://to?***"),
        ("pubsub:?user=me%40example.org", "pubsub:?user=me@example.org"),
    ],
)
def test_a_query_that_may_be_the_rest_of_a_password_is_masked(url: str, shown: str):
    assert mask_url(url) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a=1,sasl.password = pw,with=commas", "a=1,sasl.password =***"),
        ("Endpoint=sb://h/;SharedAccessKey=abc=", "Endpoint=sb://h/;SharedAccessKey=***"),
        ("https://h/?token=abc&x=1", "https://h/?token=***&x=1"),
        ("https://h/?token=abc,password=def", "https://h/?token=***"),
        ("me:pw@h:1", "***@h:1"),
        ("http://me:pw@h", "http://me:***@h"),
        ("app/host@REALM", "app/host@REALM"),
        ("a=1,b=2", "a=1,b=2"),
        ("password", "password"),
    ],
)
def test_secrets_within_a_value_are_masked(value: str, shown: str):
    assert mask_within(value) == shown


def test_parameters_named_secret_by_the_caller_are_masked():
    assert mask_url("x://h?pin=1234&y=2", ["pin"]) == "x://h?pin=***&y=2"


def refusal(url: str) -> str:
    """The parser's error; empty if it accepts the URL."""
    try:
        parse_url(url)
    except InvalidSetting as error:
        return str(error)
    return ""


SECRET = "s3cretV4lue"
CHARACTERS = st.text(alphabet="ab1:/?#@%&=,[]. ", max_size=6)


@given(before=CHARACTERS, after=CHARACTERS, tail=CHARACTERS)
def test_a_badly_escaped_password_is_never_shown(before: str, after: str, tail: str):
    url = f"nats://user:{before}{SECRET}{after}@host:4222/{tail}"
    assert SECRET not in mask_url(url)
    assert SECRET not in refusal(url)


@given(
    name=st.sampled_from(["password", "token", "sasl_password", "client_secret", "creds"]),
    value=CHARACTERS,
    tail=CHARACTERS,
)
def test_a_secret_parameter_is_never_shown(name: str, value: str, tail: str):
    url = f"nats://host?x=1&{name}={SECRET}{value}&{tail}"
    assert SECRET not in mask_url(url)
    assert SECRET not in refusal(url)


@given(before=CHARACTERS, after=CHARACTERS, tail=CHARACTERS)
def test_a_password_within_a_parameter_is_never_shown(before: str, after: str, tail: str):
    inner = quote(f"nats://user:{before}{SECRET}{after}@host,nats://u:{SECRET}@h/{tail}", safe="")
    assert SECRET not in mask_url(f"nats://host?x=1&servers={inner}")


def test_the_repr_of_the_parts_shows_no_password():
    assert SECRET not in repr(parse_url(f"nats://u:{SECRET}@h?token={SECRET}"))


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused_as_invalid(text: str):
    refused = refusal(text)
    masked = mask_url(text)
    assert refused or parse_url(text).scheme
    assert refused or parse_url(masked).scheme == parse_url(text).scheme, "what is shown of a URL is still one"
