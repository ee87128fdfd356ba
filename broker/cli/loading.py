"""Objects of the user's code, by MODULE:NAME."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from broker.cli.errors import Exit, Failure
from broker.errors import BrokerError

__all__ = ["load_object"]

T = TypeVar("T")


def load_object(text: str, kind: type[T], example: str) -> T:
    """What MODULE:NAME names, or what the function returns that it names. The working directory is searched first.

    :param kind: what it has to be.
    :param example: of such a text, for errors.
    :raises Failure: there is none.
    """
    what = kind.__name__
    module, _, path = text.partition(":")
    if not (module and path):
        raise Failure(f"{text!r} names no {what}", advice=f"Write MODULE:NAME, for instance {example}", code=Exit.USAGE)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        if not isinstance(found, kind) and callable(found):
            found = found()
    except BrokerError:
        raise
    except Exception as error:
        raise Failure(
            f"{text!r} cannot be loaded: {type(error).__name__}: {error}",
            advice=f"Check the names; modules are looked for in {here}, too",
            code=Exit.USAGE,
        ) from error
    if not isinstance(found, kind):
        article = "an" if what[0] in "AEIOU" else "a"
        raise Failure(
            f"{text!r} is {found!r}",
            advice=f"It has to be {article} {what}, or a function that returns one",
            code=Exit.USAGE,
        )
    return found
