"""Partitioners agree with the clients whose hashes they are."""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

import pytest

from broker.errors import ConfigurationError, InvalidMessage
from broker.partitioners import check_partitioner, fnv1a, murmur2, partition_by

OF_THE_JAVA_CLIENT: Final = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
"""What the tests of Kafka's Java client expect for its murmur2, as the signed ints of Java."""

OF_LIBRDKAFKA: Final = {
    b"": (0x106E08D9, 0x0, 0x7EE3623B),
    b"23456": (0x058D780F, 0xB1B451D7, 0x27E6F469),
    b"this is another string with more length to it perhaps": (0x4F7703DA, 0xB0150DF7, 0x155E3E5F),
    b"hejsan": (0x5EC19395, 0xD077037E, 0x17B1E27A),
}
"""What librdkafka takes for murmur2, crc32 (`consistent`) and fnv1a, modulo the number of partitions."""

OF_SARAMA: Final = {
    b"kafka": 0xD33C4E1,
    b"giberish123456789": 0x77A58295,
    b"1234": 0x23BDD03,
    b"234": 0x2DEA3CD2,
    b"34": 0x740FA83E,
    b"4": 0x310CA263,
    b"PreAmbleWillBeRemoved,ThePrePartThatIs": 0x65CBD69C,
    b"eAmbleWillBeRemoved,ThePrePartThatIs": 0x69EED356,
    b"": 0x7EE3623B,
    # The smallest int32, which has no positive counterpart.
    b"1468509572224": 0x80000000,
}
"""What Go's FNV-1a gives as a signed number, without the sign: the default of Sarama and goka."""


@pytest.mark.parametrize("key", OF_THE_JAVA_CLIENT)
def test_murmur2_is_the_java_clients(key: bytes) -> None:
    assert murmur2(key) == OF_THE_JAVA_CLIENT[key] % 2**32
    for partitions in (1, 2, 7, 50):
        wanted = (OF_THE_JAVA_CLIENT[key] & 0x7FFFFFFF) % partitions
        assert partition_by("murmur2", "orders", key, partitions) == wanted


@pytest.mark.parametrize("key", OF_LIBRDKAFKA)
@pytest.mark.parametrize("partitions", [1, 7, 17])
def test_partitions_are_librdkafkas(key: bytes, partitions: int) -> None:
    wanted = [hashed % partitions for hashed in OF_LIBRDKAFKA[key]]
    assert [partition_by(name, "orders", key, partitions) for name in ("murmur2", "crc32", "fnv1a")] == wanted


@pytest.mark.parametrize("key", OF_SARAMA)
def test_fnv1a_is_saramas(key: bytes) -> None:
    hashed = fnv1a(key)
    assert OF_SARAMA[key] in (hashed, 2**32 - hashed)
    for partitions in (1, 7, 50):
        assert partition_by("fnv1a", "orders", key, partitions) == OF_SARAMA[key] % partitions


def test_crc32_is_that_of_zlib() -> None:
    assert partition_by("crc32", "orders", b"k", 1000) == crc32(b"k") % 1000


def test_a_function_gets_topic_key_and_number() -> None:
    assert partition_by(lambda topic, key, partitions: len(topic + key.decode()) % partitions, "ab", b"cde", 4) == 1


@pytest.mark.parametrize("answer", [4, -1, None, True, 1.0])
def test_a_function_must_return_a_partition(answer: Any) -> None:
    with pytest.raises(InvalidMessage, match=f"returned {answer!r} for topic 'orders' and key b'k'") as raised:
        partition_by(lambda topic, key, partitions: answer, "orders", b"k", 4)
    assert "0 to 3" in raised.value.advice


def test_a_function_that_raises_is_named_with_its_key() -> None:
    with pytest.raises(InvalidMessage, match=r"raised KeyError\('k'\) for topic 'orders' and key b'k'"):
        partition_by(lambda topic, key, partitions: {}[key.decode()], "orders", b"k", 4)


def test_only_names_and_functions_of_three_arguments_are_partitioners() -> None:
    async def later(topic: str, key: bytes, partitions: int) -> int:
        return 0

    for good in ("broker", "murmur2", "crc32", "fnv1a", lambda topic, key, partitions: 0):
        check_partitioner(good)
    wrong: list[tuple[object, str]] = [
        ("murmur3", "'murmur3'"),
        (None, "None"),
        (3, "3"),
        (lambda key, partitions: 0, "cannot be called with topic and key and number of partitions"),
        (later, "later is a coroutine function"),
    ]
    for bad, text in wrong:
        with pytest.raises(ConfigurationError, match=text):
            check_partitioner(bad)
