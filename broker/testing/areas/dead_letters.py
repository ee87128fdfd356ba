"""Conformance tests of dead letters: complete letters, no lost message, and redrives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime

from broker.codecs import Json, Text
from broker.consuming.retry.policy import DROP, Retry
from broker.errors import BackendError
from broker.hooks import DeadLettered, DeadLetterFailed, Event, NoDeadLetter, Warned, logger
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.areas.retry import QUICK
from broker.testing.case import ConformanceCase
from broker.testing.faults import Faults
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, drain, eventually, nothing_more, numbered, once, take, until_seen

__all__ = ["DeadLetters"]


class DeadLetters(ConformanceCase):
    """Content, writes and redrives."""

    @promise(
        "dead-letters.carry-the-original",
        "A dead letter has the body, key and attributes of the original, and reason, error, attempts, origin and time.",
    )
    async def test_carry_the_original(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)

        async def handle(_: Message[bytes]) -> None:
            raise ValueError("raised by the test")

        async with (
            bus.messages(topic, subscription="billing", retry=QUICK, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            original = OutboundMessage(b"\x00body\xff", key=b"\x00key", attributes={"a": "b", "ä": "ö"}, id="order-1")
            await bus.topic(topic).publish(original)
            work = asyncio.ensure_future(inbox.receive(handle))
            (letter,) = await take(letters, 1, harness.patience)
            await inbox.close()
            await work
            assert [event.target for event in events if isinstance(event, DeadLettered)] == [dead]
            attributes = dict(letter.attributes)
            fields = {name: attributes.pop(f"dead-letter-{name}") for name in _FIELDS}
            place = {name: attributes.pop(f"dead-letter-{name}", None) for name in ("partition", "offset")}
            assert (letter.data, letter.key, attributes) == (original.data, original.key, dict(original.attributes))
            assert fields["reason"] == "failed 3 times"
            assert "raised by the test" in fields["error"]
            assert (fields["attempts"], fields["topic"], fields["subscription"]) == ("3", topic, "billing")
            assert fields["id"] == "order-1"
            assert datetime.fromisoformat(fields["time"]).tzinfo is not None
            if place["partition"] is not None and (records := bus.capabilities.records) and records.log_reader:
                at = int(place["offset"] or -1)
                read = [each.id async for batch in bus.log.read(topic, int(place["partition"]), at) for each in batch]
                assert read[:1] == ["order-1"]

    @promise(
        "dead-letters.reject-records-the-reason",
        "`reject(reason)` dead-letters a message at once with that reason; the message is not redelivered.",
    )
    async def test_reject_records_the_reason(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        async with (
            bus.messages(topic, subscription="readers", dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            await bus.topic(topic).publish_batch(numbered(3))
            for message in await take(inbox, 3, harness.patience):
                await (message.reject("no departure") if message.data == b"m-000001" else message.ack())
            (letter,) = await take(letters, 1, harness.patience)
            assert (letter.data, letter.attributes["dead-letter-reason"]) == (b"m-000001", "no departure")
            await nothing_more(inbox, harness.quiet)
        async with bus.messages(topic, subscription="readers", dead_letter=dead) as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise(
        "dead-letters.undecodable-is-dead-lettered",
        "A payload that cannot be decoded is dead-lettered with the reason, and reading continues.",
    )
    async def test_undecodable_is_dead_lettered(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        async with (
            bus.messages(topic, subscription="readers", codec=Json(dict[str, int]), dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            await bus.topic(topic).publish_batch([b'{"a": 1}', b"{broken", b'{"b": "not a number"}', b'{"c": 3}'])
            seen: list[dict[str, int]] = []

            async def handle(message: Message[dict[str, int]]) -> None:
                seen.append(message.payload)

            work = asyncio.ensure_future(inbox.receive(handle))
            poison = await take(letters, 2, harness.patience)
            assert {letter.data for letter in poison} == {b"{broken", b'{"b": "not a number"}'}
            assert all("decoded" in letter.attributes["dead-letter-reason"] for letter in poison)
            await eventually(lambda: len(seen) == 2, harness.patience, "the handling of the good messages")
            assert sorted(seen, key=str) == [{"a": 1}, {"c": 3}]
            await inbox.close()
            await work

    @promise(
        "dead-letters.write-failure-does-not-rerun-handler",
        "A failed dead-letter write is an event and is repeated; the handler does not run again.",
    )
    async def test_write_failure_does_not_rerun_handler(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic, dead = await harness.connect(wrap=faults), await harness.topic(), await harness.topic()
        events: list[Event] = []
        calls: list[bytes | None] = []
        bus.hooks.listen(events.append)

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.data)
            raise ValueError("raised by the test")

        async with (
            bus.messages(topic, subscription="readers", retry=Retry(max_attempts=1), dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            faults.publish[dead].extend(BackendError("dead letters are down") for _ in range(3))
            await bus.topic(topic).publish(b"x")
            work = asyncio.ensure_future(inbox.receive(handle))
            await take(letters, 1, harness.patience)
            await nothing_more(letters, harness.quiet)
            await inbox.close()
            await work
        assert calls == [b"x"]
        failed = [event for event in events if isinstance(event, DeadLetterFailed)]
        assert [(event.target, "dead letters are down" in str(event.error)) for event in failed] == [(dead, True)] * 3
        pauses = [event.pause for event in failed]
        assert pauses == sorted(pauses)
        assert pauses[0] < pauses[-1], f"The pauses between writes did not grow: {pauses}"

    @promise(
        "dead-letters.original-is-kept-until-written",
        "A message is not acked until its letter is written: it is redelivered if the consumer ends before.",
    )
    async def test_original_is_kept_until_written(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic, dead = await harness.connect(wrap=faults), await harness.topic(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers", dead_letter=dead) as inbox:
            faults.publish[dead].extend(BackendError("dead letters are down") for _ in range(1000))
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            rejecting = asyncio.ensure_future(message.reject("bad"))
            await eventually(
                lambda: any(isinstance(event, DeadLetterFailed) for event in events), harness.patience, "the failure"
            )
            assert not rejecting.done()
            await inbox.close()
            await asyncio.wait({rejecting}, timeout=harness.patience)
            assert rejecting.cancelled() or rejecting.exception() is not None
        async with bus.messages(topic, subscription="readers") as again:
            assert bodies(await until_seen(again, [b"x"], harness.patience)) == once([b"x"])

    @requires("messages.subscription_admin")
    @promise(
        "dead-letters.missing-topic-loses-nothing",
        "If the dead-letter topic was deleted, its letters are written once the topic exists again.",
    )
    async def test_missing_topic_loses_nothing(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers", dead_letter=dead) as inbox:
            await bus.admin.delete_topic(dead)
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            rejecting = asyncio.ensure_future(message.reject("bad"))
            await eventually(
                lambda: any(isinstance(event, DeadLetterFailed) for event in events), harness.patience, "the failure"
            )
            await bus.admin.ensure_topic(dead)
            await rejecting
            # Without history, a second subscription might be created too late.
            assert [letter.data for letter in await bus.admin.list_dead(dead)] == [b"x"]

    @promise("dead-letters.drop-is-explicit", "`DROP` drops a rejected message, with an event.")
    async def test_drop_is_explicit(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers", dead_letter=DROP) as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            await message.reject("worthless")
            dropped = [(e.target, e.reason) for e in events if isinstance(e, DeadLettered)]
            assert dropped == [(None, "worthless")]
            await nothing_more(inbox, harness.quiet)
        async with bus.messages(topic, subscription="readers") as again:
            await nothing_more(again, harness.quiet)

    @promise(
        "dead-letters.no-topic-drops-nothing",
        "Without a dead-letter topic, a rejected message is redelivered at the longest backoff.",
    )
    async def test_no_topic_drops_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        loop = asyncio.get_running_loop()
        policy = Retry(initial=0.05, maximum=0.6, jitter=0.0)
        async with bus.messages(topic, subscription="readers", retry=policy) as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            rejected = loop.time()
            await message.reject("bad")
            await take(inbox, 1, harness.patience)
            assert loop.time() - rejected >= 0.58

    @promise(
        "dead-letters.no-topic-is-reported",
        "Without a dead-letter topic, a rejected or undecodable message is one warning, and an event each time.",
    )
    async def test_no_topic_is_reported(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        events: list[Event] = []
        lines: list[logging.LogRecord] = []
        bus.hooks.listen(events.append)
        policy = Retry(initial=0.05, maximum=0.1, jitter=0.0)
        codec = Json(dict[str, int])

        def reported(word: str) -> list[NoDeadLetter]:
            return [event for event in events if isinstance(event, NoDeadLetter) and word in event.reason]

        with logged(lines):
            async with bus.messages(topic, subscription="readers", codec=codec, retry=policy) as inbox:
                assert any(isinstance(event, Warned) and "dead_letter" in event.text for event in events)
                await bus.topic(topic).publish_batch([b"{broken", b'{"a": 1}'])
                rejected = 0
                async with asyncio.timeout(harness.patience):
                    while rejected < 2 or len(reported("decoded")) < 2:
                        message = await inbox.next_message(0.05)
                        if message is not None:
                            assert message.payload == {"a": 1}
                            await message.reject("no departure")
                            rejected += 1
        assert {(event.message.data, event.retry_in) for event in reported("decoded")} == {(b"{broken", 0.1)}
        assert {event.message.data for event in reported("no departure")} == {b'{"a": 1}'}
        warned = [line.getMessage() for line in lines if line.levelno == logging.WARNING]
        for reason in ("cannot be decoded", "no departure"):
            (line,) = [text for text in warned if reason in text]
            assert topic in line
            assert "'readers'" in line

    @promise(
        "dead-letters.are-truncated-to-fit",
        "A letter with a very long error text is written, with its body, key and attributes complete.",
    )
    async def test_are_truncated_to_fit(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()

        async def handle(_: Message[bytes]) -> None:
            raise ValueError("ä" * 3_000_000)

        async with (
            bus.messages(topic, subscription="readers", retry=Retry(max_attempts=1), dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            await bus.topic(topic).publish(OutboundMessage(bytes(500), key="k", attributes={"a": "b"}))
            work = asyncio.ensure_future(inbox.receive(handle))
            (letter,) = await take(letters, 1, harness.patience)
            await inbox.close()
            await work
            assert (letter.data, letter.key, letter.attributes["a"]) == (bytes(500), b"k", "b")
            assert letter.attributes["dead-letter-error"].startswith("ValueError: ää")

    @requires("harness.publish_foreign")
    @promise(
        "dead-letters.foreign-messages-have-letters",
        "A message of another client has a letter with its body, whatever the names and values of its attributes.",
    )
    async def test_foreign_messages_have_letters(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        foreign: dict[bytes, list[tuple[str, str]]] = {
            b"empty": [("", "1")],
            b"ours": [("anybroker-x", "1")],
            b"attributes": [("anybroker-attributes", "anybroker-y=1&=2&retry-letter-z=3&dead-letter-z=4")],
            b"key": [("anybroker-key-64", "!"), ("anybroker-key", "")],
            b"time": [("anybroker-time", "soon")],
            b"retry": [("retry-letter-x", "1"), ("retry-letter-due", "2030-01-01T00:00:00Z")],
            b"dead": [("dead-letter-reason", "forged"), ("dead-letter-attempts", "many")],
            b"long": [("name", "x" * 900)],
            b"twice": [("name", "1"), ("name", "2")],
        }
        async with (
            bus.messages(topic, subscription="readers", dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            for body, attributes in foreign.items():
                await harness.publish_foreign(topic, body, [*attributes, ("fine", "1")])
            for message in await take(inbox, len(foreign), harness.patience):
                await message.reject("bad")
            for letter in await take(letters, len(foreign), harness.patience):
                assert letter.data in foreign
                assert letter.attributes["dead-letter-reason"] == "bad"
                assert letter.attributes["fine"] == "1", f"The letter of {letter.data!r} lacks its attributes"
        assert not [event for event in events if isinstance(event, DeadLetterFailed)]

    @requires("messages.renewable")
    @promise(
        "dead-letters.lease-is-kept-while-writing",
        "A dead-letter write that takes longer than a lease writes one letter.",
    )
    async def test_lease_is_kept_while_writing(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(short_lease=True, wrap=faults), await harness.topic()
        dead = await harness.topic()
        async with (
            bus.messages(topic, subscription="readers", dead_letter=dead) as inbox,
            bus.messages(topic, subscription="readers", dead_letter=dead) as other,
            bus.messages(dead, subscription="readers") as letters,
        ):
            faults.publish[dead].extend(BackendError("dead letters are down") for _ in range(4))
            await bus.topic(topic).publish(b"x")
            waits = {asyncio.ensure_future(reader.next_message()) for reader in (inbox, other)}
            done, waiting = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=harness.patience)
            for task in done:
                message = task.result()
                assert message is not None
                await message.reject("bad")
            assert not any(task.done() for task in waiting), "The message went to another consumer"
            for task in waiting:
                task.cancel()
            await take(letters, 1, harness.patience)
            await nothing_more(letters, harness.quiet)

    @promise(
        "dead-letters.redrive-restores-messages",
        "`redrive` publishes each original message unchanged to its topic, and returns their number.",
    )
    async def test_redrive_restores_messages(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        async with bus.messages(topic, subscription="readers", dead_letter=dead) as inbox:
            sent = [OutboundMessage(body, key=body, attributes={"n": body.decode()}) for body in numbered(10)]
            await bus.topic(topic).publish_batch(sent)
            for message in await take(inbox, 10, harness.patience):
                await message.reject("bad")
            progress: list[int] = []
            report = await bus.admin.redrive(dead, to=[topic], progress=progress.append)
            assert (report.moved, dict(report.by_topic), report.skipped) == (10, {topic: 10}, 0)
            assert report.elsewhere == 0
            assert progress
            assert progress[-1] == 10
            back = await take(inbox, 10, harness.patience)
            assert {(m.data, m.key, tuple(m.attributes.items())) for m in back} == {
                (s.data, s.key, tuple(s.attributes.items())) for s in sent
            }
            assert (await bus.admin.redrive(dead, to=[topic])).moved == 0

    @promise("dead-letters.redrive-limit", "`redrive(limit=n)` moves n letters; the others stay for the next redrive.")
    async def test_redrive_limit(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        async with bus.messages(topic, subscription="readers", dead_letter=dead) as inbox:
            await bus.topic(topic).publish_batch(numbered(6))
            for message in await take(inbox, 6, harness.patience):
                await message.reject("bad")
            assert (await bus.admin.redrive(dead, to=[topic], limit=2)).moved == 2
            first = await take(inbox, 2, harness.patience)
            await nothing_more(inbox, harness.quiet)
            assert (await bus.admin.redrive(dead, to=[topic])).moved == 4
            assert len(bodies([*first, *await take(inbox, 4, harness.patience)])) == 6

    @promise(
        "dead-letters.redrive-skips-foreign-messages",
        "A message without an origin stays in the dead-letter topic, and is counted.",
    )
    async def test_redrive_skips_foreign_messages(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        async with bus.messages(topic, subscription="readers", dead_letter=dead) as inbox:
            await bus.topic(topic).publish(b"x")
            await (await take(inbox, 1, harness.patience))[0].reject("bad")
            await bus.topic(dead).publish(b"stranger")
            report = await bus.admin.redrive(dead, to=[topic])
            assert (report.moved, report.skipped, report.elsewhere) == (1, 1, 0)
            await until_seen(inbox, [b"x"], harness.patience)

    @promise(
        "dead-letters.redrive-to-named-topics-only",
        "`redrive(to=…)` publishes to these topics only: letters that name another origin stay, and are counted.",
    )
    async def test_redrive_to_named_topics_only(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        other = await harness.topic()
        async with (
            bus.messages(topic, subscription="readers", dead_letter=dead) as inbox,
            bus.messages(other, subscription="others") as others,
        ):
            await bus.topic(topic).publish(b"x")
            await (await take(inbox, 1, harness.patience))[0].reject("bad")
            forged = {"dead-letter-topic": other, "dead-letter-reason": "forged"}
            await bus.topic(dead).publish(OutboundMessage(b"y", attributes=forged))
            expected = await bus.admin.redrive(dead, dry_run=True)
            assert (dict(expected.by_topic), expected.failed) == ({topic: 1, other: 1}, 0)
            for dry_run in (True, False):
                report = await bus.admin.redrive(dead, to=[topic], dry_run=dry_run)
                assert (dict(report.by_topic), report.failed, report.not_allowed) == ({topic: 1}, 1, {other: 1})
            await until_seen(inbox, [b"x"], harness.patience)
            await nothing_more(others, harness.quiet)
            assert (await bus.admin.redrive(dead, to=[topic, other])).moved == 1
            await until_seen(others, [b"y"], harness.patience)

    @promise(
        "dead-letters.redrive-reaches-every-subscription",
        "Every subscription of the origin receives a redriven message.",
    )
    async def test_redrive_reaches_every_subscription(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        async with (
            bus.messages(topic, subscription="first", dead_letter=dead) as first,
            bus.messages(topic, subscription="second") as second,
        ):
            await bus.topic(topic).publish(b"x")
            await until_seen(second, [b"x"], harness.patience)
            await (await take(first, 1, harness.patience))[0].reject("bad")
            await bus.admin.redrive(dead, to=[topic])
            for inbox in (first, second):
                await until_seen(inbox, [b"x"], harness.patience)

    @promise(
        "dead-letters.two-subscriptions-two-letters",
        "Two subscriptions that give up the same message write a letter each.",
    )
    async def test_two_subscriptions_two_letters(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        await bus.admin.ensure_subscription(dead, "readers")
        async with (
            bus.messages(topic, subscription="first", dead_letter=dead, codec=Text()) as first,
            bus.messages(topic, subscription="second", dead_letter=dead, codec=Text()) as second,
        ):
            await bus.topic(topic).publish(OutboundMessage(b"x", id="same"))
            for inbox in (first, second):
                message = await inbox.next_message(harness.patience)
                assert message is not None
                await message.reject("bad")
        async with bus.messages(dead, subscription="readers", start="earliest") as letters:
            seen = [await take(letters, 1, harness.patience) for _ in range(2)]
            subscriptions = {letter.attributes["dead-letter-subscription"] for (letter,) in seen}
            assert subscriptions == {"first", "second"}
            assert await drain(letters, harness.quiet) == []


@contextmanager
def logged(records: list[logging.LogRecord]) -> Generator[None]:
    """Add what the logger of `broker` gets meanwhile."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Handler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


_FIELDS = ("reason", "error", "attempts", "topic", "subscription", "id", "time")
