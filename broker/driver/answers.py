"""Reads what a server answers: bodies and JSON with limits, and answers that lack what they should have.

A server that is hostile, broken or no broker at all must not exhaust memory or stack, and is a `BrokerError` like every
other failure.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from math import isfinite
from time import monotonic
from typing import Any, Final

from broker.errors import BackendError, BrokerError

__all__ = ["LONGEST_ANSWER", "read_answer", "read_body", "reads_answer"]

LONGEST_ANSWER: Final = 32 << 20
"""Bytes."""
_DEEPEST: Final = 64
_CHUNK: Final = 1 << 16
_TEXTS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_OTHERS: Final = bytes(each for each in range(256) if each not in b"[]{}")
_ADVICE: Final = "Check that the address is that of the right server"


def read_body(answer: http.client.HTTPResponse, until: float, what: str) -> bytes:
    """The whole body, of at most 32 MiB. Blocks.

    :param until: when it must be complete, in monotonic seconds; the timeout of the socket bounds each read only.
    :raises TimeoutError: it is not complete by then.
    :raises http.client.HTTPException, OSError: the connection ends within it.
    :raises BackendError: it is longer.
    """
    parts: list[bytes] = []
    size = 0
    while part := answer.read1(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > LONGEST_ANSWER:
            raise _refused(what, f"is longer than {LONGEST_ANSWER >> 20} MiB")
        if monotonic() > until:
            raise TimeoutError("the answer does not end")
    body = b"".join(parts)
    if answer.length:
        raise http.client.IncompleteRead(body, answer.length)
    # Otherwise the connection cannot be used again.
    answer.close()
    return body


def read_answer(body: bytes, what: str) -> Any:
    """Decode a JSON answer of at most 32 MiB and 64 levels, in UTF-8, with finite numbers and whole characters.

    :param what: what answered, for the error: "The issuer 'https://…'".
    :raises BackendError: the answer is something else; the error does not quote it.
    """
    if len(body) > LONGEST_ANSWER:
        raise _refused(what, f"is longer than {LONGEST_ANSWER >> 20} MiB")
    if _is_deep(body):
        raise _refused(what, f"nests deeper than {_DEEPEST} levels")
    try:
        text = body.decode()
        found: Any = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\u" in text:
            # Half of a surrogate pair cannot be encoded again, for instance in a path.
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError:
        raise _refused(what, "is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _refused(what, f"is not JSON at character {error.pos} ({error.msg})") from None
    except ValueError as error:
        raise _refused(what, f"has a number that cannot be read: {error}") from None
    return found


@contextmanager
def reads_answer(what: str) -> Generator[None]:
    """Around code that reads a decoded answer; also a decorator of a function.

    :param what: as in `read_answer`.
    :raises BackendError: the answer lacks a field, or one has another type.
    """
    try:
        yield
    except BrokerError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _refused(what, f"lacks a field, or has one of another type ({type(error).__name__})", error) from error


def _refused(what: str, reason: str, native: Exception | None = None) -> BackendError:
    return BackendError(f"{what}: the answer {reason}", native=native, advice=_ADVICE)


def _is_deep(body: bytes) -> bool:
    """Whether brackets nest too deeply. Found before decoding, whose recursion depends on the process's limit."""
    if body.count(b"[") + body.count(b"{") <= _DEEPEST:
        return False
    left = _TEXTS.sub(b"", body).translate(_BRACKETS, _OTHERS)
    for _ in range(_DEEPEST):
        # Each round removes the innermost brackets.
        left, before = left.replace(b"[]", b""), len(left)
        if len(left) == before:
            break
    return left.count(b"[") > _DEEPEST or b"[]" in left


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError("it is not finite")
    return number
