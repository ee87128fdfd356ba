"""What a stream holds, by the word of its leader: a direct get may be answered by a replica that is behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from broker import BackendError
from broker_jetstream.connection import Connection

__all__ = ["stored_message"]

_NO_MESSAGE: Final = 10037


async def stored_message(
    connection: Connection, stream: str, wanted: Mapping[str, Any], *, what: str
) -> dict[str, Any] | None:
    """One message as the API shows it; None if the stream has none such.

    :param wanted: such as `{"seq": 1, "next_by_subj": "orders.>"}` or `{"last_by_subj": …}`.
    :param what: for errors: "Topic 'orders'".
    :raises TopicNotFound: there is no such stream. :raises BrokerError: by what the server says.
    """
    try:
        answer = await connection.api(f"STREAM.MSG.GET.{stream}", wanted, what=what)
    except BackendError as error:
        if f"err_code {_NO_MESSAGE}" not in error.message:
            raise
        return None
    found: dict[str, Any] = answer["message"]
    return found
