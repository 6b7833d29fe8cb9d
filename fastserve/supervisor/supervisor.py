"""Watch the children, and act on what happens to them: the loop of the supervisor process.

It waits in one place, for pidfds, control sockets and signals, always with a deadline. What an exit
means is policy.py's to say; what a verb does is child.py's. `run` is the whole life of a server:
spawn, serve until an outcome, then the ladder of teardown.
"""

from __future__ import annotations

import selectors
import signal
import time
from typing import TYPE_CHECKING

from fastserve.control import (
    Beat,
    Crashed,
    EngineGone,
    EngineSpawned,
    Failed,
    LaneClosed,
    LaneStuck,
    Leaving,
    Progress,
    Ready,
    Stop,
)
from fastserve.log import get_logger
from fastserve.supervisor.child import ChildState, reap_orphans
from fastserve.supervisor.outcome import Deadlines, Outcome
from fastserve.supervisor.policy import RespawnPolicy, Verdict, describe_exit, on_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.control import ControlMessage
    from fastserve.supervisor.child import Child
    from fastserve.supervisor.signals import Signals

log = get_logger("supervisor")

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_CRASH_LOOP = 3
EXIT_ENGINE_DEAD = 70

# How long a killed process may take to be gone, and how long an idle look-around lasts.
_KILL_WAIT_S = 5.0
_POLL_S = 1.0
_STARTING_POLL_S = 0.1
# A look-around that comes so much later than that: we were stopped.
_STOPPED_S_MIN = 1.0
# Of the time in which everything is gone once the engine is dead: for clients to take what they are
# told, and for whatever overruns that to be killed. The rest is for the kill itself.
_DEAD_DRAIN_SHARE = 0.6
_DEAD_EXIT_SHARE = 0.9


