"""Tokens of `oauth_cb`.

The first token is fetched before the client opens: without one, the client waits for ten seconds and does not report
why. Called in the thread that opens the client, and later in the thread that polls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import time
from typing import Any, cast

from broker import AuthenticationFailed
from broker.driver import is_finite, logger

__all__ = ["with_oauth_token"]


def with_oauth_token(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a client, with the first token of the application's `oauth_cb`, if there is one.

    :raises AuthenticationFailed: the callback returned no token.
    """
    fetch: Callable[[str | None], object] | None = config.get("oauth_cb")
    if fetch is None:
        return dict(config)
    try:
        first = [_checked(fetch(config.get("sasl.oauthbearer.config")))]
    except Exception as error:
        raise AuthenticationFailed(
            f"oauth_cb returned no token: {type(error).__name__}: {error}",
            native=error,
            advice="Return the token as a str and the time.time() at which it expires",
        ) from error

    def token(argument: str | None) -> object:
        if first:
            return first.pop()
        try:
            return _checked(fetch(argument))
        except Exception as error:
            logger.warning("oauth_cb returned no token: %s: %s", type(error).__name__, error)
            raise

    return {**config, "oauth_cb": token}


def _checked(found: object) -> object:
    """:raises TypeError, ValueError: librdkafka would reject the token, without a reason."""
    several = cast("tuple[object, ...]", found) if isinstance(found, tuple) else ()
    if len(several) < 2:
        raise TypeError(f"returned {type(cast('object', found)).__name__}, not a token and its expiry")
    token, end = several[:2]
    if not isinstance(token, str) or not is_finite(end):
        raise TypeError(f"returned {type(token).__name__} and {type(end).__name__}, not a str and a time")
    if end <= time():
        raise ValueError(f"the token expired at {end:.0f}, and now is {time():.0f}")
    return several
