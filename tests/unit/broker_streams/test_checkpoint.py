"""The bytes of checkpoints."""

from __future__ import annotations

import msgspec
import pytest

from broker import DecodeError
from broker_streams.checkpoint import Checkpoint

FULL = Checkpoint(
    positions={"in": 5, "other": 1 << 60},
    stream_time=1_700_000_000_000,
    senders={"in/0": (7, 1), "~/0": (1_700_000_000_000, 3)},
    fired=(1_700_000_000_000, 4),
    closed={"hourly": 1_700_000_000_000},
    epoch=3,
    number=9,
    version=2,
    fingerprint={"group": "g", "inputs": {"in": "input"}, "loop": None},
)


@pytest.mark.parametrize("checkpoint", [Checkpoint(), FULL])
def test_round_trip(checkpoint):
    assert Checkpoint.unpack(checkpoint.pack()) == checkpoint


def test_fields_that_an_older_version_did_not_write_have_defaults():
    assert Checkpoint.unpack(msgspec.msgpack.encode({"positions": {"in": 3}})) == Checkpoint(positions={"in": 3})


@pytest.mark.parametrize("data", [b"", b"{}", b"\xc1", FULL.pack()[:-1], msgspec.msgpack.encode({"positions": 3})])
def test_other_bytes_are_refused(data):
    with pytest.raises(DecodeError, match="checkpoint cannot be read"):
        Checkpoint.unpack(data)


def test_a_newer_format_is_refused():
    with pytest.raises(DecodeError, match="format 3"):
        Checkpoint.unpack(msgspec.msgpack.encode({"format": 3}))


def test_a_checkpoint_that_may_lack_rows_is_of_a_newer_format():
    pending = FULL.pending("token")
    assert (pending.redo, pending.format, FULL.format) == ("token", 2, 1)
    assert Checkpoint.unpack(pending.pack()) == pending
    assert pending.settled() == FULL