class Supervisor:
    """One engine and its acceptors.

    `on_ready` is called once, `on_progress` as the model loads and, with None, often until then;
    `on_gone` when there will be no acceptor any more, with why if the engine died. `seen_s` tells
    when an acceptor's event loop last ran, by its number (monotonic). `on_exit` is called with
    every child that has exited, `on_respawn` with one that is started again, and why: died or
    replaced. `go_between`: a pidfd of the process that stands for us before a launcher.
    """

    def __init__(
        self,
        *,
        engine: Child,
        acceptors: list[Child],
        policy: RespawnPolicy,
        engine_policy: RespawnPolicy,
        deadlines: Deadlines,
        on_progress: Callable[[float | None], None],
        on_ready: Callable[[str], None],
        on_gone: Callable[[EngineGone | None], None],
        seen_s: Callable[[int], float],
        on_exit: Callable[[Child], None] = lambda _: None,
        on_respawn: Callable[[Child, str], None] = lambda _, __: None,
        go_between: int | None = None,
    ) -> None:
        self._engine = engine
        self._acceptors = acceptors
        self._children = [engine, *acceptors]
        self._policy = policy
        self._engine_policy = engine_policy
        self._deadlines = deadlines
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._seen_s = seen_s
        self._tell_exit = on_exit
        self._tell_respawn = on_respawn
        self._selector = selectors.DefaultSelector()
        self._go_between = go_between
        self._outcome: Outcome | None = None
        self._engine_gone: EngineGone | None = None
        self._model_name = ""
        # When the engine last finished a step or had nothing to do, as its heartbeats tell.
        self._steps = 0
        self._progress_s = 0.0
        # Since when we have been there to see whether children move.
        self._watching_s = 0.0
        self._to_replace: list[Child] = []
        self._killed_as_useless: set[Child] = set()
        self._ready = False
        self._forced_by: int | None = None

    def run(self, signals: Signals) -> int:
        """Spawn everything, watch it until something ends the server, and tear it down.

        Returns the exit code: see README, "Exit codes".
        """
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)
        self._signals = signals
        if self._go_between is not None:
            self._selector.register(self._go_between, selectors.EVENT_READ, self._on_job_end)
        try:
            self._spawn_all()
            outcome = self._serve()
            tell = log.error if outcome.exit_code else log.info
            tell("stopping", reason=outcome.reason)
            self._drain(outcome)
        finally:
            self._stop()
        self._on_gone(self._engine_gone)
        if self._forced_by is not None:
            return 128 + self._forced_by
        assert self._outcome is not None
        return self._outcome.exit_code

    def _spawn_all(self) -> None:
        for child in self._children:
            self._spawn(child)

    def _spawn(self, child: Child) -> None:
        child.spawn()
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_exit(child))
        self._selector.register(
            child.control, selectors.EVENT_READ, lambda: self._on_control(child)
        )
        if self._engine_gone is not None and child is not self._engine:
            child.control.send(self._engine_gone)

    # ---- serving

    def _serve(self) -> Outcome:
        started_s = looked_s = time.monotonic()
        while self._outcome is None:
            self._poll(_POLL_S if self._ready else _STARTING_POLL_S)
            if not self._ready:
                self._on_progress(None)
            # Read once: what happens to us between here and a kill must not look like silence.
            now_s = time.monotonic()
            if now_s - looked_s > _POLL_S + _STOPPED_S_MIN:
                # Stopped, perhaps with everybody else, as the pause of a container does. Nobody's
                # silence in that time proves anything.
                log.warning("the supervisor stood still", for_s=round(now_s - looked_s, 1))
                self._watching_s = now_s
            looked_s = now_s
            if not self._ready and now_s - started_s > self._deadlines.start_timeout_s:
                self._end(EXIT_ENGINE_DEAD, "not ready within server.start_timeout_s")
            self._kill_if_late(now_s)
            self._kill_if_stalled(now_s)
            self._kill_if_silent(now_s)
            self._kill_if_overdue(now_s)
        return self._outcome

    def _kill_if_late(self, now_s: float) -> None:
        """A successor of the engine has as long to be ready as the first had."""
        starting = self._ready and self._engine.state is ChildState.STARTING
        if starting and now_s - self._progress_s > self._deadlines.start_timeout_s:
            log.error("engine not ready in time, killing it")
            self._engine.kill()

    def _kill_if_stalled(self, now_s: float) -> None:
        """A wedged engine, alive and silent, is as bad as a dead one, and then made one."""
        if self._engine.state is not ChildState.RUNNING:
            return
        stalled_s = now_s - max(self._progress_s, self._watching_s)
        if stalled_s > self._deadlines.stall_kill_s:
            log.error("engine stalled, killing it", stalled_s=round(stalled_s, 1))
            self._engine.kill()
            self._killed_as_useless.add(self._engine)

    def _kill_if_silent(self, now_s: float) -> None:
        """A stopped acceptor holds its clients and takes no more: its successor will."""
        for lane, acceptor in enumerate(self._acceptors):
            if acceptor.state is not ChildState.RUNNING:
                continue
            # A successor that has just become ready was not seen yet; its predecessor was.
            silent_s = now_s - max(self._seen_s(lane), self._watching_s, acceptor.entered_s)
            if silent_s > self._deadlines.silent_timeout_s:
                log.error(
                    "acceptor silent, killing it",
                    acceptor=acceptor.spec.name,
                    silent_s=round(silent_s, 1),
                )
                self._kill_as_useless(acceptor)

    def _kill_if_overdue(self, now_s: float) -> None:
        """A stopped acceptor is also noticed while it is being replaced: it does not drain in time,
        or its successor is not ready in time."""
        drained_s = self._deadlines.drain_timeout_s + self._deadlines.terminate_timeout_s
        engine = self._engine
        for acceptor in self._acceptors:
            since_s = max(acceptor.entered_s, self._watching_s)
            draining = acceptor.state is ChildState.DRAINING
            if draining and now_s - since_s > drained_s:
                log.error("acceptor does not drain, killing it", acceptor=acceptor.spec.name)
                acceptor.kill()
            starting = acceptor.state is ChildState.STARTING and engine.state is ChildState.RUNNING
            since_s = max(since_s, engine.entered_s)
            if starting and now_s - since_s > self._deadlines.start_timeout_s:
                log.error("acceptor not ready in time, killing it", acceptor=acceptor.spec.name)
                self._kill_as_useless(acceptor)

    def _on_stuck(self, acceptor: Child, incarnation: int) -> None:
        if acceptor.state is ChildState.RUNNING and acceptor.incarnation == incarnation:
            log.error("acceptor does not read its lane, killing it", acceptor=acceptor.spec.name)
            self._kill_as_useless(acceptor)

    def _kill_as_useless(self, acceptor: Child) -> None:
        acceptor.kill()
        self._killed_as_useless.add(acceptor)

    def _poll(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            # An earlier event of this round may have closed what a later one is about.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def _poll_until(self, done: Callable[[], bool], *, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not done() and self._forced_by is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            self._poll(min(left_s, _POLL_S))

    def _end(
        self,
        exit_code: int,
        reason: str,
        *,
        drain_timeout_s: float = 0.0,
        exit_timeout_s: float | None = None,
    ) -> None:
        if exit_timeout_s is None:
            exit_timeout_s = drain_timeout_s + self._deadlines.terminate_timeout_s
        if self._outcome is None:
            self._outcome = Outcome(
                exit_code=exit_code,
                reason=reason,
                drain_timeout_s=drain_timeout_s,
                exit_timeout_s=exit_timeout_s,
            )

    # ---- events

    def _on_job_end(self) -> None:
        """Once it has lost a rank, a launcher kills whatever it has started: of us, no more than
        that process. The engine ends, too, and may know why."""
        assert self._go_between is not None
        self._selector.unregister(self._go_between)
        if self._engine.state in (ChildState.STARTING, ChildState.RUNNING):
            if not self._engine.control.closed:
                self._on_control(self._engine)
            how = self._engine.last_words or "the MPI launcher has ended the job"
            reason = f"the engine died: {how}"
            self._say_engine_gone(reason)
            self._end_as_dead(EXIT_ENGINE_DEAD, reason)

    def _on_signals(self) -> None:
        for number in self._signals.received():
            if number == signal.SIGCHLD:
                reap_orphans(ours={child.pid for child in self._children if child.alive})
            elif number == signal.SIGHUP:
                self._replace_acceptors()
            elif self._outcome is None:
                self._end(
                    EXIT_OK,
                    signal.Signals(number).name,
                    drain_timeout_s=self._deadlines.drain_timeout_s,
                )
            else:
                log.warning("second signal, ending now", signal=signal.Signals(number).name)
                self._forced_by = number

    def _on_control(self, child: Child) -> None:
        for message in child.control.receive():
            self._on_message(child, message)
        if child.control.closed:
            self._selector.unregister(child.control)

    def _on_message(self, child: Child, message: ControlMessage) -> None:
        match message:
            case Progress(share):
                self._on_progress(share)
            case Ready():
                if child is self._engine:
                    self._model_name = message.detail
                    self._progress_s = time.monotonic()
                if child.state is ChildState.STARTING:
                    child.enter(ChildState.RUNNING)
                    self._replace_next()
                self._announce_when_ready()
            case Failed(reason):
                child.failure = reason
            case Leaving():
                log.warning("acceptor told to terminate", acceptor=child.spec.name)
                if child.untold:
                    child.enter(ChildState.DRAINING)
            case Crashed(error):
                child.crash = error
            case EngineGone(reason):
                child.last_words = reason
            case Beat():
                self._on_beat(message)
            case LaneStuck(lane, incarnation):
                self._on_stuck(self._acceptors[lane], incarnation)
            case _:
                log.warning("unexpected word from a child", child=child.spec.name)

    def _on_beat(self, beat: Beat) -> None:
        if beat.steps != self._steps or not beat.busy:
            self._steps = beat.steps
            self._progress_s = time.monotonic()

    def _announce_when_ready(self) -> None:
        if not self._ready and all(c.state is ChildState.RUNNING for c in self._children):
            self._ready = True
            self._on_ready(self._model_name)

    def _replace_acceptors(self) -> None:
        """Drain and respawn every acceptor, one at a time: the others serve meanwhile."""
        if self._ready and self._outcome is None and not self._to_replace:
            log.info("replacing the acceptors")
            self._to_replace = list(self._acceptors)
            self._replace_next()

    def _replace_next(self) -> None:
        if self._to_replace and all(child.state is ChildState.RUNNING for child in self._children):
            self._to_replace[0].drain(timeout_s=self._deadlines.drain_timeout_s, whole_server=False)

    def _on_exit(self, child: Child) -> None:
        if not child.control.closed:
            self._on_control(child)  # its last words may explain the exit
        self._selector.unregister(child.pidfd)
        if child.control in self._selector.get_map():
            self._selector.unregister(child.control)
        was = child.state
        now_s = time.monotonic()
        code = child.reap(now_s=now_s)
        how = child.failure or child.last_words or describe_exit(code, error=child.crash)
        self._tell_exit(child)
        expected = was in (ChildState.DRAINING, ChildState.STOPPING)
        if child is self._engine:
            if self._outcome is None or not expected or child in self._killed_as_useless:
                self._on_engine_death(how, failed_to_start=bool(child.failure))
        else:
            self._engine.control.send(LaneClosed(self._acceptors.index(child), child.incarnation))
            if self._outcome is not None:
                return
            if child in self._to_replace:  # also one that died before its turn
                self._to_replace.remove(child)
            if child.failure:
                self._end(EXIT_CONFIG, child.failure)  # trying again cannot help
            elif expected and child not in self._killed_as_useless:
                child.exited_s.pop()  # as asked, so no crash
                self._tell_respawn(child, "replaced")
                self._spawn(child)
            else:
                self._on_acceptor_death(child, how, now_s=now_s)

    def _on_engine_death(self, how: str, *, failed_to_start: bool) -> None:
        self._killed_as_useless.discard(self._engine)
        reason = how if failed_to_start else f"the engine died: {how}"
        self._say_engine_gone(reason)
        verdict = on_exit(
            essential=True,
            exits_s=self._engine.exited_s,
            now_s=time.monotonic(),
            policy=self._engine_policy,
        )
        respawn = verdict is Verdict.RESPAWN and self._ready and self._outcome is None
        if not failed_to_start:
            next_is = "it is respawned" if respawn else f"the server exits with {EXIT_ENGINE_DEAD}"
            log.error(
                "engine died", pid=self._engine.pid, how=how, next=f"clients are told, {next_is}"
            )
        if respawn:
            self._respawn_engine()
            return
        code = EXIT_CONFIG if failed_to_start else EXIT_ENGINE_DEAD
        if self._outcome is not None and not failed_to_start:
            self._outcome = None  # dead while draining: that is what the exit code must say
        self._end_as_dead(code, reason)

    def _say_engine_gone(self, reason: str) -> None:
        self._engine_gone = EngineGone(reason)
        for acceptor in self._acceptors:
            if acceptor.alive:
                acceptor.control.send(self._engine_gone)

    def _end_as_dead(self, code: int, reason: str) -> None:
        gone_s = self._deadlines.engine_dead_exit_timeout_s
        self._end(
            code,
            reason,
            drain_timeout_s=gone_s * _DEAD_DRAIN_SHARE,
            exit_timeout_s=gone_s * _DEAD_EXIT_SHARE,
        )

    def _respawn_engine(self) -> None:
        """Acceptors keep their connections, and answer 503 until the successor is ready."""
        log.warning("respawning the engine")
        self._engine_gone = None
        self._steps = 0
        self._progress_s = time.monotonic()
        self._tell_respawn(self._engine, "died")
        self._spawn(self._engine)
        for acceptor in self._acceptors:
            if acceptor.alive:
                acceptor.control.send(EngineSpawned(self._engine.incarnation))

    def _on_acceptor_death(self, child: Child, how: str, *, now_s: float) -> None:
        self._killed_as_useless.discard(child)
        verdict = on_exit(
            essential=child.spec.essential,
            exits_s=child.exited_s,
            now_s=now_s,
            policy=self._policy,
        )
        if verdict is Verdict.RESPAWN:
            log.warning(
                "acceptor died, respawning it",
                acceptor=child.spec.name,
                pid=child.pid,
                how=how,
                next="its requests are aborted, the others serve on",
            )
            self._tell_respawn(child, "died")
            self._spawn(child)
        else:
            log.error(
                "crash loop",
                acceptor=child.spec.name,
                pid=child.pid,
                how=how,
                next=f"the server exits with {EXIT_CRASH_LOOP}",
            )
            self._end(EXIT_CRASH_LOOP, f"{child.spec.name} crashes again and again: {how}")

    # ---- teardown

    def _drain(self, outcome: Outcome) -> None:
        """The gentle half of the ladder: acceptors finish, then the engine closes in order."""
        for acceptor in self._acceptors:
            acceptor.drain(timeout_s=outcome.drain_timeout_s, whole_server=True)

        def drained() -> bool:
            # Requests must not wait for one that stands still, whoever waits for them.
            self._kill_if_stalled(time.monotonic())
            return not any(acceptor.alive for acceptor in self._acceptors)

        self._poll_until(drained, timeout_s=outcome.exit_timeout_s)
        if drained():
            self._on_gone(self._engine_gone)  # and not only once the engine has ended
        if self._engine.alive and self._forced_by is None:
            self._engine.enter(ChildState.STOPPING)
            self._engine.control.send(Stop())
            self._poll_until(
                lambda: not self._engine.alive, timeout_s=self._deadlines.terminate_timeout_s
            )

    def _stop(self) -> None:
        """The other half, last started first stopped: terminate what is left, kill, reap. Who has
        overrun a drain, or the time since it was told to stop, is killed at once."""
        alive = [child for child in reversed(self._children) if child.alive]
        if self._forced_by is None:
            untold = [child for child in alive if child.untold]
            for child in untold:
                child.terminate()
            self._poll_until(
                lambda: not any(child.alive for child in untold),
                timeout_s=self._deadlines.terminate_timeout_s,
            )
        for child in alive:
            if child.alive:
                child.kill()
        deadline_s = time.monotonic() + _KILL_WAIT_S
        while any(child.alive for child in alive) and time.monotonic() < deadline_s:
            self._poll(deadline_s - time.monotonic())
        self._selector.close()
