"""The other ranks of a process group: their pages on this host, and the words of other hosts.

Note [Words of hosts]. A page can be read on its own host only. So if a group spans several hosts, one rank
per host writes a short status of the host's ranks to the group's store each second: the lowest rank whose
watcher runs. Others read it only while they wait long. A host whose word does not change any more is silent.

Note [The store's thread]. A store may never answer, for example if the rank that holds it is stopped. So a
thread of its own talks to it, with its own connection. Nobody waits for that thread without a limit.
"""

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.watch.error_words import is_consequence
from paceline.watch.process_state import STALE_SECONDS, ProcessFacts, ProcessState, judge, read_facts
from paceline.watch.rank_page import Activity, Moment, PageAddress, PageContent, PageReader
from paceline.watch.stacks import CodeLine, Stack, ask_for_stack, decode, kind_of, place_of, users_line
from paceline.watch.stall import RankStatus

# How often a word is written, and read by those who listen.
_WORD_SECONDS, _FETCH_SECONDS = 1.0, 0.4
# Ranks come to wrap a module at about the same time: how soon to look again for those that have not, and for
# how long.
_MEET_SECONDS, _MEET_SOON_SECONDS = 0.1, 10.0
# A host is silent if its word is as old as this. If the rank that speaks is stopped, another one takes over.
_SILENT_SECONDS, _SILENT_ALONE_SECONDS = 5.0, 2.5
# Between two looks at a process, of which one is compared with the other.
_LOOK_SECONDS = 0.1
# How long to look until it is certain that a process holds Python's lock.
_CERTAIN_SECONDS = 1.0
# What a store raises when it, or the rank that holds it, is gone.
_STORE_ERRORS = (RuntimeError, OSError, ValueError, KeyError, TypeError)


