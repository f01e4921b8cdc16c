"""Rendezvous and heartbeats of machines, or ranks: many at one store, each in its own thread."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta

import pytest
from patience import PATIENCE
from torch.distributed import HashStore, Store, TCPStore

from simpletuner.errors import EnvironmentNotReady, ExitCode, RemoteFailure, SettingsError, SimpleTunerError, Stopped
from simpletuner.launch.heartbeat import TERMINATION_KEY, Heartbeat, PeerMonitor, heartbeat_key
from simpletuner.launch.node_info import NodeInfo
from simpletuner.launch.ranks import ProcessExit
from simpletuner.launch.rendezvous import Group, verify_same_config
from simpletuner.launch.store import SECRET, MessageSigner, MessageStore, TorchStore, message_signer
from simpletuner.launch.termination import Termination, launcher_signaled, rank_failed
from simpletuner.system.processes.signals import StopRequest


def node(host: str, **settings: object) -> NodeInfo:
    return NodeInfo(host, 1, settings, {"torch": "2.9"})


def signed(store: Store, signer: MessageSigner | None = None) -> MessageStore:
    return MessageStore(TorchStore(store), signer)


def outcome(messages: MessageStore, group: Group, mine: NodeInfo, check=lambda: None, timeout: float = 20) -> object:
    try:
        return verify_same_config(messages, group, mine, check, timeout)
    except SimpleTunerError as error:
        return error


def outcomes(nodes: list[NodeInfo], numbers: list[int] | None = None) -> list[object]:
    """Return the outcome on each of some machines; the last ones register late."""
    store, numbers = HashStore(), numbers or list(range(len(nodes)))

    def join(place: int) -> object:
        time.sleep(0.1 * place)
        return outcome(signed(store), Group("machine", numbers[place], len(nodes)), nodes[place])

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(join, range(len(nodes))))


def test_all_learn_of_all_once_the_last_has_registered():
    nodes = [node(host, seed=1) for host in "abc"]
    assert outcomes(nodes) == [nodes] * 3


class SlowReader(TorchStore):
    def get(self, keys):
        time.sleep(0.3)
        return super().get(keys)


def test_number_0_serves_the_store_until_the_others_have_read_it():
    store, nodes, groups = HashStore(), [node("a"), node("b")], [Group("rank", number, 2) for number in range(2)]
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(outcome, MessageStore(SlowReader(store)), groups[1], nodes[1])
        assert outcome(signed(store), groups[0], nodes[0]) == nodes
        assert store.check([groups[1].key("1/has read")])
        assert slow.result() == nodes


def test_what_one_rejects_ends_all_that_wait_with_the_same_sentence():
    told = outcomes([node("a", seed=1), node("b", seed=1), node("c", seed=2)])
    sentence = "seed differs: 1 on machine 0 (a), 2 on machine 2 (c)"
    assert [str(error) for error in told] == [sentence] * 3
    assert [type(error) for error in told] == [RemoteFailure, RemoteFailure, SettingsError]
    assert [error.exit_code for error in told if isinstance(error, SimpleTunerError)] == [ExitCode.USAGE] * 3


def test_a_number_is_registered_once():
    told = outcomes([node("a"), node("b"), node("c")], numbers=[0, 1, 1])
    assert {str(error) for error in told} == {"machine_rank = 1 is used twice: by b (pid 1) and by c (pid 1)"}


def test_a_number_is_registered_once_on_one_host_too():
    told = outcomes([node("a"), node("b"), NodeInfo("b", 2, {}, {"torch": "2.9"})], numbers=[0, 1, 1])
    assert {str(error) for error in told} == {"machine_rank = 1 is used twice: by b (pid 1) and by b (pid 2)"}


def test_a_rank_is_told_of_its_own_number():
    store = HashStore()
    assert outcome(signed(store), Group("rank", 0, 1), node("a")) == [node("a")]
    told = outcome(signed(store), Group("rank", 0, 1), node("b"))
    assert isinstance(told, SettingsError)
    assert told.message == "RANK = 0 is used twice: by a (pid 1) and by b (pid 1)"
    assert told.hint == "give every rank its own RANK, from 0 to 0"


def test_who_does_not_register_is_named_on_all():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = [Group("machine", number, 4) for number in (0, 2)]
        told = list(pool.map(lambda group: outcome(signed(store), group, node("x"), timeout=0.5), groups))
    assert {str(error).partition(": ")[2] for error in told} == {"2 of 4 machines came; missing: machine 1, machine 3"}
    assert {getattr(error, "exit_code", None) for error in told} == {EnvironmentNotReady.exit_code}


def test_a_signal_to_one_ends_all_that_wait():
    store, stop = HashStore(), StopRequest()
    stop.signal_number = 15
    told = [
        outcome(signed(store), Group("machine", 0, 3), node("a"), stop.check),
        outcome(signed(store), Group("machine", 1, 3), node("b")),
    ]
    assert isinstance(told[0], Stopped)
    assert isinstance(told[1], RemoteFailure)
    assert (told[1].exit_code, told[1].message.partition(" before")[0]) == (143, "machine 0 (a): stopped by SIGTERM")


def test_machines_hear_one_another_and_the_first_reason_counts():
    store, names = HashStore(), ["machine 0 (a)", "machine 1 (b)"]
    with (
        PeerMonitor(signed(store), 0, names, 30) as first,
        PeerMonitor(signed(store), 1, names, 30) as second,
    ):
        death = rank_failed(1, ProcessExit(3, 77, -9))
        assert second.terminate(death) == death
        assert first.terminate(launcher_signaled(0, 15)) == death
        assert not first.others_are("finished", "left")
        second.leave(5)
        first.leave(5)
        assert first.others_are("left")
        assert first.find_silent() is second.find_silent() is None
        first.timeout_seconds = first.suspect_seconds = 0
        assert first.find_silent() is None, "who has left may be silent for ever"
    error = death.error(0, names)
    assert (error.exit_code, error.message) == (5, "machine 1 (b): rank 3 (pid 77) was killed by SIGKILL")
    assert death.error(1, names).message == "rank 3 (pid 77) was killed by SIGKILL"


def test_a_machine_that_is_not_heard_is_silent_sooner_where_ranks_have_lost_contact():
    store, names = HashStore(), ["machine 0 (a)", "machine 1 (b)", "machine 2 (c)"]
    with PeerMonitor(signed(store), 0, names, 60, suspect_seconds=0.3) as monitor:
        with PeerMonitor(signed(store), 2, names, 60) as other:
            time.sleep(0.5)
            assert monitor.find_silent() is None
            other.lost_contact, other.phase = True, 7  # a rank there, not one here
            other.leave(1)
        end = time.monotonic() + 40  # less than the 60 s after which any machine is silent
        while not (termination := monitor.find_silent()) and time.monotonic() < end:
            time.sleep(0.05)
    assert termination is not None
    assert termination.sentence.startswith("machine 1 (b) has been silent for ")
    assert monitor.phase_elsewhere == 7, "ranks here may be behind those of another machine"
    assert (termination.exit_code, termination.signal_number) == (5, 0)


def test_a_heartbeat_that_is_written_again_is_no_sign_of_life():
    store, names = HashStore(), ["machine 0 (a)", "machine 1 (b)"]
    with PeerMonitor(signed(store), 0, names, 0.4) as monitor:
        for turn, count in enumerate((3, 3, 2)):  # recorded, and replayed by a stranger
            signed(store).write(heartbeat_key(1), asdict(Heartbeat(count)))
            end = time.monotonic() + PATIENCE
            while monitor.received[1][0].count != 3 or (turn and not monitor.find_silent()):
                assert time.monotonic() < end
                time.sleep(0.01)


def test_the_sentence_of_a_rank_travels_to_the_other_machines():
    reason = {"rank": 2, "exit_code": 4, "message": "no pictures", "hint": "add some"}
    with PeerMonitor(signed(HashStore()), 0, ["machine 0 (a)"], 30) as monitor:
        told = monitor.terminate(rank_failed(0, ProcessExit(2, 77, 4)).with_reason(reason))
    assert told == Termination(0, 4, "rank 2: no pictures", "add some", said=True)
    assert told.is_explained_by(reason)
    assert not Termination(0, 5, "something else").is_explained_by(reason)


NAMES = ["machine 0 (a)", "machine 1 (b)"]
FORGED = {"machine": 0, "exit_code": 0, "sentence": "well done\x1b[2J\nerror: me", "hint": "", "said": False}
NONSENSE = (
    b"",
    b"no JSON",
    b"\xff\xfe",
    b"[" * 100_000,
    b"5",
    b"null",
    b'{"text": 5}',
    b'{"text": "5", "signature": ""}',
)


@pytest.mark.parametrize("secret", ["", "correct horse battery"])
def test_launchers_survive_what_strangers_write_and_take_no_success_from_them(secret):
    store, signer = HashStore(), MessageSigner(secret.encode()).for_run("1")
    messages = signed(store, signer), signed(store, signer)
    with PeerMonitor(messages[0], 0, NAMES, 4) as first, PeerMonitor(messages[1], 1, NAMES, 4) as second:
        for nonsense in NONSENSE:
            for key in (TERMINATION_KEY, "launchers/beat/1"):
                store.set(key, nonsense)  # pyright: ignore[reportArgumentType]
            first.wake.set()
            time.sleep(0.05)
        assert first.termination is None and first.messages.rejected_key and first.thread.is_alive()
        store.set(TERMINATION_KEY, MessageSigner().encode(TERMINATION_KEY, FORGED))
        time.sleep(1.2)
        if secret:
            assert first.termination is second.termination is None
            death = rank_failed(1, ProcessExit(3, 77, -9))
            assert second.terminate(death) == first.terminate(launcher_signaled(0, 15)) == death
        else:
            told = first.terminate(launcher_signaled(0, 15))
            assert (told.exit_code, told.sentence) == (5, "well done?[2J\n  error: me")
        assert first.find_silent() is second.find_silent() is None


def test_only_holders_of_the_secret_of_this_run_are_accepted(tmp_path):
    secret = MessageSigner(b"correct horse battery")
    signer = secret.for_run("1")
    message = signer.encode("key", {"count": 1}).encode()
    assert signer.decode("key", message) == {"count": 1}
    assert signer.decode("other", message) is None, "a message may not be moved"
    assert secret.for_run("2").decode("key", message) is None, "nor come from another run"
    for other in (MessageSigner(), MessageSigner(b"a guess").for_run("1")):
        assert other.decode("key", message) is None
        assert signer.decode("key", other.encode("key", {"count": 2}).encode()) is None

    # machines that have different secrets, or of which only one has any, say so
    store = HashStore()
    nodes = [node("a", seed=1), node("b", seed=1)]
    groups = [Group("machine", number, 2) for number in (0, 1)]
    stores = [signed(store, secret), signed(store)]
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda *one: outcome(*one, timeout=1.5), stores, groups, nodes))
    assert "missing: machine 1 (ignored what was not signed" in str(told[0])
    assert str(told[1]) == "machine 0 signs its messages with a run secret, which is not here"
    assert isinstance(told[1], SettingsError)

    # strangers have registered before: that is overwritten, and their rejections are ignored
    store = HashStore()
    for group in groups:
        key = group.key(group.number)
        store.set(key, MessageSigner().encode(key, nodes[0].as_json()))
    store.set(groups[0].key("refused"), '{"exit_code": 0, "message": "go away", "hint": ""}')
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(outcome, signed(store, secret), groups[0], nodes[0])]
        time.sleep(0.2)
        futures.append(pool.submit(outcome, signed(store, secret), groups[1], nodes[1]))
        assert [future.result() for future in futures] == [nodes, nodes]


def test_a_secret_comes_from_the_environment_or_from_a_file_of_its_owner(tmp_path):
    file = tmp_path / "secret"
    file.write_text("correct horse battery\n")
    for mode in (0o644, 0o640, 0o604, 0o620, 0o601):
        file.chmod(mode)
        with pytest.raises(SettingsError, match="can be read by others"):
            message_signer(file, {})
    file.chmod(0o600)
    assert message_signer(file, {}).secret == b"correct horse battery"
    assert message_signer(file, {SECRET: "the environment goes first"}).secret == b"the environment goes first"
    assert message_signer(None, {}).secret == b""
    with pytest.raises(SettingsError, match="has 5 characters; at least 16"):
        message_signer(None, {SECRET: "guess"})
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingsError, match="fifo is not a regular file"):
        message_signer(tmp_path / "fifo", {})
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        message_signer(tmp_path / "none", {})


def test_a_store_that_is_gone_silences_the_machine_that_served_it():
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store = TCPStore("127.0.0.1", served.port, timeout=timedelta(seconds=5), wait_for_workers=False)
    with PeerMonitor(signed(store), 1, ["machine 0 (a)", "machine 1 (b)"], 1.5) as monitor:
        assert monitor.find_silent() is None
        del served
        end = time.monotonic() + PATIENCE
        while not (termination := monitor.find_silent()) and time.monotonic() < end:
            time.sleep(0.05)
        assert termination is not None
        began = time.monotonic()
        assert monitor.terminate(termination) == termination
        assert time.monotonic() - began < 3, "there is nobody to wait for"
    assert termination.sentence.startswith("machine 0 (a) has been silent for ")


@pytest.mark.parametrize(("code", "number"), [(143, 15), (130, 2), (129, 1), (5, 0), (2, 0)])
def test_only_an_orderly_stop_gives_ranks_time_to_save(code, number):
    assert rank_failed(0, ProcessExit(0, 1, code)).signal_number == number


def test_a_first_machine_whose_store_answers_is_not_silent_though_its_launcher_is_busy():
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store = TCPStore("127.0.0.1", served.port, timeout=timedelta(seconds=5), wait_for_workers=False)
    with PeerMonitor(signed(store), 1, ["machine 0 (a)", "machine 1 (b)"], 1.0) as monitor:
        time.sleep(3)  # nobody sends heartbeats of machine 0
        assert monitor.find_silent() is None
