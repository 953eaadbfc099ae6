"""Processes of a run that watch each other: through a store they tell how far they are and why one of them failed.

Nobody watches such processes from outside, so each has a thread that publishes its progress and reads the others'. The
first to find something wrong leaves a note in the store; everyone who sees it leaves at once, rank 0 shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from nugnn.comm.pulse import Stamp, read
from nugnn.failure import EXIT_USER, EXIT_WORKER_LOST, Place, WorkerView, named, stall_of
from nugnn.member import Member, host_name, process_space
from nugnn.process_state import process_state
from nugnn.screen import complain
from nugnn.stall import Sample, StallWatch
from nugnn.worker_process import classify, describe

_TICK_SECONDS = 0.5
_SILENT_SECONDS = 3.0
"""A process whose thread has published nothing for so long is stopped, gone, or in code that lets no thread run."""
_SILENT_START_SECONDS = 3600.0
"""Before its first step a process of another host may be silent for so long: METIS lets no thread run."""
_SHOWN_SECONDS = 3.0
"""Rank 0 gets this long to show a note before the process that left it does."""
_PEER_SECONDS = _SILENT_SECONDS + 2 * _TICK_SECONDS
"""A process that lost a peer waits this long for the peer's own word, and until one that left none counts as silent:
what it published last may have been read a tick after its end."""
_BYE_SECONDS = 10.0
_TERMINATED_SECONDS = 4.0
"""torchrun ends everyone as soon as one process is gone; the others take this long to find out and say which."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a process publishes about itself twice a second."""

    tick: int
    host: str
    space: str
    pid: int
    beats: int
    is_stepping: bool
    is_done: bool
    waits_in: str | None
    frame: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """Why the run ends.

    Args:
        rank: Who left it.
        exit_code: For every process.
        text: For the user.
        end: Ranks to be killed, since they do not end by themselves.
    """

    rank: int
    exit_code: int
    text: str
    end: tuple[int, ...] = ()