class Peers:
    """The ranks of one process group, as seen from this one.

    Args:
        store: the group's key-value store.
        ranks: the group's global ranks.
        own: where this rank's page is.
    """

    def __init__(self, store: Any, ranks: Sequence[int], own: PageAddress) -> None:
        self.ranks = ranks
        self._own = own
        self._store = store
        self._clone: Any = None
        self._addresses: dict[int, PageAddress] = {own.rank: own}
        self._readers: dict[int, PageReader] = {}
        self._asked: dict[int, tuple[int, list[CodeLine]]] = {}  # the answers, and the heartbeats before
        self._words: dict[str, tuple[float, dict[str, Any]]] = {}
        self._number = 0
        self._next_word = 0.0
        self._next_fetch = 0.0
        self._wanted_until = 0.0
        self._listens_since = 0.0
        self._made = time.monotonic()
        with contextlib.suppress(*_STORE_ERRORS):
            store.set(_page_key(own.rank), json.dumps(asdict(own)))
        _talk_for(self)

    def __del__(self) -> None:
        for reader in self._readers.values():
            reader.close()

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in self.ranks if rank != self._own.rank]

    @property
    def is_spread(self) -> bool:
        """Whether there are ranks whose pages cannot be read here."""
        return any(rank in self._addresses and rank not in self._readers for rank in self.others)

    @property
    def is_known(self) -> bool:
        """Whether all ranks have said where their pages are."""
        return len(self._addresses) == len(self.ranks)

    @property
    def is_hasty(self) -> bool:
        """Whether something is wanted from the store soon."""
        now = time.monotonic()
        return (not self.is_known and now < self._made + _MEET_SOON_SECONDS) or now < self._wanted_until

    def ask(self, seconds: float) -> None:
        """Have words and missing addresses of other hosts fetched for some time, and our own word written."""
        now = time.monotonic()
        if now > self._wanted_until:
            self._listens_since = now
        self._wanted_until = now + seconds
        self._next_word = self._next_fetch = 0.0
        _talk_for(self)

    def statuses(self, own_stack: Stack = ()) -> list[RankStatus]:
        """What the other ranks do now; takes a tenth of a second."""
        pages = {rank: page for rank in self.others if (page := self._read(rank)) is not None}
        before = {rank: _facts(page) for rank, page in pages.items()}
        time.sleep(_LOOK_SECONDS)
        after = {rank: _facts(page) for rank, page in pages.items()}
        # Read again, and after the process was looked at: one that has ended may have written why.
        pages = {rank: self._read(rank) or page for rank, page in pages.items()}
        return [
            self._status_of_page(pages[rank], before[rank], after[rank], own_stack)
            if rank in pages
            else self._status_of_word(rank)
            for rank in self.others
        ]

    def _read(self, rank: int) -> PageContent | None:
        reader = self._readers.get(rank)
        return None if reader is None else reader.read()

    def _status_of_page(
        self, page: PageContent, before: ProcessFacts | None, after: ProcessFacts | None, own_stack: Stack
    ) -> RankStatus:
        now, doing, told = time.monotonic_ns(), page.doing, page.told
        raised = told.text if told.moment is Moment.EXITED else ""
        because_of = told.rank if told.moment is Moment.FAILED else -1
        heartbeat_age = (now - page.heartbeat) / 1e9
        state = judge(before, after, heartbeat_age=heartbeat_age)
        stack, seen = self._stack(page, state, before), (now - page.stack_at) / 1e9
        if state is ProcessState.HOLDS_LOCK:
            seen = 0.0
        return RankStatus(
            rank=page.rank,
            state=state,
            activity=doing.activity,
            wrapper=doing.wrapper,
            step=doing.step,
            bucket=doing.bucket,
            seconds=(now - doing.since) / 1e9,
            line=users_line(stack),
            kind=kind_of(stack),
            place=place_of(stack, own_stack),
            seen_seconds=seen,
            is_consequence=because_of >= 0 or is_consequence(raised),
            because_of=because_of,
            raised=raised,
        )

    def _stack(self, page: PageContent, state: ProcessState, before: ProcessFacts | None) -> list[CodeLine]:
        if state is not ProcessState.HOLDS_LOCK:
            return decode(page.stack)
        asked_at, stack = self._asked.get(page.rank, (0, []))
        if asked_at != page.heartbeat:  # otherwise it is still in the same call
            stack = []
            if self._surely_holds_lock(page, before):
                stack = self._ask_for_stack(page)
                self._asked[page.rank] = (page.heartbeat, stack)
        return stack or decode(page.stack)

    def _ask_for_stack(self, page: PageContent) -> list[CodeLine]:
        address = self._addresses[page.rank]
        if not address.signal:
            return []
        return ask_for_stack(page.pid, page.watcher, address.signal, address.stacks, page.doing.thread)

    def _surely_holds_lock(self, page: PageContent, before: ProcessFacts | None) -> bool:
        """Whether no Python code runs in a process: to ask it for its stack could kill it otherwise."""
        until = time.monotonic() + _CERTAIN_SECONDS
        while before is not None and time.monotonic() < until:
            now, again = _facts(page), self._read(page.rank)
            if now is None or now.state in "Tt" or again is None or again.heartbeat != page.heartbeat:
                return False
            if now.waits_for_lock(before, is_certain=True):
                return True
            time.sleep(_LOOK_SECONDS / 5)
        return False

    def _status_of_word(self, rank: int) -> RankStatus:
        """What another host has said of a rank."""
        address = self._addresses.get(rank)
        if address is None:
            return RankStatus(rank, ProcessState.UNKNOWN)
        if self._is_here(address) and read_facts(address.pid, 0, address.started) is None:
            return RankStatus(rank, ProcessState.ENDED, Activity.OUTSIDE)
        heard = self._words.get(address.host)
        if heard is None:
            return RankStatus(rank, ProcessState.SILENT, activity=None, host=address.node)
        at, word = heard
        found = [each for each in word["ranks"] if each["rank"] == rank]
        status = RankStatus.from_json(found[0]) if found else RankStatus(rank, ProcessState.UNKNOWN)
        now = time.monotonic()
        age, silence = now - at, now - max(at, self._listens_since)
        silent_after = _SILENT_SECONDS if len(word["ranks"]) > 1 else _SILENT_ALONE_SECONDS
        if silence > silent_after and status.state is not ProcessState.ENDED:
            status = replace(status, state=ProcessState.SILENT)
        return replace(
            status,
            host=address.node,
            seconds=status.seconds + age,
            seen_seconds=status.seen_seconds + age,
        )

    def talk(self) -> bool:
        """Do what there is to do with the store; whether there will be more. In the store's thread only."""
        if self._clone is None:
            self._clone = self._store.clone()
        if not self.is_known:
            self._fetch_addresses()
        if self._next_fetch < time.monotonic() < self._wanted_until:
            self._next_fetch = time.monotonic() + _FETCH_SECONDS
            self._fetch_words()
        if self.is_spread and time.monotonic() > self._next_word and self._speaks_for_host():
            self._next_word = time.monotonic() + 0.9 * _WORD_SECONDS
            self._write_word()
        return not self.is_known or self.is_spread

    def _fetch_addresses(self) -> None:
        keys = [_page_key(rank) for rank in self.ranks if rank not in self._addresses]
        is_wanted = time.monotonic() <= self._wanted_until
        for text in self._texts(keys, or_some=is_wanted).values():
            self._meet(PageAddress(**json.loads(text)))

    def _texts(self, keys: Sequence[str], *, or_some: bool) -> dict[str, bytes]:
        """What the store has for all keys; if some are missing, what it has for the others, or nothing."""
        # In two questions: one per key, on every rank, would be a million with a thousand ranks.
        if not self._clone.check([*keys]):
            keys = [key for key in keys if or_some and self._clone.check([key])]
        return dict(zip(keys, self._clone.multi_get([*keys]), strict=True)) if keys else {}

    def _meet(self, address: PageAddress) -> None:
        if self._is_here(address):
            with contextlib.suppress(OSError):
                self._readers[address.rank] = PageReader(address.page)
        self._addresses[address.rank] = address

    def _is_here(self, address: PageAddress) -> bool:
        """Whether its process can be seen from here."""
        return (address.host, address.namespace) == (self._own.host, self._own.namespace)

    def _speaks_for_host(self) -> bool:
        """Whether this is the lowest of the host's ranks whose watchers run."""
        now = time.monotonic_ns()
        pages = (self._read(rank) for rank in self._readers if rank < self._own.rank)
        return not any(
            page is not None and _facts(page) is not None and (now - page.heartbeat) / 1e9 < STALE_SECONDS
            for page in pages
        )

    def _write_word(self) -> None:
        self._number += 1
        own = PageReader(self._own.page)
        try:
            page = own.read()
        finally:
            own.close()
        statuses = [each for each in self.statuses() if each.rank in self._readers]
        if page is not None:
            statuses.append(self._status_of_page(page, _facts(page), _facts(page), ()))
        word = {"number": self._number, "by": self._own.rank, "ranks": [each.to_json() for each in statuses]}
        self._clone.set(_host_key(self._own.host), json.dumps(word))

    def _fetch_words(self) -> None:
        away = [address for rank, address in self._addresses.items() if rank not in self._readers]
        hosts = {_host_key(each.host): each.host for each in away if each.host != self._own.host}
        for key, text in self._texts([*hosts], or_some=True).items():
            word = json.loads(text)
            known = self._words.get(hosts[key])
            if known is None or (known[1]["number"], known[1]["by"]) != (word["number"], word["by"]):
                self._words[hosts[key]] = (time.monotonic(), word)


