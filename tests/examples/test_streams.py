"""The small stream processors, tested as their authors would: by a `Tester`. Each main program runs once in memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from broker import Json
from broker_streams import Tester
from examples.streams import clicks, messaging, multiple, simplest
from examples.streams.clicks import CLICKS, Click, User
from examples.streams.messaging import BLOCKER, COLLECTOR, DETECTOR, FILTER, TRANSLATOR, Block, Counts, Message
from examples.streams.multiple import AVERAGES, CLEANER, WATCHER, Alarm, Mean
from examples.streams.simplest import COUNTER


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROKER_URL", raising=False)


# --- simplest ---------------------------------------------------------------------------------------------------------


def test_greetings_are_counted_by_key() -> None:
    with Tester(COUNTER, partitions=4) as test:
        for key in ("a", "b", "a"):
            test.publish("demo-greetings", key=key, value="hello")
        assert test[COUNTER.table] == {"a": 2, "b": 1}


async def test_the_simplest_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert await simplest.main(messages=6) == {"key-0": 2, "key-1": 2, "key-2": 2}
    assert "key-0: 2" in capsys.readouterr().out


# --- clicks -----------------------------------------------------------------------------------------------------------


def test_a_user_has_a_row() -> None:
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    with Tester(CLICKS) as test:
        test.publish("demo-clicks", key="ann", value=Click("/home"))
        test.publish("demo-clicks", key="ann", value=Click("/news"), timestamp=noon)
        assert test[CLICKS.table] == {"ann": User(2, "/news", noon)}


def test_clicks_survive_a_crash_and_count_once() -> None:
    with Tester(CLICKS) as test:
        test.publish("demo-clicks", key="ann", value=Click("/home"))
        with test.hold_checkpoints():
            test.publish("demo-clicks", key="ann", value=Click("/news"))
            test.crash()
        assert test[CLICKS.table]["ann"].clicks == 2


def test_the_server_answers_from_a_view() -> None:
    with Tester(CLICKS) as test:
        test.publish("demo-clicks", key="ann", value=Click("/home"), timestamp=0)
        view = test.view(CLICKS.table, Json(User))
        found = b'{"clicks":1,"last_page":"/home","last_click":"1970-01-01T00:00:00Z"}'
        assert clicks.answer(view, "/ann") == (200, found)
        assert clicks.answer(view, "/") == (200, b'{"ann":' + found + b"}")
        assert clicks.answer(view, "/bob") == (404, b"null")


# --- messaging --------------------------------------------------------------------------------------------------------


@pytest.fixture
def messenger() -> Iterator[Tester]:
    with Tester(BLOCKER, TRANSLATOR, FILTER, COLLECTOR, DETECTOR, partitions=3) as test:
        yield test


def send(test: Tester, sender: str, receiver: str, text: str = "hello") -> None:
    test.publish("demo-messages", key=sender, value=Message(sender, receiver, text))


def texts(test: Tester, user: str) -> list[str]:
    return [message.text for message in test[COLLECTOR.table].get(user, [])]


def test_a_message_reaches_the_inbox_of_its_receiver(messenger: Tester) -> None:
    send(messenger, "ann", "bob")
    assert messenger[COLLECTOR.table] == {"bob": [Message("ann", "bob", "hello")]}


def test_an_inbox_keeps_the_last_messages(messenger: Tester) -> None:
    for number in range(8):
        send(messenger, "ann", "bob", str(number))
        send(messenger, "bob", "ann", str(number))
    assert texts(messenger, "bob") == ["3", "4", "5", "6", "7"]


def test_words_are_replaced(messenger: Tester) -> None:
    messenger.publish("demo-translations", key="darn", value="****")
    send(messenger, "ann", "bob", "that darn cat")
    assert texts(messenger, "bob") == ["that **** cat"]


def test_a_blocked_sender_reaches_nobody_until_unblocked(messenger: Tester) -> None:
    messenger.publish("demo-blocking", key="ann", value=Block())
    send(messenger, "ann", "bob", "1")
    messenger.publish("demo-blocking", key="ann", value=Block(blocked=False))
    send(messenger, "ann", "bob", "2")
    assert texts(messenger, "bob") == ["2"]


def test_a_message_passes_while_the_table_of_blocks_is_behind(messenger: Tester) -> None:
    messenger.lag(BLOCKER.table, 1)
    messenger.publish("demo-blocking", key="ann", value=Block())
    send(messenger, "ann", "bob", "1")
    messenger.lag(BLOCKER.table, 0)
    send(messenger, "ann", "bob", "2")
    assert texts(messenger, "bob") == ["1"]


def test_one_who_gets_no_answers_is_blocked(messenger: Tester) -> None:
    for number in range(messaging.FEW):
        send(messenger, "mallory", f"user-{number}")
        assert ("mallory" in messenger[BLOCKER.table]) is (number == messaging.FEW - 1)
    send(messenger, "mallory", "bob")
    assert texts(messenger, "bob") == []


def test_one_who_gets_answers_is_not_blocked(messenger: Tester) -> None:
    for _ in range(messaging.FEW):
        send(messenger, "ann", "bob")
        send(messenger, "bob", "ann")
    assert messenger[BLOCKER.table] == {}
    assert messenger[DETECTOR.table]["ann"] == Counts(sent=10, received=10)


def test_a_spammer_is_blocked_once_in_spite_of_crashes() -> None:
    with Tester(DETECTOR, partitions=3) as test:
        for number in range(messaging.FEW + 5):
            with test.hold_checkpoints():
                send(test, "mallory", f"user-{number}")
                test.crash()
            test.duplicate_last("demo-detector-loop")
        assert [each.key for each in test.published("demo-blocking")] == ["mallory"]
        assert test[DETECTOR.table]["mallory"] == Counts(sent=messaging.FEW + 5)
        assert test[DETECTOR.table]["user-3"] == Counts(received=1)


async def test_the_messenger_runs() -> None:
    assert (await messaging.main())[-1] == Message("alice", "bob", "hello")


# --- multiple ---------------------------------------------------------------------------------------------------------


def test_readings_are_cleaned() -> None:
    with Tester(CLEANER) as test:
        test.publish("demo-celsius", key="kitchen", value=20.0)
        test.publish("demo-fahrenheit", key="kitchen", value=68.0)
        test.publish("demo-celsius", key="kitchen", value=-400.0)
        assert [each.value for each in test.published("demo-readings")] == [20.0, 20.0]


def test_readings_far_from_the_mean_of_their_sensor_raise_an_alarm() -> None:
    with Tester(WATCHER) as test:
        test.set_row(AVERAGES.table, "kitchen", Mean(4, 80.0))
        test.publish("demo-readings", key="kitchen", value=99.0)
        test.set_row("demo-limits", "kitchen", 5.0)
        for degrees in (24.0, 26.0):
            test.publish("demo-readings", key="kitchen", value=degrees)
        assert [each.value for each in test.published(multiple.alarms)] == [Alarm(26.0, 20.0)]


def test_the_groups_work_together() -> None:
    with Tester(CLEANER, AVERAGES, WATCHER, partitions=2) as test:
        test.set_row("demo-limits", "kitchen", 10.0)
        for _ in range(9):
            test.publish("demo-celsius", key="kitchen", value=20.0)
        test.publish("demo-fahrenheit", key="kitchen", value=212.0)
        assert test[AVERAGES.table] == {"kitchen": Mean(10, 280.0)}
        (alarm,) = test.published(multiple.alarms)
        # The groups take turns in the order in which the tester was given them.
        assert (alarm.key, alarm.value) == ("kitchen", Alarm(100.0, 28.0))


async def test_the_program_of_several_groups_runs() -> None:
    alarm = await multiple.main()
    assert alarm is not None
    assert alarm.degrees == 90.0
