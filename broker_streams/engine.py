"""`PartitionEngine`: handles the messages of one partition of a group. Pure: no broker, no clock, no disk.

All semantics are here: rows, timers, windows, expiry, policies of failures, deferrals, ids. The engine is given the
messages of the partition in the order in which they are to be handled, and collects what a checkpoint has to write;
the caller writes it, and says when the store has it.

    await engine.handle(messages)
    effects = engine.take()              # the engine may go on while these are written
    ...                                  # publish, write the rows, commit
    engine.settled(effects)              # or: engine.rollback()

*Event time.* The highest time of the messages that were handled. Before a message moves it, everything that is due
until then happens, in order of time: windows close, timers are called, rows expire. Messages without a time have the
event time of the partition. Event time never goes back: after a message from the far future all windows until then are
closed, and all timers were called.

*Failure.* A callback that raises leaves nothing behind; then the policy of its edge decides. A timer, a visit or a
closing window that fails stops the partition. After `StreamFailed`, `take` returns what came before the failure.

*Repetition.* After a rollback or a crash, messages are handled again from the last checkpoint on. If they come in the
same order and the callbacks are repeatable, rows and outputs are the same again, and so are the ids of the outputs.

*Concurrency.* One task. `done` of a deferral may be called by other tasks of the same event loop.

*Cancellation.* A cancelled `handle`, `advance` or `visit` has handled a part; what it was at is undone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from inspect import isawaitable
from typing import Any, Final

from broker import Codec, ConfigurationError, DecodeError, Limits, OutboundMessage
from broker.checks import name_of
from broker_streams import keys
from broker_streams.agenda import EVENT, WALL, WINDOWS, Agenda, OpenWindow
from broker_streams.changes import Changes, StateReader
from broker_streams.checkpoint import Checkpoint
from broker_streams.context import Context, Incoming, attributes_of, moment_of
from broker_streams.deferrals import Deferrals
from broker_streams.edges import Input, Loop, Timer, Visitor, Windowed
from broker_streams.effects import Effects, SenderPlace, sender_of
from broker_streams.failures import DeadLetter, LastPolicy, Retrying, Skip, StreamFailed, dead_letter, describe
from broker_streams.graph import Group
from broker_streams.handles import Clock
from broker_streams.turn import NEVER, Reader, Turn

__all__ = ["Effects", "PartitionEngine", "Reader", "StateReader"]

logger: Final = logging.getLogger("broker_streams")

_NO_LIMITS: Final = Limits()
_NONE: Final[Mapping[str, Any]] = {}


class _Source:
    """A topic that is consumed.

    :ivar position: the next offset to handle.
    :ivar prefix: of the places of its messages.
    """

    __slots__ = (
        "bytes",
        "callback",
        "decode",
        "edge",
        "is_loop",
        "messages",
        "passes",
        "position",
        "prefix",
        "skips",
        "topic",
    )

    def __init__(self, topic: str, edge: Input[Any] | Loop[Any], prefix: str) -> None:
        self.topic: Final = topic
        self.edge: Final = edge
        self.prefix: Final = prefix
        self.position = 0
        self.decode: Final[Callable[[Any], Any]] = edge.codec.decode
        self.callback: Final[Callable[[Any, Any], Any]] = _limited(edge)
        self.skips: Final = isinstance(edge, Input) and edge.tombstones == "skip"
        self.passes: Final = isinstance(edge, Input) and edge.tombstones == "pass"
        self.is_loop: Final = isinstance(edge, Loop)
        self.messages = 0
        self.bytes = 0


class PartitionEngine:
    """See the module.

    :param state: the rows of the partition as of `checkpoint`.
    :param joins: rows of joined tables by topic, likewise `lookups`.
    :param checkpoint: where the partition goes on; None if it begins.
    :param now: the machine's time, in seconds since 1970.
    :param sleep: waits for seconds, between attempts and for deadlines.
    :param attributes: of all messages to outputs and the loop; attributes given with a message override them.
    :param limits: of the broker; what does not fit is refused within the callback.
    :param wrap: called once with the context; callbacks get what it returns.
    :param epoch: of this owner of the partition, for its checkpoints.
    :param most_rows: of one checkpoint, 2 or more: `handle` and `advance` return early rather than change more.
    :ivar raises: which errors of callbacks leave `handle`, `advance` and `visit` as they are, whatever the policy.
    """

    def __init__(
        self,
        group: Group,
        partition: int,
        state: StateReader,
        *,
        joins: Mapping[str, Reader] = _NONE,
        lookups: Mapping[str, Reader] = _NONE,
        checkpoint: Checkpoint | None = None,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        attributes: Mapping[str, str] | None = None,
        limits: Limits = _NO_LIMITS,
        wrap: Callable[[Context], Context] | None = None,
        epoch: int = 0,
        most_rows: int | None = None,
    ) -> None:
        self.group: Final = group
        self.partition: Final = partition
        self.raises: Callable[[Exception], bool] | None = None
        self.identities: dict[str, str] = {}
        """Of the topics, for checkpoints."""
        self._now = now
        self._sleep = sleep
        self._epoch = epoch
        self._limits = limits
        # A turn changes the row and the agenda of its key.
        self._most_dirty: float = NEVER if most_rows is None else most_rows - 2
        self._changes = Changes(state)
        self._deferrals = Deferrals(now, sleep)
        self._turn = Turn(
            group,
            partition,
            self._changes,
            self._deferrals,
            joins=joins,
            lookups=lookups,
            attributes=attributes or {},
            limits=limits,
            now=now,
        )
        self._wrap = wrap
        self._context = self._new_context()
        self._sources = {
            topic: _Source(topic, edge, f"{group.name}/{topic}/{partition}/") for topic, edge in group.consumed.items()
        }
        self._timers: dict[str, Timer] = {timer.name: timer for timer in group.timers}
        self._windows: dict[str, Windowed[Any]] = {edge.name: edge for edge in group.windows}
        self._idle_edges = [(edge, edge.idle_seconds) for edge in group.windows if edge.idle_seconds is not None]
        self._has_agendas = bool(group.windows) or (group.persist is not None and group.persist.ttl_ms is not None)
        self._fingerprint = group.fingerprint()
        self._version = 1 if group.persist is None else group.persist.version
        self._senders: dict[str, tuple[int, int]] = {}
        self._counts: Counter[str] = Counter()
        self._visits = 0
        self._busy = False
        self._last_message = now()
        self._idle_closed: set[str] = set()
        self._taken: deque[Effects] = deque()
        self._base = checkpoint
        self._number = 0
        self._restore()

    def _new_context(self) -> Context:
        context = Context(self._turn, self.group)
        return context if self._wrap is None else self._wrap(context)

    def _detach(self) -> Context:
        """End the context of a deferred message; return the one of the next turns."""
        self._turn.detached = False
        self._context.end()
        self._context = self._new_context()
        return self._context

    # Messages

    async def handle(self, messages: Iterable[Incoming]) -> int:
        """Handle messages in this order. Those below the position of their topic are dropped.

        :returns: how many, which are all unless `most_rows` is reached: then the others come after a checkpoint.
        :raises StreamFailed: a message failed, and its policy is to stop; those before it are handled.
        :raises BrokerError: the state cannot be read.
        :raises ConfigurationError: the group does not consume a topic.
        """
        self._enter()
        try:
            if not isinstance(messages, Sequence):
                messages = list(messages)
            self._prefetch(messages)
            if messages:
                self._last_message = self._now()
                self._idle_closed.clear()
            handled = await self._handle(messages)
            self._settle_failed()
            return handled
        finally:
            self._busy = False

    def _prefetch(self, messages: Sequence[Incoming]) -> None:
        wanted = {message.key for message in messages if message.key is not None}
        if self.group.persist is not None:
            self._changes.prefetch(wanted)
        if self._has_agendas:
            self._changes.prefetch(map(keys.agenda_key, wanted))

    async def _handle(self, messages: Sequence[Incoming]) -> int:  # noqa: C901 # calls per message cost
        turn, context, sources, deferrals = self._turn, self._context, self._sources, self._deferrals
        rows, most = self._changes.rows, self._most_dirty
        for count, message in enumerate(messages):
            topic, offset, key, data, timestamp, _ = message
            if deferrals.failed:
                self._settle_failed()
            if len(rows) > most:
                return count
            source = sources.get(topic)
            if source is None:
                raise self._not_consumed(topic)
            if offset < source.position:
                continue
            sender = None
            if data is None and source.skips:
                self._pass(source, message, "tombstones", sender)
                continue
            if source.is_loop:
                sender = sender_of(attributes_of(message))
                if sender is not None and sender.place <= self._senders.get(sender.sender, (-1, 0)):
                    self._pass(source, message, "duplicates", None)
                    continue
            try:
                if key is None:
                    raise DecodeError("The message has no key", advice="Publish every message with a key")
                if key.startswith(keys.RESERVED_STARTS):
                    keys.check(key)
                payload = None if data is None and source.passes else source.decode(data)
            except Exception as error:
                self._undecodable(source, message, error)
                self._pass(source, message, "undecodable", sender)
                continue
            stream_time = turn.stream_time
            if timestamp is None:
                timestamp = stream_time
            elif timestamp > stream_time:
                stream_time = timestamp
            if stream_time >= turn.next_due and not await self._pass_time(stream_time):
                return count
            turn.stream_time = stream_time
            turn.begin(key, message, payload, timestamp, source.prefix, offset)
            try:
                result = source.callback(context, payload)
                if result is not None and isawaitable(result):
                    await result
                if turn.late:
                    await self._call_late()
                turn.commit()
            except BaseException as error:
                turn.undo()
                await self._callback_failed(source, message, timestamp, error)
            if turn.detached:
                context = self._detach()
            source.position = offset + 1
            source.messages += 1
            if data is not None:
                source.bytes += len(data)
            if sender is not None:
                self._senders[sender.sender] = sender.place
            if turn.next_due <= stream_time:
                await self._pass_time(stream_time)
        return len(messages)

    def _pass(self, source: _Source, message: Incoming, what: str, sender: SenderPlace | None) -> None:
        """Go past a message that no callback got."""
        self._counts[what] += 1
        source.position = message.offset + 1
        source.messages += 1
        source.bytes += len(message.data or b"")
        if sender is not None:
            self._senders[sender.sender] = sender.place

    async def _callback_failed(self, source: _Source, message: Incoming, timestamp: int, error: BaseException) -> None:
        """Try a message again as its policy says, and apply the policy when it is given up."""
        turn, policy = self._turn, source.edge.on_error
        failures = 1
        while True:
            failed = self._counted(error)
            delay = policy.delay(failed, failures) if isinstance(policy, Retrying) else None
            if delay is None:
                last = policy.then if isinstance(policy, Retrying) else policy
                self._give_up(last, source, message, f"{name_of(source.edge.callback)} failed", failed, failures)
                return
            logger.warning("%s, again in %.2f s: %s", self._what_failed(source, message), delay, describe(failed))
            self._counts["retried"] += 1
            await self._sleep(delay)
            assert message.key is not None
            # The callback may have changed the payload.
            payload = None if message.data is None and source.passes else source.decode(message.data)
            if turn.detached:
                self._detach()
            turn.begin(message.key, message, payload, timestamp, source.prefix, message.offset)
            try:
                await self._run(source.callback, payload)
            except BaseException as raised:
                error = raised
                failures += 1
            else:
                return

    async def _run(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Run a callback as the turn that was begun: all of it, or nothing."""
        try:
            result = callback(self._context, *arguments)
            if result is not None and isawaitable(result):
                await result
            if self._turn.late:
                await self._call_late()
            self._turn.commit()
        except BaseException:
            self._turn.undo()
            raise

    async def _call_late(self) -> None:
        late = self._turn.late
        # The callback may find more of them.
        for window in late:
            edge = self._windows[window.edge.name]
            if edge.on_late is not None:
                result = edge.on_late(self._context, window)
                if isawaitable(result):
                    await result
        self._counts["late"] += len(late)

    # Failures

    def _counted(self, error: BaseException) -> Exception:
        """An error of a callback to which a policy applies.

        :raises BaseException: the error itself, if none does.
        """
        turn = self._turn
        if turn.broken is not None:
            broken, turn.broken = turn.broken, None
            raise broken
        if isinstance(error, asyncio.CancelledError) and not _is_cancelled():
            found = RuntimeError("The callback raised CancelledError, and was not cancelled")
            found.__cause__, error = error, found
        if not isinstance(error, Exception) or (self.raises is not None and self.raises(error)):
            raise error
        self._counts["failed"] += 1
        return error

    def _undecodable(self, source: _Source, message: Incoming, error: Exception) -> None:
        policy = source.edge.on_undecodable
        last = policy.then if isinstance(policy, Retrying) else policy
        self._give_up(last, source, message, "cannot be decoded", error, None)

    def _give_up(
        self,
        policy: LastPolicy,
        source: _Source,
        message: Incoming,
        reason: str,
        error: BaseException,
        attempts: int | None,
    ) -> None:
        """Apply the policy to a message that failed for good.

        :raises StreamFailed: the policy is to stop.
        """
        if isinstance(policy, Skip):
            logger.warning("%s, and is skipped: %s", self._what_failed(source, message, reason), describe(error))
            self._counts["skipped"] += 1
        elif isinstance(policy, DeadLetter):
            letter = self._letter(source, message, reason, error, attempts)
            logger.warning(
                "%s, and goes to %r: %s", self._what_failed(source, message, reason), policy.topic, describe(error)
            )
            self._turn.publish(policy.topic, letter)
            self._counts["dead_lettered"] += 1
        else:
            raise StreamFailed(
                f"{self._what_failed(source, message, reason)}: {describe(error)}",
                topic=message.topic,
                partition=self.partition,
                offset=message.offset,
                key=None if message.key is None else keys.decode(message.key),
                native=error,
            ) from error

    def _letter(
        self, source: _Source, message: Incoming, reason: str, error: BaseException, attempts: int | None
    ) -> OutboundMessage:
        return dead_letter(
            topic=message.topic,
            partition=self.partition,
            offset=message.offset,
            key=message.key,
            data=message.data,
            attributes=attributes_of(message),
            group=self.group.name,
            reason=reason,
            error=error,
            attempts=attempts,
            id=f"{source.prefix}{message.offset}/letter",
            timestamp=datetime.fromtimestamp(self._now(), UTC),
            publish_time=None if message.timestamp_ms is None else moment_of(message.timestamp_ms),
            limits=self._limits,
        )

    def _what_failed(self, source: _Source, message: Incoming, reason: str = "") -> str:
        key = None if message.key is None else keys.decode(message.key)
        reason = reason or f"{name_of(source.edge.callback)} failed"
        place = f"{message.topic!r}[{self.partition}]@{message.offset}"
        return f"Group {self.group.name!r}: message {place}, key {key!r}: {reason}"

    def _not_consumed(self, topic: str) -> ConfigurationError:
        return ConfigurationError(
            f"Group {self.group.name!r} does not consume topic {topic!r}",
            advice=f"It consumes {', '.join(map(repr, self._sources))}",
        )

    # Deferrals

    @property
    def pending(self) -> int:
        """Deferrals that are not done."""
        return len(self._deferrals)

    async def drained(self) -> None:
        """Return when nothing is pending.

        :raises StreamFailed: a deferral failed, or its deadline passed, and the policy is to stop.
        """
        while True:
            self._settle_failed()
            if not len(self._deferrals):
                return
            await self._deferrals.changed()

    def _settle_failed(self) -> None:
        """Apply the policies of messages whose deferrals failed. What their callbacks did stays done."""
        failed = self._deferrals.failed
        while failed:
            deferral, error = failed[0]
            message: Incoming | None = deferral.cause
            if message is None:
                raise self._stopped("A deferral", "", error) from error
            source = self._sources[message.topic]
            policy = source.edge.on_error
            last = policy.then if isinstance(policy, Retrying) else policy
            self._counts["failed"] += 1
            self._give_up(last, source, message, f"the deferral of {name_of(source.edge.callback)} failed", error, None)
            failed.popleft()

    # Time

    async def _pass_time(self, until: int) -> bool:
        """Do what is due in event time, in order; returns whether that was all, within the rows of one checkpoint."""
        turn, changes = self._turn, self._changes
        turn.firing = "event"
        try:
            while True:
                time = turn.next_due = self._next_event()
                if time > until:
                    return True
                if self.dirty > self._most_dirty:
                    return False
                turn.stream_time = max(turn.stream_time, int(time))
                timer, window = changes.first_due(EVENT), changes.first_due(WINDOWS)
                if window is not None and keys.parse_due(window)[0] == time:
                    await self._close_due(window)
                else:
                    assert timer is not None
                    await self._fire(timer, "event")
        finally:
            turn.firing = None

    def _next_event(self) -> float:
        """When the next timer, window or row is due in event time."""
        due = [entry for part in (EVENT, WINDOWS) if (entry := self._changes.first_due(part)) is not None]
        return min((keys.parse_due(entry)[0] for entry in due), default=NEVER)

    async def _fire(self, entry: bytes, clock: Clock) -> None:
        """Call the timer of an entry of the index, or let the row expire."""
        due, key = keys.parse_due(entry)
        turn = self._turn
        agenda = self._agenda_of(key)
        timers = agenda.timers if clock == "event" else agenda.wall_timers
        name = min((name for name, time in timers.items() if time <= due), default=None)
        if name is None:
            turn.begin(key, None, None, due, "", "")
            if clock == "event" and agenda.expiry is not None and agenda.expiry <= due:
                turn.expire_row()
                turn.commit()
                self._counts["expired"] += 1
            else:
                self._drop_entry(entry)
            return
        turn.begin(key, None, None, timers[name], self._prefix("timer", name), f"{timers[name]}/{_hash(key)}")
        turn.remove_timer(name, clock)
        timer = self._timers.get(name)
        if timer is None:
            logger.warning("Group %r has no timer %r any more; it is dropped", self.group.name, name)
            turn.commit()
            return
        self._counts["timers"] += 1
        await self._run_alone(f"{timer}", timer.callback)

    async def _close_due(self, entry: bytes) -> None:
        """Close the window of an entry of the index."""
        due, key = keys.parse_due(entry)
        opened = self._agenda_of(key).windows
        found = [(each.end, name, each.start, each) for name in opened for each in opened[name] if each.due <= due]
        if not found:
            self._drop_entry(entry)
            return
        _, name, _, window = min(found, key=_order)
        await self._close(key, name, window)

    async def _close(self, key: bytes, name: str, opened: OpenWindow) -> None:
        turn, edge = self._turn, self._windows.get(name)
        turn.begin(key, None, None, opened.end, self._prefix("window", name), f"{opened.start}/{_hash(key)}")
        window = turn.close_window(edge, name, opened)
        if edge is None or window is None:
            logger.warning("Group %r has no window %r any more; it is dropped", self.group.name, name)
            turn.commit()
            return
        self._counts["closed"] += 1
        if edge.on_close is None:
            turn.commit()
        else:
            await self._run_alone(f"{edge}.on_close", edge.on_close, window)

    async def _run_alone(self, what: str, callback: Callable[..., Any], *arguments: Any) -> None:
        """Run a callback that has no message, and so no policy."""
        turn = self._turn
        try:
            await self._run(callback, *arguments)
        except BaseException as error:
            failed = self._counted(error)
            raise self._stopped(what, turn.key, failed) from failed
        finally:
            if turn.detached:
                self._detach()

    def _stopped(self, what: str, key: str, error: BaseException) -> StreamFailed:
        return StreamFailed(
            f"Group {self.group.name!r}, partition {self.partition}: {what} failed for key {key!r}: {describe(error)}",
            partition=self.partition,
            key=key,
            native=error,
            advice="Mend the callback and restart; a timer, a window or a visit has no other policy",
        )

    def _prefix(self, kind: str, name: str) -> str:
        return f"{self.group.name}/{kind}:{name}/{self.partition}/"

    def _agenda_of(self, key: bytes) -> Agenda:
        return Agenda.unpack(self._changes.get(keys.agenda_key(key)))

    def _drop_entry(self, entry: bytes) -> None:
        """Remove an entry of the index that no agenda has."""
        self._changes.put_due(entry[:1], entry, None)

    async def advance(self) -> None:
        """Do what is due by the machine's time: timers, windows of an idle partition, deadlines of deferrals.

        :raises StreamFailed: a callback failed.
        """
        self._enter()
        turn = self._turn
        try:
            self._deferrals.expire()
            self._settle_failed()
            until = int(self._now() * 1000)
            turn.firing = "wall"
            while (entry := self._changes.first_due(WALL)) is not None and keys.parse_due(entry)[0] <= until:
                if self.dirty > self._most_dirty:
                    return
                await self._fire(entry, "wall")
            turn.firing = None
            for edge, time in self._idle_times():
                if self._now() >= time:
                    if not await self._close_idle(edge):
                        return
                    self._idle_closed.add(edge.name)
            if turn.next_due <= turn.stream_time:
                await self._pass_time(turn.stream_time)
        finally:
            turn.firing = None
            self._busy = False

    async def _close_idle(self, edge: Windowed[Any]) -> bool:
        """Close all open windows of an edge; what comes for them later is late. False: the checkpoint is full."""
        found: list[tuple[int, bytes, int, OpenWindow]] = []
        for entry in self._changes.all_due(WINDOWS):
            _, key = keys.parse_due(entry)
            found += [(each.end, key, each.start, each) for each in self._agenda_of(key).windows.get(edge.name, [])]
        for end, key, _, opened in sorted(found, key=_order):
            if self.dirty > self._most_dirty:
                return False
            await self._close(key, edge.name, opened)
            self._turn.closed[edge.name] = max(end, self._turn.closed.get(edge.name, end))
        return True

    @property
    def is_idle(self) -> bool:
        """Whether `advance` would close windows, since no message has come for so long."""
        if not self._idle_edges or self._changes.first_due(WINDOWS) is None:
            return False
        return any(self._now() >= time for _, time in self._idle_times())

    def _idle_times(self) -> list[tuple[Windowed[Any], float]]:
        """The edges with windows that may be open, and when these close if no message comes."""
        edges = [(edge, idle) for edge, idle in self._idle_edges if edge.name not in self._idle_closed]
        return [(edge, self._last_message + idle) for edge, idle in edges]

    def awake(self) -> None:
        """Messages wait to be handled, so the partition is not idle."""
        self._last_message = self._now()

    def next_due(self) -> float | None:
        """The machine's time at which `advance` has something to do, in seconds since 1970; None: never, as of now."""
        times: list[float] = []
        if (entry := self._changes.first_due(WALL)) is not None:
            times.append(keys.parse_due(entry)[0] / 1000)
        if (deadline := self._deferrals.deadline()) is not None:
            times.append(deadline)
        if self._turn.next_due <= self._turn.stream_time and self._next_event() <= self._turn.stream_time:
            # The last checkpoint had no room for it.
            times.append(self._now())
        if self._idle_edges and self._changes.first_due(WINDOWS) is not None:
            times += [time for _, time in self._idle_times()]
        return min(times, default=None)

    # Visits

    async def visit(self, visitor: Visitor | str, meta: Any, rows: Iterable[bytes]) -> int:
        """Call a visitor for rows that exist; returns how many. Keys of agendas and of deleted rows are passed over.

        :param rows: their keys, as in the store.
        :raises StreamFailed: the visitor failed; the rows before were visited.
        :raises ConfigurationError: the group has no such visitor.
        """
        name = visitor if isinstance(visitor, str) else visitor.name
        found = next((each for each in self.group.visitors if each.name == name), None)
        if found is None:
            raise ConfigurationError(
                f"Group {self.group.name!r} has no Visitor {name!r}",
                advice=f"It has {', '.join(repr(each.name) for each in self.group.visitors) or 'none'}",
            )
        self._enter()
        self._visits += 1
        run = f"{self._epoch}.{self._number}.{self._visits}"
        turn, count = self._turn, 0
        try:
            for key in rows:
                if keys.is_reserved(key) or self._changes.get(key) is None:
                    continue
                turn.begin(key, None, None, turn.stream_time, self._prefix("visit", name), f"{run}/{_hash(key)}")
                await self._run_alone(f"{found}", found.callback, meta)
                count += 1
            if turn.next_due <= turn.stream_time:
                await self._pass_time(turn.stream_time)
        finally:
            self._busy = False
        return count

    # Rows of an older version

    @property
    def needs_upgrade(self) -> bool:
        """Whether rows were written by an older version of the table's format: `Persist(version=)`.

        :raises ConfigurationError: they were written by a newer one, or there is no `Persist(upgrade=)`.
        """
        persist, base = self.group.persist, self._base
        if persist is None or base is None or base.version == persist.version:
            return False
        if base.version > persist.version or persist.upgrade is None:
            lacks = " and no upgrade" if base.version < persist.version else ""
            raise ConfigurationError(
                f"Table {self.group.table!r} has rows of version {base.version}, and Persist has version "
                f"{persist.version}{lacks}",
                advice="Give Persist an upgrade= from that version, or run the code that wrote the rows",
            )
        return True

    def upgrade(self, rows: Iterable[tuple[bytes, bytes]]) -> int:
        """Rewrite rows of an older version, before the first message; returns how many. Other rows are passed over.

        :param rows: keys and data, as in the store; all rows of the partition, before the next checkpoint.
        """
        persist, base = self.group.persist, self._base
        assert persist is not None
        assert persist.upgrade is not None
        assert base is not None
        count = 0
        for key, data in rows:
            if not keys.is_reserved(key):
                self._changes.put(key, self._upgraded(persist.upgrade, persist.codec, base.version, key, data))
                count += 1
        return count

    def _upgraded(
        self, upgrade: Callable[[int, bytes], object], codec: Codec[Any], version: int, key: bytes, data: bytes
    ) -> bytes:
        """:raises StreamFailed: `upgrade` has raised, or has returned what is no row."""
        try:
            found = upgrade(version, data)
            if not isinstance(found, bytes):
                raise TypeError(f"it returned {found!r}, not bytes")
            codec.decode(found)
        except Exception as error:
            name = keys.decode(key)
            raise StreamFailed(
                f"Table {self.group.table!r}, partition {self.partition}: upgrade= of the row of {name!r} from version "
                f"{version} failed: {describe(error)}",
                partition=self.partition,
                key=name,
                native=error,
                advice="Mend it and start again: nothing was written",
            ) from error
        return found

    # Checkpoints

    @property
    def positions(self) -> dict[str, int]:
        """By topic the next offset to handle; topics of which nothing was handled yet are missing."""
        return {topic: source.position for topic, source in self._sources.items() if source.position > 0}

    @property
    def stream_time(self) -> int:
        """Event time, in milliseconds since 1970."""
        return self._turn.stream_time

    @property
    def dirty(self) -> int:
        """The number of rows and agendas that changed since the last `take`."""
        return len(self._changes.rows)

    @property
    def has_effects(self) -> bool:
        """Whether a checkpoint has something to write, be it positions only."""
        return bool(self._changes.rows or self._turn.outputs or self._counts) or any(
            source.messages for source in self._sources.values()
        )

    def take(self) -> Effects:
        """What the next checkpoint writes: everything since the last one that was taken.

        :raises StreamFailed: a deferral failed, and the policy is to stop.
        :raises RuntimeError: something is pending, or a call is running.
        """
        if self._busy or len(self._deferrals):
            raise RuntimeError("A checkpoint was taken " + ("within a call" if self._busy else "before drained()"))
        self._settle_failed()
        turn = self._turn
        self._number += 1
        checkpoint = Checkpoint(
            positions=self.positions,
            stream_time=turn.stream_time,
            fired=turn.fired,
            senders=dict(self._senders),
            closed=dict(turn.closed),
            epoch=self._epoch,
            number=self._number,
            version=self._version,
            fingerprint=self._fingerprint,
            identities=self.identities,
        )
        rows, due = self._changes.take()
        topics: dict[str, tuple[int, int]] = {}
        for topic, source in self._sources.items():
            if source.messages:
                topics[topic] = source.messages, source.bytes
                source.messages = source.bytes = 0
        effects = Effects(rows, due, turn.take(), checkpoint, self._counts, topics)
        self._counts = Counter()
        self._taken.append(effects)
        return effects

    def settled(self, effects: Effects) -> None:
        """The checkpoint is written, and the store has its rows: they are read from there.

        :raises RuntimeError: it is not the earliest that was taken and not settled.
        """
        if not self._taken or self._taken[0] is not effects:
            raise RuntimeError("Checkpoints are settled in the order in which they were taken")
        self._taken.popleft()
        self._base = effects.checkpoint
        self._changes.settle()

    def rollback(self) -> None:
        """Drop everything since the last settled checkpoint; `positions` says where to read on.

        :raises RuntimeError: a call is running.
        """
        if self._busy:
            raise RuntimeError("rollback() was called within a call")
        self._taken.clear()
        self._changes.forget()
        self._restore()

    def _restore(self) -> None:
        base = self._base or Checkpoint()
        turn = self._turn
        self._deferrals.clear()
        turn.restart(base)
        self._senders = dict(base.senders)
        self._counts = Counter()
        self._number = base.number
        for topic, source in self._sources.items():
            source.position = base.positions.get(topic, 0)
            source.messages = source.bytes = 0

    def _enter(self) -> None:
        if self._busy:
            raise RuntimeError("The engine of a partition does one thing at a time")
        self._busy = True
        self._turn.broken = None


def _limited(edge: Input[Any] | Loop[Any]) -> Callable[[Any, Any], Any]:
    """The callback of an edge, under the time limit of its retries."""
    callback: Callable[[Any, Any], Any] = edge.callback
    timeout = edge.on_error.retry.timeout if isinstance(edge.on_error, Retrying) else None
    if timeout is None:
        return callback

    async def limited(context: Any, payload: Any) -> None:
        async with asyncio.timeout(timeout):
            result = callback(context, payload)
            if isawaitable(result):
                await result

    return limited


def _order(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return found[:3]


def _is_cancelled() -> bool:
    """Whether the task that runs the callback is being cancelled."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # Without an event loop.
        return False
    return task is not None and task.cancelling() > 0


def _hash(key: bytes) -> str:
    """Stands for a key in ids, which have to be short and readable."""
    return blake2b(key, digest_size=8).hexdigest()