class MutualWatch(threading.Thread):
    """Publishes this process's card, reads the others', and ends this process when a note appears."""

    def __init__(self, member: Member, store: dist.Store, memory: bytearray, timeout: float) -> None:
        super().__init__(name="nugnn-watch", daemon=True)
        self._member, self._store, self._memory = member, store, memory
        self.timeout = timeout
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._acting = threading.Lock()
        self._cards: list[Card | None] = [None] * member.world_size
        self._seen_at = [time.monotonic()] * member.world_size
        self._tick = 0
        self._is_done = False
        self._terminated_at: float | None = None
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake_end, False)
        self.how_to_go_on: Callable[[], str] = lambda: ""
        """What to add for the user when the run ends early; rank 0 is asked."""

    # -- called by the main thread -------------------------------------------------------------------------------------

    def outlive_sigterm(self) -> None:
        """Leave SIGTERM to this thread, which sees it also while the main thread waits in native code."""
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)

    def finish(self) -> None:
        """Say that this process has done its work; return when all have, and stop watching."""
        self._is_done = True
        deadline = time.monotonic() + _BYE_SECONDS
        while time.monotonic() < deadline and not all(card is not None and card.is_done for card in self._cards):
            if not self.is_alive():
                break  # the store went with rank 0, which had seen that all are done
            time.sleep(_TICK_SECONDS / 5)
        if self._member.hosts_store:  # the others may not have read that all are done
            time.sleep(2 * _TICK_SECONDS)
        self._ended.set()
        self.join(_SHOWN_SECONDS)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def fail(self, error: BaseException) -> None:
        """End the run because of ``error``; does not return."""
        kind = classify(error)
        if kind == "internal":
            traceback.print_exception(error)
        if kind == "peer":
            time.sleep(_PEER_SECONDS)  # the watch ends this process when the peer, or somebody else, has left word
            silent = [rank for rank in range(self._member.world_size) if self._is_silent(rank)]
            hosts = sorted({card.host for rank in silent if (card := self._cards[rank]) is not None})
            text = (
                f"{named(silent)} of {self._member.world_size} on {', '.join(hosts) or 'a host that never answered'} "
                f"died or cannot be reached any more"
                if silent
                else f"{self.who} lost a peer, and no worker says why: {error}"
            )
        else:
            said = describe(error, kind, Path.cwd())
            text = f"{self.who}: {said}" if kind != "internal" else f"{self.who} failed: {said}"
        code = EXIT_USER if kind == "user" else EXIT_WORKER_LOST
        self.leave(Note(rank=self._member.rank, exit_code=code, text=text))

    def leave(self, note: Note) -> None:
        """Put ``note`` into the store, unless another was first, and end this process by the one that counts."""
        with contextlib.suppress(Exception):  # without the store each is on its own
            note = _note(self._store.compare_set("note", "", json.dumps(asdict(note))))
        self._act_on(note)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        stall, judged = StallWatch(self.timeout, time.monotonic()), self.timeout
        while not self._has_ended():
            try:
                self._store.set(f"card/{self._member.rank}", json.dumps(asdict(self._card())))
                if self._store.check(["note"]):
                    self._act_on(_note(self._store.get("note")))
                self._read_cards()
            except Exception as error:
                if self._ended.is_set() or self._is_done:
                    return
                text = (
                    f"{self.who}: the store at {self._member.address}:{self._member.port} does not answer any more, "
                    f"so rank 0 or its host is gone ({type(error).__name__})"
                )
                self._act_on(Note(rank=self._member.rank, exit_code=EXIT_WORKER_LOST, text=text))
            if judged != self.timeout:
                stall, judged = StallWatch(self.timeout, time.monotonic()), self.timeout
            samples = [self._sample(rank) for rank in range(self._member.world_size)]
            if self._terminated_at is not None:
                self._look_for_the_lost(time.monotonic() - self._terminated_at)
            if not self._is_done and stall.is_stalled(samples, time.monotonic()):
                self._judge(samples, stall.is_busy)

    def _has_ended(self) -> bool:
        """Wait for the next tick, or for a signal; whether there is nothing to watch any more."""
        if select.select([self._wake], [], [], _TICK_SECONDS)[0]:
            if signal.SIGTERM in os.read(self._wake, 64) and self._terminated_at is None:
                self._terminated_at = time.monotonic()
            self._ended.wait(_TICK_SECONDS / 5)
        return self._ended.is_set()

    def _look_for_the_lost(self, seconds: float) -> None:
        """After SIGTERM: say which process is gone, or go quietly when none is; leave the others their time."""
        own_space = process_space()
        gone = [
            rank
            for rank, card in enumerate(self._cards)
            if rank != self._member.rank
            and card is not None
            and not card.is_done
            and (process_state(card.pid) is None if card.space == own_space else self._is_silent(rank))
        ]
        if gone:
            names = ", ".join(
                f"{rank} (process {card.pid} on {card.host})" for rank in gone if (card := self._cards[rank])
            )
            text = (
                f"worker {names} of {self._member.world_size} died: killed from outside, out of memory, or crashed in "
                "native code"
            )
            self.leave(Note(rank=self._member.rank, exit_code=EXIT_WORKER_LOST, text=text))
        if seconds > _TERMINATED_SECONDS:
            os._exit(128 + signal.SIGTERM)

    def _card(self) -> Card:
        self._tick += 1
        stamp = read(self._memory)
        frame = sys._current_frames().get(self._main or 0)
        return Card(
            tick=self._tick,
            host=host_name(),
            space=process_space(),
            pid=os.getpid(),
            beats=stamp.beats,
            is_stepping=stamp.is_stepping,
            is_done=self._is_done,
            waits_in=stamp.waits_in,
            frame=_place_of(frame),
        )

    def _read_cards(self) -> None:
        names = [f"card/{rank}" for rank in range(self._member.world_size)]
        missing = [
            rank for rank, name in enumerate(names) if self._cards[rank] is None and not self._store.check([name])
        ]
        known = [rank for rank in range(len(names)) if rank not in missing]
        for rank, text in zip(known, self._store.multi_get([names[rank] for rank in known]), strict=True):
            card = Card(**json.loads(text))
            if self._cards[rank] != card:
                self._cards[rank], self._seen_at[rank] = card, time.monotonic()

    def _is_silent(self, rank: int) -> bool:
        return time.monotonic() - self._seen_at[rank] > _SILENT_SECONDS

    def _sample(self, rank: int) -> Sample:
        card = self._cards[rank]
        if card is None:
            return Sample()
        sample = Sample(is_done=card.is_done, beats=card.beats, is_stepping=card.is_stepping)
        state = process_state(card.pid) if card.space == process_space() else None
        if state is not None:
            return replace(
                sample,
                is_stopped=state.is_stopped,
                cpu_seconds=state.cpu_seconds,
                # the store's traffic is no progress, and how much of it there is nobody counts
                transferred_bytes=None,
            )
        silent_for = time.monotonic() - self._seen_at[rank]
        if card.is_stepping or silent_for > _SILENT_START_SECONDS:
            return replace(sample, is_stopped=not card.is_done and silent_for > _SILENT_SECONDS)
        # unknown from here whether it computes: it gets the benefit of the doubt before its first step
        return replace(sample, cpu_seconds=time.monotonic())

    def _judge(self, samples: list[Sample], is_busy: list[bool]) -> None:
        views = []
        for rank, (sample, card) in enumerate(zip(samples, self._cards, strict=True)):
            if card is None:
                views.append(WorkerView(rank=rank, frame="its start", host="a host that never answered"))
                continue
            state = process_state(card.pid) if card.space == process_space() else None
            views.append(
                WorkerView(
                    rank=rank,
                    pid=card.pid,
                    host=card.host,
                    is_done=sample.is_done,
                    stamp=Stamp(card.beats, card.is_stepping, card.waits_in),
                    state=state,
                    is_silent=sample.is_stopped and state is None,
                    is_busy=is_busy[rank],
                    frame=card.frame,
                )
            )
        place = Place(host=host_name(), logs=Path(), keeps_logs=False)
        exit_code, text = stall_of(views, place, self.timeout)
        end = tuple(view.rank for view in views if view.is_stopped or (not view.is_done and view.waits_in is None))
        self.leave(Note(rank=self._member.rank, exit_code=exit_code, text=text, end=end))

    @property
    def who(self) -> str:
        """This process, for people."""
        return f"worker {self._member.rank} of {self._member.world_size} on {host_name()}"

    def _act_on(self, note: Note) -> None:
        """Show the note where it is this process's task, end who does not end by itself, and go."""
        self._acting.acquire()  # for good: of two threads that have the note one shows it, and ends the other here
        own_space = process_space()
        end = [
            card.pid
            for rank in note.end
            if rank != self._member.rank and (card := self._cards[rank]) is not None and card.space == own_space
        ]
        try:
            if self._member.rank == 0:
                _show(note, self.how_to_go_on())
                self._store.set("shown", "1")
                if self._member.hosts_store:
                    time.sleep(2 * _TICK_SECONDS)  # for the others to read the note
            elif end or note.rank == self._member.rank:  # who shows the note may be one of those that are ended
                deadline = time.monotonic() + _SHOWN_SECONDS
                while time.monotonic() < deadline and not self._store.check(["shown"]):
                    time.sleep(_TICK_SECONDS / 5)
                if note.rank == self._member.rank and not self._store.check(["shown"]):
                    _show(note, self.how_to_go_on())
        except Exception:
            if note.rank == self._member.rank:
                _show(note, self.how_to_go_on())
        finally:
            for pid in end:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(note.exit_code)


def _note(text: bytes) -> Note:
    fields = json.loads(text)
    return Note(**(fields | {"end": tuple(fields["end"])}))


def _show(note: Note, how_to_go_on: str) -> None:
    after = f"\n{how_to_go_on}" if how_to_go_on and note.exit_code == EXIT_WORKER_LOST else ""
    with contextlib.suppress(OSError):
        complain(f"nugnn: error: {note.text}{after}")
        sys.stderr.flush()


def _place_of(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
