"""Tokens of `oauth_cb`: the first is asked for before its client is made, which would wait ten seconds for one and not
say why there is none. In the thread that makes the client, and later in that which polls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import time
from typing import Any, cast

from broker import AuthenticationFailed
from broker.driver import is_finite, logger

__all__ = ["with_oauth_token"]


def with_oauth_token(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a client, for which the application's callback, if there is one, was asked already.

    :raises AuthenticationFailed: it gave no token.
    """
    ask: Callable[[str | None], object] | None = config.get("oauth_cb")
    if ask is None:
        return dict(config)
    try:
        first = [_checked(ask(config.get("sasl.oauthbearer.config")))]
    except Exception as error:
        raise AuthenticationFailed(
            f"oauth_cb gave no token: {type(error).__name__}: {error}",
            native=error,
            advice="It returns a token, as text, and the time.time() at which that ends",
        ) from error

    def token(said: str | None) -> object:
        if first:
            return first.pop()
        try:
            return _checked(ask(said))
        except Exception as error:
            logger.warning("oauth_cb gave no token: %s: %s", type(error).__name__, error)
            raise

    return {**config, "oauth_cb": token}


def _checked(found: object) -> object:
    """:raises TypeError, ValueError: it is no token that librdkafka takes, which does not say why."""
    several = cast("tuple[object, ...]", found) if isinstance(found, tuple) else ()
    if len(several) < 2:
        raise TypeError(f"it returned {type(cast('object', found)).__name__}, not a token and a time")
    token, end = several[:2]
    if not isinstance(token, str) or not is_finite(end):
        raise TypeError(f"it returned {type(token).__name__} and {type(end).__name__}, not a text and a time")
    if end <= time():
        raise ValueError(f"the token ended at {end:.0f}, and now is {time():.0f}")
    return several