def _facts(page: PageContent) -> ProcessFacts | None:
    return read_facts(page.pid, page.thread, page.started, watcher=page.watcher)


def _page_key(rank: int) -> str:
    return f"paceline/page/{rank}"


def _host_key(host: str) -> str:
    return f"paceline/host/{host}"


class _StoreThread:
    """See Note [The store's thread]; it ends when nobody has anything to say."""

    def __init__(self) -> None:
        self.peers: weakref.WeakSet[Peers] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self.is_exiting = threading.Event()

    def add(self, peers: Peers) -> None:
        with self._lock:
            self.peers.add(peers)
            self._wake.set()
            if self._thread is None and not self.is_exiting.is_set():
                self._thread = threading.Thread(target=self._run, name="paceline-store", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._talk()
            with self._lock:
                if not self.peers:
                    self._thread = None
                    return
                is_hasty = any(peers.is_hasty for peers in self.peers)
            self._wake.wait(_MEET_SECONDS if is_hasty else _WORD_SECONDS)
            self._wake.clear()
            if self.is_exiting.is_set():
                for peers in list(self.peers):
                    peers.ask(0.0)
                self._talk()  # other hosts hear why this rank ends
                return

    def _talk(self) -> None:
        for peers in list(self.peers):
            try:
                goes_on = peers.talk()
            except _STORE_ERRORS:  # the store is gone
                goes_on = False
            if not goes_on:
                self.peers.discard(peers)

    def stop(self, seconds: float) -> None:
        """End the thread, because the interpreter exits."""
        self.is_exiting.set()
        self._wake.set()
        if (thread := self._thread) is not None:
            thread.join(seconds)


_store_thread = _StoreThread()


def _talk_for(peers: Peers) -> None:
    _store_thread.add(peers)


def stop_talking(seconds: float) -> None:
    """End the thread that talks to stores, because the interpreter exits."""
    _store_thread.stop(seconds)


def forget_in_child() -> None:
    """In a forked child: the thread is the parent's."""
    global _store_thread
    _store_thread = _StoreThread()
